# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bands as rectangles: drawn ranges and bands, and all operations of drawn plans, by a kernel of packed sequences, against f64."""

import random
import unittest

import torch
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.schedule import Band, Mode, OpKind, QRange, Range, Score, View
from cpattn.torch import kernels
from cpattn.torch.kernels.rectangles import rectangles_of, rows_of_runs
from doubles import plain
from kernel_problems import MASKS, NONE, allowed_of, attention_ops, blank, drawn_band, drawn_op, drawn_plan
from test_kernels import check


class Plain(kernels.Kernel):
    """`plain` as a kernel that honours all, or less."""

    name = "plain"

    def __init__(self, **honours):
        usual = {
            "dtypes": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
            "softcap": True,
            "slopes": True,
            "returns_f32": True,
        }
        self.honours = kernels.Honours(**(usual | honours))

    def arguments(self, q, k, v, call):
        able = self.honours
        assert all(x.is_contiguous() for x in (q, k, v))
        assert able.group or q.shape[1] == k.shape[1]
        assert able.value_dim or v.shape[2] == q.shape[2]
        assert all(x.shape[2] % able.head_dim_multiple == 0 for x in (q, v))
        limits = call.window_left, call.window_right
        assert all(limit is None or limit >= 0 for limit in limits), limits
        assert call.lengths == tuple(zip(call.cu_seqlens_q.diff().tolist(), call.cu_seqlens_k.diff().tolist()))
        limits = (-1 if limit is None else limit for limit in limits)
        of_lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k
        return *of_lengths, call.scale, *limits, call.softcap, call.slopes

    def forward(self, q, k, v, call):
        return plain.forward(q, k, v, *self.arguments(q, k, v, call))

    def backward(self, d_o, q, k, v, o, lse, call, delta=None):
        assert all(x.is_contiguous() for x in (d_o, o, lse, delta))
        return plain.backward(d_o, q, k, v, o, lse, *self.arguments(q, k, v, call))


LIMITED = (
    {},
    {"value_dim": True},
    {"group": False},
    {"value_dim": True, "head_dim_multiple": 8},
)


class BandsTest(unittest.TestCase):
    def test_all_pairs_once_and_all_limits_allowed(self):
        joined = 0
        for seed in range(3000):
            op = drawn_op(random.Random(seed), heads=(1, 1, 0, 0, 1), stripes=seed % 3 == 0)
            # Rows of q in the order of the call are those of its ranges.
            allowed, distance, _ = allowed_of(op)
            allowed, distance = (torch.cat([x[q.range.rows] for q in op.ranges]) for x in (allowed, distance))
            counts = torch.zeros(allowed.shape, dtype=torch.long)
            for in_order in (False, True):
                counts.zero_()
                for one in rectangles_of(op, in_order):
                    rows, keys = rows_of_runs(one.q), rows_of_runs(one.k)
                    self.assertEqual((len(rows), len(keys)), (one.rows, one.keys))
                    d = torch.arange(one.keys)[None] - torch.arange(one.rows)[:, None] - (one.keys - one.rows)
                    inside = torch.ones_like(d, dtype=torch.bool)
                    for limit, of_limit in ((one.left, -d), (one.right, d)):
                        if limit is not None:
                            self.assertGreaterEqual(limit, 0, (seed, one))
                            self.assertTrue((of_limit > limit).any(), f"a limit that excludes nothing: {seed} {one}")
                            inside &= of_limit <= limit
                    self.assertTrue(inside.any(0).all() and inside.any(1).all(), f"rows without pairs: {seed} {one}")
                    if one.corner is not None:
                        found = distance[rows][:, keys]
                        self.assertTrue(torch.equal(found[inside], (d + one.corner)[inside]), (seed, one))
                    counts.index_put_((rows[:, None], keys[None]), inside.long(), accumulate=True)
                    joined += len(one.k) > 1
                self.assertTrue(torch.equal(counts, allowed.long()), seed)
        self.assertGreater(joined, 300)

    def test_stripes_of_one_period(self):
        """Long ones, which are cut by residues; short ones are cut by blocks."""
        residues = 0
        for seed in range(300):
            draw = random.Random(seed)
            block = draw.randint(1, 3)
            period = block * draw.randint(1, 4)
            q, k = (Range(0, draw.randint(0, 20), draw.randint(20, 60), block, period, 0) for _ in range(2))
            band = drawn_band(draw)
            op = blank(
                q=View(0, q.len, 0, 0, 1), k=View(0, k.len, 1, 0, 1), v=View(0, k.len, 2, 0, 1), score=Score(1.0, 0.0, draw.choice((NONE, 40)), NONE),
                ranges=(QRange(q, (0, 0), Mode.ONLY, ((k, band),)),),
            )  # fmt: skip
            counts = torch.zeros(q.len, k.len, dtype=torch.long)
            for one in rectangles_of(op, False):
                rows, keys = rows_of_runs(one.q), rows_of_runs(one.k)
                d = torch.arange(one.keys)[None] - torch.arange(one.rows)[:, None] - (one.keys - one.rows)
                inside = (d >= -(10**6 if one.left is None else one.left)) & (
                    d <= (10**6 if one.right is None else one.right)
                )
                counts.index_put_((rows[:, None], keys[None]), inside.long(), accumulate=True)
                residues += any(run.step > 1 for run in one.q) or period > block == 1
            self.assertTrue(torch.equal(counts, allowed_of(op)[0].long()), seed)
        self.assertGreater(residues, 100)

    def test_causal_ranks_are_one_rectangle_each(self):
        """The diagonal of a rank and what lies before it, in ranges that follow each other or not."""
        whole = Band(-NONE - 1, NONE, -NONE - 1, NONE, -NONE - 1, NONE, 0)
        q = Range(0, 100, 50, 50, 50, 0)
        far, near_by, mine = Range(0, 10, 30, 30, 30, 0), Range(30, 70, 30, 30, 30, 0), Range(60, 100, 50, 50, 50, 0)
        for keys in ((far, near_by, mine), (mine, near_by, far)):
            op = blank(
                q=View(0, 50, 0, 0, 1), k=View(0, 110, 1, 0, 1), v=View(0, 110, 2, 0, 1), score=Score(1.0, 0.0, NONE, 0),
                ranges=(QRange(q, (0, 0), Mode.ONLY, tuple((k, whole) for k in keys)),),
            )  # fmt: skip
            found = rectangles_of(op, in_order=False)
            self.assertEqual([(one.rows, one.keys, one.left, one.right) for one in found], [(50, 110, None, 0)])
        stripes = Range(0, 1, 50, 1, 4, 0)
        op = blank(
            q=View(0, 50, 0, 0, 1), k=View(0, 50, 1, 0, 1), v=View(0, 50, 2, 0, 1), score=Score(1.0, 0.0, NONE, 0),
            ranges=(QRange(stripes, (0, 0), Mode.ONLY, ((stripes, whole),)),),
        )  # fmt: skip
        self.assertEqual(
            [(one.rows, one.keys, one.left, one.right) for one in rectangles_of(op, False)], [(50, 50, None, 0)]
        )


