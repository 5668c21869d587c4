# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ranges of an attention operation as rectangles: what kernels for packed sequences of several lengths take.

Such a kernel attends sq rows to sk rows, where row i sees row j if i + (sk - sq) - left <= j <= i + (sk - sq) + right: limits count
from the bottom-right corner, are not negative, and may be none. A band of two ranges becomes that in three steps:

1. Ranges are `Piece`s: rows i and j of a pair are attended if low <= j - i <= high (`stripes` makes pieces of stripes). Pieces of the
   same rows of q, whose keys follow each other, are joined.
2. `trimmed`: rows of q without keys and keys without rows go. Then the last row of q has a key and the last key a row, so that both
   limits are at least 0; a limit that excludes nothing is none.
3. `joined`: keys that all rows of q see are put in front of those of a rectangle without a left limit, or behind those of one without
   a right limit, where they change neither limit of the corner; rows of q that see all of the same keys become one rectangle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...schedule import Op
from .rows import FAR
from .stripes import Piece, Run, pieces_of


@dataclass(frozen=True)
class Rectangle:
    """Rows of q and of k, each run after run, with the limits from the bottom-right corner. `corner` is the distance k_pos - q_pos of
    the last row and the last key, None where keys are not in the order of their positions."""

    q: tuple[Run, ...]
    k: tuple[Run, ...]
    left: int | None
    right: int | None
    document: int
    corner: int | None = None
    rows: int = field(init=False)
    keys: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", sum(run.count for run in self.q))
        object.__setattr__(self, "keys", sum(run.count for run in self.k))

    @property
    def full(self) -> bool:
        return self.left is None and self.right is None


