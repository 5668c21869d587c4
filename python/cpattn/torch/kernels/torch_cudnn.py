# SPDX-License-Identifier: MIT OR Apache-2.0
"""cuDNN's attention by PyTorch's own operators, those below `torch.nn.attention.varlen` where it chooses cuDNN.

They take lengths and a causal mask, and no other limits. From which corner the mask counts is no matter: a call has it only where a
sequence has as many keys as rows, and other causal rectangles are called in two parts, of which the first has no mask. o comes back in
the type of q, since these operators have no other: sums are f32 inside. lse is [rows, heads, 1], and natural.

No GPU has run it. As every kernel of rectangles it is tried on a few rows and compared before its first plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel import HALF, Honours, Kernel
from .rectangles import Rectangles
from .varlen import lengths


class Cudnn(Kernel):
    name = "cudnn"
    honours = Honours(dtypes=HALF, head_dim=128, head_dim_multiple=8, windows=False, square=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        o, lse, *_ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, *lengths(call), True, 0.0, call.window_right == 0, False, scale=call.scale
        )
        return o, lse.squeeze(2).t() if lse.ndim == 3 else lse

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
        # The state of random numbers, which only dropout reads; and no bias.
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._cudnn_attention_backward(
            d_o, q, k, v, o, lse.t().contiguous().unsqueeze(2), state, state, None, *lengths(call), 0.0,
            call.window_right == 0, scale=call.scale,
        )  # fmt: skip
        return gradients
