# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans with a kernel of your own: here one with the signature of AMD's aiter, `aiter.ops.mha`, as of March 2025. Later versions have more
arguments; the frame is the same.

    pip install ./python torch aiter
    torchrun --nproc-per-node 4 examples/python/own_kernel.py

cpattn says which rows attend to which; messages, copies and merges are PyTorch's; the kernel gets packed sequences. Sinks, merges over
ranks and the gradient of lse need nothing of it. Before the first plan it is tried on a few rows and compared with f64.
"""

import torch
import torch.distributed as dist
from cpattn.torch import Context, kernels


def aiter_kernel(mha):
    """`mha` is the module with `_flash_attn_varlen_forward` and `_flash_attn_varlen_backward`."""

    def forward(q, k, v, *lengths, softmax_scale, window_size, alibi_slopes=None, deterministic=False):
        left, right = window_size
        o, lse, *_ = mha._flash_attn_varlen_forward(
            q, k, v, *lengths, dropout_p=0.0, softmax_scale=softmax_scale, causal=(left, right) == (-1, 0),
            window_size_left=left, window_size_right=right, alibi_slopes=alibi_slopes, return_lse=True,
        )  # fmt: skip
        return o, lse

    def backward(d_o, q, k, v, o, lse, *lengths, softmax_scale, window_size, alibi_slopes=None, deterministic=False):
        left, right = window_size
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        mha._flash_attn_varlen_backward(
            d_o,
            q,
            k,
            v,
            o,
            lse,
            dq,
            dk,
            dv,
            *lengths,
            0.0,
            softmax_scale,
            (left, right) == (-1, 0),
            left,
            right,
            alibi_slopes,
            deterministic,
        )
        return dq, dk, dv

    return kernels.varlen(
        forward, backward, name="aiter", head_dim=256, head_dim_multiple=8, slopes=True, deterministic=True
    )


def main(mha, device="cuda", heads=8, head_dim=64):
    context = Context(
        kernels=aiter_kernel(mha), device=device, heads=heads, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16
    )
    batch = context.batch([0, 700, 700, 1500, 2000])
    q, k, v = (
        torch.randn(len(batch.positions), n, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, 2, 2)
    )
    o = batch.attention(q, k, v)
    o.sum().backward()
    print(
        f"rank {context.number}: o {tuple(o.shape)}, dq {tuple(q.grad.shape)}; finite: {o.isfinite().all() and q.grad.isfinite().all()}"
    )
    context.close()
    return q, k, v, o


if __name__ == "__main__":
    from aiter.ops import mha

    dist.init_process_group()
    main(mha)
    dist.destroy_process_group()