class PackedTest(unittest.TestCase):
    def test_drawn_ranges_and_bands(self):
        for seed in range(300):
            op = drawn_op(
                random.Random(seed), stripes=seed % 3 == 0, kind=(OpKind.ATTEND, OpKind.ATTEND_BACKWARD)[seed % 2]
            )
            kernel = Plain(**LIMITED[seed % len(LIMITED)])
            with self.subTest(seed=seed):
                check(
                    self,
                    kernel,
                    op,
                    seed,
                    dims=((5, 3), (3, 5), (4, 4))[seed % 3],
                    tolerance=1e-11,
                    lse_gradient=seed % 5 > 0,
                )

    def test_all_operations_of_plans(self):
        for seed in range(6):
            plan = drawn_plan(seed)
            for direction in ("forward", "backward"):
                for op in attention_ops(plan, direction):
                    with self.subTest(seed=seed, op=op.name):
                        check(self, Plain(), op, seed, tolerance=1e-11)

    def test_scales_below_0(self):
        """Kernels take the largest product of a row for its largest score."""
        for kernel in (kernels.find("math", "cpu"), kernels.find("flex", "cpu"), Plain(), kernels.find("torch", "cpu")):
            for seed in range(40):
                op = drawn_op(random.Random(seed), stripes=seed % 3 == 0)
                score = op.score._replace(scale=-0.5, softcap=op.score.softcap if kernel.honours.softcap else 0.0)
                with self.subTest(kernel=kernel.name, seed=seed):
                    check(
                        self,
                        kernel,
                        type(op)(**{**vars(op), "score": score}),
                        seed,
                        tolerance=1e-11,
                        lse_gradient=seed % 2 > 0,
                    )

    def test_slopes_where_ranks_have_all_keys(self):
        slopes = torch.rand(9)
        for seed in range(6):
            plan = drawn_plan(seed, meshes=({"ring": 1},), masks=MASKS[:4], heads_of=((4, 2), (6, 2)))
            for op in attention_ops(plan, "forward"):
                with self.subTest(seed=seed):
                    check(self, Plain(), op, seed, slopes=slopes, tolerance=1e-11)

    def test_slopes_of_parts_are_refused(self):
        plan = drawn_plan(1, meshes=({"ulysses": 1, "layout": "contiguous"},), masks=({},))
        with self.assertRaisesRegex(Unsupported, "kernels='plain' honours alibi_slopes only .*ring=1"):
            for op in attention_ops(plan, "forward"):
                kernels.Work(Plain(), op, "cpu", torch.float64, torch.rand(9))

    def test_narrow_gradients_of_lse(self):
        """In narrow types delta is in three columns; a kernel rounds only its inputs."""
        for dtype in (torch.bfloat16, torch.float16):
            for seed in range(30):
                op = drawn_op(random.Random(seed), stripes=False)
                with self.subTest(seed=seed, dtype=dtype):
                    check(self, Plain(value_dim=True), op, seed, dtype=dtype, tolerance=3e-6)

    def test_delta_without_a_gradient_of_lse(self):
        """An o along d_o carries delta as well as a rounded o."""
        for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float32, 3e-6)):
            for seed in range(30):
                op = drawn_op(random.Random(seed), stripes=False)
                with self.subTest(seed=seed, dtype=dtype):
                    check(self, Plain(), op, seed, dtype=dtype, tolerance=tolerance, dims=(16, 16), lse_gradient=False)

    def test_head_dims_that_are_too_large(self):
        op = drawn_op(random.Random(1), heads=(2, 2, 0, 0, 1))
        with self.assertRaisesRegex(
            Unsupported, "kernels='plain' has head dims up to 8, 9 is needed, of which the gradient of lse"
        ):
            check(self, Plain(head_dim=8), op, 1, dims=(8, 8))


