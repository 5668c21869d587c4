# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Batch.shift` with gradients: what heads need that predict tokens further on than the next one."""

from __future__ import annotations

import unittest
from typing import Any

import processes
import torch
import torch.distributed as dist
from torch.nn import functional as F

from cpattn.torch import Context

DOCUMENTS, WORDS, WIDTH, DEPTH = [0, 9, 10, 10, 12, 31], 20, 6, 3


def weights() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = (WORDS, WIDTH), *((2 * WIDTH, WIDTH) for _ in range(DEPTH)), (WIDTH, WORDS)
    return [torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def alone() -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients of one process, document by document."""
    (table, *projections, head), losses = weights(), []
    every = torch.randint(WORDS, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(2))
    for a, b in zip(DOCUMENTS, DOCUMENTS[1:]):
        x = hidden = table[every[a:b]]
        for by, projection in enumerate(projections, 1):
            later = torch.cat([x[by:], x.new_zeros(min(by, b - a), WIDTH)])
            hidden = (torch.cat([hidden, later], 1) @ projection).tanh()
            labels = F.pad(every[a + by + 1 : b], (0, min(by + 1, b - a)), value=-100)
            losses.append(F.cross_entropy(hidden @ head, labels, ignore_index=-100, reduction="sum"))
    sum(losses).backward()
    return float(sum(losses).detach()), [one.grad for one in (table, *projections, head)]


def _heads(rank: int, world: int) -> list[str]:
    expected, wrong = alone(), []
    every = torch.randint(WORDS, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(2))
    for options in (
        {},
        {"ring": world, "layout": "striped", "layout_parameter": 2},
        {"ulysses": world},
        {"kernels": "math"},
    ):
        with_context: dict[str, Any] = {"heads": 4, "head_dim": 4, "dtype": torch.float64, "timeout": 60.0, **options}
        context = Context(**with_context)
        batch, (table, *projections, head) = context.batch(DOCUMENTS), weights()
        ids = batch.shard(every)
        x = hidden = table[ids]
        total = x.new_zeros(())
        for by, projection in enumerate(projections, 1):
            hidden = (torch.cat([hidden, batch.shift(x, by, 0.0)], 1) @ projection).tanh()
            labels = batch.shift(ids, by + 1, -100)
            total = total + F.cross_entropy(hidden @ head, labels, ignore_index=-100, reduction="sum")
        total.backward()
        loss = total.detach().clone()
        dist.all_reduce(loss)
        far = [abs(loss.item() / expected[0] - 1)]
        for one, gradient in zip((table, *projections, head), expected[1]):
            dist.all_reduce(one.grad)
            far.append(float((one.grad - gradient).abs().max() / gradient.abs().max()))
        # Backwards, and beyond each document.
        rows = batch.shard(torch.arange(1.0, DOCUMENTS[-1] + 1, dtype=torch.float64)).requires_grad_()
        batch.shift(rows, -2, 5.0).sum().backward()
        ends = torch.tensor(DOCUMENTS)[torch.searchsorted(torch.tensor(DOCUMENTS), batch.tokens, right=True)]
        far.append(float((rows.grad - (batch.tokens + 2 < ends).double()).abs().sum()))
        nothing = batch.shift(rows, 40, 5.0)
        far.append(float((nothing.detach() - 5).abs().sum() + torch.autograd.grad(nothing.sum(), rows)[0].abs().sum()))
        if not max(far) < 1e-12:
            wrong.append(f"{options}: {far}")
        dist.barrier()
        context.close()
    return wrong


class Ahead(unittest.TestCase):
    def test_heads_of_a_model_of_ones_own(self) -> None:
        for world in (2, 3):
            for wrong in processes.run(_heads, world):
                self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
