# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans that PyTorch runs: the tests of cpattn.torch with kernels of others."""

from __future__ import annotations

import functools
import unittest
from typing import Any

import test_torch
import torch
import torch.distributed as dist
from processes import run

from cpattn.torch import Context

CHECKS = (
    test_torch.results, test_torch.kinds, test_torch.precision, test_torch.strides, test_torch.exchanges, test_torch.gradcheck,
    test_torch.log_sum_exp, test_torch.shares, test_torch.overlaps,
)  # fmt: skip


class Together(Context):
    """No rank leaves before all have made their last call."""

    def close(self) -> None:
        if self.world == dist.get_world_size():
            dist.barrier()
        super().close()


class NotCounted(test_torch.Copies):
    """PyTorch's operators move rows by copies of tensors."""

    @property
    def count(self) -> int:  # type: ignore[override]
        return 0

    @count.setter
    def count(self, _: int) -> None:
        pass


def with_kernels(rank: int, world: int, kernels: str, names: list[str]) -> None:
    """The checks of `test_torch` with another kernel."""
    test_torch.Copies = NotCounted  # type: ignore[misc]
    test_torch.Context = functools.partial(Together, kernels=kernels)  # type: ignore[misc, assignment]
    for name in names:
        getattr(test_torch, name)(rank, world)
        dist.barrier()


class Executed(unittest.TestCase):
    def test_checks_of_contexts(self) -> None:
        run(with_kernels, 4, "math", [check.__name__ for check in CHECKS])


if __name__ == "__main__":
    unittest.main()
