# SPDX-License-Identifier: MIT OR Apache-2.0
"""FlashAttention-2, -3 and -4, by their packages or by Hugging Face's `kernels`.

All three count limits from the bottom-right corner and return lse [heads, rows]. Their functions for training hide the lse that a part of
a row needs in its backward. So the functions below them are called, which take lse and write the gradients into tensors; their
signatures are compared with the packages in python/tests/test_kernels_flash.py.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ...errors import Unsupported
from .kernel import HALF, Honours, Kernel
from .rectangles import Rectangles
from .varlen import bounds, lengths, packed_lse, window

# The module with the functions, what Transformers calls the package, and how to install it.
PACKAGES = {
    "flash_attn": ("flash_attn.flash_attn_interface", "flash_attention_2", "flash-attn"),
    "flash_attn_3": ("flash_attn_interface", "flash_attention_3", "flash-attn-3"),
    "flash_attn_4": ("flash_attn.cute.interface", "flash_attention_4", "flash-attn-4"),
}


def module_of(name: str) -> Any:
    """The module with a package's functions: of the package, or of the kernel that Transformers loads in its place."""
    module, of_transformers, package = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        try:
            # Private, and the only door to the kernels of the hub.
            utils = importlib.import_module("transformers.modeling_flash_attention_utils")
            if (found := inspect.getmodule(utils._lazy_imports(of_transformers)[1])) is not None:
                return found
        except Exception:  # noqa: BLE001 (Transformers, kernels and the hub each have errors of their own)
            pass
        raise Unsupported(
            f'kernels={name!r} needs the package {package}: {error}. Install it or Hugging Face\'s kernels, or use kernels="torch"'
        ) from error


def functions(name: str, module: Any, *names: str) -> list[Any]:
    """Functions of a package's module."""
    missing = [one for one in names if not hasattr(module, one)]
    if missing:
        raise Unsupported(
            f'kernels={name!r}: {module.__name__} has no {", ".join(missing)}: use another version, or kernels="torch"'
        )
    return [getattr(module, one) for one in names]


class FlashAttention2(Kernel):
    name = "flash_attn"
    honours = Honours(
        dtypes=HALF, head_dim=256, head_dim_multiple=8, softcap=True, slopes=True, deterministic=True, strides=True
    )

    def __init__(self, module: Any = None):
        self._forward, self._backward = functions(
            self.name, module or module_of(self.name), "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        o, lse, *_ = self._forward(q, k, v, *bounds(call), dropout_p=0.0, **options(call))
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
        dq, dk, dv = fresh(q, k, v)
        self._backward(
            d_o,
            q,
            k,
            v,
            o,
            lse,
            dq,
            dk,
            dv,
            *bounds(call),
            dropout_p=0.0,
            **options(call),
            deterministic=call.deterministic,
        )
        return dq, dk, dv


def options(call: Rectangles) -> dict[str, Any]:
    left, right = window(call)
    if call.slopes is not None and right == 0:
        # With a causal mask FlashAttention-2 adds slope·column to a score, and lse is off by slope·row. A left limit that the first key of a
        # row cannot reach limits nothing, and one more would be taken for none.
        left = call.max_seqlen_k - 1 if left < 0 else min(left, call.max_seqlen_k - 1)
    return {
        "softmax_scale": call.scale,
        "causal": (left, right) == (-1, 0),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": call.softcap,
        "alibi_slopes": call.slopes,
    }


class FlashAttention3(Kernel):
    name = "flash_attn_3"
    honours = Honours(dtypes=HALF, head_dim=256, head_dim_multiple=8, softcap=True, deterministic=True, strides=True)

    def __init__(self, module: Any = None):
        self._forward, self._backward = functions(
            self.name, module or module_of(self.name), "_flash_attn_forward", "_flash_attn_backward"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        o, lse, *_ = self._forward(q, k, v, **named_lengths(call), **without_slopes(call))
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
        dq, dk, dv = fresh(q, k, v)
        arguments = without_slopes(call)
        arguments["is_causal"] = arguments.pop("causal")
        self._backward(
            d_o,
            q,
            k,
            v,
            o,
            lse,
            **named_lengths(call),
            dq=dq,
            dk=dk,
            dv=dv,
            **arguments,
            deterministic=call.deterministic,
        )
        return dq, dk, dv


class FlashAttention4(Kernel):
    """Its backward takes the gradient of lse, so that delta needs no o."""

    name = "flash_attn_4"
    honours = Honours(
        dtypes=HALF, head_dim=128, head_dim_multiple=8, softcap=True, deterministic=True, takes_delta=True
    )

    def __init__(self, module: Any = None):
        self._forward, self._backward = functions(
            self.name, module or module_of(self.name), "_flash_attn_fwd", "_flash_attn_bwd"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rectangles) -> tuple[Tensor, Tensor]:
        o, lse, *_ = self._forward(q, k, v, **named_lengths(call), **with_none(call), return_lse=True)
        return o, lse

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
        assert delta is not None
        dq, dk, dv = fresh(q, k, v)
        # ds = p·(dp - (rowsum(o·d_o) - dlse)), with o = 0.
        self._backward(
            q, k, v, torch.zeros_like(d_o), d_o, lse, **named_lengths(call), **with_none(call),
            dq=dq, dk=dk, dv=dv, dlse=-delta, deterministic=call.deterministic,
        )  # fmt: skip
        return dq, dk, dv


def fresh(*inputs: Tensor) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]


def named_lengths(call: Rectangles) -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths(call)))


def without_slopes(call: Rectangles) -> dict[str, Any]:
    arguments = options(call)
    del arguments["alibi_slopes"]
    return arguments


def with_none(call: Rectangles) -> dict[str, Any]:
    """Limits that are none are None here, and the limit 0 of a causal mask is not given twice."""
    arguments = without_slopes(call)
    causal = arguments["causal"]
    arguments |= {"window_size_left": call.window_left, "window_size_right": None if causal else call.window_right}
    return arguments
