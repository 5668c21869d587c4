# SPDX-License-Identifier: MIT OR Apache-2.0
"""The operations of a schedule around a kernel: attend and its backward, delta, the gradient of the sinks.

`kernels.Work` computes partial results of the rows of an operation. What becomes of them says the mode of each q range: they
begin the running result, are merged into it, or end it: then the sinks are applied, outside of the kernel, so that every kernel has
them. Rows of one mode are one table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...schedule import Buffer, Mode, Op, Range, View
from ..kernels import Fresh, Kernel, Work
from .partials import merge, wide
from .rows import Buffers, Rows, Run, Selection


def rows_of(view: View, runs: Sequence[Run], buffers: Sequence[Buffer], device: torch.device) -> Rows:
    """Rows of a view as rows of its buffer."""
    return Rows(
        buffers[view.buffer],
        view.buffer,
        (view.head, view.heads),
        [(view.row + first, count) for first, count in runs],
        device,
    )


def by_mode(op: Op) -> dict[Mode, tuple[list[Run], list[Run]]]:
    """For each mode, the runs of its rows among those that the operation computes, and in the q view."""
    modes: dict[Mode, tuple[list[Run], list[Run]]] = {}
    at = 0
    for q in op.ranges:
        places, rows = modes.setdefault(q.mode, ([], []))
        places.append((at, q.range.len))
        rows.append((q.range.row, q.range.len))
        at += q.range.len
    return modes


def count_of(op: Op) -> int:
    return sum(q.range.len for q in op.ranges)


class Outcome:
    """What becomes of the forward's partial results of one mode."""

    def __init__(
        self, op: Op, mode: Mode, places: list[Run], rows: list[Run], buffers: Sequence[Buffer], room: Fresh
    ) -> None:
        device, self._room = room.device, room
        self._mine = Selection(places, count_of(op), device)
        self._mode, self._sinks = mode, op.sinks if mode.finishes else None
        self._running = self._running_lse = None
        if mode.continues or not mode.finishes:
            assert op.running is not None and op.running_lse is not None
            self._running, self._running_lse = (
                rows_of(view, rows, buffers, device) for view in (op.running, op.running_lse)
            )
        if mode.finishes:
            assert op.o is not None and op.lse is not None
            self._o, self._lse = (rows_of(view, rows, buffers, device) for view in (op.o, op.lse))
        else:
            assert self._running is not None and self._running_lse is not None
            self._o, self._lse = self._running, self._running_lse
        self._words = buffers[self._lse.number].dim

    def run(self, buffers: Buffers, o: Tensor, lse: Tensor) -> None:
        """`o` [rows, heads, dim] and `lse` [rows, heads, 1] are those of the whole operation."""
        room = self._room
        parts = [(self._mine.of(o, room), self._mine.of(lse, room))]
        if self._mode.continues:
            assert self._running is not None and self._running_lse is not None
            parts.insert(0, (self._running.read(buffers, room), self._running_lse.read(buffers, room)))
        sinks = None if self._sinks is None else buffers.at(self._sinks)
        if len(parts) == 1 and sinks is None:
            values, logs = parts[0]
            self._o.write(buffers, values, room)
            self._lse.write_words(buffers, logs.select(2, 0), None, room)
            return
        to = self._o.target(buffers, parts[0][1].dtype)
        values, log, error = merge(parts, sinks, room, self._words, to)
        if values is not to:
            self._o.write(buffers, values, room)
        self._lse.write_words(buffers, log, error, room)


class Attend:
    """ATTEND."""

    def __init__(
        self, op: Op, buffers: Sequence[Buffer], kernel: Kernel, dtype: torch.dtype, slopes: Tensor | None, room: Fresh
    ) -> None:
        self.op, self._room = op, room
        self.work = Work(kernel, op, room.device, dtype, slopes, room) if count_of(op) else None
        self._outcomes = [Outcome(op, mode, *runs, buffers, room) for mode, runs in by_mode(op).items() if self.work]
        assert op.q is not None
        self._heads = slice(op.heads.q_offset, op.heads.q_offset + op.q.heads)

    def run(self, buffers: Buffers) -> None:
        op, room = self.op, self._room
        if self.work is None or op.q is None or op.k is None or op.v is None:
            return
        room.begin()
        tensors = buffers.at(op.q), buffers.at(op.k), buffers.at(op.v)
        if buffers.max_logit is None:
            o, lse = self.work.forward(*tensors)
        else:
            o, lse, largest = self.work.forward_with_max(*tensors)
            mine = buffers.max_logit[self._heads]
            torch.maximum(mine, room.cast(largest, mine.dtype), out=mine)
        lse = lse.t().unsqueeze(2)
        for outcome in self._outcomes:
            outcome.run(buffers, o, lse)


