# SPDX-License-Identifier: MIT OR Apache-2.0
"""MiniMax M3: an indexer chooses blocks of keys, counted from the first key of a row. So it runs document by document, on the keys of one
document, which begin with its first, since the layer is causal and has no window. Its queries are at their places in the document, whatever
the position_ids, which the rotary embedding has.

On the CPU the kernels attend to the keys of the chosen blocks alone, some queries are scored at a time, and there is no mask: no tensor grows
with queries times keys. On a device, and with dropout, the layer makes its own mask of the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import indexer
from .indexer import Unmade
from .keys import Keys, gathered
from .listed import NAME


class _Taken(Exception):
    """The indexer's keys for this rank's tokens, before it compares anything."""

    def __init__(self) -> None:
        self.key: Any = None

    def update_index(self, key: Tensor) -> Tensor:
        self.key = key
        raise self


class _Given:
    """Keys that the indexer gets instead of its own."""

    def __init__(self, key: Tensor) -> None:
        self._key = key

    def update_index(self, key: Tensor) -> Tensor:
        return self._key


class _Layers:
    """A cache with the same entry for each layer."""

    def __init__(self, entry: Any) -> None:
        self.layers = self
        self._entry = entry

    def __getitem__(self, layer_idx: int) -> Any:
        return self._entry


class _Blocks:
    """The layer's indexer."""

    def __init__(self, layer: Any, keys: Keys) -> None:
        self._own, self._keys, self._chosen = layer.indexer, keys, list[Tensor]()
        places = torch.zeros(1, dtype=torch.int64) if keys.alone else keys.forward.positions
        self._places = places.to(next(layer.parameters()).device)[None]

    @torch.no_grad()
    def __call__(self, hidden: Tensor, embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor) -> None:
        taken = _Taken()
        try:
            self._own(hidden, embeddings, _Layers(taken), position_ids)
        except _Taken:
            pass
        (every,) = self._keys.gather((taken.key,), (2,))
        for q, k in self._keys.documents():
            q = q.to(hidden.device)
            mine = hidden[:, q], tuple(one[:, q] for one in embeddings)
            self._chosen.append(self._own(*mine, _Layers(_Given(every[:, :, k])), self._places[:, q]))

    def build_block_mask(
        self, chosen: None, mask: Tensor, length: int, dtype: torch.dtype, device: torch.device, position_ids: Tensor
    ) -> Tensor:
        made: Any = None
        for (q, k), blocks in zip(self._keys.documents(), self._chosen, strict=True):
            q = q.to(device)
            part = self._own.build_block_mask(
                blocks, mask[:, :, q][..., k], k.stop - k.start, dtype, device, self._places[:, q]
            )
            if made is None:
                made = torch.full(
                    (1, part.shape[1], mask.shape[2], length), torch.finfo(dtype).min, dtype=dtype, device=device
                )
            made[:, :, q, k] = part
        return made  # type: ignore[no-any-return]


class _Lists(_Blocks):
    """The layer's indexer: instead of blocks, the columns of their keys."""

    @torch.no_grad()
    def __call__(self, hidden: Tensor, embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor) -> Tensor:
        taken, size, heads = _Taken(), self._own.block_size, self._own.num_heads
        try:
            self._own(hidden, embeddings, _Layers(taken), position_ids)
        except _Taken:
            pass
        (every,) = self._keys.gather((taken.key,), (2,))
        listed = torch.full((1, heads, hidden.shape[1], self._own.topk_blocks * size), -1, dtype=torch.int32)
        within = torch.arange(size)
        for of_document, k in self._keys.documents():
            # Scores of each head before and after two masks.
            rows = max(1, indexer.TILE // (12 * heads * (k.stop - k.start)))
            for q in of_document.split(rows):
                mine, places = (hidden[:, q], tuple(one[:, q] for one in embeddings)), self._places[:, q]
                chosen = self._own(*mine, _Layers(_Given(every[:, :, k])), places)
                keys = (chosen[..., None] * size + within).flatten(3)
                seen = (chosen >= 0).repeat_interleave(size, 3) & (keys <= places[:, None, :, None])
                listed[:, :, q, : keys.shape[3]] = torch.where(seen, keys + k.start, -1).to(torch.int32)
        return listed


def blocks(kind: str, layer: Any, *args: Any, **kwargs: Any) -> Any:
    hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    dropped: Any = layer.training and getattr(layer, "attention_dropout", 0.0)
    kv_heads = layer.config.num_key_value_heads
    if hidden.is_cuda or dropped or kv_heads % layer.indexer.num_heads:
        return gathered(kind, layer, *args, change=lambda layer, keys: {"indexer": _Blocks(layer, keys)}, **kwargs)
    change, mask_of = (lambda layer, keys: {"indexer": _Lists(layer, keys)}), (lambda keys, device: Unmade())
    return gathered(NAME, layer, *args, change=change, mask_of=mask_of, **kwargs)
