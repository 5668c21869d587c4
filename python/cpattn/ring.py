# SPDX-License-Identifier: MIT OR Apache-2.0
"""Is every link of a ring of ranks there, and how fast is it? `Rank.check_ring` finds out."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from . import _header
from .arguments import c_structs, number
from ._signature import resolved


@resolved
class Link(NamedTuple):
    """One link, one way: `latency` in seconds, half the shortest round trip of eight bytes."""

    source: int
    target: int
    latency: float
    bytes_per_second: float


def table(links: list[Link], slow: float = 3.0) -> str:
    """A text with a line for each link. A link that is `slow` times slower than the median is marked."""
    c_structs("links", _header.Link, links, Link, source="from", target="to")  # checks the links
    slow = number("slow", slow)
    if not links:
        return "no links"
    latency, rate = median(link.latency for link in links), median(link.bytes_per_second for link in links)
    lines = [f"{'link':>14}{'latency us':>14}{'GB/s':>10}"]
    for link in links:
        late = link.latency > slow * latency or link.bytes_per_second < rate / slow
        name = f"{link.source} -> {link.target}"
        lines.append(
            f"{name:>14}{link.latency * 1e6:>14.1f}{link.bytes_per_second / 1e9:>10.3f}{'   slow' if late else ''}"
        )
    return "\n".join(lines)
