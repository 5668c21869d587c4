# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ContextParallel.timeline`: what the attention of a step cost, in one line."""

from __future__ import annotations

import contextlib
import random
import unittest

import torch

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import cpattn
import models
import processes
from cpattn import Event, InvalidArgument
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.timeline import busy, common, costs, line

transformers.utils.logging.set_verbosity_error()
LENGTHS = [23, 1, 17, 9, 40]
PATTERN = (
    r"^2 ranks, [0-9.e+]+ m?s: attention computes [0-9.e+]+ m?s, communicates [0-9.e+]+ m?s \([0-9]+ % of it hidden\), "
    r"[0-9.e+-]+ MB sent and received, workspace [0-9.e+-]+ MB$"
)


def _recorded(rank: int, world: int) -> tuple[list[str], int, int]:
    """Lines of steps, the number of events of a trace, and the bytes of its picture."""
    model, pack = models.build("gemma3"), models.batch(LENGTHS)
    cp = ContextParallel(model, ring=world, timeout=100)
    lines = [cp.timeline()]
    cp.record()
    model(**pack).loss.backward()
    lines.append(cp.timeline())
    with torch.autocast("cpu", torch.bfloat16):  # whose context is made in this pass
        model(**pack).loss.backward()
    lines += [cp.timeline(), cp.timeline()]
    model(**pack).loss.backward()
    events = cp.trace()
    with contextlib.suppress(InvalidArgument):
        cp.record((1 << 24) + 1)
    with torch.autocast("cpu", torch.float16):  # whose context records as before
        model(**pack)
    lines.append(cp.timeline())
    cp.record(5)
    model(**pack).loss.backward()
    lines.append(cp.timeline())
    picture = cpattn.timeline_svg(events) if rank == 0 else ""
    cp.close()
    return lines, len(events), len(picture)


class Timeline(unittest.TestCase):
    def test_lines_of_steps(self) -> None:
        found = processes.run(_recorded, 2)
        self.assertEqual(found[0][0], found[1][0], "on all ranks")
        nothing, step, autocast, again, third, full = found[0][0]
        for none in (nothing, again):
            self.assertEqual(none, "no attention was recorded: call cp.record() before the step")
        self.assertIn("; recorder full: ranks [0, 1] have 5 operations, and later ones are missing", full)
        self.assertRegex(third, r"^2 ranks, [^;]*$")
        for text in (step, autocast):
            self.assertRegex(text, PATTERN)
            self.assertNotRegex(text, r", 0 MB|workspace 0 MB|communicates 0 ms")
        self.assertGreater(found[0][1], 8)
        self.assertGreater(found[0][2], 1000)
        self.assertEqual(found[1][1], 0)

    def test_spans(self) -> None:
        draw = random.Random(3)
        for _ in range(200):
            one, other = (
                [(a, a + draw.randrange(5)) for a in (draw.randrange(30) for _ in range(draw.randrange(6)))]
                for _ in range(2)
            )
            inside = [{ns for begin, end in spans for ns in range(begin, end)} for spans in (one, other)]
            self.assertEqual(sum(end - begin for begin, end in busy(one)), len(inside[0]))
            self.assertEqual(common(busy(one), busy(other)), len(inside[0] & inside[1]))

    def test_costs_of_the_rank_with_the_most(self) -> None:
        events = [
            Event(0, 0, "attend", "forward", 0, 0, 4_000_000, 0), Event(0, 1, "fetch", "forward", 0, 3_000_000, 5_000_000, 1_000_000),
            Event(1, 0, "attend", "forward", 0, 0, 1_000_000, 0), Event(1, 1, "fetch", "forward", 0, 0, 4_000_000, 2_000_000),
        ]  # fmt: skip
        self.assertEqual(costs(events)[0], (4_000_000, 2_000_000, 1_000_000, 1_000_000))
        text = "2 ranks, 5 ms: attention computes 4 ms, communicates 4 ms (25 % of it hidden), 2 MB sent and received, workspace 3 MB"
        self.assertEqual(line([events], 3_000_000, 3), text)
        self.assertEqual(line([events[::2], events[1::2]], 3_000_000, 2), text, "each dtype has a recorder")
        self.assertIn(text + "; recorder full: ranks [0, 1] have 2 operations", line([events], 3_000_000, 2))
        self.assertIn("; recorder full: ranks [0] have", line([events[:3]], 3_000_000, 2))


if __name__ == "__main__":
    unittest.main()
