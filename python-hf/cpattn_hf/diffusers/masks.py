# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention masks that hide whole keys, as those of padded texts do, and the slices that say the same.

A mask is boolean (True: the key is read) or is added to the scores, where 0 keeps a key and a number near the lowest of its type, or
Diffusers' -10000, hides it: such a key has the weight 0 in f32. Masks that differ between queries or between heads, or weigh keys, are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from cpattn.errors import InvalidArgument, Unsupported
from cpattn import Slice

# What is added to the score of a hidden key, at most: -10000 in bfloat16 is -9984.
HIDDEN = -9000.0

_OUT = "leave the mask out, or shorten the sequence to what it keeps"


def keys_of(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Which keys of this rank are read, [batch, keys], by a mask as torch's scaled_dot_product_attention or Diffusers' dispatch takes it.
    q and k are [batch, tokens, heads, dim]."""
    shape, (batch, queries, heads, _), keys = tuple(mask.shape), q.shape, k.shape[1]
    if mask.ndim == 2 and shape == (batch, keys):
        mask = mask[:, None, None]
    every = mask[(None,) * (4 - mask.ndim)] if mask.ndim <= 4 else mask
    needed = (batch, heads, queries, keys)
    if every.ndim != 4 or any(have not in (1, need) for have, need in zip(every.shape, needed, strict=True)):
        raise Unsupported(
            f"attn_mask has the shape {shape}, and attention of this rank is {needed} (batch, heads, queries, keys): a mask of keys is needed, "
            "split as the keys are"
        )
    if not keys:
        return torch.zeros(batch, 0, dtype=torch.bool)
    if not every.numel():
        raise Unsupported(
            f"attn_mask has the shape {shape}, without a query, and so does not say which keys are read: a mask of keys [batch, keys] is needed"
        )
    first = every[:, :1, :1]
    if not bool((every == first).all()):
        raise Unsupported(
            f"attn_mask, of the shape {shape}, differs between queries or between heads, a mask of keys [batch, keys] is needed: {_OUT}"
        )
    if mask.dtype == torch.bool:
        key_mask = first
    elif not mask.dtype.is_floating_point:
        raise InvalidArgument(f"attn_mask.dtype is {mask.dtype}, torch.bool or a floating type is needed")
    else:
        key_mask = first == 0
        if not bool((key_mask | (first <= HIDDEN)).all()):
            raise Unsupported(
                f"attn_mask adds other numbers than 0 and at most {HIDDEN:g} to scores, which weighs keys: {_OUT}"
            )
    return key_mask[:, 0, 0].expand(batch, keys)


def runs(key_mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The runs of keys that are read."""
    at = 0
    for read, group in groupby(key_mask):
        end = at + len(list(group))
        if read:
            yield at, end
        at = end


def slices_of(queries: int, key_mask: Sequence[bool]) -> tuple[Slice, ...]:
    """All queries read the keys that are kept."""
    return tuple(Slice(0, queries, begin, end) for begin, end in runs(key_mask))
