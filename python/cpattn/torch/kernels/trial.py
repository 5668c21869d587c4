# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of what a kernel returns.

Shapes and types are compared in every call, which costs no wait for the device. What only values show is asked once, in a trial:
see `tried`.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...errors import Error, InvalidArgument, Unsupported
from .kernel import Kernel
from .rectangles import Rectangles


def wrong(kernel: Kernel, what: str, found: Any, needed: str) -> InvalidArgument:
    return InvalidArgument(
        f"kernels={kernel.name!r}: {what} is {found}, {needed} is needed: the kernel is not as cpattn.torch.kernels.Kernel says"
    )


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


# Per kernel: the devices and types with which it was tried.
_tried: WeakKeyDictionary[Kernel, set[tuple[torch.device, torch.dtype]]] = WeakKeyDictionary()

# The limits of trials: none, a causal mask of more keys than rows and of fewer, and a window.
LIMITS = ((None, None), (None, 0), (2, 1))
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def tried(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> None:
    """Runs a kernel of rectangles once on a few rows, before the first plan with it, and compares with f64. Raises InvalidArgument for a
    kernel with other results: NaN, lse to base 2, limits from another corner. Tensors without values are not tried."""
    done = _tried.setdefault(kernel, set())
    if (device, dtype) in done or type(torch.empty(1, device=device)) is not Tensor:
        return
    for window in LIMITS if kernel.honours.windows else LIMITS[:2]:
        try:
            attempt(kernel, device, dtype, window)
        except (Error, NotImplementedError):
            raise
        except Exception as error:
            raise Unsupported(
                f"kernels={kernel.name!r} failed on {device} with {dtype} and the window {window}: {type(error).__name__}: {error}. "
                'Use kernels="torch", or kernels="math", which runs on any device'
            ) from error
    done.add((device, dtype))


def attempt(kernel: Kernel, device: torch.device, dtype: torch.dtype, limits: tuple[int | None, int | None]) -> None:
    """One trial: two sequences, of more keys than rows and of as many."""
    able = kernel.honours
    lengths, heads, dim = ((5, 5 if able.square else 9), (6, 6)), 4, max(16, able.head_dim_multiple)
    rows, keys = (sum(x) for x in zip(*lengths))
    random = torch.Generator().manual_seed(1)
    shapes = ((rows, heads, dim), *((keys, heads // (2 if able.group else 1), dim),) * 2, (rows, heads, dim))
    q, k, v, d_o = (
        torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(dtype) for shape in shapes
    )
    o, lse, dq, dk, dv = expected(q.double(), k.double(), v.double(), d_o.double(), lengths, limits)
    starts = [torch.tensor([0, *x], device="cpu").cumsum(0).int().to(device) for x in zip(*lengths)]
    call = Rectangles(starts[0], starts[1], 6, max(keys for _, keys in lengths), lengths, *limits, dim**-0.5)
    kernel.prepare(call)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, d_o = (x.to(device) for x in (q, k, v, d_o))
    with torch.no_grad():
        found = returned(kernel, q, k, v, *kernel.forward(q, k, v, call))
        compare(kernel, "lse", found[1], lse, dtype, limits)
        compare(kernel, "o", found[0], o, dtype, limits)
        if able.backward:
            delta = (o * d_o.cpu().double()).sum(2).T.contiguous()
            whole = lse.to(device, accumulator).contiguous()
            gradients = kernel.backward(
                d_o,
                q,
                k,
                v,
                None if able.takes_delta else o.to(device, dtype),
                whole,
                call,
                delta=delta.to(device, accumulator),
            )
            returned_gradients(kernel, (q, k, v), gradients)
            for name, mine, want in zip(("dq", "dk", "dv"), gradients, (dq, dk, dv)):
                compare(kernel, name, mine, want, dtype, limits)


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    lengths: tuple[tuple[int, int], ...],
    limits: tuple[int | None, int | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, lse, dq, dk and dv in f64."""
    group, left, right = q.shape[1] // k.shape[1], *limits
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        parts, logs, first_q, first_k = [], [], 0, 0
        for rows, keys in lengths:
            of_q = q[first_q : first_q + rows]
            of_k, of_v = (x[first_k : first_k + keys].repeat_interleave(group, 1) for x in (k, v))
            d = torch.arange(keys, device="cpu")[None] - torch.arange(rows, device="cpu")[:, None] - (keys - rows)
            outside = torch.zeros_like(d, dtype=torch.bool)
            outside |= False if left is None else d < -left
            outside |= False if right is None else d > right
            s = (torch.einsum("qhd,khd->hqk", of_q, of_k) * q.shape[2] ** -0.5).masked_fill(outside, -torch.inf)
            parts.append(torch.einsum("hqk,khd->qhd", s.softmax(2), of_v))
            logs.append(s.logsumexp(2))
            first_q, first_k = first_q + rows, first_k + keys
        o, lse = torch.cat(parts), torch.cat(logs, 1)
        dq, dk, dv = torch.autograd.grad(o, leaves, d_o)
    return o.detach(), lse.detach(), dq, dk, dv


def compare(
    kernel: Kernel, name: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, limits: tuple[int | None, int | None]
) -> None:
    mine = found.detach().cpu().double()
    if bool(mine.isnan().any()):
        raise wrong(kernel, name, "NaN in rows that have keys", "a number")

    def near(x: Tensor) -> bool:
        return bool((x - wanted).abs().max() <= TOLERANCE[dtype] * (1 + wanted.abs().max()))

    if near(mine):
        return
    if name == "lse" and near(mine * math.log(2)):
        raise wrong(kernel, name, "to base 2", "a natural logarithm")
    error = ((mine - wanted).abs().max() / wanted.abs().max()).item()
    raise wrong(
        kernel,
        name,
        f"off by {error:.1e} of its largest value with the window {limits}",
        "the result of this window from the bottom-right corner",
    )
