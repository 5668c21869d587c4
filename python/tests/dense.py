# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention by the formula, in f64, over a whole packed batch: the reference of the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within documents; differentiable. `window` includes the query itself."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
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
    s = s.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", s.softmax(2)[:, :, : len(k)], v)


def gradients(o: Tensor, d_o: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(o, inputs, d_o.to(o.dtype)))


def error(got: Tensor, want: Tensor) -> float:
    """Relative RMS error; 0 for empty tensors."""
    if not want.numel():
        return 0.0
    size = want.double().square().mean().sqrt().item()
    return (got.double() - want.double()).square().mean().sqrt().item() / (size or 1.0)
