# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the ranks of a group tell each other around a forward pass: that their arguments are equal, and their parts of the loss.

Each rank gives one number of 64 bits. So a rank that fails, or is at another place of its program, is noticed by the others.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ..engine import EngineTransport
from ..errors import Disagreement, Error, InvalidArgument

# The numbers that ranks exchange: REFUSED after refused arguments, odd numbers for arguments, other even numbers for parts of a loss.
# So ranks notice if one of them is at another place, because it has failed in between.
REFUSED = 2


def digest(data: bytes) -> int:
    """An odd number that is equal for equal bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") | 1


def digests(transport: EngineTransport, what: str, mine: int) -> Sequence[int]:
    """The odd numbers of all ranks, in their order. All ranks call it; `what` they are numbers of."""
    answers = transport.agree(0, transport.world, mine)
    if refusing := [rank for rank, one in enumerate(answers) if one == REFUSED]:
        raise InvalidArgument(f"ranks {refusing} of this group refused their {what}: see the error of these ranks")
    if ending := [rank for rank, one in enumerate(answers) if not one & 1]:
        raise Disagreement(
            f"ranks {ending} of this group end a forward pass while rank {transport.rank} begins one: did its previous one fail?",
            ending[0],
        )
    return answers


def compare(transport: EngineTransport, what: str, mine: int, need: str) -> None:
    """Compares a number over the ranks, and raises unless it is equal on all of them."""
    answers = digests(transport, what, mine)
    if others := [rank for rank, one in enumerate(answers) if one != answers[0]]:
        raise Disagreement(
            f"the {what} of ranks {others} of this group differ from those of rank 0 (this is rank {transport.rank}): {need}",
            others[0],
        )


def compare_settings(transport: EngineTransport, settings: Mapping[str, Any]) -> None:
    """Compares arguments of ContextParallel, by their names."""
    for name, value in settings.items():
        need = f"{name} is {value!r} on this rank, all ranks need the same"
        compare(transport, "arguments of ContextParallel", digest(repr(value).encode()), need)


def compare_names(transport: EngineTransport, names: Sequence[str], present: Set[str], need: str) -> None:
    """Refuses arguments that only some ranks were given, by their names: those of `names`, which are the same on all ranks."""
    bits = {name: 2 << at for at, name in enumerate(names[:62])}
    answers = digests(transport, "inputs", 1 + sum(bit for name, bit in bits.items() if name in present))
    for name, bit in bits.items():
        if others := [rank for rank, one in enumerate(answers) if bool(one & bit) != bool(answers[0] & bit)]:
            have, lack = ([rank for rank, one in enumerate(answers) if bool(one & bit) == has] for has in (True, False))
            raise Disagreement(
                f"{name} is given on the ranks {have} of this group, and not on {lack} (this is rank {transport.rank}): {need}",
                others[0],
            )


def content(value: Any) -> str:
    """A text that is equal for equal tensors, also in lists and mappings, and differs for different ones as good as always."""
    if isinstance(value, Mapping):
        return repr([(str(name), content(one)) for name, one in sorted(value.items())])
    if isinstance(value, list | tuple):
        return repr([content(one) for one in value])
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().contiguous().view(-1).view(torch.uint8)
    words = torch.cat([data, data.new_zeros(-len(data) % 4)]).view(torch.int32)
    parts = (words[at : at + (1 << 20)].long() for at in range(0, len(words), 1 << 20))
    sums = [(int(part.sum()), int((part * torch.arange(1, len(part) + 1, device=part.device)).sum())) for part in parts]
    return repr((str(value.dtype), tuple(value.shape), sums))


@contextmanager
def refusing(transport: EngineTransport) -> Iterator[None]:
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
        answers = transport.agree(0, transport.world, bits & ~1)
        if failed := [rank for rank, one in enumerate(answers) if one & 1 or one == REFUSED]:
            raise Disagreement(
                f"ranks {failed} of this group begin a forward pass while rank {transport.rank} ends one: did their previous one fail?",
                failed[0],
            )
        return torch.full_like(part, sum(struct.unpack(f"{len(answers)}d", struct.pack(f"{len(answers)}Q", *answers))))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None
