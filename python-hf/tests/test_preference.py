# SPDX-License-Identifier: MIT OR Apache-2.0
"""TRL's trainers with losses of their own: parameters after some steps and all that is logged as in one process."""

from __future__ import annotations

import os
import tempfile
import unittest
import warnings
from typing import Any

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL reads it when a trainer is made
try:
    import peft
    import transformers
    import trl
    from datasets import Dataset, disable_progress_bars, load_from_disk
except ImportError:
    raise unittest.SkipTest("transformers, peft, trl or datasets is not installed") from None

import models
import processes
import torch
from cpattn import InvalidArgument, Unsupported
from cpattn_hf.transformers import ContextParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

transformers.utils.logging.set_verbosity_error()
LENGTHS = [(5, 9, 4), (3, 6, 12), (7, 2, 8), (4, 15, 3), (6, 5, 4), (2, 11, 7), (9, 3, 6), (5, 8, 10)]


def _words(seed: int, n: int) -> list[int]:
    return torch.randint(3, models.WORDS, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def _text(seed: int, n: int) -> str:
    return "".join(f" w{word}" for word in _words(seed, n))


def pairs() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": _text(i, p), "chosen": _text(10 + i, c), "rejected": _text(20 + i, r)}
            for i, (p, c, r) in enumerate(LENGTHS)
        ]
    )


def saved(folder: str, rank: int) -> Dataset:
    """The pairs in a folder: with precomputed log-probabilities TRL reads on all processes what one has written beside the data."""
    if rank == 0:
        pairs().save_to_disk(f"{folder}/pairs")
    torch.distributed.barrier()
    return load_from_disk(f"{folder}/pairs")


def whole_pairs() -> Dataset:
    return Dataset.from_list(
        [
            {"chosen_ids": _words(i, p + c), "rejected_ids": _words(i, p + r), "margin": 0.1 * i}
            for i, (p, c, r) in enumerate(LENGTHS)
        ]
    )


def classes() -> Dataset:
    return Dataset.from_list([{"input_ids": _words(i, p + c), "labels": i % 3} for i, (p, c, _) in enumerate(LENGTHS)])


def unpaired() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": _text(i, p), "completion": _text(10 + i, c), "label": i % 3 > 0}
            for i, (p, c, _) in enumerate(LENGTHS)
        ]
    )


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": _text(i, p)} for i, (p, _, _) in enumerate(LENGTHS)])


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(n % 7 for n in ids) / len(ids) + 0.1 * len(ids) for ids in completion_ids]


def loaded(folder: str, rank: int) -> Any:
    """A model of a folder, from which TRL makes the reference."""
    if rank == 0:
        models.build("llama").save_pretrained(f"{folder}/llama")
    torch.distributed.barrier()
    return AutoModelForCausalLM.from_pretrained(
        f"{folder}/llama", attn_implementation="eager", dtype=torch.float32
    ).train()


def head(**more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **{**models.SMALL, "num_labels": 1, **more})
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def other(name: str, **more: Any) -> Any:
    """A reference: the same kind of model, with other parameters."""
    model = models.build(name, **more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.95)
    return model.eval()


def accuracy(found: Any) -> dict[str, float]:
    return {
        "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean()),
        "mean": float(found.predictions.mean()),
    }


def adapter() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


GENERATED = {
    "num_generations": 4,
    "max_completion_length": 8,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "temperature": 0.8,
}


