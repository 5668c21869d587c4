# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention operations by kernels of others, against f64 from the definition of a band: drawn ranges and bands, and all operations
of drawn plans, with NaN in rows that nobody may read."""

import random
import unittest

import torch
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.torch import kernels
from kernel_problems import attention_ops, drawn_op, drawn_plan, expected_backward, expected_forward, problem, strided


def check(test, kernel, op, seed, dtype=torch.float64, tolerance=1e-12, slopes=None, dims=(5, 3), lse_gradient=True):
    """Forward and backward of one operation."""
    q, k, v, d_o, lse, delta = problem(op, *dims, dtype=dtype, seed=seed, slopes=slopes)
    if not lse_gradient:
        delta = delta * (d_o.double().nan_to_num(0) ** 2).sum(2)
    work = kernels.Work(kernel, op, "cpu", dtype, slopes)
    rows = torch.arange(op.q.rows)[work.rows]
    o, logs = work.forward(*map(strided, (q, k, v)))
    want_o, want_lse, largest = expected_forward(op, q, k, v, slopes)
    close(test, o, want_o[rows], tolerance, "o")
    finite = want_lse[rows].T > -torch.inf
    test.assertTrue(torch.equal(logs > -torch.inf, finite), "rows without keys")
    close(test, logs[finite], want_lse[rows].T[finite], tolerance, "lse")
    if kernel.honours.max_logit:
        *_, found = work.forward_with_max(q, k, v)
        test.assertTrue(torch.allclose(found.double(), largest, rtol=tolerance, atol=tolerance), "largest scores")
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    of_rows = (lse.to(accumulator), delta.to(accumulator))
    found = work.backward(strided(d_o), q, k, v, None, *map(strided, of_rows), lse_gradient=lse_gradient)
    wanted = expected_backward(op, d_o, q, k, v, lse, delta, slopes)
    for name, mine, want in zip(("dq", "dk", "dv"), found, (wanted[0][rows], *wanted[1:])):
        test.assertEqual(mine.dtype, accumulator)
        close(test, mine, want, tolerance, name)


def close(test, found, wanted, tolerance, name):
    test.assertEqual(found.shape, wanted.shape, name)
    if not wanted.numel():
        return
    error = ((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=1e-3)).item()
    test.assertLess(error, tolerance, name)  # NaN is not less


class MathTest(unittest.TestCase):
    def test_drawn_ranges_and_bands(self):
        kernel = kernels.find("math", "cpu")
        for seed in range(400):
            draw = random.Random(seed)
            op = drawn_op(draw)
            slopes = torch.rand(9) if draw.random() < 0.3 else None
            with self.subTest(seed=seed):
                check(self, kernel, op, seed, slopes=slopes)

    def test_all_operations_of_plans(self):
        kernel = kernels.find("math", "cpu")
        for seed in range(10):
            plan = drawn_plan(seed)
            for direction in ("forward", "backward"):
                for op in attention_ops(plan, direction):
                    with self.subTest(seed=seed, op=op.name):
                        check(self, kernel, op, seed)

    def test_tensors_that_require_gradients(self):
        """As those of a model do: `Work` is differentiated by its backward alone."""
        kernel = kernels.find("math", "cpu")
        for seed in range(20):
            op = drawn_op(random.Random(seed))
            q, k, v, d_o, lse, delta = problem(op, seed=seed)
            work = kernels.Work(kernel, op, "cpu", torch.float64)
            with self.subTest(seed=seed):
                results = []
                for asked in (False, True):
                    for x in (q, k, v, d_o):
                        x.requires_grad_(asked)
                    results.append(
                        (
                            *work.forward(q, k, v),
                            *work.forward_with_max(q, k, v),
                            *work.backward(d_o, q, k, v, None, lse, delta),
                        )
                    )
                for x, y in zip(*results, strict=True):
                    self.assertFalse(y is not None and y.requires_grad)
                    self.assertTrue(x is y is None or torch.equal(x, y))

    def test_narrow_types_are_computed_in_f32(self):
        kernel = kernels.find("math", "cpu")
        for seed in range(40):
            op = drawn_op(random.Random(seed))
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                with self.subTest(seed=seed, dtype=dtype):
                    check(self, kernel, op, seed, dtype=dtype, tolerance=2e-6)

    def test_the_largest_score_leaves_out_nan(self):
        for seed in range(40):
            op = drawn_op(random.Random(seed))
            q, k, v, *_ = problem(op, seed=seed)
            *_, want = expected_forward(op, q, k, v)
            row = int(random.Random(seed).choice(op.ranges).range.row)
            spoiled, rest = q.clone(), q.clone()
            spoiled[row], rest[row] = torch.nan, 0.0  # a score of 0 beside others
            *_, found = kernels.Work(kernels.Math(), op, "cpu", q.dtype).forward_with_max(spoiled, k, v)
            *_, most = expected_forward(op, rest, k, v)
            with self.subTest(seed=seed):
                self.assertFalse(found.isnan().any())
                self.assertTrue((found <= torch.maximum(want, most) + 1e-12).all())
                self.assertTrue(torch.allclose(found[most > 0], most[most > 0], rtol=1e-12))

    def test_parts_of_rows_change_nothing(self):
        from cpattn.torch.kernels import math

        usual, math.ELEMENTS = math.ELEMENTS, 40
        try:
            for seed in range(60):
                with self.subTest(seed=seed):
                    check(self, kernels.find("math", "cpu"), drawn_op(random.Random(seed)), seed, slopes=torch.rand(9))
        finally:
            math.ELEMENTS = usual


class RefusalTest(unittest.TestCase):
    def test_names_of_kernels(self):
        self.assertIs(kernels.find(kernel := kernels.Math(), "cpu"), kernel)
        for wrong in ("mathematics", None, 3):
            with self.assertRaisesRegex(InvalidArgument, "kernels is .*'math'"):
                kernels.find(wrong, "cpu")

    def test_options_that_a_kernel_does_not_honour(self):
        kernel = kernels.Math()
        kernels.refuse(
            kernel,
            {
                "dtype": torch.bfloat16,
                "head_dim": 999,
                "softcap": 3.0,
                "alibi_slopes": [1.0],
                "window_left": 4,
                "dropout": 0,
            },
        )
        for name, value in (("dropout", 0.1), ("key_indices", object()), ("dtype", torch.int8), ("reproducible", True)):
            with self.assertRaisesRegex(Unsupported, f"kernels='math' .*{name} is .*kernels=\"cpattn\""):
                kernels.refuse(kernel, {name: value})

    def test_limits_of_dims_and_types(self):
        kernel = kernels.varlen(len, len, name="mine", dtypes=(torch.bfloat16,), head_dim=64, windows=False)
        kernels.refuse(
            kernel,
            {"dtype": torch.bfloat16, "head_dim": 64, "value_dim": 32, "heads": 3, "kv_heads": 1, "window_right": 0},
        )
        kernels.refuse(kernel, {"dtype": torch.bfloat16, "head_dim": 64, "value_dim": 61, "lse_gradient": True})
        for settings, text in (
            ({"head_dim": 65}, "head_dim is 65, at most 64 is needed"),
            (
                {"head_dim": 64, "lse_gradient": True},
                "the gradient of lse is used, value_dim of at most 61 is needed, or return_lse=False",
            ),
            ({"window_left": 3}, "window_left is 3, None is needed"),
            ({"head_dim": 8, "device": "cpu", "return_max_logit": True}, "return_max_logit is True, False is needed"),
        ):
            with self.assertRaisesRegex(Unsupported, f"kernels='mine' honours no such call: {text}"):
                kernels.refuse(kernel, {"dtype": torch.bfloat16, **settings})
        of_devices = kernels.find("torch", "meta")
        kernels.refuse(of_devices, {"dtype": torch.bfloat16, "window_left": 9})
        with self.assertRaisesRegex(Unsupported, "kernels='torch' .*window_left is 9"):
            kernels.refuse(of_devices, {"dtype": torch.float32, "window_left": 9})


if __name__ == "__main__":
    unittest.main()
