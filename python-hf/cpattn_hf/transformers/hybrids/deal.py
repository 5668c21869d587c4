# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole documents for layers that mix their tokens: who gets which heads of which documents, and the exchange of rows.

The heads of a layer are cut into at most as many parts as there are ranks. With fewer parts than ranks, several ranks have the same
part, and the documents are dealt among them. So a layer runs on any mesh, over any distribution of tokens, with any number of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cpattn.errors import PeerError, Unsupported
from cpattn.torch.group import Collectives


def parts_of(parts: int, world: int) -> list[int]:
    """The part of the heads of each rank; ranks of a part are consecutive."""
    return [one * parts // world for one in range(world)]


def dealt(lengths: Sequence[int], part: Sequence[int]) -> Tensor:
    """For each rank: whether it gets a document. Documents to the ranks of each part: the longest first, each to the rank with the fewest
    tokens so far."""
    owners = torch.zeros(len(part), len(lengths), dtype=torch.bool)
    load = [0] * len(part)
    longest = sorted(range(len(lengths)), key=lambda one: -lengths[one])
    for one_part in range(max(part) + 1):
        ranks = [rank for rank, of in enumerate(part) if of == one_part]
        for one in longest:
            to = min(ranks, key=load.__getitem__)
            owners[to, one], load[to] = True, load[to] + lengths[one]
    return owners


class Deal:
    """Who gets what of one batch, and this rank's rows in it.

    `tokens` are the indices in the batch of each rank's tokens. `talk` is not used with one rank.
    """

    def __init__(
        self, cu_seqlens: Sequence[int], tokens: Sequence[Tensor], rank: int, parts: int, talk: Collectives | None
    ) -> None:
        self.rank, self.world, self._talk = rank, len(tokens), talk
        self.parts = min(parts, self.world)
        self.part = parts_of(self.parts, self.world)
        ends = torch.tensor(cu_seqlens, dtype=torch.int64)
        lengths = ends.diff()
        owners = dealt(lengths.tolist(), self.part)
        own = owners[rank].nonzero().flatten()
        # The first row of each of this rank's documents among the rows of this rank.
        self.ends: list[int] = [0, *lengths[own].cumsum(0).tolist()]
        first = torch.zeros(len(lengths), dtype=torch.int64)
        first[own] = torch.tensor(self.ends[:-1], dtype=torch.int64)
        document = [torch.searchsorted(ends, of, right=True) - 1 for of in tokens]
        # The rows of this rank's tokens that each rank needs, and where the rows that come from each rank belong.
        self.send = [owners[one][document[rank]].nonzero().flatten() for one in range(self.world)]
        self.place: list[Tensor] = []
        for of, where in zip(tokens, document, strict=True):
            mine = owners[rank][where]
            self.place.append((first[where] + of - ends[where])[mine])

    def documents(self) -> list[tuple[int, int]]:
        """The rows of each of this rank's documents."""
        return list(pairwise(self.ends))

    def to_documents(self, x: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """From this rank's tokens with all columns, [tokens, width], to this rank's documents with the columns of its part. `columns`
        are those of each part; a column of several parts goes to all of them, and its gradient is summed in f32. Differentiable."""
        out: Tensor = _Move.apply(x, self, columns, x.shape, True)  # type: ignore[no-untyped-call]
        return out

    def to_tokens(self, y: Tensor, columns: Sequence[Tensor], rows: int) -> Tensor:
        """The way back, for columns that are those of one part each, to so many rows: those after this rank's tokens are 0."""
        out: Tensor = _Move.apply(y, self, columns, (rows, sum(map(len, columns))), False)  # type: ignore[no-untyped-call]
        return out

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, which have the same documents: there are as many parts as ranks. Differentiable; gradients are summed
        as well, since each rank uses the sum for its part."""
        if self._talk is None:
            return x
        if self.parts < self.world:
            raise Unsupported(
                f"a layer of {self.parts} channels on {self.world} ranks: use at most as many ranks (replicas)"
            )
        out: Tensor = _Sum.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def total(self, x: Tensor) -> Tensor:
        host = x.to("cpu", x.dtype if x.dtype == torch.float64 else torch.float32, copy=True).contiguous()
        try:
            assert self._talk is not None
            self._talk.sum(host)
        except RuntimeError as error:
            raise PeerError(f"a sum over the ranks failed on rank {self.rank}: {error}") from error
        return host.to(x.device, x.dtype)

    def scatter(self, x: Tensor, columns: Sequence[Tensor]) -> Tensor:
        own = columns[self.part[self.rank]]
        blocks = [x[rows][:, columns[part]] for rows, part in zip(self.send, self.part, strict=True)]
        got = self._exchange(blocks, [len(rows) for rows in self.place], len(own))
        out = x.new_empty(self.ends[-1], len(own))
        for rows, block in zip(self.place, got, strict=True):
            out[rows] = block
        return out

    def collect(self, y: Tensor, columns: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        blocks = [y[rows] for rows in self.place]
        widths = [len(columns[part]) for part in self.part]
        out = y.new_zeros(*shape, dtype=y.dtype if y.dtype == torch.float64 else torch.float32)
        got = self._exchange(blocks, [len(rows) for rows in self.send], widths)
        # In the order of the ranks, so that a sum is the same in each run.
        for rows, part, block in zip(self.send, self.part, got, strict=True):
            out.index_put_((rows[:, None], columns[part][None]), block.to(out.dtype), accumulate=True)
        return out.to(y.dtype)

    def _exchange(self, blocks: list[Tensor], rows: list[int], widths: int | list[int]) -> list[Tensor]:
        """Sends a block to each rank, and returns those from each. gloo takes tensors on the CPU, so others go through it."""
        if self._talk is None:
            return blocks
        each = widths if isinstance(widths, list) else [widths] * self.world
        first = blocks[0]
        sizes = [count * width for count, width in zip(rows, each, strict=True)]
        sent = torch.cat([block.reshape(-1) for block in blocks]).cpu()
        got = torch.empty(sum(sizes), dtype=first.dtype)
        item = first.element_size()
        try:
            assert self._talk is not None
            self._talk.exchange(
                got.view(torch.uint8),
                sent.view(torch.uint8),
                [size * item for size in sizes],
                [block.numel() * item for block in blocks],
            )
        except RuntimeError as error:
            raise PeerError(f"the exchange of documents failed on rank {self.rank}: {error}") from error
        parts = torch.split(got.to(first.device), sizes)
        return [part.view(count, width) for part, count, width in zip(parts, rows, each, strict=True)]


class _Move(torch.autograd.Function):
    """Either way between tokens and documents. The gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, deal: Deal, columns: Sequence[Tensor], shape: Sequence[int], out: bool) -> Tensor:
        ctx.how = deal, columns, shape, out
        return deal.scatter(x.detach(), columns) if out else deal.collect(x.detach(), columns, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        deal, columns, shape, out = ctx.how
        gradient = gradient.detach()
        return (
            deal.collect(gradient, columns, shape) if out else deal.scatter(gradient, columns),
            None,
            None,
            None,
            None,
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, deal: Deal) -> Tensor:
        ctx.deal = deal
        return deal.total(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.deal.total(gradient.detach()), None
