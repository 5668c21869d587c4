# SPDX-License-Identifier: MIT OR Apache-2.0
"""Hybrids of Transformers on several processes, without a mixer of the user, whose recurrent layers get whole documents: loss and gradients of
one process that runs each document alone, on any mesh, with more ranks than heads; and documents that do not see each other.
`test_recurrent` is of those that pass states."""

from __future__ import annotations

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
import models
import processes
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.hybrids import mixer_of
from torch.distributed.fsdp import fully_shard

transformers.utils.logging.set_verbosity_error()
# Documents of one token, of fewer than a convolution's taps, and of more than a chunk of each kernel.
LENGTHS = [33, 1, 70, 2, 3, 1, 20]


def _alone(name: str, lengths: list[int]) -> tuple[float, torch.Tensor]:
    model, pack = hybrids.build(name), models.batch(lengths)
    loss = models.part(model, pack) / models.count(pack)
    loss.backward()
    return loss.item(), models.gradients(model)


def _wrong(name: str, lengths: list[int], file: str, change: Any = None, **options: Any) -> list[str]:
    expected, gradients = torch.load(file)[name, tuple(lengths)]
    model = hybrids.build(name)
    if change:
        change(model)
    cp = ContextParallel(model, gradients="sum", timeout=60, recurrent="heads", **options)
    loss = model(**models.batch(lengths)).loss
    loss.backward()
    total = models.gradients(model)
    dist.all_reduce(total)
    cp.close()
    error, distance = abs(loss.item() - expected) / expected, models.apart(total, gradients)
    said = f"{name} {lengths} {options}: loss {error:.1e}, gradients {distance:.1e}"
    return [] if error <= 1e-6 and distance <= 1e-5 else [said]


def _right(rank: int, world: int, file: str) -> list[str]:
    wrong = []
    for name in hybrids.MODELS:
        for lengths in (LENGTHS, [41]):  # with one document and fewer heads than ranks, some ranks have no document
            wrong += _wrong(name, lengths, file, **({"ulysses": 1, "ring": world} if lengths == LENGTHS else {}))
    return wrong


def _checkpointed(rank: int, world: int, file: str) -> list[str]:
    wrong = []
    for name in ("qwen3_next", "jamba", "mamba"):
        for reentrant in (False, True):

            def change(model: Any) -> None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                if reentrant:
                    model.enable_input_require_grads()

            wrong += _wrong(name, LENGTHS, file, change, tile=40)
    return wrong


def _wrapped(rank: int, world: int, file: str) -> list[str]:
    """DDP and FSDP, also where a rank has no document of a layer: each rank has gradients of all parameters."""
    wrong = []
    for name in ("qwen3_5_text", "nemotron_h", "jamba", "lfm2"):
        expected, gradients = torch.load(file)[name, (41,)]
        for kind in ("ddp", "fsdp"):
            model = hybrids.build(name)
            cp = ContextParallel(model, timeout=60, recurrent="heads")
            if kind == "ddp":
                whole: Any = torch.nn.parallel.DistributedDataParallel(model)
            else:
                for layer in model.get_decoder().layers:
                    fully_shard(layer)
                whole = fully_shard(model)
            loss = whole(**models.batch([41])).loss
            loss.backward()
            if kind == "fsdp":
                total = torch.cat(
                    [
                        (p.grad.full_tensor() if p.grad is not None else torch.zeros(p.shape)).flatten().double()
                        for p in model.parameters()
                    ]
                )
            else:
                total = models.gradients(model)
            error, distance = abs(loss.item() - expected) / expected, models.apart(total, gradients)
            if not (error <= 1e-6 and distance <= 1e-5):
                wrong.append(f"{name}, {kind}: loss {error:.1e}, gradients {distance:.1e}")
            cp.close()
    return wrong


def _apart(rank: int, world: int) -> list[str]:
    """A change in one document leaves all logits of the others as they are, bit by bit."""
    wrong = []
    pack = models.batch(LENGTHS)
    other = {**pack, "input_ids": pack["input_ids"].clone()}
    other["input_ids"][0, 34:104:5] += 1  # in the third document
    other["input_ids"] %= models.WORDS
    for name in hybrids.MODELS:
        model = hybrids.build(name)
        cp = ContextParallel(model, gradients="sum", timeout=60, recurrent="heads")
        with torch.no_grad():
            one, two = (cp.gather(model(**given).logits)[0] for given in (pack, other))
        cp.close()
        same = (one == two).all(1)
        if not (same[:34].all() and same[104:].all()):
            wrong.append(f"{name}: another document changed")
        if same[34:104].all():
            wrong.append(f"{name}: the document did not change")
    return wrong


class Hybrids(unittest.TestCase):
    def _run(self, job: Any, worlds: tuple[int, ...], names: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({(name, tuple(of)): _alone(name, of) for name in names for of in (LENGTHS, [41])}, file)
            for world in worlds:
                for wrong in processes.run(job, world, file, seconds=300):
                    self.assertEqual(wrong, [], f"{world} processes")

    def test_loss_and_gradients_of_one_process(self) -> None:
        self._run(_right, (2, 4) if processes.LONG else (4,), hybrids.MODELS)

    def test_checkpointing_and_tiles(self) -> None:
        self._run(_checkpointed, (3,), ("qwen3_next", "jamba", "mamba"))

    def test_ddp_and_fsdp(self) -> None:
        self._run(_wrapped, (4,), ("qwen3_5_text", "nemotron_h", "jamba", "lfm2"))

    def test_documents_are_apart(self) -> None:
        for wrong in processes.run(_apart, 3, seconds=300):
            self.assertEqual(wrong, [])

    def test_a_leak_would_show(self) -> None:
        """Each layer gives the first token of a document something else after another document."""
        pack = models.batch(LENGTHS)
        for name in hybrids.MODELS:
            model = hybrids.build(name)
            layers = [module for module in model.modules() if mixer_of(module)]
            self.assertTrue(layers, name)
            taken: list[torch.Tensor] = []
            hook = layers[0].register_forward_hook(
                lambda module, args, out: taken.append((out[0] if isinstance(out, tuple) else out)[0])
            )
            with torch.no_grad():
                for ids in (pack["input_ids"][:, 34:104], pack["input_ids"][:, 36:104]):
                    model(input_ids=ids)
            hook.remove()
            self.assertGreater(models.apart(taken[0][2:3], taken[1][:1]), 1e-3, name)


if __name__ == "__main__":
    unittest.main()
