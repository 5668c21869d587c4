# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's own kernels in operations of schedules: on the CPU by what they compute, on other devices by their signatures."""

import random
import unittest

import torch
from cpattn.schedule import OpKind
from cpattn.torch import kernels
from kernel_problems import MASKS, attention_ops, drawn_op, drawn_plan
from test_kernels import check

NO_SOFTCAP = tuple(mask for mask in MASKS if "softcap" not in mask)


def without_softcap(op):
    return type(op)(**{**vars(op), "score": op.score._replace(softcap=0.0)})


class CpuTest(unittest.TestCase):
    def test_drawn_ranges_and_bands(self):
        kernel = kernels.find("torch", "cpu")
        for seed in range(300):
            op = without_softcap(
                drawn_op(
                    random.Random(seed), stripes=seed % 3 == 0, kind=(OpKind.ATTEND, OpKind.ATTEND_BACKWARD)[seed % 2]
                )
            )
            with self.subTest(seed=seed):
                check(
                    self,
                    kernel,
                    op,
                    seed,
                    dims=((5, 3), (3, 5), (16, 16))[seed % 3],
                    tolerance=1e-11,
                    lse_gradient=seed % 5 > 0,
                )

    def test_all_operations_of_plans(self):
        kernel = kernels.find("torch", "cpu")
        for seed in range(6):
            plan = drawn_plan(seed, masks=NO_SOFTCAP)
            for direction in ("forward", "backward"):
                for op in attention_ops(plan, direction):
                    with self.subTest(seed=seed, op=op.name):
                        check(self, kernel, op, seed, tolerance=1e-11)

    def test_narrow_types(self):
        """No more than rounding of the results to the type, and of delta's o."""
        kernel = kernels.find("torch", "cpu")
        for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
            for seed in range(20):
                op = without_softcap(drawn_op(random.Random(seed), stripes=False))
                for lse_gradient in (False, True):
                    with self.subTest(seed=seed, dtype=dtype, lse_gradient=lse_gradient):
                        check(
                            self,
                            kernel,
                            op,
                            seed,
                            dtype=dtype,
                            tolerance=tolerance,
                            dims=(16, 16),
                            lse_gradient=lse_gradient,
                        )

    def test_parts_of_rows_with_masks(self):
        from cpattn.torch.kernels import torch_cpu

        usual, torch_cpu.ROWS = torch_cpu.ROWS, 3
        try:
            for seed in range(60):
                op = without_softcap(drawn_op(random.Random(seed), stripes=False))
                with self.subTest(seed=seed):
                    check(self, kernels.find("torch", "cpu"), op, seed, tolerance=1e-11)
        finally:
            torch_cpu.ROWS = usual


if __name__ == "__main__":
    unittest.main()
