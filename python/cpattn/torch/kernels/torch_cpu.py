# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's flash attention for the CPU, the operator below `scaled_dot_product_attention` that returns and takes lse.

It has no packed sequences, and a mask of its own only for causal squares. So it is called for each sequence, once for all of equal
lengths that have no limit; a rectangle with a limit of 0 on the right is the keys before its corner's square, seen by all, and the
square. Other limits are masks of parts of the rows, with the keys that these rows see.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .kernel import HALF, Honours, Kernel
from .rectangles import Rectangles

# Rows of a part that has a mask.
ROWS = 256


class Block(NamedTuple):
    """Rows and keys of one call. `limits` of a mask are the least and the largest j - i, None: no mask."""

    q: slice
    k: slice
    causal: bool = False
    limits: tuple[int, int] | None = None


class TorchCpu(Kernel):
    name = "torch"
    honours = Honours(dtypes=(torch.float64, torch.float32, *HALF), devices=("cpu",), deterministic=True, strides=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        if (batch := equal(call)) is not None:
            o, lse = attend(
                split(q, batch), split(k, batch), split(v, batch), call.scale, Block(slice(0), slice(0), square(call))
            )
            return o.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
        o, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=wide(q.dtype))
        for blocks in sequences(call):
            fresh = True
            for block in blocks:
                part, logs = attend(one(q[block.q]), one(k[block.k]), one(v[block.k]), call.scale, block)
                part, logs = part[0].transpose(0, 1), logs[0]
                if len(blocks) > 1 and not fresh and block.q == blocks[0].q:
                    total = torch.logaddexp(lse[:, block.q], logs)
                    old, new = ((x - total).exp().T[..., None] for x in (lse[:, block.q], logs))
                    part, logs = o[block.q] * old + part * new, total
                o[block.q], lse[:, block.q], fresh = part, logs, False
        return o, lse

    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        call: Rectangles,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert o is not None
        if (batch := equal(call)) is not None:
            d, of_q, of_k, of_v, of_o = (split(x, batch) for x in (d_o, q, k, v, o))
            logs = lse.view(lse.shape[0], batch, -1).transpose(0, 1)
            parts = gradients(d, of_q, of_k, of_v, of_o, logs, call.scale, Block(slice(0), slice(0), square(call)))
            return tuple(x.transpose(1, 2).flatten(0, 1) for x in parts)  # type: ignore[return-value]
        kind = wide(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=kind, device=q.device) for x in (q, k, v))
        for blocks in sequences(call):
            for block in blocks:
                d, of_q, of_o = (one(x[block.q]) for x in (d_o, q, o))
                parts = gradients(
                    d, of_q, one(k[block.k]), one(v[block.k]), of_o, lse[None, :, block.q], call.scale, block
                )
                for whole, rows, part in zip((dq, dk, dv), (block.q, block.k, block.k), parts):
                    whole[rows] += part[0].transpose(0, 1)
        return dq, dk, dv


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def one(x: Tensor) -> Tensor:
    """Packed rows as a batch of one, [1, heads, rows, dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def split(x: Tensor, batch: int) -> Tensor:
    """Sequences of equal lengths, [batch, heads, rows, dim]."""
    return x.reshape(batch, -1, *x.shape[1:]).transpose(1, 2)


def square(call: Rectangles) -> bool:
    return call.window_right == 0


def equal(call: Rectangles) -> int | None:
    """How many sequences there are, if one call takes all."""
    if call.window_left is not None or len(set(call.lengths)) > 1:
        return None
    rows, keys = call.lengths[0]
    return len(call.lengths) if call.window_right is None or (call.window_right == 0 and rows == keys) else None


def sequences(call: Rectangles) -> Iterator[list[Block]]:
    """The calls of each sequence."""
    q = k = 0
    for rows, keys in call.lengths:
        yield list(blocks(q, k, rows, keys, call.window_left, call.window_right))
        q, k = q + rows, k + keys


def blocks(q: int, k: int, rows: int, keys: int, left: int | None, right: int | None) -> Iterator[Block]:
    every, corner = slice(q, q + rows), keys - rows
    if left is None and right is None:
        yield Block(every, slice(k, k + keys))
    elif left is None and right == 0 and corner >= 0:
        if corner:
            yield Block(every, slice(k, k + corner))
        yield Block(every, slice(k + corner, k + keys), causal=True)
    else:
        for first in range(0, rows, ROWS):
            count = min(ROWS, rows - first)
            begin = 0 if left is None else max(0, first + corner - left)
            end = keys if right is None else min(keys, first + count + corner + right)
            # Distances from the part's own first row and key.
            move = first + corner - begin
            limits = (-FAR if left is None else move - left, FAR if right is None else move + right)
            yield Block(slice(q + first, q + first + count), slice(k + begin, k + end), limits=limits)


FAR = 1 << 40


@lru_cache(maxsize=64)
def mask(rows: int, keys: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    d = torch.arange(keys, device="cpu")[None] - torch.arange(rows, device="cpu")[:, None]
    return torch.zeros(rows, keys, dtype=dtype, device="cpu").masked_fill((d < low) | (d > high), -torch.inf)


def mask_of(block: Block, q: Tensor, k: Tensor) -> Tensor | None:
    return None if block.limits is None else mask(q.shape[2], k.shape[2], *block.limits, q.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, block: Block) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.causal, attn_mask=mask_of(block, q, k), scale=scale
    )
    return result


def gradients(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    # The operator reads lse as it writes it: [batch, rows, heads].
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_o, q, k, v, o, lse, 0.0, block.causal, attn_mask=mask_of(block, q, k), scale=scale
    )
    return result
