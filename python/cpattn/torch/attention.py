# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention over a plan as a differentiable function of this rank's own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._check import instance, whole
from ..errors import InvalidArgument, Unsupported
from ..plan import Dtype, Plan
from ..rank import Rank

DTYPES = dict(zip((torch.float16, torch.bfloat16, torch.float32, torch.float64), Dtype, strict=True))

CPU = torch.device("cpu")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rank: Rank,
    number: int,
    plan: Plan,
    device: torch.device = CPU,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's q tokens to the whole batch. Differentiable once.

    Shapes, with this rank's numbers of tokens: q [q tokens, heads, head_dim], k [k tokens, kv_heads, head_dim],
    v [k tokens, kv_heads, value_dim], sinks [heads] (f32); the result o is [q tokens, heads, value_dim].

    All ranks of the plan call it in the same order; the same holds for the backward. `number` is this rank's number. All
    tensors are on `device`; on a CUDA device the work is enqueued on the current stream. The gradient of `sinks`, a sum
    over all ranks, is returned on rank 0 and is zero on the others, since the training loop sums gradients of parameters
    over the ranks.

    Raises InvalidArgument for a tensor of another device, dtype, layout or shape, and the errors of `Rank.forward`.
    """
    instance("rank", rank, Rank)
    instance("device", device, torch.device, "a torch.device is needed")
    number = whole("number", number, 0, instance("plan", plan, Plan).world - 1)
    inputs = {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}
    for name, tensor in inputs.items():
        dense(name, tensor)
        if tensor.device != device:
            raise InvalidArgument(f"{name}.device is {tensor.device}, this rank is on {device}")
        if name != "sinks" and DTYPES.get(tensor.dtype) != plan.dtype:
            raise InvalidArgument(f"{name}.dtype is {tensor.dtype}, the plan is for {plan.dtype.name.lower()}")
    o: Tensor = _Attention.apply(q, k, v, sinks, rank, number, plan)  # type: ignore[no-untyped-call]
    return o


def dense(name: str, tensor: Any) -> None:
    """Raises InvalidArgument if the argument is not a dense (torch.strided) tensor."""
    if instance(name, tensor, Tensor, "a tensor is needed").layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"of the layout {tensor.layout}"
        raise InvalidArgument(f"{name} is {kind}, torch.strided is needed: see {name}.to_dense()")


def _stream(tensor: Tensor) -> int | None:
    """PyTorch's current stream."""
    if not tensor.is_cuda:
        return None
    stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
    return stream


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rank: Rank, number: int, plan: Plan
    ) -> Tensor:
        tokens = plan.share(number).q_tokens
        # Tensors that are sent must be compact; compact ones are not copied.
        inputs = [x.detach().contiguous() for x in (q, k, v)]
        learned = None if sinks is None else sinks.detach().contiguous()
        o = torch.empty(tokens, plan.heads, plan.value_dim, dtype=q.dtype, device=q.device)
        accumulator = torch.float64 if plan.dtype == Dtype.F64 else torch.float32
        lse = torch.empty(plan.heads, tokens, dtype=accumulator, device=q.device)
        rank.forward(plan, _stream(q), q=inputs[0], k=inputs[1], v=inputs[2], sinks=learned, o=o, lse=lse)
        ctx.save_for_backward(*inputs, learned, o, lse)
        ctx.rank, ctx.number, ctx.plan = rank, number, plan
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()
        with torch.no_grad():
            gradients = _Attention._gradients(ctx, d_o)
        if twice:
            # They depend on the anchor, so that PyTorch does not treat them as constants.
            given = [g for g in gradients if g is not None]
            gradients = [*_Once.apply(torch.empty(0, requires_grad=True), *given), None][:4]  # type: ignore[no-untyped-call]
        return *gradients, None, None, None

    @staticmethod
    def _gradients(ctx: Any, d_o: Tensor) -> list[Tensor | None]:
        saved: list[Any] = [x if x is None else x.detach() for x in ctx.saved_tensors]
        q, k, v, sinks, o, lse = saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dsinks = None if sinks is None else torch.empty(sinks.shape, dtype=lse.dtype, device=lse.device)
        ctx.rank.backward(
            ctx.plan,
            _stream(q),
            q=q,
            k=k,
            v=v,
            sinks=sinks,
            o=o,
            lse=lse,
            d_o=d_o.detach().contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            dsinks=dsinks,
        )
        if dsinks is not None:
            dsinks = dsinks.to(sinks.dtype) if ctx.number == 0 else torch.zeros_like(sinks)
        return [dq, dk, dv, dsinks]


class _Once(torch.autograd.Function):
    """The identity on gradients, with a backward that raises. PyTorch's `once_differentiable` raises another error, and
    treats the gradients as constants if `d_o` is one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise Unsupported(
            "attention is differentiable once, and its gradients were differentiated: detach them, or compute second derivatives "
            "without cpattn"
        )
