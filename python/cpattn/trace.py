# SPDX-License-Identifier: MIT OR Apache-2.0
"""Events that ranks recorded (`Rank.record`, `Rank.trace`, `Rank.gather_trace`), and files of them."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import byref, c_uint64
from typing import NamedTuple

from . import _header
from .arguments import c_structs
from ._library import call, text_of
from ._signature import resolved


@resolved
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
    """The time in nanoseconds on this process's clock for events."""
    ns = c_uint64()
    call("clock", byref(ns))
    return ns.value


def chrome_trace(events: Iterable[Event]) -> str:
    """Chrome trace events for Perfetto or chrome://tracing, with a process for each rank and a thread for each lane."""
    rows = c_structs("events", _header.Event, events, Event)
    return text_of("chrome_trace", rows, len(rows))


def timeline_svg(events: Iterable[Event]) -> str:
    """A picture of each rank's compute lane and communication lane, and the share of communication hidden by computation."""
    rows = c_structs("events", _header.Event, events, Event)
    return text_of("timeline_svg", rows, len(rows))
