# SPDX-License-Identifier: MIT OR Apache-2.0
"""Schedules as data, and the example that executes them with PyTorch alone."""

from __future__ import annotations

import inspect
import sys
import unittest
from collections import defaultdict
from dataclasses import is_dataclass
from pathlib import Path

import torch
from processes import run

import cpattn
import cpattn.torch
from cpattn.schedule import Lane, OpKind, OpMessage, Schedule, Tensor

sys.path.append(str(Path(__file__).parents[2] / "examples/python"))
import execute_schedule
import who_sends_what

WORLD = 4


def job(rank: int, world: int) -> list[float]:
    return [*(execute_schedule.compare(name, rank, world) for name in execute_schedule.CASES), all_to_all(rank)]


def all_to_all(rank: int) -> float:
    """k to heads and back: two ranks have each kv head, so the way back doubles it."""
    made = plan(kind="other", ring=1)
    whole = torch.randn(40, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    order = torch.tensor([t for r in range(WORLD) for t in made.tokens(cpattn.Side.K, r)])
    mine, heads = whole[torch.tensor(made.tokens(cpattn.Side.K, rank))], made.share(rank)
    tensors = {Tensor.OWN_TOKENS: mine}
    executor = execute_schedule.Executor(tensors)
    executor.run(made.all_to_all_schedule(rank, "to_heads", "k", 3, "float64"))
    held = whole[order, heads.kv_head_begin : heads.kv_head_end]
    apart = (tensors[Tensor.OWN_HEADS] - held).abs().max()
    executor.run(made.all_to_all_schedule(rank, cpattn.AllToAll.TO_TOKENS, cpattn.Side.K, 3, torch.float64))
    return max(apart.item(), (tensors[Tensor.OWN_TOKENS] - 2 * mine).abs().max().item())


def plan(**options: object) -> cpattn.Plan:
    return cpattn.Plan([0, 9, 40], 4, 8, kv_heads=2, world=WORLD, **options)  # type: ignore[arg-type]


class Schedules(unittest.TestCase):
    def test_executed_with_torch(self) -> None:
        for rank, worst in enumerate(run(job, WORLD)):
            for name, difference in zip([*execute_schedule.CASES, "all-to-all"], worst, strict=True):
                self.assertLess(difference, 1e-13, f"{name} on rank {rank}")

    def test_the_picture_of_a_mesh(self) -> None:
        page = Path(__file__).parents[2] / "docs/mesh.svg"
        self.assertEqual(
            "\n".join(who_sends_what.picture()) + "\n",
            page.read_text(),
            "examples/python/who_sends_what.py > docs/mesh.svg",
        )

    def test_messages_of_all_ranks_match(self) -> None:
        for direction in cpattn.Direction:
            lists: list[Schedule] = [plan(ulysses=2, ring=2).schedule(rank, direction) for rank in range(WORLD)]
            sent, received = ({} for _ in range(2))
            for s in lists:
                for op in s.ops:
                    self.assertEqual(bool(op.messages), op.kind == OpKind.EXCHANGE)
                    for m in op.messages:
                        ends = (s.rank, m.peer) if m.send else (m.peer, s.rank)
                        (sent if m.send else received)[(*ends, m.tag)] = (m.bytes, s.buffers[m.view.buffer].dtype)
                        self.check_bytes(s, m)
            self.assertEqual(sent, received)
            self.assertGreater(len(sent), WORLD)

    def check_bytes(self, s: Schedule, m: OpMessage) -> None:
        """Whole rows, as contiguous bytes of a compact tensor of the buffer's shape."""
        buffer = s.buffers[m.view.buffer]
        memory = torch.empty(buffer.shape, dtype=cpattn.torch.TORCH_DTYPES[buffer.dtype])
        view = memory[m.view.place]
        self.assertTrue(view.is_contiguous())
        self.assertEqual((view.data_ptr() - memory.data_ptr(), view.nbytes), (m.offset, m.bytes))

    def test_fields(self) -> None:
        made = plan(ring=4, layout="zigzag", sinks=True, reproducible=True)
        s = made.schedule(1, "backward")
        self.assertEqual(
            (s.rank, s.direction, s.workspace_bytes),
            (1, cpattn.Direction.BACKWARD, made.workspace(1, cpattn.Direction.BACKWARD)),
        )
        given = {b.tensor: b for b in s.buffers if b.tensor is not None}
        of_others = {
            Tensor.OWN_TOKENS,
            Tensor.OWN_HEADS,
            Tensor.PARTIAL_O,
            Tensor.PARTIAL_LSE,
            Tensor.D_LSE,
            Tensor.MAX_LOGIT,
            Tensor.DECAY,
            Tensor.STATE,
            Tensor.INITIAL_STATE,
        }
        self.assertEqual(set(given), set(Tensor) - of_others)
        self.assertEqual({t for t, b in given.items() if b.written}, {Tensor.DQ, Tensor.DK, Tensor.DV, Tensor.DSINKS})
        tokens = len(made.tokens(cpattn.Side.Q, 1))
        self.assertEqual(
            (given[Tensor.Q].shape, given[Tensor.K].shape, given[Tensor.LSE].shape),
            ((tokens, 4, 8), (tokens, 2, 8), (tokens, 4, 1)),
        )
        ends = [b.offset + b.rows * b.heads * b.dim * 4 for b in s.buffers if b.tensor is None]
        self.assertLessEqual(max(ends), s.workspace_bytes)
        last: dict[Lane, int] = defaultdict(lambda: -1)
        for at, op in enumerate(s.ops):
            self.assertTrue(op.after is None or (op.after < at and s.ops[op.after].lane != op.lane))
            last[op.lane] = at
        self.assertEqual(set(last), set(Lane))
        calls = [op for op in s.ops if op.kind == OpKind.ATTEND_BACKWARD]
        self.assertTrue(calls)
        for call in calls:
            self.assertTrue(call.aligned)
            self.assertEqual((call.score.window_right, call.heads), (0, (0, 0, 2)))
            self.assertTrue(all(pair[0] in call.k_ranges for q in call.ranges for pair in q.pairs))
        # The list is a copy: it stays when the plan is gone.
        del made
        self.assertEqual(s.ops[0].name, "delta")

    def test_signatures(self) -> None:
        """help() shows types."""
        every = [
            kind
            for kind in (*vars(cpattn.schedule).values(), cpattn.Slice, cpattn.Event, cpattn.Link, cpattn.Message)
            if inspect.isclass(kind)
        ]
        told = [str(inspect.signature(kind)) for kind in every if hasattr(kind, "_fields") or is_dataclass(kind)]
        self.assertGreater(len(told), 14)
        self.assertEqual([one for one in told if "ForwardRef" in one or "'" in one], [])

    def test_refused(self) -> None:
        with self.assertRaisesRegex(cpattn.InvalidArgument, "rank is 4, expected below the world of 4"):
            plan().schedule(4, "forward")
        with self.assertRaisesRegex(cpattn.InvalidArgument, "direction is 'sideways'"):
            plan().schedule(0, "sideways")
        with self.assertRaisesRegex(cpattn.InvalidArgument, "direction is 'forward'"):
            plan().all_to_all_schedule(0, "forward", "k", 8, "float32")
        with self.assertRaisesRegex(cpattn.InvalidArgument, "dim is 0"):
            plan().all_to_all_schedule(0, "to_heads", "k", 0, "float32")
        with self.assertRaisesRegex(cpattn.Unsupported, "CPATTN_OTHER"):
            plan(kind="other", ring=1).schedule(0, "forward")


if __name__ == "__main__":
    unittest.main()
