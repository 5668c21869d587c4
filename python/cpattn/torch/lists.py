# SPDX-License-Identifier: MIT OR Apache-2.0
"""The keys that each query lists: the arguments `key_indices` and `key_blocks` of attention.

Blocks are expanded to the keys that the mask allows: the kernels, and the rows that move, are those of listed keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._header import UNLIMITED
from ..arguments import whole
from ..errors import InvalidArgument, Unsupported
from .operators import dense

if TYPE_CHECKING:
    from .context import Batch, Context


def lists_of(context: Context, keys: Tensor | None, name: str = "key_indices") -> Tensor | None:
    """The lists as int32 [tokens, heads, entries]. Positions that int32 has not are no positions, and stay refused."""
    if keys is None:
        return None
    if context.device.type != "cpu":
        raise Unsupported(
            f"{name} on {context.device}: no CUDA kernel attends to listed keys, use a context on the CPU"
        )
    dense(name, keys)
    if keys.dtype not in (torch.int32, torch.int64) or keys.device.type != "cpu":
        raise InvalidArgument(
            f"{name} is a tensor of {keys.dtype} on {keys.device}, torch.int32 or torch.int64 on cpu is needed"
        )
    if keys.ndim not in (2, 3):
        raise InvalidArgument(
            f"{name} has the shape {tuple(keys.shape)}, [tokens, entries] or [tokens, kv_heads, entries] is needed"
        )
    keys = keys.detach()
    if keys.dtype == torch.int64:
        keys = keys.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return (keys[:, None] if keys.ndim == 2 else keys).contiguous()


def of_blocks(
    batch: Batch, blocks: Tensor | None, block_size: int | None, window: tuple[int | None, int | None]
) -> Tensor | None:
    """The keys of blocks as int32 [tokens, heads, entries · block_size]: those that the mask allows, -1 in place of the others."""
    size = None if block_size is None else whole("block_size", block_size, 1, 2**31 - 1)
    if (listed := lists_of(batch.context, blocks, "key_blocks")) is None:
        if size is not None:
            raise InvalidArgument(f"block_size is {size} without key_blocks: give the blocks too")
        return None
    if size is None:
        raise InvalidArgument("key_blocks is given without block_size: give the keys of a block")
    if len(listed) != len(batch.tokens):
        raise InvalidArgument(
            f"key_blocks has {len(listed)} rows, {len(batch.tokens)} are needed: one for each of this rank's tokens"
        )
    if batch.packing.slices is not None:
        raise Unsupported("key_blocks in a batch with slices: blocks are those of documents, leave key_blocks out")
    ends, ends_k = (torch.tensor(list(x)) for x in (batch.cu_seqlens, batch.cu_seqlens_k))
    document = torch.searchsorted(ends, batch.tokens, right=True) - 1
    keys = ends_k.diff()[document][:, None, None]  # of each token's document
    wrong = ((listed < -1) | (listed.long() * size >= keys)).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        blocks_of = -(-int(keys[at[0]]) // size)
        raise InvalidArgument(
            f"key_blocks[{at[0]}, {at[1]}, {at[2]}] is {int(listed[tuple(at)])}, -1 or below {blocks_of} is needed: document {int(document[at[0]])} has "
            f"{int(keys[at[0]])} k tokens, {blocks_of} blocks of {size}"
        )
    ordered = listed.sort(-1).values
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).nonzero()
    if len(twice):
        token, head, place = twice[0].tolist()
        raise InvalidArgument(
            f"key_blocks[{token}, {head}] has {int(ordered[token, head, place])} twice, each block once in a list is needed"
        )
    kind = batch.context._kind
    left = kind.get("window_left", UNLIMITED) if window[0] is None else window[0]
    right = kind.get("window_right", 0) if window[1] is None else window[1]
    far = 2**31
    first, last = (batch.positions - min(left, far))[:, None, None], (batch.positions + min(right, far))[:, None, None]
    last = torch.minimum(last, keys - 1)
    found = listed[..., None] * size + torch.arange(size, dtype=torch.int32)
    allowed = (listed >= 0)[..., None] & (found >= first[..., None]) & (found <= last[..., None])
    return torch.where(allowed, found, -1).flatten(2).to(torch.int32)
