# SPDX-License-Identifier: MIT OR Apache-2.0
"""The indexer of a layer, some of this rank's queries at a time.

An indexer scores each query with all keys, for each of its heads, in f32: with 32,768 keys and 64 heads these are 8 MB for a query, and 70 GB for
a rank's share of 8,192. Its own code runs here on as many queries as fit in a tile, with the keys of all ranks. Neither its scores nor the mask
are ever whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .keys import Keys

# Bytes of the scores of one tile.
TILE = 1 << 26


class _Taken(Exception):
    """The indexer's keys for this rank's tokens, before it compares anything."""

    key: Any = None

    def update_indexer(self, key: Tensor, layer_idx: int | None = None) -> Tensor:
        self.key = key
        raise self


class _Every:
    """The keys of all ranks, for an indexer that has made some of its own."""

    def __init__(self, key: Tensor) -> None:
        self._key = key

    def update_indexer(self, key: Tensor, layer_idx: int | None = None) -> Tensor:
        return self._key


class Tiled:
    """A layer's indexer: its forward returns the columns of each query, -1 where the mask allows fewer."""

    def __init__(self, own: Any, keys: Keys) -> None:
        self._own, self._keys = own, keys

    @torch.no_grad()
    def __call__(
        self,
        hidden: Tensor,
        q_resid: Tensor,
        embeddings: tuple[Tensor, Tensor],
        mask: Any,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        taken = _Taken()
        try:
            self._own(hidden, q_resid, embeddings, mask, position_ids, past_key_values=taken)
        except _Taken:
            pass
        every = _Every(self._keys.gather((taken.key,), (1,))[0])
        tokens, found = hidden.shape[1], []
        # Scores of each head before and after the rectifier, their sum, and the mask.
        pair = 8 * getattr(self._own, "n_heads", 64) + 16
        rows = max(1, TILE // (pair * self._keys.length))
        for begin in range(0, tokens, rows):
            end = min(begin + rows, tokens)
            seen = self._keys.rows_of_mask(begin, end, hidden.device)[None]
            places = None if position_ids is None else position_ids.expand(1, tokens)[:, begin:end]
            some = tuple(one[:, begin:end] for one in (hidden, q_resid, *embeddings))
            chosen = self._own(*some[:2], some[2:], seen, places, past_key_values=every)
            found.append(torch.where(seen.gather(-1, chosen.long()), chosen, -1))
        return torch.cat(found, 1)


class Unmade:
    """What a layer gets for its mask [1, 1, tokens, keys] where nothing but its indexer reads it."""

    dtype = torch.bool

    def __getitem__(self, item: Any) -> Unmade:
        return self
