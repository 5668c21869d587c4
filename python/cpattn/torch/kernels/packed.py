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
from .rectangles import Rectangle, Rectangles, causal, rectangles_of, rows_of_runs
from .trial import returned, returned_gradients, tried

if TYPE_CHECKING:
    from .work import Work

Index = slice | torch.Tensor


def index_of(rows: Tensor, device: torch.device) -> Index:
    """Rows as a slice, which copies nothing, or as a table on the device."""
    if len(rows) and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[0]) + len(rows))
    return rows.to(device)


def take(x: Tensor, index: Index) -> Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


class Turn(NamedTuple):
    """Some rows of a call, and their places. `fresh`: no call and no turn before had these places, where results are merged."""

    rows: Index
    places: Index
    fresh: bool


class Places:
    """Where the results of calls belong, in turns of which none has a place twice."""

    def __init__(self, count: int, device: torch.device, merges: bool = False):
        self._had, self._device, self._merges = torch.zeros(count, dtype=torch.bool, device="cpu"), device, merges

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
            had = self._had[places] if self._merges else torch.zeros_like(places, dtype=torch.bool)
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
        if slopes is not None:
            refuse_corners(self.kernel.name, found)
        # The longest first, and all of one pair of limits in one call.
        groups: dict[tuple[int | None, int | None], list[Rectangle]] = {}
        for one in found:
            groups.setdefault((one.left, one.right), []).append(one)
        rows = torch.arange(work.rows.start, work.rows.stop, device="cpu") if isinstance(work.rows, slice) else work.rows.cpu()
        of_q = Places(work.count, work.device, merges=True)
        of_k = Places(work.k.rows, work.device)
        self._calls = [self._call(op, limits, group, rows, of_q, of_k, slopes) for limits, group in groups.items()]
        for call in self._calls:
            self.kernel.prepare(call.arguments)
        self.calls = [self._describe(call, group) for call, group in zip(self._calls, groups.values())]
        # A result that is the whole of one call needs no copy.
        turns = self._calls[0].of_q if len(self._calls) == 1 else []
        every = slice(0, work.count)
        self._whole = len(turns) == 1 and all(isinstance(index, slice) and index == every for index in turns[0][:2])

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
        return Call(index_of(rows[torch.cat(q)], device), index_of(torch.cat(k), device), arguments, of_q.turns(q), of_k.turns(k))

    def _describe(self, call: Call, group: Sequence[Rectangle]) -> dict[str, Any]:
        told = call.arguments
        rows, keys = sum(one.rows for one in group), sum(one.keys for one in group)
        copied = (0 if isinstance(call.q, slice) else rows) + (0 if isinstance(call.k, slice) else keys)
        return {
            "kernel": self.kernel.name,
            "sequences": len(group),
            "rows": rows,
            "keys": keys,
            "longest": (told.max_seqlen_q, told.max_seqlen_k),
            "window": (told.window_left, told.window_right),
            "copied": copied,
            "heads expanded": self.heads.expands,
        }

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        work, dims = self.work, self._dims(q, v, 0)
        if not self._whole:
            o = torch.zeros(work.count, q.shape[1], v.shape[2], dtype=work.accumulator, device=q.device)
            lse = torch.full((q.shape[1], work.count), -torch.inf, dtype=work.accumulator, device=q.device)
        for call in self._calls:
            mine = self._inputs(take(q, call.q), take(k, call.k), take(v, call.k), dims)
            part, logs = returned(self.kernel, *mine, *self.kernel.forward(*mine, call.arguments))
            part, logs = part[..., : v.shape[2]].to(work.accumulator), logs.to(work.accumulator)
            if self._whole:
                return part, logs
            for turn in call.of_q:
                values, of_rows = take(part, turn.rows), take(logs.T, turn.rows)
                if not turn.fresh:
                    values, of_rows = merged(take(o, turn.places), take(lse.T, turn.places), values, of_rows)
                put(o, turn.places, values)
                put(lse.T, turn.places, of_rows)
        return o, lse

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lse_gradient: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`lse` and `delta` are [rows, heads] of the q view."""
        work = self.work
        columns = columns_of_delta(q.dtype) if lse_gradient and not self.able.takes_delta else 0
        dims = self._dims(q, v, columns)
        queries, keys = work.gradients
        of_k = self.heads.kv_heads
        dq = torch.zeros(work.count, *q.shape[1:], dtype=work.accumulator, device=q.device) if queries else None
        dk = torch.zeros(k.shape[0], of_k, k.shape[2], dtype=work.accumulator, device=q.device) if keys else None
        dv = torch.zeros(v.shape[0], of_k, v.shape[2], dtype=work.accumulator, device=q.device) if keys else None
        for call in self._calls:
            d, logs, of_rows = (take(x, call.q) for x in (d_o, lse, delta))
            mine = self._inputs(take(q, call.q), take(k, call.k), take(v, call.k), dims)
            o = None
            if not self.able.takes_delta:
                d, o = with_delta(d, of_rows, columns)
                o = padded(o, dims[1]).contiguous()
            d = self._strided(padded(d, dims[1]))
            parts = self.kernel.backward(
                d, *mine, o, logs.T.contiguous(), call.arguments, delta=of_rows.T.contiguous()
            )
            returned_gradients(self.kernel, mine, parts)
            of_q, *of_keys = (x.to(work.accumulator) for x in parts)
            if dq is not None:
                of_q = -of_q if self._negative else of_q
                for turn in call.of_q:
                    add(dq, turn.places, take(of_q[..., : q.shape[2]], turn.rows))
            for whole, part in zip((dk, dv), of_keys):
                if whole is not None:
                    part = self.heads.summed(part[..., : whole.shape[2]])
                    for turn in call.of_k:
                        add(whole, turn.places, take(part, turn.rows))
        return dq, dk, dv

    def _dims(self, q: Tensor, v: Tensor, columns: int) -> tuple[int, int]:
        """The dims of q and k, and of v, that the kernel is given."""
        able = self.able
        dims = [-(-dim // able.head_dim_multiple) * able.head_dim_multiple for dim in (q.shape[2], v.shape[2] + columns)]
        if not able.value_dim:
            dims = [max(dims)] * 2
        if able.head_dim is not None and max(dims) > able.head_dim:
            of_lse = ", of which the gradient of lse takes some columns" if columns else ""
            raise Unsupported(
                f"kernels={self.kernel.name!r} has head dims up to {able.head_dim}, {max(dims)} is needed{of_lse}: use kernels=\"math\" or \"cpattn\""
            )
        return dims[0], dims[1]

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        q = -q if self._negative else q
        q, k, v = padded(q, dims[0]), padded(self.heads.expanded(k), dims[0]), padded(self.heads.expanded(v), dims[1])
        return self._strided(q), self._strided(k), self._strided(v)

    def _strided(self, x: Tensor) -> Tensor:
        return x if self.able.strides and x.stride(-1) == 1 else x.contiguous()


def refuse_windows(name: str, rectangles: Iterable[Rectangle]) -> None:
    for one in rectangles:
        if one.left is not None:
            raise Unsupported(
                f"kernels={name!r} has no limit on the left, and window_left, or a band of the slices, needs one: use kernels=\"flex\", \"math\" or \"cpattn\""
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


def padded(x: Tensor, dim: int) -> Tensor:
    """More columns of zeros."""
    return x if x.shape[2] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[2]))


def put(x: Tensor, places: Index, values: Tensor) -> None:
    if isinstance(places, slice):
        x[places] = values
    else:
        x.index_copy_(0, places, values)


def add(x: Tensor, places: Index, values: Tensor) -> None:
    """Adds rows, of which none occurs twice."""
    if isinstance(places, slice):
        x[places] += values
    else:
        x.index_add_(0, places, values)


def merged(o: Tensor, lse: Tensor, part: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results of the same rows, all of which have keys in both: [rows, heads, dim] and [rows, heads]."""
    total = torch.logaddexp(lse, logs)
    return o * (lse - total).exp().unsqueeze(2) + part * (logs - total).exp().unsqueeze(2), total


def with_delta(d_o: Tensor, delta: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """d_o and an o with rowsum(o·d_o) = delta, in the type of d_o. With `columns` both have so many more."""
    wide, delta = d_o.to(delta.dtype), delta.unsqueeze(2)
    if columns:
        rest, words = delta, []
        for _ in range(columns):
            words.append(rest.to(d_o.dtype))
            rest = rest - words[-1]
        o = torch.cat([torch.zeros_like(d_o), *words], 2)
        return torch.cat([d_o, torch.ones_like(o[..., :columns])], 2), o
    # Squares of small numbers would be 0.
    largest = wide.abs().amax(2, keepdim=True)
    unit = wide / largest.where(largest > 0, 1)
    square = unit.square().sum(2, keepdim=True)
    return d_o, (unit * (delta / (largest * square)).where(largest > 0, 0)).to(d_o.dtype)
