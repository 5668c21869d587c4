# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the ranks of a group tell each other around a forward pass: that their arguments are equal, and their parts of the loss.

Each rank gives one number of 64 bits. So a rank that fails, or is at another place of its program, is noticed by the others.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ..engine import EngineTransport
from ..errors import Disagreement, Error, InvalidArgument

# The numbers that ranks exchange: REFUSED after refused arguments, odd numbers for arguments, other even numbers for parts of a loss.
# So ranks notice if one of them is at another place, because it has failed in between.
REFUSED = 2


def number(data: bytes) -> int:
    """An odd number that is equal for equal bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") | 1


def same(transport: EngineTransport, what: str, mine: int, need: str) -> None:
    """Compares a number over the ranks, and raises unless it is equal on all of them."""
    said = transport.agree(0, transport.world, mine)
    if refusing := [rank for rank, one in enumerate(said) if one == REFUSED]:
        raise InvalidArgument(f"ranks {refusing} of this group refused their {what}: see the error of these ranks")
    if ending := [rank for rank, one in enumerate(said) if not one & 1]:
        raise Disagreement(f"ranks {ending} of this group end a forward pass while rank {transport.rank} begins one: did its previous one fail?", ending[0])
    if others := [rank for rank, one in enumerate(said) if one != said[0]]:
        raise Disagreement(
            f"the {what} of ranks {others} of this group differ from those of rank 0 (this is rank {transport.rank}): {need}", others[0]
        )


@contextmanager
def told(transport: EngineTransport) -> Iterator[None]:
    """Tells the other ranks, which wait in `same`, if this one raises."""
    try:
        yield
    except Exception:
        with suppress(Error):  # the first error is raised
            transport.agree(0, transport.world, REFUSED)
        raise


class Total(torch.autograd.Function):
    """The sum over the ranks. Each rank gets the gradient of its own part, times a factor."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, transport: EngineTransport, factor: float) -> Tensor:
        ctx.factor = factor
        (bits,) = struct.unpack("Q", struct.pack("d", part.item()))
        said = transport.agree(0, transport.world, bits & ~1)
        if failed := [rank for rank, one in enumerate(said) if one & 1 or one == REFUSED]:
            raise Disagreement(f"ranks {failed} of this group begin a forward pass while rank {transport.rank} ends one: did their previous one fail?", failed[0])
        return torch.full_like(part, sum(struct.unpack(f"{len(said)}d", struct.pack(f"{len(said)}Q", *said))))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None
