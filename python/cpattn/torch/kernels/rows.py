# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ranges of an attention operation as intervals: for each row of q and each k range, the rows of k that it attends to.

Positions of a range increase with its rows, also through stripes, and what a band, its limits and the window allow to a position
of q is an interval of positions. So it is an interval of rows, and two numbers for each row and k range say all. The intervals
are tables made once for a plan; a kernel compares them with row numbers on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...schedule import Band, Op, Range, Score

# Positions, limits and ends beyond it are none: nothing could be added to the largest numbers, by which schedules say that.
FAR = 1 << 60


@dataclass(frozen=True)
class Keys:
    """Rows of the k view, in the order of their positions, all of which some row of the group attends to: row i of the group attends to
    rows[begin[i]:end[i]]. The distance that slopes multiply is |k_pos[j] - q_pos[i]|, where k_pos includes the shift of the band."""

    rows: Tensor
    begin: Tensor
    end: Tensor
    k_pos: Tensor
    q_pos: Tensor
    # Each row attends to all of them.
    every: bool = False


@dataclass(frozen=True)
class Group:
    """Rows of q in the order of the call, all of which have keys. `slopes`, [heads], are those of their document."""

    rows: Tensor
    keys: tuple[Keys, ...]
    slopes: Tensor | None


@dataclass(frozen=True)
class Rows:
    """One call: all of an operation. `kv` is the kv head of each q head, as rows of the k view's heads. `per_q_head`: dk and dv have
    the heads of q."""

    groups: tuple[Group, ...]
    kv: Tensor
    kv_heads: int
    scale: float
    softcap: float
    per_q_head: bool
    queries: bool
    keys: bool
    # What kernels keep for the next run of the plan.
    tables: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def positions(r: Range) -> Tensor:
    """The position of each row of a range."""
    i = torch.arange(r.len, device="cpu")
    return r.pos + i // r.block * r.period + i % r.block


def limits(band: Band, score: Score) -> tuple[int, int]:
    """The least and the largest allowed distance k_pos - q_pos, the shift of the band included: its own and those of the window."""
    return max(band.low, -score.window_left), min(band.high, score.window_right)


def near(place: int) -> int:
    return max(-FAR, min(FAR, place))


def rows_before(r: Range, place: Tensor) -> Tensor:
    """How many rows of a range have positions less than `place`."""
    t = (place - r.pos).clamp(min=0)
    whole = torch.div(t, r.period, rounding_mode="floor") * r.block + (t % r.period).clamp(max=r.block)
    # The rows of an unstriped range have one block, whose period may be any.
    return (t if r.block >= r.len else whole).clamp(max=r.len)


def rows_before_one(r: Range, place: int) -> int:
    """As `rows_before`, of one position."""
    t = max(0, place - r.pos)
    return min(r.len, t if r.block >= r.len else t // r.period * r.block + min(t % r.period, r.block))


def interval(q: Range, k: Range, band: Band, score: Score) -> tuple[Tensor, Tensor]:
    """For each row of `q`, where its rows of `k` begin and end. Rows without keys have an empty interval."""
    low, high = limits(band, score)
    x = positions(q)
    least, most = torch.full_like(x, near(band.k_begin)), torch.full_like(x, near(band.k_end))
    if low > -FAR:
        least = torch.maximum(least, x + low - band.shift)
    if high < FAR:
        most = torch.minimum(most, x + high - band.shift + 1)
    begin, end = rows_before(k, least), rows_before(k, most)
    inside = (x >= band.q_begin) & (x < band.q_end)
    return begin, torch.where(inside, torch.maximum(begin, end), begin)


def groups_of(op: Op, device: torch.device, slopes: Tensor | None) -> tuple[Group, ...]:
    """A group for each q range that has keys. Rows without keys and keys without rows are left out: nobody may read them, and what
    they hold, which may be NaN, must not meet a weight of 0. `slopes` are [heads], or [documents, heads]."""
    groups, at = [], 0
    for q in op.ranges:
        found = [(k, band, *interval(q.range, k, band, op.score)) for k, band in q.pairs]
        used = torch.zeros(q.range.len, dtype=torch.bool, device="cpu")
        for _, _, begin, end in found:
            used |= begin < end
        keys = [keys_of(q.range, *each, used, device) for each in found if bool((each[2] < each[3]).any())]
        of_document = None
        if slopes is not None and op.q is not None:
            mine = slice(op.heads.q_offset, op.heads.q_offset + op.q.heads)
            of_document = (slopes if slopes.ndim == 1 else slopes[q.range.doc])[mine].to(device)
        if keys:
            groups.append(Group((at + used.nonzero()[:, 0]).to(device), tuple(keys), of_document))
        at += q.range.len
    return tuple(groups)


def keys_of(q: Range, k: Range, band: Band, begin: Tensor, end: Tensor, used: Tensor, device: torch.device) -> Keys:
    """The keys of a pair of ranges without those that no row attends to."""
    edges = torch.zeros(k.len + 1, dtype=torch.long, device="cpu")
    some = begin < end
    edges.index_add_(0, begin[some], torch.ones_like(begin[some])).index_add_(0, end[some], -torch.ones_like(end[some]))
    read = edges.cumsum(0)[:-1] > 0
    before = torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), read.cumsum(0)])
    places = read.nonzero()[:, 0]
    first, last = before[begin[used]], before[end[used]]
    every = bool((first == 0).all() and (last == len(places)).all())
    tables = (k.row + places, first, last, positions(k)[places] + band.shift, positions(q)[used])
    rows, first, last, k_pos, q_pos = (x.to(device) for x in tables)
    return Keys(rows, first, last, k_pos, q_pos, every)
