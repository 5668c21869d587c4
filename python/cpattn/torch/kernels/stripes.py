# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pairs of ranges as pieces: rows of q and keys, of which row i sees key j if low <= j - i <= high.

Ranges of consecutive positions are one piece. Where all rows of q see the same keys, positions do not matter, and stripes are one piece
too. Others are cut, in the way that copies fewer rows:

- by residues, if both ranges have the same period: every `block`-th row of q has positions `period` apart, and so have the keys. That
  makes a piece for each pair of residues, and a single one of stripes of one token;
- by blocks: the rows of a block have consecutive positions. They see some keys all of them, and at either end of these a few more
  blocks in part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...schedule import Band, Range, Score
from .rows import FAR, interval, limits, near, rows_before_one


@dataclass(frozen=True)
class Run:
    """Rows first, first + step, …"""

    first: int
    count: int
    step: int = 1


@dataclass(frozen=True)
class Piece:
    """Rows and keys, counted from 0 through all runs. `base` is the distance k_pos - q_pos of the first of both, where positions are
    consecutive; else None."""

    q: tuple[Run, ...]
    k: tuple[Run, ...]
    low: int
    high: int
    base: int | None


def pieces_of(q: Range, at: int, k: Range, band: Band, score: Score) -> Iterator[Piece]:
    """The pieces of two ranges. The first row of q is row `at` of the call."""
    # Positions of rows increase: what a band leaves of a range is rows without a gap.
    q_rows = rows_before_one(q, near(band.q_begin)), rows_before_one(q, near(band.q_end))
    k_rows = rows_before_one(k, near(band.k_begin)), rows_before_one(k, near(band.k_end))
    if q_rows[0] >= q_rows[1] or k_rows[0] >= k_rows[1]:
        return
    low, high = (near(limit) for limit in limits(band, score))
    least = place(k, k_rows[0]) - place(q, q_rows[1] - 1) + band.shift
    most = place(k, k_rows[1] - 1) - place(q, q_rows[0]) + band.shift
    if low > high or low > most or high < least:
        return
    whole = low <= least and high >= most
    if whole or (plain(q, *q_rows) and plain(k, *k_rows)):
        straight = plain(q, *q_rows) and plain(k, *k_rows)
        base = place(k, k_rows[0]) - place(q, q_rows[0]) + band.shift
        yield Piece(
            (Run(at + q_rows[0], q_rows[1] - q_rows[0]),),
            (Run(k.row + k_rows[0], k_rows[1] - k_rows[0]),),
            minus(low, base) if straight else -FAR,
            minus(high, base) if straight else FAR,
            base if straight else None,
        )
        return
    residues = q.period == k.period and not plain(q, *q_rows) and not plain(k, *k_rows)
    blocks = max(1, (q_rows[1] - q_rows[0]) // q.block)
    # Rows copied: each residue's for each of the other range; about half of all keys for each block.
    if (
        residues
        and (q_rows[1] - q_rows[0]) * k.block + (k_rows[1] - k_rows[0]) * q.block
        <= blocks * (k_rows[1] - k_rows[0]) // 2
    ):
        yield from by_residues(q, q_rows, at, k, k_rows, (low, high), band.shift)
    else:
        yield from by_blocks(q, q_rows, at, k, k_rows, (low, high), band, score)


def plain(r: Range, begin: int, end: int) -> bool:
    """Whether the positions of these rows are consecutive."""
    return r.block == r.period or begin // r.block == (end - 1) // r.block


def place(r: Range, row: int) -> int:
    return r.pos + row // r.block * r.period + row % r.block


def minus(limit: int, base: int) -> int:
    """A limit of distances as one of rows: none stays none."""
    return limit if abs(limit) >= FAR else limit - base


def by_residues(
    q: Range, q_rows: tuple[int, int], at: int, k: Range, k_rows: tuple[int, int], band: tuple[int, int], shift: int
) -> Iterator[Piece]:
    period = q.period
    for a in range(min(q.block, q_rows[1] - q_rows[0])):
        i = q_rows[0] + a
        of_q = Run(at + i, (q_rows[1] - i + q.block - 1) // q.block, q.block)
        for b in range(min(k.block, k_rows[1] - k_rows[0])):
            j = k_rows[0] + b
            of_k = Run(k.row + j, (k_rows[1] - j + k.block - 1) // k.block, k.block)
            base = place(k, j) - place(q, i) + shift
            # low <= base + period·(j - i) <= high
            low = -FAR if band[0] <= -FAR else -((base - band[0]) // period)
            high = FAR if band[1] >= FAR else (band[1] - base) // period
            yield Piece((of_q,), (of_k,), low, high, None)


def by_blocks(
    q: Range,
    q_rows: tuple[int, int],
    at: int,
    k: Range,
    k_rows: tuple[int, int],
    limits: tuple[int, int],
    band: Band,
    score: Score,
) -> Iterator[Piece]:
    begins, ends = (x.tolist() for x in interval(q, k, band, score))
    for first, end in blocks_of(q, *q_rows):
        mine = (Run(at + first, end - first),)
        # Keys of some row, and between them those of all rows.
        some = [(begins[i], ends[i]) for i in range(first, end) if begins[i] < ends[i]]
        if not some:
            continue
        outer = min(b for b, _ in some), max(e for _, e in some)
        inner = (max(b for b, _ in some), min(e for _, e in some)) if len(some) == end - first else (outer[0], outer[0])
        if inner[0] < inner[1]:
            yield Piece(mine, (Run(k.row + inner[0], inner[1] - inner[0]),), -FAR, FAR, None)
        else:
            inner = outer[0], outer[0]
        for part in ((outer[0], inner[0]), (inner[1], outer[1])):
            for k_first, k_end in blocks_of(k, *part):
                base = place(k, k_first) - place(q, first) + band.shift
                yield Piece(
                    mine, (Run(k.row + k_first, k_end - k_first),), minus(limits[0], base), minus(limits[1], base), base
                )


def blocks_of(r: Range, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Rows `begin` to `end` of a range in parts of consecutive positions."""
    if begin < end and plain(r, begin, end):
        yield begin, end
        return
    while begin < end:
        until = min(end, (begin // r.block + 1) * r.block)
        yield begin, until
        begin = until
