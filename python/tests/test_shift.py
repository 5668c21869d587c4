# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Rank.shift` without PyTorch: rows that lie some tokens on, from each rank's own."""

from __future__ import annotations

import unittest
from array import array

import cpattn
from cpattn import Memory, Rank, Side

DOCUMENTS, WORLD = [0, 5, 5, 12], 3


def memory(numbers: array[int], *shape: int, code: int = 0) -> Memory:
    return Memory(numbers.buffer_info()[0], shape, 64, code=code)


class Shift(unittest.TestCase):
    def test_rows_of_other_ranks(self) -> None:
        plan = cpattn.Plan(DOCUMENTS, 2, 4, world=WORLD, ring=WORLD, layout="ZIGZAG")

        def job(number: int, rank: Rank) -> list[list[int]]:
            tokens = plan.tokens(Side.Q, number)
            rows, fill, answers = array("q", (10 * t for t in tokens)), array("q", [-1]), []
            for by in (1, -2, 7, 2**63 - 1):
                out = array("q", [7] * len(tokens))
                rank.shift(plan, by, memory(fill, 1), memory(rows, len(tokens)), memory(out, len(tokens)))
                ends = [(0, 5)] * 5 + [(5, 12)] * 7
                want = [10 * (t + by) if ends[t][0] <= t + by < ends[t][1] else -1 for t in tokens]
                self.assertEqual(out.tolist(), want, (number, by))
                answers.append(want)
            return answers

        answers = cpattn.on_all(cpattn.local_group(WORLD), job)
        self.assertEqual(
            sum(label >= 0 for labels, *_ in answers for label in labels), 10, "all but the last of a document"
        )

    def test_refusals(self) -> None:
        plan = cpattn.Plan([0, 4], 2, 4)
        (rank,) = cpattn.local_group(1)
        rows, out, fill = array("q", range(4)), array("q", range(4)), array("q", [0, 0])
        good = memory(rows, 4), memory(out, 4)
        for one in (memory(fill, 2), memory(fill, 1, code=2), memory(fill, 1, 2)):
            with self.assertRaisesRegex(
                cpattn.InvalidArgument,
                "fill has . elements of DLPack type ., .* rows has DLPack type 0, 64 bits, on device type 1: give fill 1 element",
            ):
                rank.shift(plan, 1, one, *good)
        with self.assertRaisesRegex(cpattn.InvalidArgument, r"rows\.shape\[0\] is 3, expected 4 tokens"):
            rank.shift(plan, 1, memory(fill, 1), memory(rows, 3), memory(out, 4))
        with self.assertRaisesRegex(cpattn.InvalidArgument, "out is memory that overlaps rows"):
            rank.shift(plan, 1, memory(fill, 1), memory(rows, 4), memory(rows, 4))
        with self.assertRaisesRegex(cpattn.InvalidArgument, "by is 1.5"):
            rank.shift(plan, 1.5, memory(fill, 1), *good)  # type: ignore[arg-type]
        with self.assertRaisesRegex(cpattn.InvalidArgument, "plan is None, a Plan is needed"):
            rank.shift(None, 1, memory(fill, 1), *good)  # type: ignore[arg-type]
        rank.shift(plan, 1, memory(fill, 1, 1), *good)
        self.assertEqual(out.tolist(), [1, 2, 3, 0])
        rank.close()
        with self.assertRaisesRegex(cpattn.InvalidHandle, "this rank is closed"):
            rank.gather_trace()


if __name__ == "__main__":
    unittest.main()
