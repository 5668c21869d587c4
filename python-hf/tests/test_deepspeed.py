# SPDX-License-Identifier: MIT OR Apache-2.0
"""ZeRO of DeepSpeed around a ContextParallel: losses, gradients and updated weights of one process, and what is refused by name.

DeepSpeed runs on CPUs over gloo here, without its compiled operators. A model's parameters are in parts from the beginning (`deepspeed.zero.Init`)
unless a case says otherwise, and none of them stays whole because it is small.
"""

from __future__ import annotations

import os
import tempfile
import unittest
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
try:
    import deepspeed
    import transformers
    from deepspeed.utils import safe_get_full_grad
except ImportError:
    raise unittest.SkipTest("deepspeed or transformers is not installed") from None

import hybrids
import images
import models
import processes
import test_gathered
import test_preference
import torch
import torch.distributed as dist
from cpattn import Error
from cpattn_hf.transformers import ContextParallel
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

transformers.utils.logging.set_verbosity_error()
deepspeed.utils.logger.setLevel("ERROR")
# They would be compiled, and an allreduce over shared memory would take the place of gloo's.
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))

WORLD, RATE = 2, 0.1
PACKS = [[20, 13], [5, 9, 15]]  # of replicas: 17 or 16 and 15 or 14 tokens a rank
PARTS = {"stage": 3, "stage3_param_persistence_threshold": 0}


def config(zero: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's gradient_clipping is 1.0 if it is left out."""
    usual = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return {**usual, "zero_optimization": zero}


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten().double() for one in tensors])


