# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans that PyTorch runs: the tests of cpattn.torch, Transformers and Diffusers with kernels of others.

The jobs are those of the other test modules. A context that is not told its kernels has those of this test.
"""

from __future__ import annotations

import functools
import importlib
import unittest
from typing import Any

import test_compile
import test_gather
import test_latent
import test_serving
import test_slices
import test_slopes
import test_torch
import torch.distributed as dist
from processes import run

from cpattn.torch import Context

JOBS = {
    test_torch: "results kinds contexts precision strides exchanges gradcheck log_sum_exp shares overlaps subgroups second_derivatives",
    test_slices: "values drawn of_layers cross refusals",
}


class NotCounted(test_torch.Copies):
    """PyTorch's operators move rows by copies of tensors."""

    @property
    def count(self) -> int:  # type: ignore[override]
        return 0

    @count.setter
    def count(self, _: int) -> None:
        pass


def use(kernels: str) -> None:
    """Makes these the kernels of contexts in this process."""
    usual, leave = Context.__init__, Context.close

    @functools.wraps(usual)
    def changed(self: Any, *args: Any, **options: Any) -> None:
        options.pop("reproducible", None)  # which no kernel of others honours
        usual(self, *args, **{"kernels": kernels, **options})

    def together(self: Any) -> None:
        # No rank leaves before all have made their last call.
        if self.world == dist.get_world_size():
            dist.barrier()
        leave(self)

    Context.__init__, Context.close = changed, together  # type: ignore[method-assign]
    test_torch.Copies = NotCounted  # type: ignore[misc]


def with_kernels(rank: int, world: int, kernels: str, module: str, names: str, *args: Any) -> Any:
    """Jobs of a test module with other kernels; the result of the last one."""
    use(kernels)
    for name in names.split():
        result = getattr(importlib.import_module(module), name)(rank, world, *args)
        dist.barrier()
    return result


class Executed(unittest.TestCase):
    def test_batches(self) -> None:
        for module, names in JOBS.items():
            run(with_kernels, 4, "math", module.__name__, names, seconds=400)

    def test_compiled(self) -> None:
        run(with_kernels, 2, "math", test_compile.__name__, "compiled", "aot_eager", seconds=300)

    def test_scores(self) -> None:
        run(with_kernels, 3, "math", test_slopes.__name__, "all_of_it")
        run(with_kernels, 2, "math", test_latent.__name__, "everything")

    def test_rows_of_other_ranks(self) -> None:
        for wrong in run(with_kernels, 3, "math", test_gather.__name__, "_right", seconds=300):
            self.assertEqual(wrong, [])

    def test_combined(self) -> None:
        for worst in run(with_kernels, test_serving.WORLD, "math", test_serving.__name__, "job"):
            self.assertLess(max(worst), 1.0)

if __name__ == "__main__":
    unittest.main()
