# SPDX-License-Identifier: MIT OR Apache-2.0
"""aiter's `aiter.ops.mha` of March 2025, for examples/python/own_kernel.py."""

import torch
from doubles import plain
from doubles.flash_attn_2 import checked, limits, slopes_of


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
    alibi_slopes=None, return_lse=False, return_softmax=False, block_table=None, zero_tensors=False,
):  # fmt: skip
    checked(q, k, v)
    assert dropout_p == 0.0
    of = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        *limits(causal, window_size_left, window_size_right),
    )
    o, lse = plain.forward(q, k, v, *of, slopes=slopes_of(alibi_slopes, cu_seqlens_q, q))
    return o.to(q.dtype), lse if return_lse else torch.empty(0), torch.empty(0), torch.zeros(2)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
):  # fmt: skip
    checked(q, k, v, dout, out, dq, dk, dv)
    of = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        *limits(causal, window_size_left, window_size_right),
    )
    slopes = slopes_of(alibi_slopes, cu_seqlens_q, q)
    for gradient, values in zip((dq, dk, dv), plain.backward(dout, q, k, v, out, softmax_lse, *of, slopes=slopes)):
        gradient.copy_(values)
    return torch.zeros(q.shape[1], len(q))
