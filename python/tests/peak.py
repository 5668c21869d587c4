# SPDX-License-Identifier: MIT OR Apache-2.0
"""How much memory a call takes at most, for the tools that measure. Linux only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _kb(name: str) -> int:
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )


def peak(what: Callable[[], object]) -> float:
    """MB by which the resident pages of this process grow at most. What an earlier call has freed, but not returned, counts as before."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the earlier peak
    before = _kb("VmRSS")
    what()
    return (_kb("VmHWM") - before) / 1e3
