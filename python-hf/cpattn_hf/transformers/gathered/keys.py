# SPDX-License-Identifier: MIT OR Apache-2.0
"""The keys of a layer that runs its own attention: this rank's queries, and the keys and values that they read, from all ranks.

A layer that can generate text adds its keys and values to a cache and attends to what the cache returns. The cache here returns
those of other ranks, and the layer's mask is that of this rank's queries and these keys.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from cpattn.errors import Unsupported
from ..attention import Mask
from ..hybrids.shared import view

# The names of a layer's arguments for its cache, and for the tokens of an encoder.
CACHES = ("past_key_values", "cache", "layer_past", "past_key_value")
ENCODER = ("encoder_hidden_states", "key_value_states")


class Keys:
    """What the tokens of one forward pass read in layers of one kind of mask."""

    def __init__(self, mask: Mask) -> None:
        self.forward, self.reads = mask.forward, mask.forward.reads(mask.window)
        # A rank without tokens has a row all the same, which reads itself.
        self.alone = not self.reads.given
        self.length = 1 if self.alone else len(self.reads)
        self._masks: dict[Any, Tensor] = {}

    @classmethod
    def of(cls, layer: nn.Module, mask: Any) -> Keys:
        """Of a mask of this forward pass, made once for all layers that have it."""
        if not isinstance(mask, Mask):
            kind = "no mask" if mask is None else f"a mask of the type {type(mask).__name__}"
            raise Unsupported(f"{type(layer).__name__} has {kind}, a mask of transformers.masking_utils is needed")
        if "keys" not in vars(mask):
            vars(mask)["keys"] = cls(mask)
        keys: Keys = vars(mask)["keys"]
        return keys

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask [1, 1, tokens, keys], of booleans or of numbers that are added to scores."""
        if (dtype, device) not in self._masks:
            seen = (torch.ones(1, 1, dtype=torch.bool) if self.alone else self.reads.mask()).to(device)[None, None]
            if dtype != torch.bool:
                seen = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
            self._masks[dtype, device] = seen
        return self._masks[dtype, device]

    def rows_of_mask(self, begin: int, end: int, device: torch.device) -> Tensor:
        """The mask [tokens, keys] of some of this rank's tokens, of booleans."""
        seen = torch.ones(1, 1, dtype=torch.bool) if self.alone else self.reads.mask(begin, end)
        return seen.to(device)

    def documents(self) -> list[tuple[Tensor, slice]]:
        """The rows of this rank's queries and of the keys of each document that it has a query of."""
        if self.alone:
            return [(torch.zeros(1, dtype=torch.int64), slice(0, 1))]
        own = self.reads.own_documents
        numbers = own.bincount().nonzero().flatten()
        begins = torch.searchsorted(self.reads.documents, numbers).tolist()
        ends = torch.searchsorted(self.reads.documents, numbers, right=True).tolist()
        return [
            ((own == one).nonzero().flatten(), slice(*ends_of))
            for one, *ends_of in zip(numbers.tolist(), begins, ends, strict=True)
        ]

    def gather(self, x: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
        """The rows that this rank reads of tensors with this rank's tokens at these dims, in one exchange."""
        rows = [one.movedim(dim, 0) for one, dim in zip(x, dims, strict=True)]
        got = self.reads.gather(*(one[: self.reads.given] for one in rows))
        if self.alone:
            got = tuple(torch.cat([none, one]) for none, one in zip(got, rows, strict=True))
        return [one.movedim(0, dim) for one, dim in zip(got, dims, strict=True)]

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What is added to the numbers of queries and keys, counted from 0, so that they are positions in their documents."""
        q = torch.zeros(1, dtype=torch.int64) if self.alone else self.forward.positions.cpu()
        k = torch.zeros(1, dtype=torch.int64) if self.alone else self.reads.positions
        made = [(one - torch.arange(len(one))).to(device) for one in (q, k)]
        return made[0], made[1]


class Cache:
    """What a layer takes for a cache, in one call."""

    def __init__(self, keys: Keys, device: torch.device) -> None:
        self._keys, self._device = keys, device

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = self._keys.gather((key, value), (2, 2))
        return key, value

    def update_indexer(self, key: Tensor, layer_idx: int | None = None) -> Tensor:
        return self._keys.gather((key,), (1,))[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        return self._keys.offsets(self._device)[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, Tensor]:
        return self._keys.length, self._keys.offsets(self._device)[1]


@lru_cache(maxsize=256)
def _parameters(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def gathered(
    kind: str,
    layer: Any,
    *args: Any,
    change: Callable[[Any, Keys], dict[str, Any]] | None = None,
    mask_of: Callable[[Keys, torch.device], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """The layer's own forward with attention of this kind, "eager" or another, whose mask has booleans, on this rank's queries and gathered
    keys. `change` makes attributes that it has instead of its own, `mask_of` what it gets for a mask."""
    forward = type(layer).forward
    given = _parameters(forward).bind(layer, *args, **kwargs)
    name = type(layer).__name__
    for option in ENCODER:
        if given.arguments.get(option) is not None:
            raise Unsupported(
                f"{name} is given {option}, cross-attention, which is not supported: leave the encoder out"
            )
    hidden = next(one for one in given.args[1:] if isinstance(one, Tensor))
    keys = Keys.of(layer, given.arguments.get("attention_mask"))
    dtype = hidden.dtype if kind == "eager" else torch.bool
    mask = mask_of(keys, hidden.device) if mask_of else keys.mask(dtype, hidden.device)
    taken = next(one for one in CACHES if one in given.signature.parameters)
    given.arguments |= {"attention_mask": mask, taken: Cache(keys, hidden.device)}
    if "relative_distance" in given.arguments:  # of each query to each key
        q, k = keys.offsets(hidden.device)
        q, k = (
            torch.arange(n, device=hidden.device) + offset for n, offset in ((hidden.shape[1], q), (keys.length, k))
        )
        given.arguments["relative_distance"] = q[:, None] - k
    changed = change(layer, keys) if change else {}
    if hasattr(layer, "config"):
        changed["config"] = copy.copy(layer.config)
        changed["config"]._attn_implementation_internal = kind
    return forward(view(layer, **changed), *given.args[1:], **given.kwargs)
