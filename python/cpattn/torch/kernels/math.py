# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention by PyTorch's products and softmax, on any device, in f32 (f64 for f64): the reference of every other kernel.

Rows of q are taken in parts, so that the scores of a part stay below a fixed number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .kernel import HALF, Honours, Kernel
from .rows import Group, Rows

# The scores of a part: 64 MB in f32.
ELEMENTS = 1 << 24


class Part(NamedTuple):
    """Some rows of a group: their scores [heads, rows, keys], the derivative of the scores by the product q·k, and the rows of k."""

    rows: Tensor
    scores: Tensor
    slope: Tensor
    k_rows: Tensor


class Math(Kernel):
    name = "math"
    form = "rows"
    honours = Honours(
        dtypes=(torch.float64, torch.float32, *HALF),
        value_dim=True,
        softcap=True,
        slopes=True,
        returns_f32=True,
        deterministic=True,
        max_logit=True,
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rows) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, call, None)

    def forward_with_max(self, q: Tensor, k: Tensor, v: Tensor, call: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """o, lse, and the largest score of each head, NaN left out."""
        largest = torch.full((q.shape[1],), -torch.inf, dtype=accumulator(q.dtype), device=q.device)
        return *self._forward(q, k, v, call, largest), largest

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rows, largest: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = accumulator(q.dtype)
        o = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide, device=q.device)
        for group in call.groups:
            for part in parts(q, k, group, call):
                logs = part.scores.logsumexp(2)
                values = v.index_select(0, part.k_rows).to(wide)[:, call.kv]
                o[part.rows] = torch.einsum("hqk,khd->qhd", weights(part.scores, logs), values)
                lse[:, part.rows] = logs
                if largest is not None:
                    numbers = part.scores.masked_fill(part.scores.isnan(), -torch.inf)
                    torch.maximum(largest, numbers.amax((1, 2)), out=largest)
        return o, lse

    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        call: Rows,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, device = accumulator(q.dtype), q.device
        heads = q.shape[1] if call.per_q_head else k.shape[1]
        to = torch.arange(q.shape[1], device=device) if call.per_q_head else call.kv
        dq = torch.zeros(q.shape, dtype=wide, device=device)
        dk = torch.zeros(k.shape[0], heads, k.shape[2], dtype=wide, device=device)
        dv = torch.zeros(v.shape[0], heads, v.shape[2], dtype=wide, device=device)
        if delta is None:
            assert o is not None
            delta = (o.to(wide) * d_o.to(wide)).sum(2).T
        for group in call.groups:
            for part in parts(q, k, group, call):
                keys, values = (x.index_select(0, part.k_rows).to(wide)[:, call.kv] for x in (k, v))
                d, of_q = d_o[part.rows].to(wide), q[part.rows].to(wide)
                p = weights(part.scores, lse[:, part.rows].to(wide))
                ds = (
                    p * (torch.einsum("qhd,khd->hqk", d, values) - delta[:, part.rows].to(wide)[..., None]) * part.slope
                )
                if call.queries:
                    dq[part.rows] = torch.einsum("hqk,khd->qhd", ds, keys)
                if call.keys:
                    for sum_of, left, right in ((dk, ds, of_q), (dv, p, d)):
                        by_head = torch.einsum("hqk,qhd->khd", left, right)
                        gathered = torch.zeros(
                            len(part.k_rows), heads, by_head.shape[2], dtype=wide, device=device
                        ).index_add_(1, to, by_head)
                        sum_of.index_add_(0, part.k_rows, gathered)
        return dq, dk, dv


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of partial results: f32, and f64 for f64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse) in rows with keys, 0 in others."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()


def parts(q: Tensor, k: Tensor, group: Group, call: Rows) -> Iterator[Part]:
    """The rows of a group in parts."""
    wide, device = accumulator(q.dtype), q.device
    k_rows = torch.cat([keys.rows for keys in group.keys])
    keys_of_head = k.index_select(0, k_rows).to(wide)[:, call.kv]
    # Where rows see all keys, there is nothing to mask.
    every = all(keys.every for keys in group.keys)
    step = max(1, ELEMENTS // (len(k_rows) * q.shape[1]))
    for first in range(0, len(group.rows), step):
        local = slice(first, first + step)
        mine = group.rows[local]
        allowed, distance = [], []
        for keys in group.keys:
            if not every:
                j = torch.arange(len(keys.rows), device=device)
                allowed.append((j >= keys.begin[local, None]) & (j < keys.end[local, None]))
            if group.slopes is not None:
                distance.append(keys.k_pos - keys.q_pos[local, None])
        s = torch.einsum("qhd,khd->hqk", q.index_select(0, mine).to(wide), keys_of_head) * call.scale
        slope = torch.full_like(s, call.scale)
        if call.softcap:
            t = torch.tanh(s / call.softcap)
            s, slope = call.softcap * t, slope * (1 - t * t)
        if group.slopes is not None:
            s = s - group.slopes.to(wide)[:, None, None] * torch.cat(distance, 1).abs()
        s = s if every else s.masked_fill_(~torch.cat(allowed, 1), -torch.inf)
        yield Part(mine, s, slope, k_rows)
