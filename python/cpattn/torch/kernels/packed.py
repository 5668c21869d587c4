# SPDX-License-Identifier: MIT OR Apache-2.0
"""An operation by a kernel of rectangles: one call for each pair of window limits.

A call's rows of q and k are gathered, unless they lie end to end. Rows that several rectangles read are merged by lse; their gradients
are added. `Places` keeps that deterministic: rows that occur several times are taken in turns, none of which has a row twice.

What a kernel does not do is done here, exactly: heads that do not divide are expanded, head dims are padded with zeros, and delta,
which kernels compute from o and d_o, is put into an o: delta·d_o/|d_o|², whose product with d_o is delta. Where the loss has a gradient
of lse, delta may be other than 0 in rows whose d_o is 0. Then more columns carry it: o has delta there, d_o 1 and v 0.

A scale below 0 is the sign of q: kernels take the largest product for the largest score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...errors import Unsupported
from ...schedule import Op
from .heads import HeadMap
from .kernel import columns_of_delta
from .rectangles import Rectangle, Rectangles, causal, rectangles_of, rows_of_runs, squared
from .scratch import Fresh, Index
from .trial import returned, returned_gradients, tried

if TYPE_CHECKING:
    from .work import Work


def index_of(rows: Tensor, device: torch.device) -> Index:
    """Rows as a slice, which copies nothing, or as a table on the device."""
    if len(rows) and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[0]) + len(rows))
    return rows.to(device)


class Turn(NamedTuple):
    """Some rows of a call, and their places. `fresh`: no call and no turn before had these places."""

    rows: Index
    places: Index
    fresh: bool


class Places:
    """Where the results of calls belong, in turns of which none has a place twice."""

    def __init__(self, count: int, device: torch.device):
        self._had, self._device = torch.zeros(count, dtype=torch.bool, device="cpu"), device

    @property
    def all_had(self) -> bool:
        """Whether turns so far have had every place."""
        return bool(self._had.all())

    def turns(self, parts: Sequence[Tensor]) -> list[Turn]:
        """`parts` are the places of each sequence of a call. A sequence has no place twice."""
        levels: list[list[tuple[int, Tensor]]] = []
        seen = torch.zeros(len(self._had), dtype=torch.long, device="cpu")
        first = 0
        for part in parts:
            level = int(seen[part].max()) if len(part) else 0
            seen[part] = level + 1
            while len(levels) <= level:
                levels.append([])
            levels[level].append((first, part))
            first += len(part)
        turns = []
        for level_parts in levels:
            rows = torch.cat([torch.arange(begin, begin + len(part), device="cpu") for begin, part in level_parts])
            places = torch.cat([part for _, part in level_parts])
            had = self._had[places]
            for mask, fresh in ((~had, True), (had, False)):
                if bool(mask.any()):
                    turns.append(Turn(index_of(rows[mask], self._device), index_of(places[mask], self._device), fresh))
            self._had[places] = True
        return turns


class Call(NamedTuple):
    """One call: its rows in the views of q and k, the arguments of the kernel, and where its results belong."""

    q: Index
    k: Index
    arguments: Rectangles
    of_q: list[Turn]
    of_k: list[Turn]


class ByRectangles:
    def __init__(self, work: Work, slopes: Tensor | None):
        self.work, self.kernel, op = work, work.kernel, work.op
        self.able = self.kernel.honours
        tried(self.kernel, work.device, work.dtype)
        self._negative = op.score.scale < 0
        self.heads = HeadMap(work.kv.tolist(), work.k.heads, op.per_q_head, work.device, self.able.group)
        found = rectangles_of(op, in_order=slopes is not None)
        if not self.able.windows:
            found = [part for one in found for part in causal(one)]
            refuse_windows(self.kernel.name, found)
        if self.able.square:
            found = [part for one in found for part in squared(one)]
        if slopes is not None:
            refuse_corners(self.kernel.name, found)
        # The longest first, and all of one pair of limits in one call.
        groups: dict[tuple[int | None, int | None], list[Rectangle]] = {}
        for one in found:
            groups.setdefault((one.left, one.right), []).append(one)
        rows = (
            torch.arange(work.rows.start, work.rows.stop, device="cpu")
            if isinstance(work.rows, slice)
            else work.rows.cpu()
        )
        of_q = Places(work.count, work.device)
        of_k = Places(work.k.rows, work.device)
        self._calls = [self._call(op, limits, group, rows, of_q, of_k, slopes) for limits, group in groups.items()]
        for call in self._calls:
            self.kernel.prepare(call.arguments)
        self.calls = [self._describe(call, group) for call, group in zip(self._calls, groups.values())]
        # A result that is the whole of one call needs no copy, and one that calls write all of no zeros.
        self._whole = self._is_whole([call.of_q for call in self._calls], work.count)
        self._whole_k = self._is_whole([call.of_k for call in self._calls], work.k.rows)
        self._all_q, self._all_k = of_q.all_had, of_k.all_had
        self._dims_of: dict[tuple[int, int, int], tuple[int, int]] = {}

    @staticmethod
    def _is_whole(of_calls: Sequence[Sequence[Turn]], count: int) -> bool:
        turns = of_calls[0] if len(of_calls) == 1 else []
        every = slice(0, count)
        return len(turns) == 1 and all(isinstance(index, slice) and index == every for index in turns[0][:2])

    def _call(
        self,
        op: Op,
        limits: tuple[int | None, int | None],
        group: Sequence[Rectangle],
        rows: Tensor,
        of_q: Places,
        of_k: Places,
        slopes: Tensor | None,
    ) -> Call:
        device = self.work.device
        q, k = [rows_of_runs(one.q) for one in group], [rows_of_runs(one.k) for one in group]
        of_sequences = None
        if slopes is not None:
            mine = slice(op.heads.q_offset, op.heads.q_offset + self.work.q.heads)
            each = [(slopes if slopes.ndim == 1 else slopes[one.document])[mine] for one in group]
            of_sequences = torch.stack(each).to(device, torch.float32).contiguous()
        arguments = Rectangles(
            cumulative((one.rows for one in group), device),
            cumulative((one.keys for one in group), device),
            max(one.rows for one in group),
            max(one.keys for one in group),
            tuple((one.rows, one.keys) for one in group),
            *limits,
            abs(op.score.scale),
            op.score.softcap,
            of_sequences,
        )
        return Call(
            index_of(rows[torch.cat(q)], device),
            index_of(torch.cat(k), device),
            arguments,
            of_q.turns(q),
            of_k.turns(k),
        )

    def _describe(self, call: Call, group: Sequence[Rectangle]) -> dict[str, Any]:
        arguments = call.arguments
        rows, keys = sum(one.rows for one in group), sum(one.keys for one in group)
        copied = (0 if isinstance(call.q, slice) else rows) + (0 if isinstance(call.k, slice) else keys)
        return {
            "kernel": self.kernel.name,
            "sequences": len(group),
            "rows": rows,
            "keys": keys,
            "longest": (arguments.max_seqlen_q, arguments.max_seqlen_k),
            "window": (arguments.window_left, arguments.window_right),
            "copied": copied,
            "heads expanded": self.heads.expands,
        }

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        work, room, kind, dims = self.work, self.work.room, self.work.accumulator, self._dims(q, v, 0)
        if not self._whole:
            make = room.empty if self._all_q else room.zeros
            o, lse = make((work.count, q.shape[1], v.shape[2]), kind), make((q.shape[1], work.count), kind)
            if not self._all_q:
                lse.fill_(-torch.inf)
        for call in self._calls:
            mine = self._inputs(room.take(q, call.q), room.take(k, call.k), room.take(v, call.k), dims)
            part, logs = returned(self.kernel, *mine, *self.kernel.forward(*mine, call.arguments))
            part = part if part.shape[2] == v.shape[2] else part.narrow(2, 0, v.shape[2])
            if self._whole:
                return room.cast(part, kind), room.cast(logs, kind)
            logs = logs.t()
            for turn in call.of_q:
                values, of_rows = room.take(part, turn.rows), room.take(logs, turn.rows)
                if not turn.fresh:
                    earlier = room.take(o, turn.places), room.take(lse.t(), turn.places)
                    values, of_rows = merged(room, *earlier, room.cast(values, kind), room.cast(of_rows, kind))
                room.put(o, turn.places, values)
                room.put(lse.t(), turn.places, of_rows)
        return o, lse

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lse_gradient: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`lse` and `delta` are [rows, heads] of the q view."""
        work, room, kind = self.work, self.work.room, self.work.accumulator
        columns = columns_of_delta(q.dtype) if lse_gradient and not self.able.takes_delta else 0
        dims = self._dims(q, v, columns)
        queries, keys = work.gradients
        of_k = self.heads.kv_heads
        of_q_rows, of_k_rows = (room.empty if every else room.zeros for every in (self._all_q, self._all_k))
        dq = of_q_rows((work.count, *q.shape[1:]), kind) if queries and not self._whole else None
        keeps = keys and not self._whole_k
        dk, dv = (of_k_rows((k.shape[0], of_k, x.shape[2]), kind) if keeps else None for x in (k, v))
        for call in self._calls:
            d, logs, of_rows = (room.take(x, call.q) for x in (d_o, lse, delta))
            mine = self._inputs(room.take(q, call.q), room.take(k, call.k), room.take(v, call.k), dims)
            o = None
            if not self.able.takes_delta:
                d, o = with_delta(room, d, of_rows, columns)
                o = room.contiguous(padded(room, o, dims[1]))
            d = self._strided(padded(room, d, dims[1]))
            parts = self.kernel.backward(
                d, *mine, o, room.contiguous(logs.t()), call.arguments, delta=room.contiguous(of_rows.t())
            )
            returned_gradients(self.kernel, mine, parts)
            of_q, *of_keys = parts
            if queries:
                of_q = of_q if of_q.shape[2] == q.shape[2] else of_q.narrow(2, 0, q.shape[2])
                of_q = torch.neg(of_q, out=room.like(of_q)) if self._negative else of_q
                dq = self._collected(dq, of_q, call.of_q)
            if keys:
                of_keys = [
                    part if part.shape[2] == x.shape[2] else part.narrow(2, 0, x.shape[2])
                    for part, x in zip(of_keys, (k, v))
                ]
                of_keys = [self.heads.summed(room.cast(part, kind), room) for part in of_keys]
                dk, dv = (self._collected(whole, part, call.of_k) for whole, part in zip((dk, dv), of_keys))
        return dq, dk, dv

    def _collected(self, whole: Tensor | None, part: Tensor, turns: Sequence[Turn]) -> Tensor:
        """A gradient with that of a call; None is a gradient that is the call's."""
        room = self.work.room
        if whole is None:
            return room.cast(part, self.work.accumulator)
        for turn in turns:
            (room.put if turn.fresh else room.add)(whole, turn.places, room.take(part, turn.rows))
        return whole

    def _dims(self, q: Tensor, v: Tensor, columns: int) -> tuple[int, int]:
        """The dims of q and k, and of v, that the kernel is given."""
        if (found := self._dims_of.get((q.shape[2], v.shape[2], columns))) is not None:
            return found
        able = self.able
        dims = [
            -(-dim // able.head_dim_multiple) * able.head_dim_multiple for dim in (q.shape[2], v.shape[2] + columns)
        ]
        if not able.value_dim:
            dims = [max(dims)] * 2
        if able.head_dim is not None and max(dims) > able.head_dim:
            of_lse = ", of which the gradient of lse takes some columns" if columns else ""
            raise Unsupported(
                f'kernels={self.kernel.name!r} has head dims up to {able.head_dim}, {max(dims)} is needed{of_lse}: use kernels="math" or "cpattn"'
            )
        self._dims_of[q.shape[2], v.shape[2], columns] = dims[0], dims[1]
        return dims[0], dims[1]

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        room = self.work.room
        q = torch.neg(q, out=room.like(q)) if self._negative else q
        q, k, v = (
            padded(room, q, dims[0]),
            padded(room, self.heads.expanded(k, room), dims[0]),
            padded(room, self.heads.expanded(v, room), dims[1]),
        )
        return self._strided(q), self._strided(k), self._strided(v)

    def _strided(self, x: Tensor) -> Tensor:
        return x if self.able.strides and x.stride(-1) == 1 else self.work.room.contiguous(x)


def refuse_windows(name: str, rectangles: Iterable[Rectangle]) -> None:
    for one in rectangles:
        if one.left is not None:
            raise Unsupported(
                f'kernels={name!r} has no limit on the left, and window_left, or a band of the slices, needs one: use kernels="flex", "math" or "cpattn"'
            )


def refuse_corners(name: str, rectangles: Iterable[Rectangle]) -> None:
    """A kernel counts the distances of slopes from the corner, and no call says where a corner is."""
    if any(one.corner != 0 for one in rectangles):
        raise Unsupported(
            f"kernels={name!r} honours alibi_slopes only where each rank has all keys of its rows, and this plan gives it parts of "
            'documents: use ring=1, or kernels="flex", "math" or "cpattn"'
        )


def cumulative(lengths: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32).to(device)


def padded(room: Fresh, x: Tensor, dim: int) -> Tensor:
    """More columns of zeros."""
    if x.shape[2] == dim:
        return x
    result = room.zeros((*x.shape[:2], dim), x.dtype)
    result.narrow(2, 0, x.shape[2]).copy_(x)
    return result


def merged(room: Fresh, o: Tensor, lse: Tensor, part: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results of the same rows, all of which have keys in both: [rows, heads, dim] and [rows, heads]."""
    total = torch.logaddexp(lse, logs, out=room.like(lse))
    old, new = (torch.sub(x, total, out=room.like(total)).exp_().unsqueeze(2) for x in (lse, logs))
    return torch.mul(o, old, out=room.like(o)).addcmul_(part, new), total


def with_delta(room: Fresh, d_o: Tensor, delta: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """d_o and an o with rowsum(o·d_o) = delta, in the type of d_o. With `columns` both have so many more."""
    delta = delta.unsqueeze(2)
    if columns:
        rows, heads, dim = d_o.shape
        d, o = room.empty((rows, heads, dim + columns), d_o.dtype), room.zeros((rows, heads, dim + columns), d_o.dtype)
        d.narrow(2, 0, dim).copy_(d_o)
        d.narrow(2, dim, columns).fill_(1.0)
        rest = room.like(delta).copy_(delta)
        for column in range(dim, dim + columns):
            rest.sub_(o.narrow(2, column, 1).copy_(rest))
        return d, o
    wide = room.cast(d_o, delta.dtype)
    unit = torch.abs(wide, out=room.like(wide))
    # Squares of small numbers would be 0.
    largest = torch.amax(unit, 2, keepdim=True, out=room.like(delta))
    nothing = torch.le(largest, 0.0, out=room.empty(delta.shape, torch.bool))
    largest.masked_fill_(nothing, 1.0)
    torch.div(wide, largest, out=unit)
    square = torch.sum(torch.mul(unit, unit, out=room.like(unit)), 2, keepdim=True, out=room.like(delta))
    scale = torch.div(delta, square.mul_(largest), out=square).masked_fill_(nothing, 0.0)
    return d_o, torch.mul(unit, scale, out=room.empty(d_o.shape, d_o.dtype))
