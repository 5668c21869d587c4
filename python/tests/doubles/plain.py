# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention of packed sequences from its definition, in f32 (f64 for f64), one sequence after another; delta is computed from o and
d_o as flash kernels do. All arguments are checked."""

import torch


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def sequences(cu_q, cu_k, q, k, max_q=None, max_k=None):
    """The rows of each sequence, after checks of lengths."""
    for name, cu, x, longest in (("q", cu_q, q, max_q), ("k", cu_k, k, max_k)):
        assert cu.dtype == torch.int32 and cu.ndim == 1 and cu.is_contiguous(), f"cu_seqlens_{name}"
        assert cu.device == x.device, f"cu_seqlens_{name} is on {cu.device}"
        lengths = cu.diff()
        assert cu[0] == 0 and cu[-1] == len(x) and (lengths > 0).all(), f"cu_seqlens_{name} {cu.tolist()} of {len(x)}"
        assert longest is None or (type(longest) is int and longest == lengths.max()), (
            f"max_seqlen_{name} is {longest!r}"
        )
    assert len(cu_q) == len(cu_k)
    cu_q, cu_k = cu_q.tolist(), cu_k.tolist()
    for at in range(len(cu_q) - 1):
        yield at, slice(cu_q[at], cu_q[at + 1]), slice(cu_k[at], cu_k[at + 1])


def scores(q, k, scale, left, right, softcap, slopes, by_column=False):
    """Scores [heads, rows, keys] of one sequence, and their derivative by the product. A limit less than 0 is none. `by_column`: slopes
    are multiplied with the column instead of the distance, which adds a number to all scores of a row."""
    assert scale > 0, "the largest product is not the largest score"
    d = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    slope = torch.full_like(s, scale)
    if softcap:
        t = torch.tanh(s / softcap)
        s, slope = softcap * t, slope * (1 - t * t)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[:, None, None] * (-torch.arange(len(k)) if by_column else d.abs())
    allowed = torch.ones_like(d, dtype=torch.bool)
    if left >= 0:
        allowed &= d >= -left
    if right >= 0:
        allowed &= d <= right
    return s.masked_fill(~allowed, -torch.inf), slope


def forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, left=-1, right=-1, softcap=0.0, slopes=None, by_column=False):
    """o [rows, heads, dim] in the wide type, lse [heads, rows]."""
    kind, group = wide(q.dtype), q.shape[1] // k.shape[1]
    assert q.shape[1] == group * k.shape[1] and k.shape[1] == v.shape[1]
    o, lse = (
        torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=kind),
        torch.full((q.shape[1], len(q)), torch.nan, dtype=kind),
    )
    for at, mine, keys in sequences(cu_q, cu_k, q, k, max_q, max_k):
        of_k, of_v = (x[keys].to(kind).repeat_interleave(group, 1) for x in (k, v))
        s, _ = scores(
            q[mine].to(kind), of_k, scale, left, right, softcap, None if slopes is None else slopes[at], by_column
        )
        logs = s.logsumexp(2)
        assert (logs > -torch.inf).all() or torch.isnan(logs).any(), "a row has no keys"
        lse[:, mine] = logs
        o[mine] = torch.einsum("hqk,khd->qhd", (s - logs[..., None]).exp(), of_v)
    return o, lse


def backward(
    d_o,
    q,
    k,
    v,
    o,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    scale,
    left=-1,
    right=-1,
    softcap=0.0,
    slopes=None,
    d_lse=None,
    by_column=False,
):
    """dq, dk and dv in the wide type."""
    kind, group = wide(q.dtype), q.shape[1] // k.shape[1]
    assert (
        lse.shape == (q.shape[1], len(q)) and lse.dtype == kind and o.shape == d_o.shape == (*q.shape[:2], v.shape[2])
    )
    delta = (o.to(kind) * d_o.to(kind)).sum(2).T
    if d_lse is not None:
        delta = delta - d_lse
    dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=kind) for x in (q, k, v))
    for at, mine, keys in sequences(cu_q, cu_k, q, k, max_q, max_k):
        of_q, of_d = q[mine].to(kind), d_o[mine].to(kind)
        of_k, of_v = (x[keys].to(kind).repeat_interleave(group, 1) for x in (k, v))
        s, slope = scores(of_q, of_k, scale, left, right, softcap, None if slopes is None else slopes[at], by_column)
        p = (s - lse[:, mine, None]).exp()
        ds = p * (torch.einsum("qhd,khd->hqk", of_d, of_v) - delta[:, mine, None]) * slope
        dq[mine] = torch.einsum("hqk,khd->qhd", ds, of_k)
        for whole, left_of, right_of in ((dk, ds, of_q), (dv, p, of_d)):
            whole[keys] = torch.einsum("hqk,qhd->khd", left_of, right_of).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv
