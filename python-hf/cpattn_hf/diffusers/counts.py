# SPDX-License-Identifier: MIT OR Apache-2.0
"""How many rows each rank has, in the one number that it tells the others: with it goes what the rows are, so that a rank at another place of
the model is noticed before rows move."""

from __future__ import annotations

import hashlib
from typing import Any

from cpattn.engine import EngineTransport
from cpattn.errors import Disagreement, InvalidArgument
from cpattn.torch.group import digests, refusing

# The bits of each of two numbers. One more bit makes the whole odd, as all numbers that `digests` takes; the rest are of a digest.
_BITS = 24


def counts(transport: EngineTransport, what: str, kind: Any, *mine: int) -> list[list[int]]:
    """One or two numbers of rows of this rank as lists of those of all ranks, which need the same `kind`. All ranks call it."""
    with refusing(transport):
        if max(mine) >> _BITS:
            raise InvalidArgument(
                f"{what} has {max(mine)} rows on rank {transport.rank}, fewer than {1 << _BITS} are needed: use more ranks"
            )
    digest = int.from_bytes(hashlib.blake2b(repr((what, kind)).encode(), digest_size=8).digest(), "little") >> (
        2 * _BITS + 1
    )
    shifts = [1 + _BITS * at for at in range(2)]
    numbers = digests(
        transport,
        what,
        1 | digest << (2 * _BITS + 1) | sum(one << shift for one, shift in zip(mine, shifts, strict=False)),
    )
    if others := [rank for rank, one in enumerate(numbers) if one >> (2 * _BITS + 1) != digest]:
        raise Disagreement(
            f"ranks {others} of this group are at another place of the model than rank {transport.rank}, at {what} of {kind}",
            others[0],
        )
    return [[one >> shift & (1 << _BITS) - 1 for one in numbers] for shift in shifts[: len(mine)]]
