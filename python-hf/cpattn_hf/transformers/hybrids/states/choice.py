# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether a recurrent layer gets whole documents for its share of the heads, or passes states between segments.

Heads: each token's projections go to the ranks of its document and come back, and a rank has its documents' tokens for a part of the heads.
With fewer parts than ranks, documents are dealt whole, so one long document leaves ranks without work. States: a rank has its own
tokens for all heads, and sends a state for each segment; a segment inside of a document costs more than its tokens alone.

Both are counted for the rank with the most, in multiply-adds of the kernel and in bytes; what both forms do alike is left out. All ranks
count the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..deal import dealt, parts_of
from .segments import Segment

# Multiply-adds that a device does in the time in which a byte reaches it from another rank.
RATE = 1000


@dataclass(frozen=True)
class Cost:
    """Of a layer: into how many `heads` it can be cut, the columns of its projections and of its result for a token, the numbers of a
    state with its decay, the multiply-adds of a token, those that a token within a document costs `more` if states pass, and the numbers of
    the `taps` before a segment, in a layer without states."""

    heads: int
    columns: int
    state: int
    token: int
    more: int
    taps: int = 0


@dataclass(frozen=True)
class Load:
    """Of the rank with the most of it."""

    work: int
    bytes: int

    @property
    def total(self) -> int:
        return self.work + self.bytes * RATE


def by_heads(cost: Cost, lengths: Sequence[int], world: int, size: int) -> Load:
    """`lengths` are those of the documents, `size` is that of an element of an activation in bytes."""
    parts = parts_of(min(cost.heads, world), world)
    owners = dealt(lengths, parts)
    rows = max(sum(length for length, there in zip(lengths, one, strict=True) if there) for one in owners.tolist())
    share = -(-cost.heads // min(cost.heads, world))  # the largest part
    return Load(rows * cost.token * share // cost.heads, rows * cost.columns * share // cost.heads * size)


def by_states(cost: Cost, every: Sequence[Sequence[Segment]], sent: Sequence[int] | None = None) -> Load:
    """`every` are the segments of each rank, and `sent` says how many states each rank sends and gets. Without it each segment sends one to
    the next."""

    def of(segments: Sequence[Segment], states: int | None) -> Load:
        inside = sum(one.end - one.first for one in segments if not one.starts)
        tokens = sum(one.end - one.first for one in segments)
        borders = sum((not one.starts) + (not one.ends) for one in segments)
        numbers = (borders if states is None else states) * cost.state + borders * cost.taps
        return Load(tokens * cost.token + inside * cost.more, numbers * 4)

    counts: Sequence[int | None] = sent or [None] * len(every)
    loads = [of(one, states) for one, states in zip(every, counts, strict=True)]
    return Load(max(one.work for one in loads), max(one.bytes for one in loads))


def described(kind: str, passes: bool, heads: Load, states: Load) -> str:
    """A line for `explain`."""
    form = "pass states" if passes else "get whole documents for their share of the heads"
    costs = (
        f"{name} {load.work:,} multiply-adds, {load.bytes:,} bytes"
        for name, load in (("states", states), ("heads", heads))
    )
    return f"{kind}: layers {form}; the rank with the most, a layer and a direction: {'; '.join(costs)}"
