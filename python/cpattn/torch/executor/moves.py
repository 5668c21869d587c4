# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies, casts, sums and merges of a schedule. Sums run in the order of their sources, in f32 (f64), and are rounded once.

Blocks of one part run in any order, so blocks between the same buffers and heads become one move of all their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ...schedule import Buffer, Op, OpKind, Sum, View
from ..kernels import Fresh
from .partials import merge, wide
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

    def __init__(self, op: Op, buffers: Sequence[Buffer], room: Fresh) -> None:
        self._room = room
        self._blocks = [
            (dst, sources, in_place(dst, sources)) for dst, sources in blocks(op.sums, buffers, room.device)
        ]

    def run(self, buffers: Buffers) -> None:
        room = self._room
        room.begin()
        for dst, sources, direct in self._blocks:
            if not sources:
                dst.clear(buffers)
                continue
            if len(sources) == 1:
                dst.write(buffers, sources[0].read(buffers, room), room)
                continue
            parts = [source.read(buffers, room) for source in sources]
            kind = wide(torch.promote_types(parts[0].dtype, parts[1].dtype))
            to = dst.target(buffers, kind) if direct and all(part.dtype == kind for part in parts) else None
            result = total(parts, kind, room, to)
            if result is not to:
                dst.write(buffers, result, room)


def in_place(dst: Rows, sources: Sequence[Rows]) -> bool:
    """Whether the sum may be made where it goes: no source is there, or the first one is the destination."""
    if not sources:
        return True
    first, *rest = sources
    return all(one.number != dst.number for one in rest) and (first.number != dst.number or first.same_as(dst))


def total(parts: Sequence[Tensor], kind: torch.dtype, room: Fresh, to: Tensor | None = None) -> Tensor:
    """The sum of tensors in their order, in the type `kind` or a wider one of theirs."""
    result = room.empty(parts[0].shape, kind) if to is None else to
    if all(part.dtype == kind for part in parts[:2]):
        torch.add(parts[0], parts[1], out=result)
    else:
        # Operators round to the type of their inputs first.
        result.copy_(parts[0]).add_(parts[1])
    for part in parts[2:]:
        result = room.cast(result, torch.float64) if part.dtype == torch.float64 else result
        result.add_(part)
    return result


class Joins:
    """COMPOSE and COMPOSE_MATRIX: a decay times a state or a decay, plus a state if there is one."""

    def __init__(self, op: Op) -> None:
        self._matrix, self._sums = op.kind == OpKind.COMPOSE_MATRIX, op.sums

    def run(self, buffers: Buffers) -> None:
        for one in self._sums:
            to, decay, *others = (buffers.at(view) for view in (one.dst, *one.sources))
            rows = math.isqrt(decay.shape[2]) if self._matrix else decay.shape[2]
            to, of, *add = (of_rows(x, rows) for x in (to, *others))
            if self._matrix:
                to.copy_(product(of_rows(decay, rows), of))
            else:
                torch.mul(decay.unsqueeze(3), of, out=to)
            if add:
                to.add_(add[0])


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of states and decays, exact to their own type. Products of f32 are made in f64 where there is one: programs let those of f32 be
    TF32 or bf16, by autocast or for a whole process (`torch.set_float32_matmul_precision`), and an error in a state stays in it."""
    kind = torch.float64 if a.device.type in ("cpu", "cuda") else a.dtype
    with torch.autocast(a.device.type, enabled=False):
        return (a.to(kind) @ b.to(kind)).to(a.dtype)


def of_rows(x: Tensor, rows: int) -> Tensor:
    """A view of [rows, heads, dim], each head a matrix of so many rows."""
    return x.view(*x.shape[:2], rows, x.shape[2] // rows)


class Merges:
    """MERGE: pairs of o and its lse, whose first source is the destination. COMBINE: several, with the sinks."""

    def __init__(self, op: Op, buffers: Sequence[Buffer], room: Fresh) -> None:
        of_o, of_lse = (blocks(op.sums[at::2], buffers, room.device) for at in (0, 1))
        self._blocks, self._sinks, self._room = list(zip(of_o, of_lse, strict=True)), op.sinks, room
        # Partial results of callers may hold anything in rows without keys.
        self._of_callers = op.kind == OpKind.COMBINE
        self._words = [buffers[lse.number].dim for _, (lse, _) in self._blocks]

    def run(self, buffers: Buffers) -> None:
        room = self._room
        room.begin()
        sinks = None if self._sinks is None else buffers.at(self._sinks)
        for ((o, os), (lse, lses)), count in zip(self._blocks, self._words):
            parts = []
            for of_o, of_lse in zip(os, lses):
                logs = of_lse.read(buffers, room)
                values = room.cast(of_o.read(buffers, room), logs.dtype)
                if self._of_callers:
                    nothing = torch.eq(
                        logs.narrow(2, 0, 1), -torch.inf, out=room.empty((*logs.shape[:2], 1), torch.bool)
                    )
                    values = room.like(values).copy_(values).masked_fill_(nothing, 0.0)
                parts.append((values, logs))
            to = o.target(buffers, parts[0][1].dtype)
            values, log, error = merge(parts, sinks, room, count, to)
            if values is not to:
                o.write(buffers, values, room)
            lse.write_words(buffers, log, error, room)
