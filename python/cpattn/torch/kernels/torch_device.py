# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's own kernels of devices: the operators below `torch.nn.attention.varlen` and `scaled_dot_product_attention` that return and
take lse. Flash attention for f16 and bf16, memory-efficient attention for f32.

The device is that of the tensors: PyTorch dispatches these operators. Flash attention takes any window; memory-efficient attention has
a causal mask from the bottom-right corner and no groups of heads, and other limits are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import Unsupported
from .kernel import HALF, Honours, Kernel
from .rectangles import Rectangles
from .varlen import bounds, lengths, packed_lse, padded_lse, places_in_padded, window

CAUSAL_FROM_BOTTOM_RIGHT = 2


class TorchDevice(Kernel):
    """By the type of the tensors."""

    name = "torch"
    honours = Honours(dtypes=(torch.float32, *HALF), head_dim=256, head_dim_multiple=8, deterministic=False)

    def __init__(self) -> None:
        self._flash, self._efficient = Flash(), Efficient()

    def of(self, dtype: torch.dtype) -> Kernel:
        return self._flash if dtype in HALF else self._efficient


class Flash(Kernel):
    name = "torch"
    honours = Honours(dtypes=HALF, head_dim=256, head_dim_multiple=8)

    def prepare(self, call: Rectangles) -> None:
        if torch.version.hip:
            places_in_padded(call, call.max_seqlen_q, call.cu_seqlens_q.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        left, right = window(call)
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds(call), 0.0, (left, right) == (-1, 0), False,
            scale=call.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return o, packed_lse(lse, call)

    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        call: Rectangles,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = window(call)
        # The state of random numbers, which only dropout reads.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        if torch.version.hip:
            lse = padded_lse(lse, call, call.max_seqlen_q)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            d_o, q, k, v, o, lse, *bounds(call), 0.0, (left, right) == (-1, 0), state, state[:0],
            scale=call.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return gradients


class Efficient(Kernel):
    name = "torch"
    honours = Honours(dtypes=(torch.float32, *HALF), head_dim_multiple=8, value_dim=True, windows=False, group=False)

    def prepare(self, call: Rectangles) -> None:
        places_in_padded(call, longest(call), call.cu_seqlens_q.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        o, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None],
            k[None],
            v[None],
            None,
            *lengths(call),
            0.0,
            mask_type(call),
            compute_log_sumexp=True,
            scale=call.scale,
        )
        return o[0], packed_lse(lse, call)

    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        call: Rectangles,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert o is not None
        padded = padded_lse(lse, call, longest(call))
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            d_o[None],
            q[None],
            k[None],
            v[None],
            None,
            o[None],
            *lengths(call),
            padded,
            0.0,
            state,
            state,
            mask_type(call),
            False,
            scale=call.scale,
        )
        return dq[0], dk[0], dv[0]


def longest(call: Rectangles) -> int:
    """Places for the rows of a sequence in lse, as the forward writes it: a multiple of 32."""
    return -(-call.max_seqlen_q // 32) * 32


def mask_type(call: Rectangles) -> int:
    """No mask, or a causal one: a call has no other limits, since `windows` is not honoured."""
    if call.window_left is not None or call.window_right not in (None, 0):
        raise Unsupported(
            f'kernels=\'torch\' has no window {window(call)} in f32: use kernels="flex", "math" or "cpattn", or bf16'
        )
    return 0 if call.window_right is None else CAUSAL_FROM_BOTTOM_RIGHT
