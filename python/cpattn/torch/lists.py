# SPDX-License-Identifier: MIT OR Apache-2.0
"""The keys that each query lists: the argument `key_indices` of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InvalidArgument, Unsupported
from .operators import dense

if TYPE_CHECKING:
    from .context import Context


def lists_of(context: Context, keys: Tensor | None) -> Tensor | None:
    """The lists as int32 [tokens, heads, entries]. Positions that int32 has not are no positions, and stay refused."""
    if keys is None:
        return None
    if context.device.type != "cpu":
        raise Unsupported(
            f"key_indices on {context.device}: no CUDA kernel attends to listed keys, use a context on the CPU"
        )
    dense("key_indices", keys)
    if keys.dtype not in (torch.int32, torch.int64) or keys.device.type != "cpu":
        raise InvalidArgument(
            f"key_indices is a tensor of {keys.dtype} on {keys.device}, torch.int32 or torch.int64 on cpu is needed"
        )
    if keys.ndim not in (2, 3):
        raise InvalidArgument(
            f"key_indices has the shape {tuple(keys.shape)}, [tokens, entries] or [tokens, kv_heads, entries] is needed"
        )
    keys = keys.detach()
    if keys.dtype == torch.int64:
        keys = keys.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return (keys[:, None] if keys.ndim == 2 else keys).contiguous()
