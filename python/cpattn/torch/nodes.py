# SPDX-License-Identifier: MIT OR Apache-2.0
"""How many ranks of a group share a node, by the argument `ranks_per_node` or by torchrun's LOCAL_WORLD_SIZE.

A rank knows its own number only: hosts may have different numbers of processes, and a job may give the argument on some ranks. So
the ranks exchange their numbers first. Then all ranks refuse wrong ones, and none waits for another until the timeout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

from ..arguments import attempt, refused, whole
from ..engine import EngineTransport
from ..errors import Error, InvalidArgument
from ..options import ranks_per_node

T = TypeVar("T")

ARGUMENT, TORCHRUN = "ranks_per_node", "LOCAL_WORLD_SIZE"
_SOURCES = ("", ARGUMENT, TORCHRUN)
# A word is the index in `_SOURCES` times `_BASE`, plus the number + 1, or plus 0 for an invalid number.
_BASE = 1 << 60


def agreed(transport: EngineTransport, members: Sequence[int], options: Mapping[str, Any]) -> tuple[int, bool]:
    """The option `ranks_per_node` of all ranks, and whether it is torchrun's. `members` are the global ranks of the group. All
    ranks call it. If it raises on one rank, it raises on all of them."""
    words = transport.agree(0, transport.world, _word(options))

    def decided() -> tuple[int, bool]:
        if len(set(words)) > 1:
            raise InvalidArgument(_differing(words))
        if ARGUMENT in options:
            return whole(ARGUMENT, options[ARGUMENT], 0, _BASE - 2), False
        return (_of_torchrun(members) if TORCHRUN in os.environ else 0), True

    return together(transport, decided)


def together(transport: EngineTransport, job: Callable[[], T]) -> T:
    """Runs a job that fails on all ranks or on none. After a failure it waits for all ranks: one that leaves could end a call of another."""
    try:
        return job()
    except Error:
        with suppress(Error):
            transport.agree(0, transport.world, 0)
        raise


def _word(options: Mapping[str, Any]) -> int:
    """The source and the number of this rank, as one word."""
    if ARGUMENT in options:
        source, number = ARGUMENT, attempt(whole, ARGUMENT, options[ARGUMENT], 0, _BASE - 2)
    elif TORCHRUN in os.environ:
        source, number = TORCHRUN, _number()
    else:
        return 0
    return _SOURCES.index(source) * _BASE + (0 if number is None else number + 1)


def _differing(words: Sequence[int]) -> str:
    """The text of the error for different words, the same on all ranks."""
    ranks_of: dict[int, list[int]] = {}
    for rank, word in enumerate(words):
        ranks_of.setdefault(word, []).append(rank)
    found, sizes = [], []
    for word, ranks in ranks_of.items():
        source, size = _SOURCES[word // _BASE], word % _BASE - 1
        setting = (
            (f"{source} {size}" if size >= 0 else f"an invalid {source}")
            if source
            else f"neither {ARGUMENT} nor {TORCHRUN}"
        )
        found.append(f"{setting} on {_runs(ranks)}")
        sizes.append(size)
    common = math.gcd(*sizes) if min(sizes) > 0 else 1
    fits = f"{common}, which divides all of these" if common > 1 else "a number that divides the ranks of each node"
    return f"{'; '.join(found)}: all ranks of the group need the same. Give {ARGUMENT} on all of them: {fits}, or 0 if all links are alike"


def _runs(ranks: Sequence[int]) -> str:
    """Ascending ranks as a short text: ranks 0-3, 8."""
    # Consecutive ranks have the same difference to their index.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _number() -> int | None:
    """Torchrun's number of ranks on this node, or None if it is invalid."""
    return attempt(lambda: whole(TORCHRUN, int(os.environ[TORCHRUN]), 0, _BASE - 2))


def _of_torchrun(members: Sequence[int]) -> int:
    """The number of members of a group on a node; 0 if all share one node."""
    each = _number()
    if not each:
        raise refused(
            TORCHRUN,
            os.environ[TORCHRUN],
            f"a whole number of at least 1 is needed, or {ARGUMENT}, 0 if all links are alike",
        )
    if len({rank // each for rank in members}) == 1:
        return 0
    try:
        ranks = ranks_per_node([rank // each for rank in members])
        # With one member on each node a second level saves nothing, and Ulysses may be the better mesh.
        return ranks if ranks > 1 else 0
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{error}. {TORCHRUN} is {each}, and the group has the ranks {list(members)}: give {ARGUMENT}, 0 if all links are alike"
        ) from error
