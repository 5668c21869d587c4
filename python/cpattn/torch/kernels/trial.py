# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of what a kernel returns.

Shapes and types are compared in every call, which costs no wait for the device. What only values show is asked once, in a trial:
see `tried`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import InvalidArgument
from .kernel import Kernel


def wrong(kernel: Kernel, what: str, found: Any, needed: str) -> InvalidArgument:
    return InvalidArgument(f"kernels={kernel.name!r}: {what} is {found}, {needed} is needed: the kernel is not as cpattn.torch.kernels.Kernel says")


def is_tensor(kernel: Kernel, what: str, x: Any, shape: tuple[int, ...], like: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise wrong(kernel, what, f"a {type(x).__name__}", "a tensor")
    if tuple(x.shape) != shape:
        raise wrong(kernel, f"{what}.shape", tuple(x.shape), f"{shape}")
    if not x.dtype.is_floating_point:
        raise wrong(kernel, f"{what}.dtype", x.dtype, "a float type")
    if x.device != like.device:
        raise wrong(kernel, f"{what}.device", x.device, f"{like.device}")


def returned(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, o: Any, lse: Any) -> tuple[Tensor, Tensor]:
    """What a forward returned."""
    is_tensor(kernel, "o", o, (q.shape[0], q.shape[1], v.shape[2]), q)
    is_tensor(kernel, "lse", lse, (q.shape[1], q.shape[0]), q)
    if lse.dtype.itemsize < 4:
        raise wrong(kernel, "lse.dtype", lse.dtype, "torch.float32")
    return o, lse


def returned_gradients(kernel: Kernel, inputs: tuple[Tensor, Tensor, Tensor], gradients: Any) -> None:
    """What a backward returned."""
    if not isinstance(gradients, tuple | list) or len(gradients) != 3:
        raise wrong(kernel, "the result of backward", f"{type(gradients).__name__}", "dq, dk and dv")
    for name, x, gradient in zip("qkv", inputs, gradients):
        is_tensor(kernel, f"d{name}", gradient, tuple(x.shape), x)