def trainers(kinds: list[str], folder: str, rank: int) -> dict[str, Any]:
    """For each kind: the model, the class of the trainer, its config, and what it is made with."""
    tokenizer = models.tokenizer()
    every: dict[str, Any] = {
        "dpo": lambda: (models.build("gemma2"), trl.DPOTrainer, trl.DPOConfig, {}, {"train_dataset": pairs(), "eval_dataset": pairs(), "ref_model": other("gemma2")}),
        "dpo, experts": lambda: (
            models.build("mixtral"), trl.DPOTrainer, trl.DPOConfig, {"router_aux_loss_coef": 0.5, "precompute_ref_log_probs": True},
            {"train_dataset": saved(folder, rank), "ref_model": other("mixtral")},
        ),
        "dpo, lora": lambda: (models.build("qwen3"), trl.DPOTrainer, trl.DPOConfig, {"gradient_checkpointing": True}, {"train_dataset": pairs(), "peft_config": adapter()}),
        "reward": lambda: (head(), trl.RewardTrainer, trl.RewardConfig, {}, {"train_dataset": whole_pairs(), "eval_dataset": whole_pairs()}),
        "classes": lambda: (
            head(num_labels=3), Trainer, TrainingArguments, {"gradient_accumulation_steps": 2},
            {"train_dataset": classes(), "eval_dataset": classes(), "compute_metrics": accuracy},
        ),
        "grpo": lambda: (
            models.build("llama"), trl.GRPOTrainer, trl.GRPOConfig, {**GENERATED, "beta": 0.0, "steps_per_generation": 2, "num_iterations": 2},
            {"train_dataset": prompts(), "eval_dataset": prompts(), "reward_funcs": reward},
        ),
        "grpo, lora": lambda: (
            models.build("qwen3"), trl.GRPOTrainer, trl.GRPOConfig, {**GENERATED, "beta": 0.1, "loss_type": "grpo"},
            {"train_dataset": prompts(), "reward_funcs": reward, "peft_config": adapter()},
        ),
        "rloo": lambda: (
            models.build("llama"), trl.RLOOTrainer, trl.RLOOConfig, {**GENERATED, "beta": 0.0}, {"train_dataset": prompts(), "reward_funcs": reward},
        ),
        "kto": lambda: (
            loaded(folder, rank), trl.KTOTrainer, trl.KTOConfig, {"per_device_train_batch_size": 4}, {"train_dataset": unpaired()},
        ),
        "sft": lambda: (
            models.build("mixtral"), trl.SFTTrainer, trl.SFTConfig, {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2, "max_length": None, "gradient_checkpointing": True},
            {"train_dataset": Dataset.from_list([{"input_ids": row["chosen_ids"]} for row in whole_pairs()])},
        ),
    }  # fmt: skip
    return {name: (*every[name](), tokenizer) for name in kinds}


