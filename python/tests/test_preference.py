# SPDX-License-Identifier: MIT OR Apache-2.0
"""TRL's trainers with losses of their own: parameters after some steps and all that is logged as in one process."""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
import warnings
from typing import Any

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL reads it when a trainer is made
try:
    import peft
    import transformers
    import trl
    from datasets import Dataset, load_from_disk
except ImportError:
    raise unittest.SkipTest("transformers, peft, trl or datasets is not installed") from None

import models
import processes
import torch
from cpattn.transformers import ContextParallel
from transformers import AutoConfig, AutoModelForSequenceClassification

transformers.utils.logging.set_verbosity_error()
processes._forks.set_forkserver_preload(["torch.distributed", "transformers.models.auto", "models", "cpattn.transformers", "transformers.trainer", "peft", "trl"])
LENGTHS = [(5, 9, 4), (3, 6, 12), (7, 2, 8), (4, 15, 3), (6, 5, 5), (2, 11, 7), (9, 3, 6), (5, 8, 10)]


def _words(seed: int, n: int) -> list[int]:
    return torch.randint(3, models.WORDS, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def _text(seed: int, n: int) -> str:
    return "".join(f" w{word}" for word in _words(seed, n))


def pairs() -> Dataset:
    return Dataset.from_list([{"prompt": _text(i, p), "chosen": _text(10 + i, c), "rejected": _text(20 + i, r)} for i, (p, c, r) in enumerate(LENGTHS)])


def saved(folder: str, rank: int) -> Dataset:
    """The pairs in a folder: with precomputed log-probabilities TRL reads on all processes what one has written beside the data."""
    if rank == 0:
        pairs().save_to_disk(f"{folder}/pairs")
    torch.distributed.barrier()
    return load_from_disk(f"{folder}/pairs")


def whole_pairs() -> Dataset:
    return Dataset.from_list([{"chosen_ids": _words(i, p + c), "rejected_ids": _words(i, p + r), "margin": 0.1 * i} for i, (p, c, r) in enumerate(LENGTHS)])


def unpaired() -> Dataset:
    return Dataset.from_list([{"prompt": _text(i, p), "completion": _text(10 + i, c), "label": i % 3 > 0} for i, (p, c, _) in enumerate(LENGTHS)])


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": _text(i, p)} for i, (p, _, _) in enumerate(LENGTHS)])


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(n % 7 for n in ids) / len(ids) + 0.1 * len(ids) for ids in completion_ids]


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


def lora(model: Any) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def adapter() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


GENERATED = {"num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "temperature": 0.8}
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def trainers(kinds: list[str], folder: str, rank: int) -> dict[str, Any]:
    """For each kind: the model, the class of the trainer, its config, and what it is made with."""
    tokenizer = models.tokenizer()
    every: dict[str, Any] = {
        "dpo": lambda: (models.build("gemma2"), trl.DPOTrainer, trl.DPOConfig, {}, {"train_dataset": pairs(), "eval_dataset": pairs(), "ref_model": other("gemma2")}),
        "dpo, experts": lambda: (
            models.build("mixtral"), trl.DPOTrainer, trl.DPOConfig, {"router_aux_loss_coef": 0.5, "precompute_ref_log_probs": True},
            {"train_dataset": saved(folder, rank), "ref_model": other("mixtral")},
        ),
        "dpo, lora": lambda: (models.build("qwen3"), trl.DPOTrainer, trl.DPOConfig, {}, {"train_dataset": pairs(), "peft_config": adapter()}),
        "reward": lambda: (head(), trl.RewardTrainer, trl.RewardConfig, {}, {"train_dataset": whole_pairs(), "eval_dataset": whole_pairs()}),
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
            models.build("llama"), trl.KTOTrainer, trl.KTOConfig, {"per_device_train_batch_size": 4},
            {"train_dataset": unpaired(), "ref_model": other("llama")},
        ),
        "sft": lambda: (
            models.build("mixtral"), trl.SFTTrainer, trl.SFTConfig, {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2, "max_length": None},
            {"train_dataset": Dataset.from_list([{"input_ids": row["chosen_ids"]} for row in whole_pairs()])},
        ),
    }  # fmt: skip
    return {name: (*every[name](), tokenizer) for name in kinds}


def _job(rank: int, world: int, kinds: list[str], folder: str, replicas: int, parallel: bool) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, (model, kind, config, options, more, tokenizer) in trainers(kinds, folder, rank).items():
        cp = ContextParallel(model, replicas=replicas) if parallel else None
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as place:
            options = {
                "use_cpu": True, "max_steps": 3, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 2,
                "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "seed": 1, "logging_nan_inf_filter": False,
                "bf16": False, "eval_strategy": "steps" if "eval_dataset" in more else "no", "eval_steps": 3, "gradient_checkpointing": False, **options,
            }  # fmt: skip
            trainer = (cp.trainer(kind) if cp else kind)(model=model, args=config(place, **options), processing_class=tokenizer, **more)
            trainer.train()
        logged = [{key: value for key, value in entry.items() if "time" not in key and "per_second" not in key} for entry in trainer.state.log_history]
        weights = torch.cat([p.detach().flatten().double() for p in trainer.model.parameters() if p.requires_grad])
        found[name] = logged, trainer.accelerator.unwrap_model(trainer.model) is not None and weights.numpy()
        if cp:
            cp.close()
    return found


def compare(test: unittest.TestCase, kinds: list[str], one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    for found in several:
        for name in kinds:
            logs, weights = (torch.tensor(found[name][1]), torch.tensor(one[name][1]))
            test.assertLessEqual(models.apart(logs, weights), 2e-6, name)
            test.assertEqual(len(found[name][0]), len(one[name][0]))
            for a, b in zip(found[name][0], one[name][0], strict=True):
                test.assertEqual(a.keys(), b.keys(), name)
                for key in a:
                    test.assertLessEqual(abs((a[key] or 0) - (b[key] or 0)), 1e-4 * max(abs(b[key] or 0), 1), (name, key, a, b))


KINDS = sys.argv[1:]
if __name__ == "__main__":
    import numpy as np
    world, replicas = int(KINDS.pop(0)), int(KINDS.pop(0))
    one = processes.run(_job, replicas, KINDS, tempfile.mkdtemp(), 1, False, seconds=400)[0]
    for k in KINDS:
        for e in one[k][0]: print(k, e)
    outs = processes.start(_job, world, KINDS, tempfile.mkdtemp(), replicas, True, seconds=400)
    for o in outs: print((o.error or "")[-1500:])
    for r in [o.value for o in outs if o.value]:
        for k in KINDS:
            print(k, models.apart(torch.tensor(r[k][1]), torch.tensor(one[k][1])))
            for a, b in zip(r[k][0], one[k][0]):
                bad = {x: (a.get(x), b.get(x)) for x in a.keys()|b.keys() if a.get(x)!=b.get(x) and not (x in a and x in b and abs((a[x] or 0)-(b[x] or 0))<=1e-5*max(1,abs(b[x] or 0)))}
                print("  bad", bad)
