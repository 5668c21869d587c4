# SPDX-License-Identifier: MIT OR Apache-2.0
"""Partial results of attention and their merges, by operators of PyTorch.

The lse of a partial result has two words, whose sum it is: the value and the rounding error of that value. Weights exp(lse - max)
from one word of f32 would err by |lse|·2⁻²⁴, and each merge would add to it. All functions take o [rows, heads, dim] and
lse [rows, heads, words].

A row without keys has o = 0 and lse = -inf, and stays so if it is merged with another one of its kind. A NaN stays a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import Fresh

Partial = tuple[Tensor, Tensor]

# Less than any sum of weights but 0, of which one is about exp(0); its reciprocal is finite in f32.
_LEAST = 1e-30


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: f32, and f64 for f64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(
    parts: Sequence[Partial],
    sinks: Tensor | None = None,
    room: Fresh | None = None,
    words: int = 2,
    to: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Partial results of the same rows as one: o, lse, and its rounding error if it has two `words`. `sinks`, [1, heads, n], join the
    sum of weights without values. `to`, which may be the first o, gets o."""
    logs = [lse.select(2, 0) for _, lse in parts]
    room = room or Fresh(logs[0].device)
    largest = room.like(logs[0])
    if len(parts) == 1:
        largest.copy_(logs[0])
    else:
        torch.maximum(logs[0], logs[1], out=largest)
        for one in logs[2:]:
            torch.maximum(largest, one, out=largest)
    if sinks is not None:
        sinks = room.cast(sinks, largest.dtype)
        torch.maximum(largest, torch.amax(sinks, 2, out=room.empty(sinks.shape[:2], sinks.dtype)), out=largest)
    # Infinities cancel in no difference.
    base = largest.nan_to_num_(0.0, 0.0, 0.0)
    weights = [weight(lse, log, base, room) for (_, lse), log in zip(parts, logs)]
    total = room.like(base).copy_(weights[0])
    for one in weights[1:]:
        total.add_(one)
    if sinks is not None:
        each = torch.sub(sinks, base.unsqueeze(2), out=room.empty((*base.shape, sinks.shape[2]), base.dtype)).exp_()
        total.add_(torch.sum(each, 2, out=room.like(base)))
    # A weight of infinity is a sink's, beside which all else is 0.
    scale = torch.clamp(total, min=_LEAST, out=room.like(base)).reciprocal_()
    first = parts[0][0]
    o = torch.mul(
        first, weights[0].mul_(scale).unsqueeze(2), out=room.empty(first.shape, base.dtype) if to is None else to
    )
    for (values, _), one in zip(parts[1:], weights[1:]):
        o.addcmul_(room.cast(values, o.dtype), one.mul_(scale).unsqueeze(2))
    return o, *log_sum(base, total, room, words)


def weight(lse: Tensor, value: Tensor, base: Tensor, room: Fresh) -> Tensor:
    """exp(lse - base) of an lse of one or two words."""
    difference: Tensor = torch.sub(value, base, out=room.like(base))
    if lse.shape[2] == 2:
        difference.add_(lse.select(2, 1))
    return difference.exp_()


def log_sum(base: Tensor, total: Tensor, room: Fresh, words: int) -> tuple[Tensor, Tensor | None]:
    """base + log(total) as a value and its rounding error. `total` is gone."""
    log = total.log_()
    value = torch.add(base, log, out=room.like(base))
    if words == 1:
        return value, None
    part = torch.sub(value, base, out=room.like(base))
    error = torch.sub(value, part, out=room.like(base))
    torch.sub(base, error, out=error)
    # Of an infinite value there is no error.
    return value, error.add_(log.sub_(part)).nan_to_num_(0.0, 0.0, 0.0)
