# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recurrent layers that pass states, with kernels of other packages, of which doubles are at hand: their gradients cross the borders of ranks,
and no rank waits for another's state in the backward pass, whichever weight trains."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import hybrids
import kernels
import models
import processes
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.hybrids import mixer_of

transformers.utils.logging.set_verbosity_error()
PACKS = [[33, 1, 70, 2, 3, 1, 20], [150]]
SCANS = {
    "mamba": "mamba_selective_scan",
    "zamba": "mamba_selective_scan",
    "mamba2": "mamba2_chunk_scan",
    "nemotron_h": "mamba2_chunk_scan",
    "qwen3_5_text": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
}
# The one weight of the last recurrent layer that trains: a kernel gets it, but no state depends on it.
LAST = {
    "mamba": ("D",),
    "mamba2": ("D",),
    "olmo_hybrid": ("q_proj.weight",),
    "zamba": ("D",),
}


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if mixer_of(module)]


def _module(model: Any) -> Any:
    return sys.modules[type(_layers(model)[0]).__module__]


def _alone(name: str, lengths: list[int]) -> tuple[float, torch.Tensor]:
    model, pack = hybrids.build(name), models.batch(lengths)
    loss = models.part(model, pack) / models.count(pack)
    loss.backward()
    return loss.item(), models.gradients(model)


def _right(rank: int, world: int, file: str) -> list[str]:
    alone, wrong = torch.load(file), []
    for name, kernel in SCANS.items():
        model = hybrids.build(name)
        with kernels.replaced(_module(model)) as called:
            cp = ContextParallel(model, gradients="sum", timeout=60, recurrent="states")
            for lengths in PACKS:
                loss, gradients = alone[name, tuple(lengths)]
                model.zero_grad()
                out = model(**models.batch(lengths))
                out.loss.backward()
                total = models.gradients(model)
                dist.all_reduce(total)
                error, distance = abs(out.loss.item() - loss) / loss, models.apart(total, gradients)
                if not (error <= 1e-5 and distance <= 1e-5):
                    wrong.append(f"{name} {lengths}: loss {error:.1e}, gradients {distance:.1e}")
            cp.close()
        if set(called) != {kernel}:
            wrong.append(f"{name}: {set(called)} ran")
    return wrong


def _one_weight(rank: int, world: int, names: dict[str, tuple[str, ...]]) -> list[str]:
    wrong = []
    for name, weights in names.items():
        found = []
        for recurrent in ("heads", "states"):
            model = hybrids.build(name)
            chosen = {id(p) for of, p in _layers(model)[-1].named_parameters() if of in weights}
            assert len(chosen) == len(weights), name
            for p in model.parameters():
                p.requires_grad_(id(p) in chosen)
            with kernels.replaced(_module(model)):
                cp = ContextParallel(model, gradients="sum", timeout=60, recurrent=recurrent, layout="contiguous")
                model(**models.batch([150])).loss.backward()
                total = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])
                dist.all_reduce(total)
                found.append(total)
                cp.close()
        if not models.apart(found[1], found[0]) <= 1e-5:
            wrong.append(f"{name}: gradients {models.apart(found[1], found[0]):.1e}")
    return wrong


class Kernels(unittest.TestCase):
    def test_gradients_of_one_process(self) -> None:
        """Also from a kernel whose last state has no gradient (Mamba-1)."""
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({(name, tuple(of)): _alone(name, of) for name in SCANS for of in PACKS}, file)
            for wrong in processes.run(_right, 3, file, seconds=500):
                self.assertEqual(wrong, [])

    def test_one_weight_of_which_no_state_is_made(self) -> None:
        for wrong in processes.run(_one_weight, 3, LAST, seconds=500):
            self.assertEqual(wrong, [])

    def test_the_double_drops_the_gradient_of_its_state(self) -> None:
        from transformers.models.mamba import modeling_mamba as module

        draw = torch.Generator().manual_seed(0)
        u, dt, B, C = (torch.rand(1, wide, 5, generator=draw, requires_grad=True) for wide in (3, 3, 2, 2))
        A, D = -torch.rand(3, 2, generator=draw), torch.ones(3, requires_grad=True)
        with kernels.replaced(module):
            out, state = module.mamba_selective_scan(u, dt, A, B, C, D=D, return_last_state=True)
        self.assertTrue(state.requires_grad)
        (alone,) = torch.autograd.grad(out.sum(), u, retain_graph=True)
        (both,) = torch.autograd.grad(out.sum() + state.sum(), u)
        self.assertTrue(torch.equal(alone, both))
        self.assertGreater(float(alone.abs().max()), 0)


if __name__ == "__main__":
    unittest.main()
