# SPDX-License-Identifier: MIT OR Apache-2.0
"""The check of the links between the processes of a torch.distributed group, over gloo."""

from __future__ import annotations

import torch.distributed as dist

from ..ring import Link
from ..ring import check_ring as check
from .gloo import GlooTransport


def check_ring(group: dist.ProcessGroup | None = None, *, timeout: float = 60.0, bytes: int = 4 << 20) -> list[Link]:
    """`cpattn.check_ring` over a gloo group of its own with the ranks of `group`; all of them call it."""
    return check(GlooTransport(group, timeout=timeout), bytes)
