# SPDX-License-Identifier: MIT OR Apache-2.0
"""FlashAttention-4's `flash_attn.cute.interface` of 4.0.0b36: what `kernels="flash_attn_4"` calls. Its addresses are multiples of 16."""

from doubles import plain
from doubles.flash_attn_2 import checked


def aligned(*tensors):
    for x in tensors:
        assert x.data_ptr() % 16 == 0 and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1]), (
            x.shape,
            x.stride(),
        )
        assert x.shape[2] <= 128


def limits(causal, left, right):
    assert not (causal and right), "a causal mask has no limit of its own"
    assert (left is None or left >= 0) and (right is None or right >= 0), (left, right)
    right = 0 if causal else right
    return -1 if left is None else left, -1 if right is None else right


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
    learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None,
    score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
    q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None,
    disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
):  # fmt: skip
    checked(q, k, v)
    aligned(q, k, v)
    of = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        *limits(causal, window_size_left, window_size_right),
    )
    o, logs = plain.forward(q, k, v, *of, softcap or 0.0)
    return o.to(q.dtype), logs if return_lse else None, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, window_size_right=None, m_block_size=64,
    n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False,
    AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None,
    aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None,
):  # fmt: skip
    checked(q, k, v, dout, out, dq, dk, dv)
    aligned(q, k, v, dout, out, dq, dk, dv)
    assert lse.is_contiguous() and dlse.is_contiguous() and dlse.shape == lse.shape
    of = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        *limits(causal, window_size_left, window_size_right),
    )
    for gradient, values in zip((dq, dk, dv), plain.backward(dout, q, k, v, out, lse, *of, softcap, d_lse=dlse)):
        gradient.copy_(values)
    return dq, dk, dv
