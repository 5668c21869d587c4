# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a kernel computes of a plan, and what is done outside of it, as text."""

from __future__ import annotations

from typing import Any

import torch

from ...options import Direction
from ...plan import Plan
from ...schedule import Mode, OpKind, Schedule
from ..dtypes import TORCH_DTYPES
from ..kernels import Kernel, Work, refuse
from .rank import settings_of, slopes_of


def explain(plan: Plan, rank: int, kernel: Kernel, device: torch.device) -> str:
    """The calls of a kernel on a rank, operation by operation. Raises Unsupported for what the kernel does not honour."""
    dtype, lines = TORCH_DTYPES[plan.dtype], [f"kernels={kernel.name!r} on rank {rank}"]
    refuse(kernel, {**settings_of(plan), "device": device, "dtype": dtype})
    if not kernel.honours.returns_f32 and dtype in (torch.float16, torch.bfloat16):
        lines.append(f"  partial results come back in {dtype}: half a bit is lost where one is merged")
    for direction in Direction:
        schedule = plan.schedule(rank, direction)
        lines.append(f"  {direction.name.lower()}: {outside(schedule)}")
        for at, op in enumerate(schedule.ops):
            if op.kind in (OpKind.ATTEND, OpKind.ATTEND_BACKWARD) and op.ranges:
                work = Work(kernel, op, device, dtype, slopes_of(plan))
                calls = "; ".join(shown(call) for call in work.calls) or "no call"
                lines.append(f"    operation {at}, {op.name}, {op.phase}, step {op.step}: {calls}")
    return "\n".join(lines)


def shown(call: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in call.items() if name != "kernel")


def outside(schedule: Schedule) -> str:
    """What PyTorch's operators do besides the calls."""
    kinds = [op.kind for op in schedule.ops]
    merged = sum(
        q.range.len
        for op in schedule.ops
        if op.kind == OpKind.ATTEND
        for q in op.ranges
        if q.mode in (Mode.MERGE, Mode.LAST)
    )
    found = {
        "calls in": sum(kind in (OpKind.ATTEND, OpKind.ATTEND_BACKWARD) for kind in kinds), "exchanges": kinds.count(OpKind.EXCHANGE),
        "sums": kinds.count(OpKind.SUM), "merges of parts of other ranks": kinds.count(OpKind.MERGE),
    }  # fmt: skip
    parts = [
        f"{found.pop('calls in')} operations with a kernel",
        *(f"{count} {name}" for name, count in found.items() if count),
    ]
    return ", ".join(parts) + (f", {merged} rows merged into earlier parts" if merged else "")
