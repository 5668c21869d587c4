# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context parallelism beside PyTorch's pipeline and tensor parallelism, 2 x 2 processes: the loss and all gradients of one process, in f64."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any

import processes
import programs
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS
from torch.utils.checkpoint import checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples/python/parallelism.py"
sys.path.append(str(EXAMPLE.parent))
import parallelism  # noqa: E402

FOUR = ((0,), (1,), (2,), (3,))
# By the order of forwards and backwards: the layers of each stage, and the pipeline rank that has it. (Those in a V send from a rank to itself,
# which gloo cannot.)
SCHEDULES: dict[Any, tuple[Any, Any]] = {
    pipelining.ScheduleGPipe: (((0, 1), (2, 3)), (0, 1)),
    pipelining.Schedule1F1B: (((0,), (1, 2, 3)), (0, 1)),
    pipelining.ScheduleInterleaved1F1B: (FOUR, (0, 1, 0, 1)),
    ScheduleLoopedBFS: (FOUR, (0, 1, 0, 1)),
    # Gradients of inputs first, those of weights later.
    pipelining.ScheduleInterleavedZeroBubble: (FOUR, (0, 1, 0, 1)),
}
MESHES: list[dict[str, Any]] = [
    {"ring": 2},
    {"ulysses": 2},
    {"ring": 2, "circulate": "queries", "layout": "striped", "layout_parameter": 2},
    {},
]


def _pipelines(rank: int, world: int) -> list[str]:
    wrong = []
    expected = parallelism.alone(torch.float64)
    names: set[str] = set()
    for number, (schedule, (stages, where)) in enumerate(SCHEDULES.items()):
        for plans in (1, 16):
            # With one plan in the cache, all others that are in flight are their batches' own.
            options = {"plans": plans, **MESHES[(number + (plans == 1)) % len(MESHES)]}
            found = parallelism.pipeline(schedule, torch.float64, stages, where, **options)
            names |= found[1].keys()
            if not (far := parallelism.apart(found, expected)) < 1e-12:
                wrong.append(f"{schedule.__name__}, {options}: {far}")
    if not names:
        wrong.append("no gradients were compared")
    return wrong


def _checkpoints(rank: int, world: int) -> list[str]:
    """Layers of a stage that are computed again in its backwards, between forwards of other micro-batches."""
    usual = parallelism.Layer.forward
    expected = parallelism.alone(torch.float64)
    parallelism.Layer.forward = lambda self, x, batch: checkpoint(usual, self, x, batch, use_reentrant=False)
    stages, where = SCHEDULES[pipelining.ScheduleInterleaved1F1B]
    found = parallelism.pipeline(pipelining.ScheduleInterleaved1F1B, torch.float64, stages, where, plans=1)
    far = [parallelism.apart(found, expected), parallelism.apart(parallelism.tensors(torch.float64), expected)]
    return [] if max(far) < 1e-12 else [str(far)]


def _tensors(rank: int, world: int) -> list[str]:
    expected, wrong = parallelism.alone(torch.float64), []
    for options in ({"ring": 2}, {"ulysses": 2}, {"ring": 2, "circulate": "queries"}):
        if not (far := parallelism.apart(parallelism.tensors(torch.float64, **options), expected)) < 1e-12:
            wrong.append(f"{options}: {far}")
    return wrong


class Parallelism(unittest.TestCase):
    def test_pipelines(self) -> None:
        for wrong in processes.run(_pipelines, 4, seconds=400):
            self.assertEqual(wrong, [])

    def test_layers_that_are_computed_again(self) -> None:
        for wrong in processes.run(_checkpoints, 4, seconds=300):
            self.assertEqual(wrong, [])

    def test_tensor_parallel(self) -> None:
        for wrong in processes.run(_tensors, 4, seconds=300):
            self.assertEqual(wrong, [])

    def test_the_example(self) -> None:
        done = programs.run(str(EXAMPLE), 4)
        self.assertEqual(done.returncode, 0, done.stderr)
        for what in ("2 pipeline stages x 2 context ranks", "2 tensor-parallel x 2 context ranks"):
            self.assertRegex(done.stdout, f"{what}: loss [0-9.]+, that of one process")


if __name__ == "__main__":
    unittest.main()
