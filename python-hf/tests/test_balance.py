# SPDX-License-Identifier: MIT OR Apache-2.0
"""Packs of documents for replicas: equal costs in a step, each document once, no pack with too many tokens."""

from __future__ import annotations

import random
import sys
import unittest
from pathlib import Path

try:
    import transformers  # noqa: F401
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

from processes import run

from cpattn import InvalidArgument
from cpattn_hf.transformers import balanced
from cpattn_hf.transformers.balance import causal_area

sys.path.append(str(Path(__file__).parents[2] / "examples/python"))
import joined_groups


def waiting(lengths: list[int], steps: list[list[list[int]]]) -> float:
    """The time of all steps, each as long as its most expensive pack, over that with equal packs."""
    costs = [[sum(causal_area(lengths[i]) for i in pack) for pack in step] for step in steps]
    return sum(map(max, costs)) / sum(sum(step) / len(step) for step in costs)


def join(rank: int, world: int) -> list[tuple[int, list[list[int]], float]]:
    return list(joined_groups.train())


class Joined(unittest.TestCase):
    def test_the_example(self) -> None:
        for steps in run(join, 4):
            self.assertEqual({ranks for ranks, _, _ in steps}, {2, 4})
            self.assertEqual(
                sorted(i for _, packs, _ in steps for pack in packs for i in pack),
                list(range(len(joined_groups.LENGTHS))),
            )
            self.assertLess(max(apart for _, _, apart in steps), 1e-5)


class Balance(unittest.TestCase):
    def test_unequal_documents(self) -> None:
        draw = random.Random(1)
        lengths = [min(int(draw.lognormvariate(6, 1.2)) + 1, 8192) for _ in range(1200)]
        steps = balanced(lengths, tokens=8192, replicas=4)
        packs = [pack for step in steps for pack in step]
        self.assertEqual(sorted(i for pack in packs for i in pack), list(range(len(lengths))))
        self.assertTrue(all(len(step) == 4 for step in steps))
        self.assertLessEqual(max(sum(lengths[i] for i in pack) for pack in packs), 8192)
        # Packs as they come, of at most as many tokens, as a collator makes them.
        usual: list[list[int]] = [[]]
        for i, n in enumerate(lengths):
            if sum(lengths[j] for j in usual[-1]) + n > 8192:
                usual.append([])
            usual[-1].append(i)
        plain = [usual[at : at + 4] for at in range(0, len(usual) - len(usual) % 4, 4)]
        # A document of 8192 tokens is a pack alone, and no other pack of as many tokens costs as much.
        self.assertLessEqual(waiting(lengths, steps), 1.05)
        self.assertGreater(waiting(lengths, plain), 1.5)
        self.assertLessEqual(len(packs), 1.3 * len(usual))

    def test_small(self) -> None:
        # A document of 8 tokens has an area of 36, four of 4 tokens have 10 each.
        steps = balanced([8, 4, 4, 4, 4], tokens=16, replicas=2)
        self.assertEqual([[sorted(pack) for pack in step] for step in steps], [[[1, 2, 3, 4], [0]]])
        by_tokens = balanced([8, 4, 4, 4, 4], tokens=16, replicas=2, cost=float)
        self.assertEqual(sorted(sum([8, 4, 4, 4, 4][i] for i in pack) for pack in by_tokens[0]), [12, 12])
        self.assertEqual(balanced([], tokens=5), [])
        # Three of 4 tokens do not fit into one pack of 10 nor, with 2 more, into the fewest that the tokens allow.
        self.assertEqual(len(balanced([6, 6, 6], tokens=10)), 3)
        # Fewer documents than packs leave packs of the last step empty; documents that cost nothing do not.
        self.assertEqual(balanced([8, 8, 8], tokens=8, replicas=2), [[[0], [1]], [[2], []]])
        self.assertEqual(sorted(balanced([4, 4], tokens=16, replicas=2, cost=lambda n: 0)[0]), [[0], [1]])

    def test_refusals(self) -> None:
        for options, text in (
            ({"lengths": [5, 11]}, "lengths has a document of 11 tokens, from 1 to 10"), ({"lengths": "x"}, "lengths is 'x'"),
            ({"replicas": 0}, "replicas is 0"), ({"tokens": 1.5}, "tokens is 1.5"), ({"cost": lambda n: float("nan")}, "cost is"),
        ):  # fmt: skip
            with self.assertRaisesRegex(InvalidArgument, text):
                balanced(**{"lengths": [5], "tokens": 10, **options})  # type: ignore[arg-type]


if __name__ == "__main__":
    unittest.main()
