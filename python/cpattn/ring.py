# SPDX-License-Identifier: MIT OR Apache-2.0
"""Is every link of a ring of ranks there, and how fast is it?"""

from __future__ import annotations

import os
from ctypes import byref, c_size_t
from statistics import median
from typing import NamedTuple

from . import _header
from ._check import whole
from ._interruptible import Interruptible
from ._library import error_of, status_of
from .errors import Error, PeerError
from .rank import destroy
from .transport import Callbacks, Transport


class Link(NamedTuple):
    """One link, one way: `latency` in seconds, half the shortest round trip of eight bytes."""

    source: int
    target: int
    latency: float
    bytes_per_second: float


def check_ring(transport: Transport, bytes: int = 4 << 20) -> list[Link]:
    """Sends stamped bytes over each link, all the way round the ring and back, one link at a time; takes the transport over.

    All ranks call it with the same number of bytes. Rank 0 gets all links in the order in which they were measured, other
    ranks those before their last turn. A PeerError names the link that failed, as far as this rank was at it, and what to try.
    """
    bytes = whole("bytes", bytes, 1, (1 << 48) - 1)
    callbacks, count = Callbacks(transport), c_size_t()
    links = (_header.Link * (2 * transport.world))()
    handle = callbacks.create()
    interruptible = Interruptible()

    def run() -> Error | None:
        status = status_of("ring_check", handle, bytes, links, len(links), byref(count))
        return error_of("ring_check", status) if status else None

    try:
        if said := interruptible(run, transport.abort):
            if isinstance(said, PeerError):
                said.peer = getattr(callbacks.failure, "peer", None)
            raise said from callbacks.failure
    finally:
        interruptible.close()
        destroy("transport_destroy", handle, callbacks, os.getpid())
    return [Link(getattr(link, "from"), link.to, link.latency, link.bytes_per_second) for link in links[: count.value]]


def table(links: list[Link], slow: float = 3.0) -> str:
    """For people: a line for each link, those marked that are `slow` times slower than the median."""
    if not links:
        return "no links"
    latency, rate = median(link.latency for link in links), median(link.bytes_per_second for link in links)
    lines = [f"{'link':>14}{'latency us':>14}{'GB/s':>10}"]
    for link in links:
        late = link.latency > slow * latency or link.bytes_per_second < rate / slow
        name = f"{link.source} -> {link.target}"
        lines.append(f"{name:>14}{link.latency * 1e6:>14.1f}{link.bytes_per_second / 1e9:>10.3f}{'   slow' if late else ''}")
    return "\n".join(lines)