class WrongKernelTest(unittest.TestCase):
    def test_wrong_shapes_and_types_are_named(self):
        op = drawn_op(random.Random(1), heads=(2, 1, 0, 0, 2))

        class Wrong(Plain):
            def forward(self, q, k, v, call):
                o, lse = super().forward(q, k, v, call)
                return self.change(o, lse)

        for change, text in (
            (lambda o, lse: (o[:-1], lse), "o.shape is"),
            (lambda o, lse: (o, lse.T.contiguous()), "lse.shape is"),
            (lambda o, lse: (o, lse.bfloat16()), "lse.dtype is torch.bfloat16, torch.float32 is needed"),
            (lambda o, lse: (o.long(), lse), "o.dtype is"),
            (lambda o, lse: (o, None), "lse is a NoneType"),
        ):
            kernel = Wrong()
            kernel.change = change
            with self.assertRaisesRegex(InvalidArgument, f"kernels='plain': {text}"):
                check(self, kernel, op, 1)

    def test_wrong_values_are_named_before_a_plan_runs(self):
        op = drawn_op(random.Random(1), heads=(2, 1, 0, 0, 2))

        class Wrong(Plain):
            name = "wrong"

            def forward(self, q, k, v, call):
                o, lse = super().forward(q, k, v, call)
                return self.change(o, lse, q, k, v, call)

            def backward(self, d_o, *others, **options):
                return super().backward(d_o * self.factor, *others, **options)

        def top_left(o, lse, q, k, v, call):
            """Limits from the other corner, as before FlashAttention 2.1."""
            if call.window_right is None:
                return o, lse
            padded = [(rows, rows) if keys > rows else (rows, keys) for rows, keys in call.lengths]
            keep = torch.cat([torch.arange(b) + a for a, (_, b) in zip(call.cu_seqlens_k.tolist(), padded)])
            cu = torch.tensor([0, *(b for _, b in padded)]).cumsum(0).int()
            other = call.max_seqlen_q, max(b for _, b in padded), call.scale, call.window_left or -1, call.window_right
            return plain.forward(q, k[keep], v[keep], call.cu_seqlens_q, cu, *other)

        for change, text in (
            (lambda o, lse, *_: (o, lse / torch.tensor(2.0).log()), "lse is to base 2, a natural logarithm is needed"),
            (lambda o, lse, *_: (o, lse.masked_fill(lse == lse.max(), torch.nan)), "lse is NaN in rows that have keys"),
            (lambda o, lse, *_: (o * 1.5, lse), "o is off by "),
            (top_left, r"lse is off by .* with the window \(None, 0\), .* bottom-right corner"),
        ):
            kernel = Wrong()
            kernel.change, kernel.factor = change, 1
            with self.assertRaisesRegex(InvalidArgument, f"kernels='wrong': {text}"):
                kernels.Work(kernel, op, "cpu", torch.float32)
        kernel = Wrong()
        kernel.change, kernel.factor = (lambda o, lse, *_: (o, lse)), 2
        with self.assertRaisesRegex(InvalidArgument, "kernels='wrong': dq is off by"):
            kernels.Work(kernel, op, "cpu", torch.bfloat16)
        kernel.change = lambda *_: 1 / 0
        with self.assertRaisesRegex(Unsupported, "kernels='wrong' failed on cpu .*ZeroDivisionError"):
            kernels.Work(kernel, op, "cpu", torch.float16)


if __name__ == "__main__":
    unittest.main()
