# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows of the buffers of a run, as tables made once for a plan.

A schedule names many short runs of rows. Joined, they are a slice, which costs nothing, or else an index on the device, with which
one operator of PyTorch moves all of them. So a run has as many calls as a schedule has kinds of moves, not as it has fragments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...schedule import Buffer, View

_NONE = torch.empty(0, device="cpu")

Run = tuple[int, int]
"""The first row and the number of rows."""


class Buffers:
    """The tensors of a run by the numbers of their buffers. A view is made once: of the workspace for all runs, of the caller's tensors
    for one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self.tensors: list[Tensor] = [_NONE] * len(buffers)
        self._views: dict[View, Tensor] = {}
        self._of_callers: dict[View, Tensor] = {}
        # What a call may leave out, and so no schedule has.
        self.d_lse: Tensor | None = None
        self.max_logit: Tensor | None = None

    def place(self, workspace: Tensor, types: dict[int, torch.dtype]) -> None:
        """Puts the buffers of the workspace into this memory."""
        self._views.clear()
        for at, b in enumerate(self.buffers):
            if b.tensor is None:
                dtype = types[b.dtype]
                size = b.rows * b.heads * b.dim * dtype.itemsize
                self.tensors[at] = workspace[b.offset : b.offset + size].view(dtype).view(b.shape)

    def displace(self) -> None:
        """Lets go of the workspace."""
        self._views.clear()
        for at, b in enumerate(self.buffers):
            if b.tensor is None:
                self.tensors[at] = _NONE

    def at(self, view: View) -> Tensor:
        """Rows and heads of a buffer, [rows, heads, dim]."""
        if (found := self._views.get(view)) is None and (found := self._of_callers.get(view)) is None:
            of = self.buffers[view.buffer]
            found = self.tensors[view.buffer]
            if view.rows != of.rows:
                found = found.narrow(0, view.row, view.rows)
            if view.heads != of.heads:
                found = found.narrow(1, view.head, view.heads)
            (self._views if of.tensor is None else self._of_callers)[view] = found
        return found

    def release(self) -> None:
        """Lets go of the caller's tensors."""
        self._of_callers.clear()
        self.d_lse = self.max_logit = None
        for at, b in enumerate(self.buffers):
            if b.tensor is not None:
                self.tensors[at] = _NONE


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


class Rows:
    """Runs of rows of some heads of a buffer, to read or to write."""

    def __init__(self, of: Buffer, number: int, heads: Run, runs: Iterable[Run], device: torch.device) -> None:
        self.number, parts = number, joined(runs)
        self.count = sum(count for _, count in parts)
        self._heads = None if heads == (0, of.heads) else slice(heads[0], sum(heads))
        self._rows = slice(parts[0][0], sum(parts[0])) if len(parts) == 1 else slice(0, 0) if not parts else None
        self._index = None if self._rows is not None else numbers(parts).to(device)

    def _of(self, tensor: Tensor) -> Tensor:
        return tensor if self._heads is None else tensor[:, self._heads]

    def read(self, buffers: Buffers) -> Tensor:
        """A view of the rows, or a copy if they do not lie together."""
        every = self._of(buffers.tensors[self.number])
        return every[self._rows] if self._index is None else every.index_select(0, self._index)

    def write(self, buffers: Buffers, values: Tensor) -> None:
        every = self._of(buffers.tensors[self.number])
        if self._index is None:
            every[self._rows].copy_(values)
        else:
            every.index_copy_(0, self._index, values.to(every.dtype))

    def add(self, buffers: Buffers, values: Tensor) -> None:
        every = self._of(buffers.tensors[self.number])
        if self._index is None:
            every[self._rows].add_(values)
        else:
            every.index_add_(0, self._index, values.to(every.dtype))


class Selection:
    """Rows of a tensor that a call computes: all of it, a part, or an index."""

    def __init__(self, runs: Iterable[Run], total: int, device: torch.device) -> None:
        parts = joined(runs)
        self._rows = slice(parts[0][0], sum(parts[0])) if len(parts) == 1 else slice(0, 0) if not parts else None
        self._all = parts == [(0, total)]
        self._index = None if self._rows is not None else numbers(parts).to(device)

    def of(self, x: Tensor) -> Tensor:
        if self._all:
            return x
        return x[self._rows] if self._index is None else x.index_select(0, self._index)
