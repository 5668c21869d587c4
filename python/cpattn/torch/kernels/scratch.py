# SPDX-License-Identifier: MIT OR Apache-2.0
"""Memory of an operation for what it needs besides its results: rows that are gathered, sums before they are rounded.

An operation asks for the same tensors in each run, in one order. So a `Scratch` keeps them: the first run makes them, later ones
find them by their number. They lie in a `Memory`, which operations that come one after another share, as large as the largest needs:
what a tensor holds is gone when the next operation begins. `Fresh` makes new tensors instead, for results that are to stay.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Tensors begin at multiples of it, as those of PyTorch's own allocators.
ALIGNMENT = 256

Index = slice | torch.Tensor
"""Rows: from one to another, or a table on the device."""


class Fresh:
    """New tensors, and what is made with them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """What was asked for may be used for something else."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.empty(shape, dtype).zero_()

    def like(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, x.dtype)

    def take(self, x: Tensor, index: Index, dim: int = 0) -> Tensor:
        """Rows of a tensor: a view, or a copy if they do not lie together."""
        if isinstance(index, slice):
            first, count = index.start, index.stop - index.start
            return x if count == x.shape[dim] else x.narrow(dim, first, count)
        shape = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
        result: Tensor = torch.index_select(x, dim, index, out=self.empty(shape, x.dtype))
        return result

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if x.dtype == dtype else self.empty(x.shape, dtype).copy_(x)

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() else self.like(x).copy_(x)

    def put(self, x: Tensor, places: Index, values: Tensor) -> None:
        """Writes rows, of which none occurs twice."""
        if isinstance(places, slice):
            self.take(x, places).copy_(values)
        else:
            x.index_copy_(0, places, self.cast(values, x.dtype))

    def add(self, x: Tensor, places: Index, values: Tensor) -> None:
        """Adds rows, of which none occurs twice."""
        if isinstance(places, slice):
            self.take(x, places).add_(values)
        else:
            x.index_add_(0, places, self.cast(values, x.dtype))


class Memory:
    """Bytes for operations that come one after another. `other` is a stream that each of their runs is joined with at its end.

    They grow between operations alone: what does not fit has tensors of its own until the next one begins. Earlier bytes are held by
    what lies in them, which their owner lets go of after a run (`Scratch.renew`), when no stream uses them any more."""

    def __init__(self, device: torch.device, other: torch.Stream | None = None) -> None:
        self.device, self._other = device, other
        self.clear()

    def clear(self) -> None:
        with torch.inference_mode(False):
            self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.wanted = 0
        self._overfull: Scratch | None = None

    def settle(self) -> None:
        """Between operations: the memory is as large as they wanted so far."""
        if self._overfull is not None:
            self._overfull.fit()
            self._overfull = None
        if self.wanted > self.bytes.shape[0]:
            with torch.inference_mode(False):
                self.bytes = torch.empty(self.wanted, dtype=torch.uint8, device=self.device)
            if self._other is not None:
                self.bytes.record_stream(self._other)

    def piece(self, of: Scratch, first: int, size: int, end: int) -> Tensor:
        """Bytes from one to another, if there are as many."""
        if end <= self.bytes.shape[0]:
            return self.bytes[first : first + size]
        self.wanted, self._overfull = max(self.wanted, end), of
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=self.device)


class Piece(NamedTuple):
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    end: int


class Scratch(Fresh):
    """The tensors of one operation."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory.device)
        self._memory, self._of = memory, memory.bytes
        self._tensors: list[Piece] = []
        self._number = self._end = 0

    def begin(self) -> None:
        self._memory.settle()
        self._number = self._end = 0
        self.renew()

    def renew(self) -> None:
        """Lets go of an earlier memory."""
        if self._of is not self._memory.bytes:
            self.release()

    def fit(self) -> None:
        """Lets go of what is not in the memory."""
        while self._tensors and self._tensors[-1].end > self._of.shape[0]:
            del self._tensors[-1]

    def release(self) -> None:
        """Lets go of the memory."""
        self._tensors.clear()
        self._of = self._memory.bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        number = self._number
        self._number = number + 1
        if number < len(self._tensors):
            found, of, kind, self._end = self._tensors[number]
            if of == shape and kind is dtype:
                return found
            # Another call of the operation: with a gradient of lse, say.
            del self._tensors[number:]
            self._end = self._tensors[-1].end if number else 0
        of = tuple(shape)
        size, first = math.prod(of) * dtype.itemsize, self._end
        self._end = first + -(-size // ALIGNMENT) * ALIGNMENT
        found = self._memory.piece(self, first, size, self._end).view(dtype).view(of)
        self._tensors.append(Piece(found, of, dtype, self._end))
        return found
