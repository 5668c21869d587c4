# SPDX-License-Identifier: MIT OR Apache-2.0
"""Heads of an operation for kernels, which map q head h to kv head h // (heads / kv heads).

A rank may hold some q heads of a kv head only, so that heads do not divide; the gradients of k and v may be wanted for each q head; or a
kernel has no groups. Then k and v are expanded to the heads of q, and gradients summed over the q heads of each kv head, in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scratch import Fresh


class HeadMap:
    """`expands`: k and v are copied for each q head."""

    def __init__(self, of_q: list[int], kv_heads: int, per_q_head: bool, device: torch.device, groups: bool = True):
        """`of_q` is the kv head of each q head; without `groups` a kernel has as many kv heads as q heads."""
        heads = len(of_q)
        divides = heads % kv_heads == 0 and of_q == [h // (heads // kv_heads) for h in range(heads)]
        self.of_q, self.expands = of_q, heads != kv_heads and (not divides or not groups or per_q_head)
        self._sums = self.expands and not per_q_head
        # Heads of dk and dv.
        self.kv_heads = heads if per_q_head else kv_heads
        # A run makes no tensor of numbers of the host, for which a device would have to be waited for.
        self._index = torch.tensor(of_q, device="cpu").to(device)
        self._runs = [(head, self.of_q.index(head), self.of_q.count(head)) for head in sorted(set(self.of_q))]

    def expanded(self, x: Tensor, room: Fresh | None = None) -> Tensor:
        return (room or Fresh(x.device)).take(x, self._index, 1) if self.expands else x

    def summed(self, gradient: Tensor, room: Fresh | None = None) -> Tensor:
        """A gradient by q heads as one by kv heads."""
        if not self._sums:
            return gradient
        shape = gradient.shape[0], self.kv_heads, gradient.shape[2]
        total = (room or Fresh(gradient.device)).zeros(shape, gradient.dtype)
        for head, first, count in self._runs:
            torch.sum(gradient.narrow(1, first, count), 1, out=total.select(1, head))
        return total
