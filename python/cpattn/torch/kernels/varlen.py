# SPDX-License-Identifier: MIT OR Apache-2.0
"""A kernel of two functions of the usual signature for packed sequences.

    kernel = varlen(forward, backward, name="mine", head_dim=128)
    context = Context(group, ..., kernels=kernel)

    forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=, window_size=(left, right)) -> o, lse
    backward(d_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=, window_size=) -> dq, dk, dv

Limits count from the bottom-right corner, -1 is none, and (-1, 0) a causal mask. lse is [heads, rows] in natural logarithms and f32; the
padded [sequences, heads, longest] is taken too. `softcap=`, `alibi_slopes=` and `deterministic=` are given to a kernel that honours
them. Slopes must subtract slope·|i + keys - rows - j| from a score: a number added to all scores of a row is in lse. The backward computes delta as rowsum(o·d_o).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...arguments import refused
from .kernel import HALF, Honours, Kernel
from .rectangles import Rectangles


class Varlen(Kernel):
    """See `varlen`."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any] | None, name: str, honours: Honours):
        self._forward, self._backward, self.name, self.honours = forward, backward, name, honours

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        o, lse, *_ = self._forward(q, k, v, *lengths(call), **self._options(call))
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
        assert self._backward is not None
        dq, dk, dv, *_ = self._backward(d_o, q, k, v, o, lse, *lengths(call), **self._options(call))
        return dq, dk, dv

    def _options(self, call: Rectangles) -> dict[str, Any]:
        options: dict[str, Any] = {"softmax_scale": call.scale, "window_size": window(call)}
        if call.softcap:
            options["softcap"] = call.softcap
        if call.slopes is not None:
            options["alibi_slopes"] = call.slopes
        if self.honours.deterministic:
            options["deterministic"] = call.deterministic
        return options


def varlen(
    forward: Callable[..., Any], backward: Callable[..., Any] | None = None, *, name: str | None = None, **honours: Any
) -> Kernel:
    """A kernel of two functions; see `cpattn.torch.kernels.varlen`'s module for their arguments. `honours` are the fields of `Honours`;
    without them f16 and bf16, windows and groups of heads are honoured. Without `backward` a call that needs gradients is refused."""
    for what, function in (("forward", forward), ("backward", backward)):
        if not callable(function) and not (what == "backward" and function is None):
            raise refused(what, function, "a function is needed")
    fields: dict[str, Any] = {"dtypes": HALF, "backward": backward is not None}
    return Varlen(forward, backward, name or str(getattr(forward, "__name__", "varlen")), Honours(**(fields | honours)))


def lengths(call: Rectangles) -> tuple[Tensor, Tensor, int, int]:
    return call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k


def bounds(call: Rectangles) -> tuple[Tensor, Tensor, int, int]:
    """Lengths for FlashAttention-2, which takes a limit of at least `max_seqlen_k` for none. On the right, and with more rows than keys, such
    a limit may be one."""
    of_q, of_k, rows, keys = lengths(call)
    return of_q, of_k, rows, keys if call.window_right is None else max(keys, call.window_right + 1)


def window(call: Rectangles) -> tuple[int, int]:
    """The limits, -1: none."""
    left, right = (-1 if limit is None else limit for limit in (call.window_left, call.window_right))
    return left, right


def packed_lse(lse: Any, call: Rectangles) -> Any:
    """lse [heads, rows] of a padded one, [sequences, heads, at least the longest]."""
    if not isinstance(lse, Tensor) or lse.ndim != 3:
        return lse
    return lse.transpose(0, 1).flatten(1).index_select(1, places_in_padded(call, lse.shape[2], lse.device))


def padded_lse(lse: Tensor, call: Rectangles, longest: int) -> Tensor:
    """lse [sequences, heads, longest] of a packed one; places without a row are 0."""
    padded = lse.new_zeros(lse.shape[0], len(call.lengths) * longest)
    padded.index_copy_(1, places_in_padded(call, longest, lse.device), lse)
    return padded.view(lse.shape[0], len(call.lengths), longest).transpose(0, 1).contiguous()


def places_in_padded(call: Rectangles, longest: int, device: torch.device) -> Tensor:
    """For each row its place among sequences padded to `longest`; made once for a call."""
    key = longest, device
    if key not in call.tables:
        parts = [torch.arange(rows, device="cpu") + at * longest for at, (rows, _) in enumerate(call.lengths)]
        call.tables[key] = torch.cat(parts).to(device)
    return call.tables[key]
