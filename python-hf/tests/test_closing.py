# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is closed leaves nothing behind: no descriptor, no thread, no group of PyTorch's."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import cpattn.torch
import models
import processes
import resources
from cpattn import InvalidArgument
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()


def _closes(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def whole() -> None:
        model = models.build("llama")
        cp = ContextParallel(model)
        assert model(**models.batch([9, 4])).loss.isfinite()
        assert [batch for batch in cp.loader([1, 2] if rank == 0 else [])] == [1, 2]
        dist.barrier()
        cp.close()
        for name, call in (("gather", lambda: cp.gather(torch.zeros(1, 1))), ("loader", lambda: next(cp.loader([1])))):
            try:
                call()
            except InvalidArgument as error:
                found[name] = str(error)

    def refused() -> None:
        for more in ({"ulysses": 2}, {"tile": rank}, {"layers": [(0, {})]}):
            try:
                ContextParallel(models.build("llama"), **more)
            except cpattn.Error:
                continue
            raise AssertionError(f"{more} was not refused")

    def context() -> None:
        context = cpattn.torch.Context(heads=4, head_dim=8)
        context.batch([0, 5]).attention(*torch.randn(3, len(context.batch([0, 5]).tokens), 4, 8))
        dist.barrier()
        context.close()

    for job in (whole, refused, context):
        job()  # what is made once in a process is not counted
        before = resources.now()
        for _ in range(3):
            job()
        found[job.__name__] = (before, resources.now())
    return found


def _ranks(rank: int, world: int) -> dict[str, Any]:
    """A group by its global ranks, without one of PyTorch's; the members have made unequally many groups before."""
    found: dict[str, Any] = {}
    for _ in range(2 * rank):
        dist.new_group([rank], use_local_synchronization=True)
    if rank:
        model, pack = models.build("llama"), models.batch([9, 4])
        cp = ContextParallel(model, group=[1, 2], gradients="sum")
        loss = model(**pack).loss
        found["loss"], found["alone"], found["rank"] = loss.item(), models.alone("llama", pack)[0], cp.rank
        cp.close()
    for name, group in (
        ("twice", [1, 1]),
        ("order", [2, 1, 0]),
        ("world", [0, 1, 2, 3]),
        ("empty", []),
        ("word", ["a"]),
        ("other", [(rank + 1) % 3]),
    ):
        try:
            cpattn.torch.Context(group, heads=4, head_dim=8)
            found[name] = "not refused"
        except InvalidArgument as error:
            found[name] = str(error)
    return found


class Closing(unittest.TestCase):
    def test_nothing_is_left(self) -> None:
        for found in processes.run(_closes, 3):
            for name in ("whole", "refused", "context"):
                before, after = found[name]
                self.assertEqual(before, after, name)
            for name in ("gather", "loader"):
                self.assertIn("this ContextParallel is closed", found[name])

    def test_groups_by_their_ranks(self) -> None:
        for rank, found in enumerate(processes.run(_ranks, 3)):
            if rank:
                self.assertLessEqual(abs(found["loss"] / found["alone"] - 1), 1e-6)
                self.assertEqual(found["rank"], rank - 1)
            for name in ("twice", "order", "world", "empty", "word"):
                self.assertIn("ascending global ranks below 3 are needed", found[name])
            self.assertIn(f"process {rank} is not a member of group", found["other"])


if __name__ == "__main__":
    unittest.main()
