# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention by the formula, in f64, over a whole packed batch: the reference of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpattn import Slice


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Causal attention within documents, or of the pairs that are `allowed`; differentiable. `window` includes the query itself."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if allowed is None:
        lengths = torch.tensor(cu_seqlens).diff()
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        place = torch.arange(len(q))
        back = place[:, None] - place[None, :]
        allowed = (document[:, None] == document[None, :]) & (back >= 0)
        if window is not None:
            allowed &= back < window
    s = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    # A row without keys is 0; it has no softmax.
    some = allowed.any(1, keepdim=True)
    s = s.masked_fill(~allowed & some, -torch.inf)
    if sinks is not None:
        of_heads = sinks.double().view(len(sinks), 1, -1)  # [heads], or [heads, n]
        s = torch.cat([s, of_heads.expand(-1, len(q), -1)], dim=2)
    return torch.einsum("hqk,khd->qhd", s.softmax(2)[:, :, : len(k)] * some, v)


def allowed_by(
    slices: Sequence[Slice], q_tokens: int, k_tokens: int, left: int | None = None, right: int | None = None
) -> Tensor:
    """The pairs of slices within a window of `left` keys before and `right` keys after a query, by the definition of a slice."""
    pairs = torch.zeros(q_tokens, k_tokens, dtype=torch.int64)
    for q_begin, q_end, k_begin, k_end, start, low, high in slices:
        start = k_end - k_begin - (q_end - q_begin) if start is None else start
        k_pos, q_pos = torch.arange(k_end - k_begin), torch.arange(q_end - q_begin) + start
        distance = k_pos[None, :] - q_pos[:, None]
        inside = torch.ones_like(distance, dtype=torch.bool)
        for limit, after in ((low, False), (high, True), (None if left is None else -left, False), (right, True)):
            if limit is not None:
                inside &= distance <= limit if after else distance >= limit
        pairs[q_begin:q_end, k_begin:k_end] += inside
    assert not (pairs > 1).any(), "a pair is in two slices"
    return pairs.bool()


def gradients(o: Tensor, d_o: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(o, inputs, d_o.to(o.dtype)))


def error(got: Tensor, want: Tensor) -> float:
    """Relative RMS error; 0 for empty tensors."""
    if not want.numel():
        return 0.0
    size = want.double().square().mean().sqrt().item()
    return (got.double() - want.double()).square().mean().sqrt().item() / (size or 1.0)