@dataclass(frozen=True)
class Rectangles:
    """One call of a kernel: sequences of packed rows, all with one pair of limits.

    `cu_seqlens_q` and `cu_seqlens_k` are i32 on the device, `lengths` has the same on the host: rows and keys of each sequence, none of
    which is 0. `slopes` [sequences, heads] are in f32; a kernel counts distances from the bottom-right corner too."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    lengths: tuple[tuple[int, int], ...]
    window_left: int | None
    window_right: int | None
    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    # What adapters keep for the next run of the plan.
    tables: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def deterministic(self) -> bool:
        """Whether PyTorch is told to use deterministic algorithms."""
        return torch.are_deterministic_algorithms_enabled()


def trimmed(piece: Piece, document: int = 0) -> Rectangle | None:
    """The rectangle of a piece, or None if it has no pair."""
    rows, keys = sum(run.count for run in piece.q), sum(run.count for run in piece.k)
    low, high = piece.low, piece.high
    if not rows or not keys or low > high:
        return None
    # Row i has keys if i + low <= keys - 1 and i + high >= 0.
    first, end = max(0, -high), min(rows, keys - low)
    if first >= end:
        return None
    # Key j has rows if it is in the band of the first row or after it, and of the last one or before it.
    k_first, k_end = max(0, first + low), min(keys, end + high)
    # From here on counted from the first row and the first key that are left.
    low, high, rows, keys = low + first - k_first, high + first - k_first, end - first, k_end - k_first
    corner = keys - rows
    return Rectangle(
        q=tuple(part(piece.q, first, end)),
        k=tuple(part(piece.k, k_first, k_end)),
        left=None if low <= 1 - rows else corner - low,
        right=None if high >= keys - 1 else high - corner,
        document=document,
        corner=None if piece.base is None else piece.base + (k_end - 1) - (end - 1),
    )


def part(runs: Iterable[Run], begin: int, end: int) -> list[Run]:
    """Rows `begin` to `end` of some runs."""
    found, at = [], 0
    for run in runs:
        a, b = max(begin - at, 0), min(end - at, run.count)
        if a < b:
            found.append(Run(run.first + a * run.step, b - a, run.step))
        at += run.count
    return found


def consecutive(pieces: list[Piece]) -> list[Piece]:
    """Pieces of one q range, of which those that have the same rows and limits, and keys whose positions follow each other, are one."""
    groups: dict[tuple[tuple[Run, ...], int, int], list[Piece]] = {}
    alone = []
    for piece in pieces:
        if piece.base is None:
            alone.append(piece)
        else:
            # Limits of distances, which are the same for ranges at other places.
            key = (piece.q, bounded(piece.low, piece.base), bounded(piece.high, piece.base))
            groups.setdefault(key, []).append(piece)
    for found in groups.values():
        found.sort(key=lambda piece: piece.base or 0)
        last = found[0]
        for piece in found[1:]:
            if (last.base or 0) + sum(run.count for run in last.k) == piece.base:
                last = replace(last, k=(*last.k, *piece.k))
            else:
                alone.append(last)
                last = piece
        alone.append(last)
    return alone


def bounded(limit: int, base: int) -> int:
    """A limit of distances for one of rows: none stays none."""
    return limit if abs(limit) >= FAR // 2 else limit + base


def joined(rectangles: list[Rectangle]) -> list[Rectangle]:
    """The same pairs by fewer rectangles; positions are no longer in order."""
    by_rows: dict[tuple[Run, ...], list[Rectangle]] = {}
    for one in rectangles:
        by_rows.setdefault(one.q, []).append(one)
    parts: list[Rectangle] = []
    whole: dict[tuple[Run, ...], Rectangle] = {}
    for found in by_rows.values():
        seen = [run for one in found if one.full for run in one.k]
        rest = [one for one in found if not one.full]
        count = sum(run.count for run in seen)
        at = next((at for at, one in enumerate(rest) if one.left is None or one.right is None), None) if seen else None
        if at is not None:
            one = rest[at]
            if one.left is None:
                rest[at] = replace(one, k=(*seen, *one.k), corner=None)
            else:
                rest[at] = replace(one, k=(*one.k, *seen), left=one.left + count, corner=None)
        elif seen:
            one = next(one for one in found if one.full)
            keys = tuple(seen)
            if keys in whole:
                whole[keys] = replace(whole[keys], q=(*whole[keys].q, *one.q), corner=None)
            else:
                whole[keys] = replace(one, k=keys, corner=None if len(keys) > 1 else one.corner)
        parts += rest
    return [*parts, *whole.values()]


def causal(one: Rectangle) -> list[Rectangle]:
    """A rectangle without a left limit as ones whose limit on the right is 0 or none: the last `right` rows see all keys."""
    if one.left is not None or not one.right:
        return [one]
    rows = one.rows - one.right
    first, rest = (replace(one, q=tuple(part(one.q, *ends)), corner=None) for ends in ((0, rows), (rows, one.rows)))
    return [replace(first, right=0), replace(rest, right=None)]


def squared(one: Rectangle) -> list[Rectangle]:
    """A causal rectangle as the keys that all rows see, and as many keys as rows."""
    more = one.keys - one.rows
    if one.right != 0 or not more:
        return [one]
    ends = (0, more), (more, one.keys)
    before, rest = (replace(one, k=tuple(part(one.k, *some)), corner=None) for some in ends)
    return [replace(before, right=None), rest]


def rectangles_of(op: Op, in_order: bool) -> list[Rectangle]:
    """All pairs of an operation. Rows of q count in the operation's ranges, one after another; rows of k in the k view. `in_order`: keys
    stay in the order of their positions, which slopes need."""
    found, at = [], 0
    for q in op.ranges:
        pieces = [piece for k, band in q.pairs for piece in pieces_of(q.range, at, k, band, op.score)]
        found += [one for piece in consecutive(pieces) if (one := trimmed(piece, q.range.doc)) is not None]
        at += q.range.len
    return found if in_order else joined(found)


def rows_of_runs(runs: Iterable[Run]) -> Tensor:
    """The rows of runs, on the host."""
    parts = [torch.arange(run.first, run.first + run.count * run.step, run.step, device="cpu") for run in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device="cpu")
