# SPDX-License-Identifier: MIT OR Apache-2.0
"""A sequence in parts, one for each rank: `part` takes this rank's rows, `Whole` brings all of them together again.

Parts differ by at most one row, and may be empty. Both are exact adjoints of each other over the ranks: the gradient of a row that only
one rank reads is on that rank, and that of a gathered row is the sum of what all ranks have for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cpattn.errors import PeerError
from cpattn.torch.group import Collectives


def bounds(length: int, rank: int, world: int) -> tuple[int, int]:
    """The first row of a rank, and the one after its last."""
    return length * rank // world, length * (rank + 1) // world


def part(x: Tensor, dim: int, rank: int, world: int) -> Tensor:
    """This rank's rows, in memory of their own."""
    begin, end = bounds(x.shape[dim], rank, world)
    return x.narrow(dim, begin, end - begin).contiguous()


def lengths(length: int, world: int) -> list[int]:
    return [end - begin for begin, end in (bounds(length, rank, world) for rank in range(world))]


def exchanged(data: Tensor, leaving: list[int], arriving: list[int], collectives: Collectives) -> Tensor:
    """Rows of bytes for each rank, in the order of the ranks; returns those from each. The numbers are of rows."""
    width = data.shape[1]
    got = torch.empty(sum(arriving), width, dtype=torch.uint8)
    try:
        collectives.exchange(
            got.view(-1), data.reshape(-1), *([rows * width for rows in way] for way in (arriving, leaving))
        )
    except RuntimeError as error:
        raise PeerError(f"gathering the sequence failed: {error}") from error
    return got


def _bytes(x: Tensor) -> Tensor:
    """Of rows [n, ...], on the CPU."""
    host = x.detach().cpu().contiguous()
    return host.view(-1).view(torch.uint8).view(len(x), math.prod(x.shape[1:]) * x.element_size())


def _values(data: Tensor, like: Tensor) -> Tensor:
    return data.view(-1).view(like.dtype).view(len(data), *like.shape[1:]).to(like.device)


class Whole(torch.autograd.Function):
    """From this rank's rows [n, ...] to those of all ranks, of which each has so many."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, each: list[int], rank: int, collectives: Collectives) -> Tensor:
        ctx.rest = each, rank, collectives
        if not math.prod(rows.shape[1:]):
            return rows.new_empty(sum(each), *rows.shape[1:])
        sent = _bytes(rows).repeat(len(each), 1)
        return _values(exchanged(sent, [len(rows)] * len(each), each, collectives), rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        each, rank, collectives = ctx.rest
        mine = each[rank]
        if not math.prod(gradient.shape[1:]):
            return gradient.new_empty(mine, *gradient.shape[1:]), None, None, None
        got = _values(exchanged(_bytes(gradient), each, [mine] * len(each), collectives), gradient)
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        total = got.view(len(each), mine, *gradient.shape[1:]).to(wide).sum(0)
        return total.to(gradient.dtype), None, None, None


class Divided(torch.autograd.Function):
    """The identity, with a gradient that is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.world, None