# The gradients dq, dk and dv of no rows.
NONE: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


class AttendBackward:
    """ATTEND_BACKWARD. `lse_gradient`: the loss has a gradient of lse."""

    def __init__(
        self,
        op: Op,
        buffers: Sequence[Buffer],
        kernel: Kernel,
        dtype: torch.dtype,
        slopes: Tensor | None,
        room: Fresh,
        lse_gradient: bool,
    ) -> None:
        self.op, self._lse_gradient, self._room, device = op, lse_gradient, room, room.device
        self.work = Work(kernel, op, device, dtype, slopes, room) if count_of(op) else None
        self._dq = []
        if op.dq is not None and self.work:
            for mode, (places, rows) in by_mode(op).items():
                self._dq.append(
                    (mode.continues, Selection(places, count_of(op), device), rows_of(op.dq, rows, buffers, device))
                )
        runs = runs_of(op.k_ranges)
        assert op.k is not None
        self._mine = Selection(runs, op.k.rows, device)
        self._keys = [rows_of(view, runs, buffers, device) for view in (op.dk, op.dv) if view is not None]

    def run(self, buffers: Buffers) -> None:
        op, gradients, room = self.op, NONE, self._room
        room.begin()
        if self.work is not None:
            assert op.q and op.k and op.v and op.d_o and op.lse and op.delta
            o = None if op.o is None else buffers.at(op.o)
            lse, delta = buffers.column(op.lse), buffers.column(op.delta)
            gradients = self.work.backward(
                buffers.at(op.d_o),
                buffers.at(op.q),
                buffers.at(op.k),
                buffers.at(op.v),
                o,
                lse,
                delta,
                self._lse_gradient,
            )
        dq, *of_keys = gradients
        for adds, mine, rows in self._dq:
            if dq is not None:
                (rows.add if adds else rows.write)(buffers, mine.of(dq, room), room)
        for rows, gradient in zip(self._keys, of_keys):
            if gradient is not None:
                (rows.add if op.accumulate_keys else rows.write)(buffers, self._mine.of(gradient, room), room)
            elif not op.accumulate_keys:
                rows.write(buffers, room.zeros((), buffers.tensors[rows.number].dtype), room)


def runs_of(ranges: Sequence[Range]) -> list[Run]:
    return sorted((r.row, r.len) for r in ranges)


class Delta:
    """DELTA: rowsum(d_o·o), less the gradient of lse in rows that have keys or sinks."""

    def __init__(self, op: Op, lse: int | None, room: Fresh) -> None:
        assert op.o is not None and op.d_o is not None and op.delta is not None
        self._o, self._d_o, self._delta, self._lse, self._room = op.o, op.d_o, op.delta, lse, room

    def run(self, buffers: Buffers) -> None:
        delta, o, d_o, room = buffers.at(self._delta), buffers.at(self._o), buffers.at(self._d_o), self._room
        room.begin()
        product = room.empty(o.shape, wide(o.dtype))
        if o.dtype == d_o.dtype == product.dtype:
            torch.mul(o, d_o, out=product)
        else:
            product.copy_(o).mul_(d_o)
        torch.sum(product, 2, keepdim=True, dtype=product.dtype, out=delta)
        if buffers.d_lse is not None and self._lse is not None:
            place = self._o.place
            lse, gradient = buffers.tensors[self._lse][place], buffers.d_lse[place]
            nothing = torch.eq(lse, -torch.inf, out=room.empty(lse.shape, torch.bool))
            delta.sub_(room.like(gradient).copy_(gradient).masked_fill_(nothing, 0.0))


class SinkGradient:
    """SINK_GRADIENT: -sum of exp(sink - lse)·delta over rows."""

    def __init__(self, op: Op, room: Fresh) -> None:
        assert op.sinks is not None and op.dsinks is not None and op.lse is not None and op.delta is not None
        self._views, self._room = (op.sinks, op.dsinks, op.lse, op.delta), room

    def run(self, buffers: Buffers) -> None:
        room = self._room
        room.begin()
        sinks, part, lse, delta = map(buffers.at, self._views)
        kind = torch.promote_types(sinks.dtype, lse.dtype)
        weights = torch.sub(sinks, lse, out=room.empty((*lse.shape[:2], sinks.shape[2]), kind)).exp_()
        weights.masked_fill_(torch.eq(lse, -torch.inf, out=room.empty(lse.shape, torch.bool)), 0.0)
        total = torch.sum(weights.mul_(delta), 0, keepdim=True, out=room.empty(part.shape, kind))
        part.copy_(total.neg_())
