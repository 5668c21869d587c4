# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the attention of a step cost, in one line: the time in which ranks communicated, how much of it was hidden, bytes and workspace.

Operations of one lane may overlap, and count once. Of each number the line has that of the rank with the most: the others wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cpattn import Event

COMPUTE, COMMUNICATION = 0, 1


class Costs(NamedTuple):
    """Of a rank: nanoseconds in which it computed, communicated, and did both, and the bytes that it sent and received."""

    computing: int
    communicating: int
    hidden: int
    bytes: int


def busy(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of time as disjoint ones, ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif begin < end:
            found.append((begin, end))
    return found


def common(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
    """The time that is in both of two lists of disjoint ascending spans."""
    total, i, j = 0, 0, 0
    while i < len(one) and j < len(other):
        total += max(min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]), 0)
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def costs(events: Iterable[Event]) -> dict[int, Costs]:
    """By the rank."""
    every = list(events)
    found = {}
    for rank in sorted({one.rank for one in every}):
        mine = [one for one in every if one.rank == rank]
        computing, communicating = (
            busy((one.start_ns, one.end_ns) for one in mine if one.lane == lane) for lane in (COMPUTE, COMMUNICATION)
        )
        computed, communicated = (sum(end - begin for begin, end in spans) for spans in (computing, communicating))
        found[rank] = Costs(computed, communicated, common(computing, communicating), sum(one.bytes for one in mine))
    return found


def line(traces: Sequence[Sequence[Event]], workspace: int, capacity: int) -> str:
    """The costs of some steps, from the events of recorders with room for `capacity` on each rank. `workspace` is in bytes."""
    every = [Counter(one.rank for one in events) for events in traces]
    full = sorted({rank for counts in every for rank, count in counts.items() if count >= capacity})
    events = [one for part in traces for one in part]
    if not (each := costs(events)):
        return "no attention was recorded: call cp.record() before the step"
    took = max(one.end_ns for one in events) - min(one.start_ns for one in events)
    most = Costs(*(max(one) for one in zip(*each.values())))
    slowest = max(each.values(), key=lambda one: one.communicating)
    hidden = round(100 * slowest.hidden / slowest.communicating) if slowest.communicating else 0
    missing = f"; recorder full: ranks {full} have {capacity} operations, and later ones are missing, call cp.timeline() after fewer steps or cp.record() with more"
    return (
        f"{len(each)} ranks, {_ms(took)}: attention computes {_ms(most.computing)}, communicates {_ms(most.communicating)} ({hidden} % of it hidden), "
        f"{_mb(most.bytes)} sent and received, workspace {_mb(workspace)}{missing if full else ''}"
    )


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3g} ms" if ns < 1e9 else f"{ns / 1e9:.3g} s"


def _mb(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
