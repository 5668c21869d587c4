# SPDX-License-Identifier: MIT OR Apache-2.0
"""Traces over processes: every rank's operations on one clock."""

from __future__ import annotations

import json
import time
import unittest
from xml.etree import ElementTree

import torch
import torch.distributed as dist
from processes import run

import cpattn
from cpattn.torch import Context


def job(rank: int, world: int, kernels: str) -> object:
    # Clocks begin at different times, so that the comparison has a difference to find.
    time.sleep(0.3 * rank)
    cpattn.clock()
    with_trace = Context(heads=4, head_dim=8, ring=world, ulysses=1, timeout=60, kernels=kernels)
    batch = with_trace.batch([0, 30, 64])
    q = torch.ones(len(batch.tokens), 4, 8)
    batch.attention(q, q, q)
    with_trace.record()
    spans = []
    for _ in range(2):
        dist.barrier()
        began = cpattn.clock()
        batch.attention(q, q, q)
        dist.barrier()
        spans.append((began, cpattn.clock()))
        time.sleep(0.2)
    events = with_trace.trace()
    assert with_trace.trace() == [], "taken"
    with_trace.close()
    return [spans, [tuple(e) for e in events]]


class Trace(unittest.TestCase):
    def test_one_clock(self) -> None:
        """With the library's kernels, and with PyTorch's in the executor."""
        for kernels in ("cpattn", "torch"):
            with self.subTest(kernels=kernels):
                self.of_kernels(kernels)

    def of_kernels(self, kernels: str) -> None:
        (spans, rows), *others = run(job, 3, kernels)
        self.assertTrue(all(not theirs for _, theirs in others))
        events = [cpattn.Event(*row) for row in rows]
        self.assertEqual({e.rank for e in events}, {0, 1, 2})
        self.assertEqual({(e.rank, e.lane) for e in events}, {(rank, lane) for rank in range(3) for lane in range(2)})
        for event in events:
            # Between barriers that all ranks were in, by the clock of rank 0; clocks differ by 0.3 s and more.
            self.assertTrue(any(a - 5e7 < event.start_ns <= event.end_ns < b + 5e7 for a, b in spans), (event, spans))
        text = json.loads(cpattn.chrome_trace(events))
        self.assertEqual(len([row for row in text["traceEvents"] if row["ph"] == "X"]), len(events))
        picture = ElementTree.fromstring(cpattn.timeline_svg(events))
        self.assertEqual(len(picture.findall(".//{*}title")), len(events))

    def test_events_of_others(self) -> None:
        own = cpattn.Event(1, 0, "an operation whose name is longer than 31 bytes", "ß" * 20, 7, 5, 9, 0)
        text = cpattn.chrome_trace(iter([own]))
        self.assertIn('"an operation whose name is long"', text)
        json.loads(text)
        self.assertIn("rank 1", cpattn.timeline_svg([own, own._replace(lane=1)]))
        ElementTree.fromstring(cpattn.timeline_svg([]))
        for name, value in (("lane", 2), ("end_ns", 4), ("rank", -1), ("bytes", 2**64), ("step", 1.5)):
            with self.assertRaisesRegex(cpattn.InvalidArgument, rf"events\[1\]\.{name}"):
                cpattn.timeline_svg([own, own._replace(**{name: value})])


if __name__ == "__main__":
    unittest.main()