def _job(rank: int, world: int, kinds: list[str], folder: str, replicas: int, parallel: bool) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    warnings.simplefilter("ignore")
    disable_progress_bars()
    found: dict[str, Any] = {}
    for name, (model, kind, config, options, more, tokenizer) in trainers(kinds, folder, rank).items():
        cp = ContextParallel(model, replicas=replicas) if parallel else None
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as place:
            options = {
                "use_cpu": True, "max_steps": 3, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 2,
                "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "seed": 1, "logging_nan_inf_filter": False,
                "bf16": False, "ddp_find_unused_parameters": False, "eval_strategy": "steps" if "eval_dataset" in more else "no", "eval_steps": 3, "gradient_checkpointing": False, **options,
            }  # fmt: skip
            trainer = (cp.trainer(kind, send_batches=name in ("kto", "rloo")) if cp else kind)(
                model=model, args=config(place, **options), processing_class=tokenizer, **more
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
        logged = [
            {key: value for key, value in entry.items() if "time" not in key and "per_second" not in key}
            for entry in trainer.state.log_history
        ]
        weights = torch.cat([p.detach().flatten().double() for p in trainer.model.parameters() if p.requires_grad])
        found[name] = logged, weights.numpy()
        if cp:
            cp.close()
            # A reference is closed with the model.
            assert getattr(getattr(trainer, "ref_model", None), "_cpattn", None) is None
    if parallel and replicas == 1:
        found["refused"] = _refused()
    return found


def _refused() -> dict[str, str]:
    """What is refused when a trainer is made."""
    found: dict[str, str] = {}
    model = models.build("llama")
    cp = ContextParallel(model)
    more = {"model": model, "train_dataset": prompts(), "reward_funcs": reward, "processing_class": models.tokenizer()}
    with tempfile.TemporaryDirectory() as place:
        usual = {
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "num_generations": 4,
            "per_device_train_batch_size": 4,
        }

        def refuse(name: str, kind: Any, args: Any, **others: Any) -> None:
            try:
                cp.trainer(kind)(args=args, **more, **others)
            except (InvalidArgument, Unsupported) as error:
                found[name] = str(error)

        refuse("no arguments", trl.GRPOTrainer, None)
        refuse("batch", trl.GRPOTrainer, trl.GRPOConfig(place, **{**usual, "per_device_train_batch_size": 2}))
        args = trl.GRPOConfig(place, **usual)
        args.use_vllm = True
        refuse("vllm", trl.GRPOTrainer, args)
        args.vllm_mode = "server"
        refuse("tools", trl.GRPOTrainer, args, tools=[len])
        args.use_vllm, args.use_transformers_continuous_batching = False, True
        refuse("continuous", trl.GRPOTrainer, args)
        refuse("smoothing", trl.GRPOTrainer, trl.GRPOConfig(place, **usual, label_smoothing_factor=0.1))

        class Other(trl.GRPOTrainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                return super().compute_loss(*args, **kwargs)

        refuse("subclass", Other, trl.GRPOConfig(place, **usual))
    cp.close()
    return found


def compare(test: unittest.TestCase, kinds: list[str], one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    for found in several:
        for name in kinds:
            test.assertLessEqual(models.apart(torch.tensor(found[name][1]), torch.tensor(one[name][1])), 1e-6, name)
            test.assertEqual(len(found[name][0]), len(one[name][0]))
            for a, b in zip(found[name][0], one[name][0], strict=True):
                test.assertEqual(a.keys(), b.keys(), name)
                for key in a:
                    test.assertLessEqual(
                        abs((a[key] or 0) - (b[key] or 0)), 1e-4 * max(abs(b[key] or 0), 1), (name, key, a, b)
                    )


def _environment(rank: int, world: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


QUICK: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "max_steps": 2, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 2, "logging_steps": 1,
    "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "seed": 1,
}  # fmt: skip


def _in_memory(rank: int, world: int, folder: str) -> str:
    _environment(rank, world)
    cp = ContextParallel(models.build("llama"), timeout=60)
    made = cp.trainer(trl.DPOTrainer)
    args = trl.DPOConfig(folder, **QUICK, precompute_ref_log_probs=True)
    try:
        made(model=cp.model, args=args, train_dataset=pairs(), processing_class=models.tokenizer())
    except Unsupported as error:
        return str(error)
    return "not refused"


def _adapted_rewards(rank: int, world: int, folder: str) -> list[float]:
    _environment(rank, world)
    model = head()
    kind: Any = trl.RewardTrainer if world == 1 else ContextParallel(model, timeout=60).trainer(trl.RewardTrainer)
    lora = peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules="all-linear")
    trainer = kind(
        model=model,
        args=trl.RewardConfig(folder, **QUICK, center_rewards_coefficient=0.01),
        train_dataset=whole_pairs(),
        peft_config=lora,
        processing_class=models.tokenizer(),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Preference(unittest.TestCase):
    def test_as_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one = processes.run(_job, 1, KINDS, f"{folder}/one", 1, False, seconds=300)[0]
            several = processes.run(_job, 2, KINDS, f"{folder}/two", 1, True, seconds=300)
        compare(self, KINDS, one, several)
        said = {
            "no arguments": "args is needed: the GRPOConfig", "batch": "has 2 prompts (generation_batch_size", "vllm": "vllm_mode is 'colocate'",
            "tools": "use_vllm is True and tools is given", "continuous": "use_transformers_continuous_batching is True",
            "smoothing": "label smoothing", "subclass": "Other computes its loss in test_preference",
        }  # fmt: skip
        for found in several:
            for name, text in said.items():
                self.assertIn(text, found["refused"].get(name, ""), name)
        rewards = [entry["reward_std"] for entry in one["grpo"][0] if "reward_std" in entry]
        self.assertGreater(min(rewards), 0.05, "the completions differ, and so do their rewards")

    def test_reference_of_a_data_set_in_memory(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for said in processes.run(_in_memory, 2, folder):
                self.assertIn("precompute_ref_log_probs is True, and the data set 'train' is in memory", said)

    def test_rewards_with_an_adapter_of_its_task(self) -> None:
        """PEFT wraps the head and trains a copy."""
        with tempfile.TemporaryDirectory() as folder:
            one = processes.run(_adapted_rewards, 1, f"{folder}/one")[0]
            for losses in processes.run(_adapted_rewards, 2, f"{folder}/two"):
                self.assertEqual(len(losses), 2)
                for a, b in zip(losses, one, strict=True):
                    self.assertLessEqual(abs(a - b), 1e-5 * b)

    def test_replicas_as_processes(self) -> None:
        """Two groups of two ranks, as two processes of TRL with data in parallel."""
        kinds = ["grpo", "reward"]
        with tempfile.TemporaryDirectory() as folder:
            two = processes.run(_job, 2, kinds, folder, 1, False, seconds=300)[0]
            compare(self, kinds, two, processes.run(_job, 4, kinds, folder, 2, True, seconds=300))


KINDS = ["dpo", "dpo, experts", "dpo, lora", "reward", "classes", "grpo", "grpo, lora", "rloo", "kto", "sft"]

if __name__ == "__main__":
    unittest.main()
