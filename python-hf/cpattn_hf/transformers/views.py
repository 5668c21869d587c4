# SPDX-License-Identifier: MIT OR Apache-2.0
"""The batches of one forward pass: one for each kind of layer and dtype, all with the same tokens on each rank.

Without slices in the call, a layer with a window has the documents, and a layer with another mask the slices that its mask makes of them.
Slices of the call stand for causal documents: each layer's window applies inside of them, and chunks cut them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from cpattn import UNLIMITED
from cpattn.errors import InvalidArgument, Unsupported
from cpattn import Slice
from cpattn.torch import Batch
from .masks import Blocks, Expression, Parts, Window, chunked, has, slices_of
from .pack import Pack


class Views:
    def __init__(self, pack: Pack, batch_of: Callable[[torch.dtype], Batch], blocks: Blocks | None) -> None:
        self._pack, self._make, self._rule = pack, batch_of, blocks
        self._batches: dict[torch.dtype, Batch] = {}
        self._seen: dict[tuple[torch.dtype, Window | Parts], tuple[Batch, Window]] = {}
        self._slices: dict[Expression, list[Slice]] = {}
        # Which tokens are in a block.
        self.inside: Tensor | None = None if blocks is None or pack.types is None else blocks.members(pack.types)

    def batch(self, dtype: torch.dtype) -> Batch:
        if dtype not in self._batches:
            self._batches[dtype] = self._make(dtype)
        return self._batches[dtype]

    def blocked(self, numbers: Tensor, tokens: Tensor) -> bool:
        """Whether the batch has blocks. `numbers` are those of these tokens."""
        expected = torch.zeros_like(numbers[0], dtype=torch.bool) if self.inside is None else self.inside[tokens]
        if not torch.equal(numbers[0] >= 0, expected.to(numbers.device)):
            raise Unsupported(
                f"the model's mask puts {int((numbers >= 0).sum())} of this rank's tokens into blocks, and by its rule for token types these are "
                f"{int(expected.sum())}: use cpattn.torch, whose batches take any mask as slices"
            )
        return self.inside is not None and bool(self.inside.any())

    def refuse_is_causal(self, message: str) -> None:
        """Refuses a layer whose `is_causal` contradicts its mask, unless slices decide."""
        if self._pack.slices is None:
            raise Unsupported(f"{message}{', or give token types, which decide its mask' * (self._rule is not None)}")

    def of(self, dtype: torch.dtype, window: Window | Parts) -> tuple[Batch, Window]:
        """The batch of layers with this mask, and the window that they have in it."""
        key = dtype, window
        if key not in self._seen:
            self._seen[key] = self._view(self.batch(dtype), window)
        return self._seen[key]

    def _view(self, batch: Batch, window: Window | Parts) -> tuple[Batch, Window]:
        pack = self._pack
        if isinstance(window, Parts):
            if pack.slices is None:
                return batch.with_slices(self._slices_of(window.expression)), (UNLIMITED, UNLIMITED)
            size, window = _chunk(window)
            positions = (pack.positions - pack.first).tolist()
            batch = batch.with_slices(chunked(pack.slices, size, positions))
        # Slices say themselves which keys after a query it sees.
        return batch, window if pack.slices is None or window[1] else (window[0], UNLIMITED)

    def _slices_of(self, expression: Expression) -> list[Slice]:
        """The slices that a mask makes of the documents."""
        if expression not in self._slices:
            pack = self._pack
            begins = pack.positions[[a for a, b in pairwise(pack.cu_seqlens) if a < b]] - pack.first
            if pack.by_positions and bool(begins.any()) and has(expression, "chunk"):
                raise Unsupported(
                    f"position_ids of documents begin with {sorted(set(begins.tolist()))[:5]}, and the model has chunked attention, whose chunks begin "
                    "with the document: give position_ids that begin with 0, or leave them out"
                )
            blocks = (
                self._rule.of(pack.types, pack.cu_seqlens)
                if self._rule is not None and pack.types is not None
                else None
            )
            self._slices[expression] = slices_of(expression, pack.cu_seqlens, blocks)
        return self._slices[expression]


def _chunk(parts: Parts) -> tuple[int, Window]:
    """The chunk and the window of a mask over slices of a call."""
    name, *rest = parts.expression
    pieces = rest if name == "and" else [parts.expression]
    sizes = [one[1] for one in pieces if one[0] == "chunk"]
    if len(sizes) != 1 or any(one[0] not in ("chunk", "band") for one in pieces):
        raise InvalidArgument(
            "slices are given, and the model's mask has blocks of token types: leave token types out, and give slices that have the blocks"
        )
    low, high = next(((one[1], one[2]) for one in pieces if one[0] == "band"), (-UNLIMITED, UNLIMITED))
    return sizes[0], (UNLIMITED if low <= -(1 << 62) else -low, UNLIMITED if high >= 1 << 62 else high)
