# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies, casts, sums and merges of a schedule. Sums run in the order of their sources, in f32 (f64), and are rounded once.

Blocks of one part run in any order, so blocks between the same buffers and heads become one move of all their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ...schedule import Buffer, Op, OpKind, Sum, View
from .partials import merge, wide, words
from .rows import Buffers, Rows, Run


def blocks(sums: Sequence[Sum], buffers: Sequence[Buffer], device: torch.device) -> list[tuple[Rows, list[Rows]]]:
    """Sums as rows: destinations and sources, part after part."""
    result = []
    for _, part in groupby(sums, lambda one: one.part):
        alike: dict[tuple[tuple[int, int, int], ...], list[tuple[View, ...]]] = {}
        for one in part:
            views = (one.dst, *one.sources)
            alike.setdefault(tuple((v.buffer, v.head, v.heads) for v in views), []).append(views)
        for key, every in alike.items():
            columns = []
            for (number, head, heads), column in zip(key, zip(*every), strict=True):
                runs: list[Run] = [(v.row, v.rows) for v in column]
                columns.append(Rows(buffers[number], number, (head, heads), runs, device))
            if columns[0].count:
                result.append((columns[0], columns[1:]))
    return result


class Sums:
    """SUM and SINK_TOTAL."""

    def __init__(self, op: Op, buffers: Sequence[Buffer], device: torch.device) -> None:
        self._blocks = blocks(op.sums, buffers, device)

    def run(self, buffers: Buffers) -> None:
        for dst, sources in self._blocks:
            dst.write(buffers, total([source.read(buffers) for source in sources]))


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors in their order; one alone as it is."""
    if len(parts) == 1:
        return parts[0]
    kind = wide(torch.promote_types(parts[0].dtype, parts[1].dtype))
    result = torch.add(parts[0].to(kind), parts[1])
    for part in parts[2:]:
        result = result.double() if part.dtype == torch.float64 and result.dtype != torch.float64 else result
        result.add_(part)
    return result


class Merges:
    """MERGE: pairs of o and its lse, whose first source is the destination. COMBINE: several, with the sinks."""

    def __init__(self, op: Op, buffers: Sequence[Buffer], device: torch.device) -> None:
        of_o, of_lse = (blocks(op.sums[at::2], buffers, device) for at in (0, 1))
        self._blocks, self._sinks = list(zip(of_o, of_lse, strict=True)), op.sinks
        # Partial results of callers may hold anything in rows without keys.
        self._of_callers = op.kind == OpKind.COMBINE
        self._words = [buffers[lse.number].dim for _, (lse, _) in self._blocks]

    def run(self, buffers: Buffers) -> None:
        sinks = None if self._sinks is None else buffers.at(self._sinks)
        for ((o, os), (lse, lses)), count in zip(self._blocks, self._words, strict=True):
            parts = []
            for of_o, of_lse in zip(os, lses, strict=True):
                logs = of_lse.read(buffers)
                values = of_o.read(buffers).to(logs.dtype)
                parts.append((values.masked_fill(logs[..., :1] == -torch.inf, 0.0) if self._of_callers else values, logs))
            values, log, error = merge(parts, sinks)
            o.write(buffers, values)
            lse.write(buffers, words(log, error, count))
