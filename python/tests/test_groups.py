# SPDX-License-Identifier: MIT OR Apache-2.0
"""Documents over groups that change size: each once, groups apart and aligned, room kept; and what is refused."""

from __future__ import annotations

import random
import unittest
from pathlib import Path

import cpattn

MACHINE = (Path(__file__).parents[2] / "machines/h100_8x400g.machine").read_text()


def ends(lengths: list[int]) -> list[int]:
    return [sum(lengths[:at]) for at in range(len(lengths) + 1)]


class Groups(unittest.TestCase):
    def test_what_is_promised(self) -> None:
        draw = random.Random(3)
        for trial in range(30):
            lengths = [min(int(50 / (1.001 - draw.random())), 4000) for _ in range(draw.randrange(60))]
            how = {"machine": MACHINE, "dtype": "bf16"} if trial % 3 == 0 else {"window_left": 100}
            found = cpattn.plan_groups(
                ends(lengths), 8, 64, kv_heads=2, sizes=(1, 2, 4), room=1000, world=8, token_flops=10**7, **how
            )
            self.assertEqual(
                sorted(d for one in found.passes for group in one for d in group.documents), list(range(len(lengths)))
            )
            for one in found.passes:
                ranks = [rank for group in one for rank in range(group.first_rank, group.first_rank + group.ranks)]
                self.assertEqual(len(ranks), len(set(ranks)))
                self.assertLessEqual(set(ranks), set(range(8)))
                for group in one:
                    self.assertIn(group.ranks, (1, 2, 4))
                    self.assertEqual(group.first_rank % group.ranks, 0)
                    self.assertLessEqual(sum(lengths[d] for d in group.documents), group.ranks * 1000)
            self.assertLessEqual(found.bound, found.makespan)

    def test_short_documents_work_apart(self) -> None:
        found = cpattn.plan_groups(ends([100] * 8 + [60_000]), 8, 64, sizes=(1, 8), room=8192, world=16)
        (one,) = found.passes
        self.assertEqual([group.ranks for group in one], [8] + [1] * 8)
        self.assertEqual(one[0].documents, (8,))
        self.assertEqual(cpattn.plan_groups([0], 8, 64, sizes=(1,), room=5).passes, ())

    def test_refusals(self) -> None:
        for wrong, text in (
            ({"sizes": ()}, "sizes"), ({"sizes": (2, 3)}, "sizes is"), ({"sizes": (1, 8)}, "world is 4"), ({"room": 3}, "document 1"),
            ({"room": 5, "most_passes": 1}, "passes is 1"), ({"machine": "x"}, "line 1"), ({"machine": "a\0"}, "zero byte"),
            ({"ulysses": 2}, "ulysses"), ({"passes": 2}, "passes"), ({"cu_seqlens": []}, "cu_seqlens"),
        ):  # fmt: skip
            with self.subTest(text), self.assertRaisesRegex(cpattn.InvalidArgument, text):
                cpattn.plan_groups(
                    **{"cu_seqlens": [0, 10, 30], "heads": 4, "head_dim": 8, "sizes": (1, 2, 4), "room": 9, "world": 4}
                    | wrong
                )  # type: ignore[arg-type]


if __name__ == "__main__":
    unittest.main()
