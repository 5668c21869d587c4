# SPDX-License-Identifier: MIT OR Apache-2.0
"""FlexAttention on the CPU, without its compiler. Its backward is refused there by a check of PyTorch's, which one test leaves out to see
that the gradients of parts of rows are right."""

import random
import unittest
from unittest import mock

import torch
from cpattn.torch import kernels
from cpattn.torch.kernels import flex
from kernel_problems import attention_ops, drawn_op, drawn_plan
from test_kernels import check
from torch.nn.attention import flex_attention as of_torch


class FlexTest(unittest.TestCase):
    def test_drawn_operations(self):
        kernel = kernels.find("flex", "cpu")
        for seed in range(40):
            op = drawn_op(random.Random(seed))
            with self.subTest(seed=seed):
                check(self, kernel, op, seed, dtype=torch.float32, tolerance=3e-6)

    def test_several_blocks(self):
        usual, flex.BLOCK = flex.BLOCK, 4
        try:
            for seed in range(25):
                with self.subTest(seed=seed):
                    check(
                        self,
                        kernels.find("flex", "cpu"),
                        drawn_op(random.Random(seed)),
                        seed,
                        dtype=torch.float32,
                        tolerance=3e-6,
                    )
        finally:
            flex.BLOCK = usual

    def test_blocks_are_those_of_the_dense_mask(self):
        for seed in range(15):
            draw = random.Random(seed)
            rows, keys = draw.randint(1, 700), draw.randint(1, 700)
            begin = torch.tensor([[draw.randint(0, keys) for _ in range(2)] for _ in range(rows)]).sort(1)[0]
            end = torch.stack(
                [torch.minimum(begin[:, 0] + draw.randint(0, keys), begin[:, 1]), torch.full((rows,), keys)], 1
            )
            mine = flex.mask_of(begin, end, keys, torch.device("cpu"))
            theirs = of_torch.create_block_mask(mine.mask_mod, None, None, rows, keys, device="cpu")
            self.assertTrue(torch.equal(mine.to_dense(), theirs.to_dense()), seed)
            self.assertTrue(torch.equal(mine.full_kv_num_blocks, theirs.full_kv_num_blocks), seed)

    def test_operations_of_plans_and_slopes(self):
        slopes = torch.rand(9)
        for seed in range(2):
            for op in attention_ops(drawn_plan(seed, masks=({}, {"window_left": 9}, {"softcap": 2.0})), "backward"):
                with self.subTest(seed=seed):
                    check(
                        self,
                        kernels.find("flex", "cpu"),
                        op,
                        seed,
                        dtype=torch.float32,
                        tolerance=3e-6,
                        slopes=(None, slopes)[seed % 2],
                    )

    def test_gradients_of_parts_of_rows(self):
        with mock.patch.object(of_torch, "_validate_device", lambda *_: None):
            kernel = flex.Flex("cpu", of_torch.flex_attention)
            for seed in range(30):
                with self.subTest(seed=seed):
                    check(self, kernel, drawn_op(random.Random(seed)), seed, dtype=torch.float32, tolerance=2e-5)


if __name__ == "__main__":
    unittest.main()
