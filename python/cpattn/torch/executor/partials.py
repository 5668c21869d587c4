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

Partial = tuple[Tensor, Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: f32, and f64 for f64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def words(value: Tensor, error: Tensor | None, count: int) -> Tensor:
    """One or two words of an lse."""
    if count == 1:
        return value.unsqueeze(-1)
    return torch.stack([value, torch.zeros_like(value) if error is None else error], -1)


def merge(parts: Sequence[Partial], sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Partial results of the same rows as one: o, lse and its rounding error. `sinks`, [1, heads, n], join the sum of weights
    without values."""
    largest = parts[0][1][..., 0]
    for _, lse in parts[1:]:
        largest = torch.maximum(largest, lse[..., 0])
    if sinks is not None:
        sinks = sinks.to(largest.dtype)
        largest = torch.maximum(largest, sinks.amax(2))
    # Infinities cancel in no difference.
    base = torch.where(largest.isfinite(), largest, 0.0)
    weights = [weight(lse, base) for _, lse in parts]
    total = sum(weights[1:], weights[0])
    if sinks is not None:
        of_sinks = (sinks - base.unsqueeze(2)).exp().sum(2)
        total = total + of_sinks
    # A weight of infinity is a sink's, beside which all else is 0.
    scale = torch.where(total == 0, 1.0, total).reciprocal().masked_fill(total == torch.inf, 0.0)
    o = parts[0][0] * (weights[0] * scale).unsqueeze(2)
    for (values, _), one in zip(parts[1:], weights[1:], strict=True):
        o.addcmul_(values.to(o.dtype), (one * scale).unsqueeze(2))
    return o, *log_sum(base, total)


def weight(lse: Tensor, base: Tensor) -> Tensor:
    """exp(lse - base) of an lse of one or two words."""
    difference = lse[..., 0] - base
    return (difference if lse.shape[-1] == 1 else difference + lse[..., 1]).exp()


def log_sum(base: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """base + log(total) as a value and its rounding error."""
    log = total.log()
    value = base + log
    part = value - base
    error = (base - (value - part)) + (log - part)
    return value, torch.where(value.isfinite(), error, 0.0)
