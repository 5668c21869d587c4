# SPDX-License-Identifier: MIT OR Apache-2.0
"""Doubles of the kernels of mamba_ssm and fla, which run on a GPU alone: their arguments, each one node of autograd.

A kernel of theirs is one `autograd.Function`. So all that it returns requires a gradient if anything does that it gets, also what does not
depend on that. The scan of Mamba-1 returns a last state without a gradient: its backward pass leaves that of the state out. Transformers
hands a kernel the arguments of its own function, those by name only if the kernel has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class _Node(torch.autograd.Function):
    """`outputs` of the results have a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], outputs: int, *tensors: Tensor | None) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.how = call, outputs
        return call(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, outputs = ctx.how
        wanted = ctx.needs_input_grad[2:]
        own = [
            None if one is None else one.detach().requires_grad_(wants)
            for one, wants in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            results = call(*own)
        results = results if isinstance(results, tuple) else (results,)
        every = list(zip(results, gradients, strict=True))[:outputs]
        pairs = [(x, g) for x, g in every if g is not None and x is not None and x.requires_grad]
        some = [one for one, wants in zip(own, wanted, strict=True) if wants]
        found: Any = [None] * len(some)
        if pairs:
            outs, incoming = zip(*pairs, strict=True)
            found = torch.autograd.grad(outs, some, incoming, allow_unused=True)
        each = iter(found)
        return None, None, *(next(each) if wants else None for wants in wanted)


def node(function: Callable[..., Any], outputs: int = 2) -> Callable[..., Any]:
    """The function of tensors and options as one node of autograd."""

    @wraps(function)
    def one(*args: Any, **options: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **options).arguments
        names = [name for name, value in bound.items() if isinstance(value, Tensor)]

        def call(*tensors: Tensor | None) -> Any:
            return function(**bound | dict(zip(names, tensors, strict=True)))

        return _Node.apply(call, outputs, *(bound[name] for name in names))  # type: ignore[no-untyped-call]

    return one


def selective_scan(usual: Callable[..., Any]) -> Callable[..., Any]:
    """mamba_ssm's `selective_scan_fn`."""

    def selective_scan_fn(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False,
    ) -> Any:  # fmt: skip
        more = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        return usual(u, delta, A, B, C, **more, return_last_state=return_last_state, use_associative_scan=False)

    return node(selective_scan_fn, 1)


def chunk_scan(usual: Callable[..., Any]) -> Callable[..., Any]:
    """mamba_ssm's `mamba_chunk_scan_combined`."""

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False, return_varlen_states: bool = False,
    ) -> Any:  # fmt: skip
        assert seq_idx is None and cu_seqlens is None and not return_varlen_states
        more = {"D": D, "dt_bias": dt_bias, "initial_states": initial_states, "dt_softplus": dt_softplus}
        found = usual(x, dt, A, B, C, chunk_size, **more, dt_limit=dt_limit, return_final_states=return_final_states)
        if z is None:
            return found
        out, *state = found if isinstance(found, tuple) else (found,)
        gated = out * torch.nn.functional.silu(z.float()).to(out.dtype)
        return (gated, *state) if state else gated

    return node(mamba_chunk_scan_combined)


def delta_rule(usual: Callable[..., Any]) -> Callable[..., Any]:
    """fla's `chunk_gated_delta_rule`, without keeping sequences apart (`test_recurrent` has one that does)."""

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if cu_seqlens is not None:
            raise NotImplementedError
        assert scale is None
        how = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return usual(q, k, v, g=g, beta=beta, initial_state=initial_state, **how)

    return node(chunk_gated_delta_rule)


DOUBLES: dict[str, Callable[..., Callable[..., Any]]] = {
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": chunk_scan,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
}


def handed(usual: Callable[..., Any], kernel: Callable[..., Any], called: Callable[[], Any]) -> Callable[..., Any]:
    """The function of Transformers' module with which it hands the arguments of `usual` to another package's kernel."""
    takes = set(inspect.signature(kernel).parameters)

    @wraps(usual)
    def wrapped(*args: Any, **options: Any) -> Any:
        called()
        return kernel(*args, **{name: value for name, value in options.items() if name in takes})

    return wrapped


@contextmanager
def replaced(module: ModuleType) -> Iterator[list[str]]:
    """Calls of the module's kernels go to their doubles. Yields the names of those that are called."""
    called: list[str] = []
    kept = {name: vars(module)[name] for name in DOUBLES if name in vars(module)}

    try:
        for name, usual in kept.items():
            setattr(module, name, handed(usual, DOUBLES[name](usual), partial(called.append, name)))
        yield called
    finally:
        for name, usual in kept.items():
            setattr(module, name, usual)
