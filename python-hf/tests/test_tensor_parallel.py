# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models that tensor parallelism has split, by Transformers or by hand, on 2 x 2 processes: loss and gradients of one process."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel, tensors

transformers.utils.logging.set_verbosity_error()
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32}
LENGTHS = [23, 1, 17, 9, 40]
NAMES = ("llama", "gemma3", "qwen3")
SPLIT = {
    **dict.fromkeys(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel
    )
}
SPLIT |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel)


def by_hand(model: Any, mesh: Any) -> None:
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {name: how() for name, how in SPLIT.items()})


def apart(model: Any, expected: dict[str, torch.Tensor], group: Any = None) -> float:
    """The largest distance of whole gradients, summed over a group if there is one."""
    far = 0.0
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if group is not None:
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        far = max(far, models.apart(grad.double(), expected[name].double()))
    return far


def _right(rank: int, world: int, folder: str) -> dict[str, float]:
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    found: dict[str, float] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for name in NAMES:
        loss, expected = torch.load(f"{folder}/{name}.pt")
        # Transformers splits heads over consecutive ranks, and FSDP2 shards over the ranks with one part of them.
        kind = DistributedConfig(tp_size=2, tp_plan="auto", fsdp_size=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            f"{folder}/{name}", distributed_config=kind, attn_implementation="eager"
        ).train()
        cp = ContextParallel(model, mesh=mesh, timeout=100, tile=8 if name == "gemma3" else 0)
        if name == "qwen3":
            models.checkpointing(model, False)
        out = model(**models.batch(LENGTHS))
        out.loss.backward()
        found[f"{name}, tp_plan: loss"] = abs(out.loss.item() / loss - 1)
        found[f"{name}, tp_plan: gradients"] = apart(model, expected)
        scores = cp.logprobs(models.batch(LENGTHS)).log_probs
        found[f"{name}, log-probabilities"] = abs(-scores.sum().item() / models.count(models.batch(LENGTHS)) / loss - 1)
        cp.close()
        if (
            name != "llama"
        ):  # norms of q and k see the heads of a rank alone: their gradients are parts, which Transformers sums
            continue
        model = models.build(name, **HEADS)
        by_hand(model, mesh["tp"])
        cp = ContextParallel(model, mesh=mesh, gradients="sum", timeout=100, ulysses=2)
        out = model(**models.batch(LENGTHS))
        out.loss.backward()
        found[f"{name}, by hand: loss"] = abs(out.loss.item() / loss - 1)
        found[f"{name}, by hand: gradients"] = apart(model, expected, mesh.get_group("cp"))
        cp.close()
    return found


def _refused(rank: int, world: int) -> dict[str, str]:
    said: dict[str, str] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))

    def refuse(name: str, call: Any) -> None:
        try:
            call()
            said[name] = "not refused"
        except Error as error:
            said[name] = f"{type(error).__name__}: {error}"

    model = models.build("llama", **HEADS)
    by_hand(model, mesh["tp"])
    refuse("all ranks", lambda: ContextParallel(model, timeout=60))
    refuse("other option of peers", lambda: ContextParallel(model, mesh=mesh, timeout=60, tile=8 * (rank % 2)))
    cp = ContextParallel(model, mesh=mesh, timeout=60)
    refuse("other batch of peers", lambda: model(**models.batch(LENGTHS, seed=1 + rank % 2)))
    refuse("other batch of one rank", lambda: model(**models.batch(LENGTHS, seed=1 + (rank == 3))))
    refuse("bad batch of peers", lambda: model(**(models.batch(LENGTHS) | ({"labels": 3} if rank % 2 else {}))))
    loss = model(**models.batch(LENGTHS)).loss.item()
    assert loss > 0
    from transformers import Trainer, TrainingArguments

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as folder:
        refuse(
            "trainer",
            lambda: cp.trainer(Trainer)(
                model=model, args=TrainingArguments(folder, use_cpu=True, report_to=[]), train_dataset=[]
            ),
        )
    cp.close()
    drops = models.build("llama", **HEADS, attention_dropout=0.1)
    by_hand(drops, mesh["tp"])
    cp = ContextParallel(drops, mesh=mesh, timeout=60)
    torch.manual_seed(5 + rank)
    refuse("seeds", lambda: drops(**models.batch(LENGTHS)))
    torch.manual_seed(5 + (rank == 3))
    refuse("seed of one rank", lambda: drops(**models.batch(LENGTHS)))
    torch.manual_seed(5)
    own = torch.Generator().manual_seed(rank)  # stands for a device's
    with mock.patch.object(tensors, "generators", lambda device: [torch.default_generator, own]):
        refuse("seeds of devices", lambda: drops(**models.batch(LENGTHS)))
    assert drops(**models.batch(LENGTHS)).loss.isfinite()
    cp.close()
    bloom = transformers.AutoModelForCausalLM.from_config(
        transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4)
    )
    parallelize_module(
        bloom.transformer.h[0],
        mesh["tp"],
        {"mlp.dense_h_to_4h": ColwiseParallel(), "mlp.dense_4h_to_h": RowwiseParallel()},
    )
    refuse("adapter", lambda: ContextParallel(bloom, mesh=mesh, timeout=60, compare_weights=False))
    return said


class Tensors(unittest.TestCase):
    def test_loss_and_gradients_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in NAMES:
                model, pack = models.build(name, **HEADS), models.batch(LENGTHS)
                model.save_pretrained(f"{folder}/{name}")
                loss = models.part(model, pack) / models.count(pack)
                loss.backward()
                torch.save(
                    (loss.item(), {key: one.grad for key, one in model.named_parameters()}), Path(folder) / f"{name}.pt"
                )
            for found in processes.run(_right, 4, folder, seconds=300):
                self.assertEqual(
                    {
                        case: error
                        for case, error in found.items()
                        if not error <= (1e-5 if "gradients" in case else 1e-6)
                    },
                    {},
                )

    def test_refusals(self) -> None:
        for rank, said in enumerate(processes.run(_refused, 4, seconds=200)):
            for name, word in (
                ("all ranks", "in one group of ContextParallel, which needs ranks with the same part"), ("other option of peers", "tile is"),
                ("other batch of peers", "hold parts of one model, and need the same batch"), ("other batch of one rank", "Disagreement" if rank % 2 else "refused their"),
                ("bad batch of peers", "labels is" if rank % 2 else "refused their"), ("trainer", "cp.trainer"), ("seeds", "torch.manual_seed with one number on all"),
                ("seeds of devices", "torch.manual_seed with one number on all"),
                ("seed of one rank", "torch.manual_seed with one number on all" if rank > 1 else "refused their batches or random generators"),
                ("adapter", "has layers with an adapter, which is not supported"),
            ):  # fmt: skip
                self.assertIn(word, said[name], (rank, name))


if __name__ == "__main__":
    unittest.main()