def adapted(model: Any) -> None:
    """As LoRA does it: few parameters are trained, and the embeddings are not."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "in_proj" in name)


def build(name: str) -> Any:
    if name in images.MODELS:
        return images.build(name)
    return (
        hybrids.build if name in hybrids.MODELS else models.build if name in models.MODELS else test_gathered._build
    )(name)


def loss_of_one(name: str, model: Any, packs: int) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    if name in images.MODELS:
        each = images.documents(name)
        lengths = torch.tensor([0, *images.lengths(each)]).cumsum(0)
        return images.one_by_one(model, each)[0], [{**images.packed(each), "cu_seqlens": lengths.to(torch.int32)}]
    given = [models.batch(lengths, seed) for seed, lengths in enumerate(PACKS[:packs])]
    return sum(models.part(model, pack) for pack in given) / sum(map(models.count, given)), given


# By name: the model, ZeRO's config, the arguments of ContextParallel, what is done to the model, and whether its parameters are in parts before.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Any], Any] | None, bool]] = {
    **{f"ZeRO-{stage}": ("llama", {"stage": stage}, {}, None, False) for stage in range(4)},
    "Init": ("gpt-oss", PARTS, {}, None, True),
    "checkpointing": ("llama", PARTS, {}, lambda model: models.checkpointing(model, False), True),
    "reentrant": ("llama", PARTS, {}, lambda model: (models.checkpointing(model, True), model.enable_input_require_grads()), True),
    "tied, tiles, replicas": ("smollm2", PARTS, {"replicas": 2, "tile": 2}, None, True),
    "ZeRO-2, replicas": ("llama", {"stage": 2}, {"replicas": 2}, None, False),
    "groups of several sizes, ZeRO-2": ("llama", {"stage": 2}, {"group_sizes": (1, 2)}, None, False),
    "groups of several sizes": ("gpt-oss", PARTS, {"group_sizes": (1, 2)}, None, True),
    "offload": ("llama", {**PARTS, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, {}, None, True),
    "hpZ": ("llama", {**PARTS, "zero_hpz_partition_size": 1}, {}, None, True),
    "delta net, adapters": ("qwen3_next", PARTS, {}, adapted, True),
    "Mamba-2, checkpointing": ("nemotron_h", PARTS, {}, lambda model: models.checkpointing(model, False), True),
    "listed keys": ("deepseek_v32", PARTS, {}, None, True),
    "blocks of keys": ("minimax_m3_vl_text", PARTS, {}, None, True),
    "images": ("qwen3_vl", PARTS, {"vision": "shard"}, None, True),
}  # fmt: skip


def case(name: str, zero: dict[str, Any], options: dict[str, Any], change: Any, parts: bool) -> list[float]:
    """How far loss, gradients and updated weights are from those of one process."""
    one, model, replicas = build(name), build(name), options.get("replicas", 1)
    for each in (one, model):
        if change:
            change(each)
    expected, packs = loss_of_one(name, one, replicas)
    expected.backward()
    made = config(zero)
    if parts:
        deepspeed.zero.Init(module=model, config_dict_or_path=made)
    cp = ContextParallel(model, **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=made)
    items = {} if replicas == 1 else {"num_items_in_batch": sum(map(models.count, packs))}
    loss = engine(**packs[cp.replica], **items).loss * replicas
    engine.backward(loss)
    gradients = full_gradients(model)
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())) if zero["stage"] == 3 else nullcontext():
        weights = flat(model.parameters())
    engine.destroy()
    cp.close()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    wanted = models.gradients(one)
    far = abs(float(mean) / WORLD - expected.item()) / expected.item()
    return [far, models.apart(gradients, wanted), models.apart(weights, flat(one.parameters()) - RATE * wanted)]


def full_gradients(model: Any) -> torch.Tensor:
    found = (safe_get_full_grad(parameter) for parameter in model.parameters())
    return flat(
        torch.zeros(getattr(p, "ds_shape", p.shape)) if g is None else g for p, g in zip(model.parameters(), found)
    )


def _others() -> dict[str, float]:
    """Under ZeRO-3: a head that reads one token of a row, log-probabilities, text that is generated."""
    found: dict[str, float] = {}
    one, model = test_preference.head(num_labels=3), test_preference.head(num_labels=3)
    rows = {"input_ids": torch.arange(36).view(3, 12) + 3, "labels": torch.tensor([2, 0, 1])}
    one(**rows).loss.backward()
    deepspeed.zero.Init(module=model, config_dict_or_path=config(PARTS))
    cp = ContextParallel(model)
    engine = engine_of(model, PARTS)
    engine.backward(engine(**rows).loss)
    found["a head of one token"] = models.apart(full_gradients(model), models.gradients(one))
    engine.destroy()
    cp.close()
    pack = models.batch(PACKS[0])
    one, model = models.build("llama"), models.build("llama")
    (models.part(one, pack) / models.count(pack)).backward()
    engine = engine_of(model, PARTS)
    cp = ContextParallel(model)  # after the engine, as for a reference that TRL has wrapped
    engine.backward(-cp.logprobs(pack, model=engine).log_probs.sum() / models.count(pack))
    found["logprobs"] = models.apart(full_gradients(model), models.gradients(one))
    with cp.off():
        words = [
            each.eval().generate(pack["input_ids"][:, :5], max_new_tokens=4, do_sample=False) for each in (model, one)
        ]
    found["generate"] = float(not torch.equal(*words))
    engine.destroy()
    cp.close()
    model = models.build("llama")
    cp = ContextParallel(model, gradients="sum")
    engine = engine_of(model, {"stage": 2}, gradient_allreduce_op="sum")
    engine.backward(engine(**pack).loss)
    found["sums"] = models.apart(full_gradients(model), models.alone("llama", pack)[1])
    engine.destroy()
    cp.close()
    return found


def _said(job: Callable[[], Any]) -> str:
    try:
        job()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def engine_of(model: Any, zero: dict[str, Any], **more: Any) -> Any:
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config={**config(zero), **more}
    )[0]


def _refused(rank: int) -> dict[str, str]:
    pack, found = models.batch(PACKS[0]), {}
    model = models.build("llama")
    engine = engine_of(model, {"stage": 2})
    found["an engine"] = _said(lambda: ContextParallel(engine))
    engine.destroy()
    model = hybrids.build("qwen3_next")
    engine = engine_of(model, PARTS)
    found["blocks of an engine"] = _said(lambda: ContextParallel(model))
    engine.destroy()
    model = models.build("llama")
    deepspeed.zero.Init(module=model, config_dict_or_path=config(PARTS))
    found["a part of the ranks"] = _said(lambda: ContextParallel(model, group=[rank]))
    # One block of attention that two layers share.
    made = AutoConfig.for_model(
        "zamba2", **{**hybrids.SMALL, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1},
        mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=6, mamba_headdim=12, adapter_rank=4, chunk_size=16, attention_hidden_size=72, attention_head_dim=18,
    )  # fmt: skip
    made.num_key_value_heads = 4
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)
    cp = ContextParallel(model)
    engine = engine_of(model, PARTS)
    found["shared blocks"] = _said(lambda: engine(**pack))
    engine.destroy()
    cp.close()
    for name, zero, gradients, more in (
        ("sum, ZeRO-3", PARTS, "sum", {}), ("sum, ZeRO-0", {"stage": 0}, "sum", {}), ("mean", {"stage": 2}, "mean", {"gradient_allreduce_op": "sum"}),
    ):  # fmt: skip
        model = models.build("llama")
        cp = ContextParallel(model, gradients=gradients)
        engine = engine_of(model, zero, **more)
        found[name] = _said(lambda: engine(**pack))
        engine.destroy()
        cp.close()
    # DeepSpeed's sequence parallelism divides gradients by fewer ranks.
    from deepspeed.utils import groups

    class Parallel:
        """What UlyssesSPAttentionHF.register_with_transformers gives to deepspeed.initialize as mpu."""

        get_sequence_parallel_world_size = staticmethod(lambda: WORLD)

    model = models.build("llama")
    cp = ContextParallel(model)
    groups.mpu = Parallel
    try:
        found["sequence parallelism"] = _said(lambda: model(**pack))
        found["sequence parallelism before"] = _said(lambda: ContextParallel(models.build("llama")))
    finally:
        groups.mpu = None
    groups._init_tp_mesh_device(tensor_model_parallel_size=WORLD)
    found["tensor parallelism"] = _said(lambda: model(**pack))
    cp.close()
    return found


REFUSED = {
    **dict.fromkeys(
        ("sum, ZeRO-3", "sum, ZeRO-0"), "InvalidArgument: gradients is 'sum', and DeepSpeed takes the mean of gradients"
    ),
    "mean": "InvalidArgument: gradients is 'mean', and gradient_allreduce_op of DeepSpeed's config is 'sum'",
    "summed": "Unsupported: gradient_allreduce_op of DeepSpeed's config is 'sum'",
    "shared blocks": "Unsupported: Zamba2HybridLayer shares parameters with another block, whose gradients ZeRO-3 would reduce too early",
    "a part of the ranks": "has parameters that ZeRO-3 holds in parts on the ranks [0, 1], and the group of this ContextParallel has the ranks [",
    "accelerate's": "sp_size of accelerate's ParallelismConfig is {}, which is not supported together with ContextParallel",
    "an engine": "the model is a DeepSpeedEngine around a LlamaForCausalLM: ContextParallel(model) first",
    "blocks of an engine": "has Qwen3NextDecoderLayer, which has to be gathered at once: ContextParallel(model) first, and then deepspeed.initialize",
    "sequence parallelism": f"Unsupported: DeepSpeed's sequence parallelism is on, over {WORLD} ranks",
    "sequence parallelism before": f"DeepSpeed's sequence parallelism is on, over {WORLD} ranks",
    "tensor parallelism": f"Unsupported: DeepSpeed's tensor parallelism is on, over {WORLD} ranks",
}
OF_TRAINERS = ("accelerate's", "summed")


def _all(rank: int, world: int) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo")
    return {name: case(*one) for name, one in CASES.items()}, _others(), _refused(rank)


AUTO = {
    name: "auto"
    for name in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    )
}


def _trained(rank: int, world: int, folder: str, replicas: int, stage: int | None) -> dict[str, Any]:
    """Trainer, then SFTTrainer with packing: losses and norms of gradients, the loss of an evaluation, and saved weights."""
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    if stage is not None:
        deepspeed.init_distributed("gloo")
    elif rank == 0:
        models.build("llama").save_pretrained(f"{folder}/model")
    rows = [
        {"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))}
        for n in (31, 17, 24, 40, 22, 13, 9, 28, 19, 33, 12, 15)
    ]
    for kind, kind_of_args, more in (
        (Trainer, TrainingArguments, {"eval_strategy": "no"}),
        (SFTTrainer, SFTConfig, {"packing": True, "max_length": 48}),
    ):
        zero = {**PARTS, "stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {"stage": stage}
        args: Any = kind_of_args(
            f"{folder}/{kind.__name__}-{world}", use_cpu=True, bf16=False, max_steps=3, gradient_accumulation_steps=2 * (replicas if world == 1 else 1),
            per_device_train_batch_size=1, per_device_eval_batch_size=1, logging_steps=1, optim="sgd", learning_rate=0.5, max_grad_norm=1.0, seed=1,
            report_to=[], disable_tqdm=True, save_strategy="no", gradient_checkpointing=kind is Trainer, logging_nan_inf_filter=False,
            deepspeed=None if stage is None else {**AUTO, "zero_optimization": zero}, **more,
        )  # fmt: skip
        # The usual way: under ZeRO-3 the arguments have from_pretrained make a model with parameters in parts.
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/model", attn_implementation="eager", dtype=torch.float32
        ).train()
        assert hasattr(next(model.parameters()), "ds_id") == (stage == 3)
        cp = ContextParallel(model, replicas=replicas) if world > 1 else None
        data = Dataset.from_list(rows)
        own: Any = cp.trainer(kind) if cp else kind
        trainer = own(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=data.select(range(6)),
            processing_class=models.tokenizer(),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        evaluated = (
            trainer.evaluate()["eval_loss"] if replicas == 1 else 0.0
        )  # replicas: not that of one process, as under DDP without this
        trainer.save_model(f"{folder}/saved-{kind.__name__}-{world}")
        if world > 1:
            dist.barrier()
        unset_hf_deepspeed_config()
        saved = flat(
            AutoModelForCausalLM.from_pretrained(
                f"{folder}/saved-{kind.__name__}-{world}", dtype=torch.float32
            ).parameters()
        )
        found[kind.__name__] = (
            [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one],
            evaluated,
            saved.numpy(),
        )
        if cp and kind is Trainer:
            AcceleratorState._reset_state(True)
            args = TrainingArguments(
                folder,
                use_cpu=True,
                deepspeed=args.deepspeed,
                parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=world),
            )
            found["accelerate's"] = _said(lambda: own(model=model, args=args, train_dataset=data))
            AcceleratorState._reset_state(True)
            args = TrainingArguments(
                folder,
                use_cpu=True,
                deepspeed={**args.deepspeed, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}},
            )
            found["summed"] = _said(lambda: own(model=model, args=args, train_dataset=data))
            unset_hf_deepspeed_config()
        if cp:
            cp.close()
        AcceleratorState._reset_state(True)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return found


class DeepSpeed(unittest.TestCase):
    def test_as_one_process(self) -> None:
        for found, others, said in processes.run(_all, WORLD, seconds=200):
            self.assertLess(max(others.values()), 2e-6, others)
            for name, far in found.items():
                self.assertLess(max(far), 2e-6, (name, far))
                self.assertLess(far[2], 1e-7, (name, far))
            for name, words in REFUSED.items():
                if name not in OF_TRAINERS:
                    self.assertIn(words, said[name], name)

    def test_trainers(self) -> None:
        for world, replicas, stage in ((2, 1, 3), (2, 2, 2), (4, 2, 3)) if processes.LONG else ((2, 1, 3),):
            with tempfile.TemporaryDirectory() as folder:
                one = processes.run(_trained, 1, folder, replicas, None)[0]
                for several in processes.run(_trained, world, folder, replicas, stage, seconds=200):
                    for name in OF_TRAINERS:
                        self.assertIn(REFUSED[name].format(world), several.pop(name))
                    for name, (logged, evaluated, saved) in one.items():
                        found = several[name]
                        for a, b in zip(found[0], logged, strict=True):
                            self.assertLess(
                                max(abs(x - y) / y for x, y in zip(a, b, strict=True)), 2e-6, (name, found[0], logged)
                            )
                        self.assertLessEqual(abs(found[1] - evaluated), 1e-6 * evaluated, name)
                        self.assertLess(models.apart(torch.tensor(found[2]), torch.tensor(saved)), 1e-7, name)


if __name__ == "__main__":
    unittest.main()
