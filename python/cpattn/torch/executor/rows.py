# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows of the buffers of a run, as tables made once for a plan.

A schedule names many short runs of rows. Joined, they are a slice, which costs nothing, or else an index on the device, with which
one operator of PyTorch moves all of them. So a run has as many calls as a schedule has kinds of moves, not as it has fragments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...schedule import Buffer, View
from ..kernels import Fresh
from ..kernels.scratch import Index

_NONE = torch.empty(0, device="cpu")

Run = tuple[int, int]
"""The first row and the number of rows."""


class Buffers:
    """The tensors of a run by the numbers of their buffers. What lies in the workspace has the same views in all runs: `fixed` has them,
    and whatever else was made of them, by its owner."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self.tensors: list[Tensor] = [_NONE] * len(buffers)
        self.fixed: dict[Any, Any] = {}
        self._of_callers = [at for at, b in enumerate(buffers) if b.tensor is not None]
        self._views: dict[View, Tensor] = {}
        # What a call may leave out, and so no schedule has.
        self.d_lse: Tensor | None = None
        self.max_logit: Tensor | None = None

    def place(self, workspace: Tensor, types: dict[int, torch.dtype]) -> None:
        """Puts the buffers of the workspace into this memory."""
        self.fixed.clear()
        for at, b in enumerate(self.buffers):
            if b.tensor is None:
                dtype = types[b.dtype]
                size = b.rows * b.heads * b.dim * dtype.itemsize
                self.tensors[at] = workspace[b.offset : b.offset + size].view(dtype).view(b.shape)

    def displace(self) -> None:
        """Lets go of the workspace."""
        self.fixed.clear()
        for at, b in enumerate(self.buffers):
            if b.tensor is None:
                self.tensors[at] = _NONE

    def at(self, view: View) -> Tensor:
        """Rows and heads of a buffer, [rows, heads, dim]."""
        if (found := self.fixed.get(view)) is None and (found := self._views.get(view)) is None:
            of = self.buffers[view.buffer]
            found = narrowed(self.tensors[view.buffer], of, (view.row, view.rows), (view.head, view.heads))
            (self.fixed if of.tensor is None else self._views)[view] = found
        result: Tensor = found
        return result

    def column(self, view: View) -> Tensor:
        """The first column of a view, [rows, heads]."""
        if (found := self.fixed.get((view, 0))) is None:
            found = self.at(view).select(2, 0)
            if self.buffers[view.buffer].tensor is None:
                self.fixed[view, 0] = found
        result: Tensor = found
        return result

    def release(self) -> None:
        """Lets go of the caller's tensors."""
        self._views.clear()
        self.d_lse = self.max_logit = None
        for at in self._of_callers:
            self.tensors[at] = _NONE


def narrowed(x: Tensor, of: Buffer, rows: Run, heads: Run) -> Tensor:
    """Rows and heads of a buffer."""
    if rows != (0, of.rows):
        x = x.narrow(0, *rows)
    return x if heads == (0, of.heads) else x.narrow(1, *heads)


def joined(runs: Iterable[Run]) -> list[Run]:
    """The runs in their order, those that follow each other as one; empty ones are left out."""
    every: list[Run] = []
    for first, count in runs:
        if not count:
            continue
        if every and sum(every[-1]) == first:
            every[-1] = every[-1][0], every[-1][1] + count
        else:
            every.append((first, count))
    return every


def numbers(runs: Sequence[Run]) -> Tensor:
    """The rows of runs, on the CPU."""
    if not runs:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    first, count = torch.tensor(runs, dtype=torch.int64, device="cpu").unbind(1)
    return torch.arange(int(count.sum()), device="cpu") + (first - (count.cumsum(0) - count)).repeat_interleave(count)


def index_of(parts: Sequence[Run], device: torch.device) -> Index:
    """Joined runs as a slice, or as a table on the device."""
    if len(parts) > 1:
        return numbers(parts).to(device)
    return slice(parts[0][0], sum(parts[0])) if parts else slice(0, 0)


class Rows:
    """Runs of rows of some heads of a buffer, to read or to write."""

    def __init__(self, of: Buffer, number: int, heads: Run, runs: Iterable[Run], device: torch.device) -> None:
        self.number, parts = number, joined(runs)
        self.count = sum(count for _, count in parts)
        self.index = index_of(parts, device)
        self._of, self._heads, self._stays = of, heads, of.tensor is None
        self._rows = (self.index.start, self.count) if isinstance(self.index, slice) else (0, of.rows)
        self._shape = self.count, heads[1], of.dim

    def same_as(self, other: Rows) -> bool:
        """Whether both are the same rows, which lie together."""
        slices = isinstance(self.index, slice) and self.index == other.index
        return slices and (self.number, self._heads) == (other.number, other._heads)

    def _view(self, buffers: Buffers) -> Tensor:
        """The rows, or all of the buffer's if they do not lie together."""
        if (found := buffers.fixed.get(self)) is None:
            found = narrowed(buffers.tensors[self.number], self._of, self._rows, self._heads)
            if self._stays:
                buffers.fixed[self] = found
        result: Tensor = found
        return result

    def _columns(self, buffers: Buffers) -> tuple[Tensor, ...]:
        """The columns of `_view`."""
        if (found := buffers.fixed.get((self, 0))) is None:
            found = self._view(buffers).unbind(2)
            if self._stays:
                buffers.fixed[self, 0] = found
        result: tuple[Tensor, ...] = found
        return result

    def read(self, buffers: Buffers, room: Fresh) -> Tensor:
        """A view of the rows, or a copy if they do not lie together."""
        every = self._view(buffers)
        return every if isinstance(self.index, slice) else room.take(every, self.index)

    def target(self, buffers: Buffers, dtype: torch.dtype) -> Tensor | None:
        """The rows, to write results of a type into; None if they do not lie together, or have another type."""
        if not isinstance(self.index, slice) or (every := self._view(buffers)).dtype != dtype:
            return None
        return every

    def write(self, buffers: Buffers, values: Tensor, room: Fresh) -> None:
        every = self._view(buffers)
        if isinstance(self.index, slice):
            every.copy_(values)
        else:
            room.put(every, self.index, values.expand(self._shape) if not values.ndim else values)

    def clear(self, buffers: Buffers) -> None:
        """Writes zeros."""
        every = self._view(buffers)
        every.zero_() if isinstance(self.index, slice) else every.index_fill_(0, self.index, 0.0)

    def write_words(self, buffers: Buffers, value: Tensor, error: Tensor | None, room: Fresh) -> None:
        """An lse, [rows, heads], and its rounding error where there is a second word; None: 0."""
        first, *more = self._columns(buffers)
        if isinstance(self.index, slice):
            first.copy_(value)
        else:
            room.put(first, self.index, value)
        for second in more:
            if error is not None:
                second.copy_(error) if isinstance(self.index, slice) else room.put(second, self.index, error)
            elif isinstance(self.index, slice):
                second.zero_()
            else:
                second.index_fill_(0, self.index, 0.0)

    def add(self, buffers: Buffers, values: Tensor, room: Fresh) -> None:
        every = self._view(buffers)
        if isinstance(self.index, slice):
            every.add_(values)
        else:
            room.add(every, self.index, values)


class Selection:
    """Rows of a tensor that a call computes: all of it, a part, or an index."""

    def __init__(self, runs: Iterable[Run], total: int, device: torch.device) -> None:
        self._index = index_of(joined(runs), device)

    def of(self, x: Tensor, room: Fresh) -> Tensor:
        return room.take(x, self._index)
