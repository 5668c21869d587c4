# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks whose models have other weights: found when ContextParallel is made, by the name of the parameter."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None
try:
    import peft
except ImportError:
    peft = None

import models
import processes
from cpattn import Error
from cpattn.torch.weights import hashes
from cpattn_hf.transformers import ContextParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

transformers.utils.logging.set_verbosity_error()
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def _sharded(model: Any, shards: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicas", "shards"))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)


def _said(model: Any, **options: Any) -> str:
    try:
        ContextParallel(model, timeout=60, **options).close()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def _changes(rank: int, world: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    found = {}

    def case(name: str, change: Callable[[Any], None], shards: int = 0, **options: Any) -> None:
        model = models.build("llama", **({"tie_word_embeddings": True} if name == "tied" else {}))
        if shards:
            _sharded(model, shards)
        with torch.no_grad():
            change(model)
        found[name] = _said(model, **options)

    def one(model: Any) -> None:
        weight = model.get_parameter(WEIGHT)
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        if rank == world - 1:
            local[-1, 0] = torch.nextafter(local[-1, 0], torch.tensor(9.0))

    def buffer(model: Any) -> None:
        if rank == 1:
            model.model.rotary_emb.inv_freq[0] *= 2

    def kind(model: Any) -> None:
        if rank == 1:
            model.lm_head.to(torch.bfloat16)

    def more(model: Any) -> None:
        if rank == 0:
            model.lm_head.register_buffer("table", torch.zeros(3))

    case("equal", lambda model: None)
    case("tied", lambda model: None)
    case("one word", one)
    case("one word, left out", one, compare_weights=False)
    case("a buffer", buffer)
    case("a type", kind)
    case("one more", more)
    # Each rank has its own shard.
    case("sharded", lambda model: None, shards=world)
    case("sharded, one word", one, shards=world)
    # Two ranks have the same shard.
    case("replicas", lambda model: None, shards=2)
    case("replicas, one word", one, shards=2)
    case("another option", lambda model: None, compare_weights=rank != 1)
    case("no option", lambda model: None, compare_weights="yes")
    return found


def _added(rank: int, world: int) -> dict[str, str]:
    """Adapters that are drawn on each rank after ContextParallel."""
    found, pack = {}, models.batch([9, 14])
    for name, seed, wrap in (
        ("equal", 1, None),
        ("drawn", rank, None),
        ("drawn, sent by DDP", rank, torch.nn.parallel.DistributedDataParallel),
        ("left out", rank, None),
    ):
        model = models.build("llama")
        cp = ContextParallel(model, timeout=60, compare_weights=name != "left out")
        torch.manual_seed(seed)
        outer = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        outer = outer if wrap is None else wrap(outer)
        try:
            for _ in range(2):
                outer(**pack).loss.backward()
            found[name] = "taken"
        except Error as error:
            found[name] = f"{type(error).__name__}: {error}"
        cp.close()
    return found


class Weights(unittest.TestCase):
    def test_models_that_differ(self) -> None:
        for rank, found in enumerate(processes.run(_changes, 4, seconds=200)):
            with self.subTest(rank=rank):
                for name in ("equal", "tied", "one word, left out", "sharded", "sharded, one word", "replicas"):
                    self.assertEqual(found[name], "taken", name)
                for name, words in (
                    (
                        "one word",
                        f"Disagreement: {WEIGHT} differs over the ranks of this group (this is rank {rank}): load the same weights",
                    ),
                    ("a buffer", "Disagreement: model.rotary_emb.inv_freq differs"),
                    (
                        "a type",
                        f"lm_head.weight of the shape (96, 36) and the type torch.{'bfloat16' if rank == 1 else 'float32'}",
                    ),
                    (
                        "one more",
                        "lm_head.table of the shape (3,)"
                        if rank == 0
                        else "parameters and buffers differ over the ranks of this group",
                    ),
                    (
                        "replicas, one word",
                        f"Disagreement: {WEIGHT} differs over ranks of this group that hold the same shard",
                    ),
                    ("another option", "compare_weights is"),
                    ("no option", "compare_weights is 'yes', True or False is needed"),
                ):
                    self.assertIn(words, found[name], name)

    @unittest.skipIf(peft is None, "peft is not installed")
    def test_added_before_the_first_pass(self) -> None:
        for found in processes.run(_added, 2, seconds=200):
            self.assertIn(
                "self_attn.q_proj.lora_A.default.weight differs over the ranks of this group", found.pop("drawn")
            )
            self.assertEqual(set(found.values()), {"taken"}, found)

    def test_hashes(self) -> None:
        draw = torch.Generator().manual_seed(1)
        usual = torch.randn(300_001, generator=draw)
        before = hashes([usual])

        def changed(at: Any, value: Any) -> list[int]:
            other = usual.clone()
            other[at] = value
            return hashes([other])

        found = [
            before,
            changed([0, 1], usual[[1, 0]]),
            changed([0, 1], -usual[[0, 1]]),
            changed([7, 7 + (1 << 16)], usual[[7 + (1 << 16), 7]]),
        ]
        found += [changed(at, torch.nextafter(usual[at], torch.tensor(9.0))) for at in (0, 65_535, 65_536, 300_000)]
        self.assertEqual(len({one[0] for one in found}), len(found))
        # The place in memory does not matter.
        half = usual.bfloat16()
        self.assertEqual(hashes([half[1:]]), hashes([half[1:].clone()]))
        square = usual[:64].view(8, 8)
        self.assertEqual(hashes([square.t()]), hashes([square.t().contiguous()]))
        for dtype in (torch.bool, torch.int8, torch.float64, torch.complex64, torch.float8_e4m3fn):
            a, b = torch.zeros(7).to(dtype), torch.zeros(7).to(dtype)
            b[6] = 1
            self.assertNotEqual(hashes([a]), hashes([b]), dtype)
        self.assertEqual(hashes([torch.zeros(0), torch.zeros(3, device="meta")]), [0, 0])


if __name__ == "__main__":
    unittest.main()
