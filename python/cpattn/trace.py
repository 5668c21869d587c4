# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ran when: events that ranks recorded (`Rank.record`, `Rank.trace`), and files of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from ctypes import byref, c_uint64
from typing import NamedTuple

from ._library import call

LANES = ("compute", "communication")


class Event(NamedTuple):
    """One operation of a rank. The times are nanoseconds of `clock`."""

    rank: int
    lane: int
    name: str
    phase: str
    step: int
    start_ns: int
    end_ns: int
    bytes: int


def clock() -> int:
    """Nanoseconds of this process's clock of events."""
    ns = c_uint64()
    call("clock", byref(ns))
    return ns.value


def chrome_trace(events: Iterable[Event]) -> str:
    """Chrome trace events, for Perfetto or chrome://tracing: a process for each rank, a thread for each lane."""
    events = list(events)
    rows: list[dict[str, object]] = [
        {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}
        for rank in sorted({e.rank for e in events})
        for kind, lane, name in [("process_name", 0, f"rank {rank}"), *(("thread_name", i, x) for i, x in enumerate(LANES))]
    ]
    rows += [
        {"ph": "X", "name": e.name, "cat": e.phase, "pid": e.rank, "tid": e.lane, "ts": e.start_ns / 1e3,
         "dur": (e.end_ns - e.start_ns) / 1e3, "args": {"phase": e.phase, "step": e.step, "bytes": e.bytes}}
        for e in events
    ]  # fmt: skip
    return json.dumps({"traceEvents": rows})
