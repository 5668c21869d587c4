# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arrays of other libraries: those that may not be written are inputs, and never outputs."""

from __future__ import annotations

import importlib.util
import unittest
from typing import Any

import numpy as np

import cpattn

TOKENS, HEADS, DIM = 5, 2, 4
INPUTS, OUTPUTS = ("q", "k", "v"), ("o", "lse")
GRADIENTS = ("dq", "dk", "dv")


def arrays(seed: int = 1) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    made = {
        name: random.standard_normal((TOKENS, HEADS, DIM), np.float32) for name in (*INPUTS, "d_o", "o", *GRADIENTS)
    }
    return made | {"lse": random.standard_normal((HEADS, TOKENS), np.float32)}


def of(made: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: made[name] for name in names}


class ReadOnly(unittest.TestCase):
    def setUp(self) -> None:
        self.plan, self.rank = cpattn.Plan([0, TOKENS], HEADS, DIM), cpattn.local_group(1)[0]

    def run_with(self, change: Any, *changed: str) -> dict[str, Any]:
        """Forward and backward, with some arrays made into others."""
        made = arrays()
        made |= {name: change(made[name]) for name in changed}
        self.rank.forward(self.plan, **of(made, *INPUTS, *OUTPUTS))
        self.rank.backward(self.plan, **of(made, *INPUTS, *OUTPUTS, "d_o", *GRADIENTS))
        return made

    def check(self, change: Any) -> None:
        want, got = self.run_with(np.copy), self.run_with(change, *INPUTS, "d_o")
        for name in (*OUTPUTS, *GRADIENTS):
            np.testing.assert_array_equal(got[name], want[name], name)
        for name in (*OUTPUTS, *GRADIENTS):
            made = arrays()
            kept = made[name] = change(made[name])
            before = np.array(kept)
            with self.assertRaisesRegex(
                cpattn.InvalidArgument,
                f"^{name} is a read-only .*Array.*: give a writable tensor|^{name} is a read-only numpy.ndarray",
            ):
                if name in OUTPUTS:
                    self.rank.forward(self.plan, **of(made, *INPUTS, *OUTPUTS))
                else:
                    self.rank.backward(self.plan, **of(made, *INPUTS, *OUTPUTS, "d_o", *GRADIENTS))
            np.testing.assert_array_equal(np.array(kept), before)
        whole, local = np.zeros((TOKENS, 3), np.float32), change(np.ones((TOKENS, 3), np.float32))
        with self.assertRaisesRegex(cpattn.InvalidArgument, "^local is a read-only"):
            self.plan.shard("q", 0, whole, local)
        self.plan.unshard("q", 0, local, whole)
        self.assertTrue((whole == 1).all())
        source = np.ones((TOKENS, HEADS, DIM), np.float32)
        for exchange in (self.rank.to_heads, self.rank.to_tokens):
            to = np.zeros_like(source)
            kept = change(to)
            with self.assertRaisesRegex(cpattn.InvalidArgument, "^to is a read-only"):
                exchange(self.plan, "q", source, kept)
            self.assertFalse(np.array(kept).any())
            exchange(self.plan, "q", change(source), to)
            self.assertTrue((to == 1).all())

    def test_numpy(self) -> None:
        def frozen(array: Any) -> Any:
            array = array.copy()
            array.flags.writeable = False
            return array

        self.check(frozen)

    @unittest.skipUnless(importlib.util.find_spec("jax"), "no JAX here")
    def test_jax(self) -> None:
        import jax

        self.check(jax.numpy.asarray)


if __name__ == "__main__":
    unittest.main()
