# SPDX-License-Identifier: MIT OR Apache-2.0
"""FlashAttention-3's `flash_attn_interface`: what `kernels="flash_attn_3"` calls."""

from doubles import plain
from doubles.flash_attn_2 import checked, limits


def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
    seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1,
    window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    checked(q, k, v)
    of = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        *limits(causal, window_size_left, window_size_right),
    )
    o, lse = plain.forward(q, k, v, *of, softcap)
    return o.to(q.dtype), lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None,
    dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False,
    sm_margin=0,
):  # fmt: skip
    checked(q, k, v, dout, out, dq, dk, dv)
    assert softmax_lse.is_contiguous() and dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous()
    of = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        *limits(is_causal, window_size_left, window_size_right),
    )
    for gradient, values in zip((dq, dk, dv), plain.backward(dout, q, k, v, out, softmax_lse, *of, softcap)):
        gradient.copy_(values)
    return None
