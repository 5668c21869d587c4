# SPDX-License-Identifier: MIT OR Apache-2.0
"""FlashAttention-2's `flash_attn_interface` of 2.8: what `kernels="flash_attn"` calls. Types, dims, strides and lengths are checked as its
library does, and what it only assumes too. With a causal mask its alibi.h adds slope·column to a score, so that o and gradients are those of
distances, and lse is not."""

import torch
from doubles import plain


def checked(q, k, v, *others):
    for x in (q, k, v, *others):
        assert x.dtype in (torch.float16, torch.bfloat16) and x.dtype == q.dtype, x.dtype
        assert x.stride(-1) == 1, x.stride()
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0 and q.shape[2] <= 256, q.shape
    assert q.shape[1] % k.shape[1] == 0


def limits(causal, left, right):
    assert left >= -1 and right >= -1
    return left, 0 if causal else right


def of_calls(cu_q, cu_k, max_q, max_k, scale, causal, left, right):
    """Arguments of `plain`. As in flash_api.cpp limits of at least `max_k` are none, also where rows are more than keys; and `max_k` may
    be more than the keys of any sequence."""
    assert max_k >= cu_k.diff().max()
    left, right = limits(causal, *(-1 if limit >= max_k else limit for limit in (left, right)))
    return cu_q, cu_k, max_q, None, scale, left, right


def slopes_of(slopes, cu_seqlens_q, q):
    if slopes is not None:
        assert (
            slopes.dtype == torch.float32
            and slopes.stride(-1) == 1
            and slopes.shape in ((q.shape[1],), (len(cu_seqlens_q) - 1, q.shape[1]))
        )
        slopes = slopes.expand(len(cu_seqlens_q) - 1, -1)
    return slopes


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    checked(q, k, v)
    assert dropout_p == 0.0
    of = of_calls(
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
    )
    o, lse = plain.forward(
        q, k, v, *of, softcap, slopes_of(alibi_slopes, cu_seqlens_q, q), by_column=of[-2:] == (-1, 0)
    )
    return o.to(q.dtype), lse, None, torch.zeros(2, dtype=torch.uint64)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
):  # fmt: skip
    checked(q, k, v, dout, out, dq, dk, dv)
    assert dropout_p == 0.0 and type(deterministic) is bool
    assert softmax_lse.is_contiguous() and dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous()
    of = of_calls(
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
    )
    found = plain.backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *of,
        softcap,
        slopes_of(alibi_slopes, cu_seqlens_q, q),
        by_column=of[-2:] == (-1, 0),
    )
    for gradient, values in zip((dq, dk, dv), found):
        gradient.copy_(values)
    return torch.zeros(q.shape[1], len(q))
