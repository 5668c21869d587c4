# SPDX-License-Identifier: MIT OR Apache-2.0
"""FlashAttention-2, -3 and -4 by doubles with their signatures, which check what they are given; the signatures are compared with the
packages' files, where these are on the path. And kernels of two functions."""

import ast
import inspect
import random
import sys
import unittest
from pathlib import Path

import torch
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.torch import kernels
from cpattn.torch.kernels import flash
from doubles import flash_attn_2, flash_attn_3, flash_attn_4, plain
from kernel_problems import MASKS, attention_ops, drawn_op, drawn_plan
from test_kernels import check

PACKAGES = (
    (flash.FlashAttention2, flash_attn_2, "flash_attn/flash_attn_interface.py"),
    (flash.FlashAttention3, flash_attn_3, "flash_attn_interface.py"),
    (flash.FlashAttention4, flash_attn_4, "flash_attn/cute/interface.py"),
)


class FlashTest(unittest.TestCase):
    def test_drawn_operations(self):
        for kind, double, _ in PACKAGES:
            kernel = kind(double)
            for seed in range(60):
                op = drawn_op(random.Random(seed), stripes=seed % 3 == 0)
                # o and gradients are rounded to bf16 in each call, delta's o too.
                with self.subTest(kernel=kernel.name, seed=seed):
                    check(
                        self,
                        kernel,
                        op,
                        seed,
                        dtype=torch.bfloat16,
                        tolerance=1.2e-2,
                        dims=((16, 16), (8, 5))[seed % 2],
                        lse_gradient=seed % 4 > 0,
                    )

    def test_operations_of_plans(self):
        for kind, double, _ in PACKAGES:
            kernel = kind(double)
            for seed in range(3):
                for op in attention_ops(drawn_plan(seed, dtype="bf16"), "backward"):
                    with self.subTest(kernel=kernel.name, seed=seed):
                        check(self, kernel, op, seed, dtype=torch.bfloat16, tolerance=1.2e-2, dims=(16, 16))

    def test_slopes(self):
        slopes = torch.rand(9)
        for op in attention_ops(drawn_plan(2, meshes=({"ring": 1},), masks=MASKS[:4], heads_of=((4, 2),)), "forward"):
            check(
                self,
                flash.FlashAttention2(flash_attn_2),
                op,
                1,
                dtype=torch.bfloat16,
                tolerance=1.2e-2,
                slopes=slopes,
                dims=(16, 16),
            )
        for kind, double, _ in PACKAGES[1:]:
            with self.assertRaisesRegex(Unsupported, f"kernels='{kind.name}' .*alibi_slopes is set, None is needed"):
                kernels.refuse(kind(double), {"alibi_slopes": [0.5]})

    def test_a_missing_package_is_named(self):
        for name, package in (
            ("flash_attn", "flash-attn"),
            ("flash_attn_3", "flash-attn-3"),
            ("flash_attn_4", "flash-attn-4"),
        ):
            try:
                kernels.find(name, "cpu")
            except Unsupported as error:
                self.assertRegex(str(error), f"kernels='{name}' needs the package {package}: .*kernels=\"torch\"")

    def test_a_version_without_the_functions_is_named(self):
        with self.assertRaisesRegex(
            Unsupported, "kernels='flash_attn': doubles.plain has no _flash_attn_varlen_forward, .*another version"
        ):
            flash.FlashAttention2(plain)


class SignatureTest(unittest.TestCase):
    """Of the packages' files, without importing them, which needs a GPU."""

    def test_doubles_have_the_signatures_of_the_packages(self):
        seen = 0
        for kind, double, place in PACKAGES:
            file = next((Path(folder) / place for folder in sys.path if (Path(folder) / place).is_file()), None)
            if file is None:
                continue
            seen += 1
            functions = {
                node.name: node.args for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
            }
            for name, function in inspect.getmembers(double, inspect.isfunction):
                if name.startswith("_flash_attn"):
                    with self.subTest(kernel=kind.name, function=name):
                        self.assertEqual(
                            [x.arg for x in functions[name].args], list(inspect.signature(function).parameters)
                        )
        if not seen:
            self.skipTest("none of the packages is on the path")


def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, window_size):
    return plain.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, *window_size)


def padded_forward(q, k, v, cu_seqlens_q, *others, **options):
    """lse as [sequences, heads, longest and more], as older kernels return it."""
    o, lse = forward(q, k, v, cu_seqlens_q, *others, **options)
    lengths = cu_seqlens_q.diff().tolist()
    padded = torch.full((len(lengths), q.shape[1], others[1] + 3), torch.nan, dtype=lse.dtype)
    for at, part in enumerate(lse.split(lengths, 1)):
        padded[at, :, : part.shape[1]] = part
    return o, padded


def backward(d_o, q, k, v, o, lse, *lengths, softmax_scale, window_size):
    return plain.backward(d_o, q, k, v, o, lse, *lengths, softmax_scale, *window_size)


class VarlenTest(unittest.TestCase):
    def test_two_functions(self):
        for first in (forward, padded_forward):
            kernel = kernels.varlen(first, backward, name="mine", dtypes=(torch.float64,))
            for seed in range(60):
                op = drawn_op(random.Random(seed), stripes=False)
                op = type(op)(**{**vars(op), "score": op.score._replace(softcap=0.0)})
                with self.subTest(seed=seed, forward=first.__name__):
                    check(self, kernel, op, seed, tolerance=1e-11)

    def test_what_is_not_honoured_is_refused(self):
        kernel = kernels.varlen(forward, name="mine")
        for settings, text in (
            ({"dtype": torch.float32}, "dtype is torch.float32, one of torch.float16, torch.bfloat16 is needed"),
            ({"softcap": 2.0, "dtype": torch.bfloat16}, "softcap is 2.0, 0 is needed"),
            ({"backward": True}, "backward is True, a forward without gradients is needed"),
        ):
            with self.assertRaisesRegex(Unsupported, f"kernels='mine' honours no such call: {text}"):
                kernels.refuse(kernel, settings)
        with self.assertRaisesRegex(InvalidArgument, "forward is 3, a function is needed"):
            kernels.varlen(3)


if __name__ == "__main__":
    unittest.main()
