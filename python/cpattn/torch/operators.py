# SPDX-License-Identifier: MIT OR Apache-2.0
"""The differentiable functions of a batch: `Attention` for eager mode, and operators in torch.ops.cpattn, so that torch.compile
keeps the calls in its graphs. (Operators take longer, and the first call of one loads the compiler.)

Every call exchanges messages with the other ranks, so all ranks must make the same calls in the same order. The operators are
registered with an ordered effect: no compiler may remove one with an unused result, merge two with equal arguments, or change their
order, which it might do on some ranks only, since sizes differ.

A graph outlives the batch that it was made with. So an operator takes the number of a context and a tensor, whose values the graph does
not know, with all that a batch is: its documents and slices. The batch is looked up with these, or made again.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, get_args, get_type_hints
from weakref import WeakValueDictionary

import torch
from torch import Tensor

try:
    from torch._library.effects import EffectType
except ImportError as error:
    raise ImportError(
        f"torch.__version__ is {torch.__version__}, 2.10 or later is needed for cpattn.torch: pip install 'torch>=2.10'"
    ) from error

from ..arguments import instance
from ..errors import InvalidArgument, InvalidHandle, Unsupported
from ..packing import Layer, Packing
from ..options import Side
from ..plan import Plan
from ..rank import Rank
from ..slopes import slopes_of
from .dropout import known, seed_of

if TYPE_CHECKING:
    from .context import Batch, Context
    from .executor import Executor

# Contexts by their numbers.
CONTEXTS: WeakValueDictionary[int, Context] = WeakValueDictionary()


def dense(name: str, tensor: Any) -> None:
    """Raises InvalidArgument if the argument is not a dense (torch.strided) tensor."""
    if instance(name, tensor, Tensor, "a tensor is needed").layout != torch.strided or tensor.is_nested:
        kind = "is a nested tensor" if tensor.is_nested else f"has the layout {tensor.layout}"
        raise InvalidArgument(f"{name} {kind}, torch.strided is needed: convert it, for example with {name}.to_dense()")


def on_device(context: Context, name: str, tensor: Tensor, ndim: int | None = None) -> None:
    """Refuses everything but a dense tensor on the device of an open context."""
    context.check_open()
    dense(name, tensor)
    if tensor.device != context.device:
        raise InvalidArgument(
            f"{name}.device is {tensor.device}, {context.device} is needed, the device of the context"
        )
    if ndim and tensor.ndim != ndim:
        raise InvalidArgument(f"{name}.ndim is {tensor.ndim}, {ndim} is needed: [tokens, heads, dim]")


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with contiguous head elements, which kernels need; other strides may be any."""
    tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _stream(rank: Rank | Executor, tensor: Tensor) -> int | None:
    """PyTorch's current stream, which an executor finds itself."""
    if not tensor.is_cuda or not isinstance(rank, Rank):
        return None
    stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
    return stream


def _results(
    q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, largest: bool, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    o, lse = q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=accumulator)
    return o, lse, q.new_empty(q.shape[1] if largest else 0, dtype=torch.float32)


def _forward(
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    largest: bool,
    seed: Tensor | None,
    keys: Tensor | None,
    layer: Layer,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse, and the largest scores, which are empty unless they are asked for."""
    q, k, v = map(_rows, (q, k, v))
    o, lse, max_logit = _results(q, k, v, sinks, largest)
    sinks = None if sinks is None else sinks.detach().contiguous()
    operands: dict[str, Any] = {"max_logit": max_logit} if largest else {}
    if seed is not None:
        operands["dropout_seed"] = known(seed_of("dropout_seed", seed))
    if keys is not None:
        operands["key_indices"] = keys
    plan = batch._plan_for(q, k, v, sinks, layer, listed=keys is not None)
    batch.context.runs += 1
    batch.context.rank.forward(
        plan, _stream(batch.context.rank, q), q=q, k=k, v=v, sinks=sinks, o=o, lse=lse, **operands
    )
    return o, lse, max_logit


def _gradients(
    d_o: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(torch.empty_like(_rows(x)) for x in (q, k, v)), dsinks)


def _backward(
    batch: Batch,
    d_o: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    o: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
    seed: Tensor | None,
    keys: Tensor | None,
    layer: Layer,
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsinks. dsinks is empty without sinks. The gradient of o or that of lse may be None: it was not used."""
    d_o, q, k, v, o = map(_rows, (torch.zeros_like(o) if d_o is None else d_o, q, k, v, o))
    lse = lse.detach()
    dq, dk, dv, dsinks = _gradients(d_o, q, k, v, sinks)
    operands: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o, "dq": dq, "dk": dk, "dv": dv}
    if sinks is not None:
        operands |= {"sinks": sinks.detach().contiguous(), "dsinks": lse.new_empty(sinks.shape)}
    if d_lse is not None:
        operands["d_lse"] = d_lse.detach()
    if seed is not None:
        operands["dropout_seed"] = seed_of("dropout_seed", seed)
    if keys is not None:
        operands["key_indices"] = keys
    rank = batch.context.rank
    rank.backward(batch._plan_for(q, k, v, sinks, layer, d_o, listed=keys is not None), _stream(rank, q), **operands)
    if sinks is not None:
        dsinks.copy_(operands["dsinks"]) if batch.context.number == 0 else dsinks.zero_()
    return dq, dk, dv, dsinks


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        batch: Batch,
        largest: bool,
        seed: Tensor | None,
        keys: Tensor | None,
        layer: Layer,
    ) -> tuple[Tensor, Tensor, Tensor]:
        o, lse, max_logit = _forward(batch, q, k, v, sinks, largest, seed, keys, layer)
        ctx.save_for_backward(q, k, v, sinks, o, lse, seed, keys)
        ctx.mark_non_differentiable(max_logit)
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.layer = batch, layer
        return o, lse, max_logit

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse, seed, keys = ctx.saved_tensors
        *gradients, dsinks = _backward(ctx.batch, d_o, q, k, v, sinks, o, lse, d_lse, seed, keys, ctx.layer)
        if sinks is not None:
            gradients.append(dsinks)
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            # They depend on the anchor, so that PyTorch does not treat them as constants.
            gradients = _Once.apply(torch.empty(0, requires_grad=True), *gradients)  # type: ignore[no-untyped-call]
        # None for sinks that are not given, and for the arguments after them.
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients))


class _Once(torch.autograd.Function):
    """The identity on gradients, with a backward that raises. PyTorch's `once_differentiable` raises another error, and treats the
    gradients as constants if `d_o` is a constant."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise Unsupported(
            "attention is differentiable once, and its gradients were differentiated: detach them, or compute second derivatives "
            "without cpattn"
        )


def _batch(packing: Tensor, context: int) -> Batch:
    if (found := CONTEXTS.get(context)) is None:
        raise InvalidHandle("the context of this call is gone: keep it for the whole job")
    return found._batch_of(Packing.from_numbers(packing.tolist()))


def _keep_order() -> None:
    """Works around Inductor of PyTorch 2.11, while it compiles a graph: it stores the dependencies of an effect under the name of
    the operation's buffer and looks them up under the name of the operation, so it could reorder independent calls."""
    graph: Any = getattr(getattr(sys.modules.get("torch._inductor.virtualized"), "V", None), "graph", None)
    noted = getattr(graph, "additional_star_deps", None)
    if type(noted) is not defaultdict:
        return

    class Noted(defaultdict):  # type: ignore[type-arg]
        def __missing__(self, name: str) -> Any:
            operation = graph.name_to_op.get(name)
            buffer = name if operation is None else operation.get_name()
            return self[buffer] if buffer in self else super().__missing__(name)

    graph.additional_star_deps = Noted(noted.default_factory, noted)


def _operator(name: str, inputs: str, outputs: str, function: Any, fake: Any) -> Any:
    batch = "Tensor packing, int context"
    schema = f"({inputs}, {batch}, {_NUMBERS}) -> ({outputs})"
    operator = torch.library.custom_op(f"cpattn::{name}", function, mutates_args=(), schema=schema)
    operator.register_effect(EffectType.ORDERED)

    def shapes(*operands: Any) -> Any:
        _keep_order()
        return fake(*operands)

    operator.register_fake(shapes)
    return operator


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, _, seed, slopes, keys, packing, *ctx.numbers = inputs
    ctx.inputs = len(inputs)
    ctx.save_for_backward(q, k, v, sinks, *output[:2], seed, slopes, keys, packing)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _attention_backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Any, ...]:
    *saved, seed, slopes, keys, packing = ctx.saved_tensors
    *gradients, dsinks = attention_backward(d_o, *saved, d_lse, seed, slopes, keys, packing, *ctx.numbers)
    return *gradients, None if saved[3] is None else dsinks, *(None,) * (ctx.inputs - 4)


def slopes_tensor(slopes: Any) -> Tensor | None:
    """Slopes as an argument of an operator."""
    if isinstance(slopes, Tensor) and slopes.requires_grad:
        slopes_of("alibi_slopes", slopes)  # raises
    return slopes if slopes is None or isinstance(slopes, Tensor) else torch.tensor(slopes, dtype=torch.float32)


# The options of a layer that are numbers, in the order in which operators take them, as a schema has them.
_KINDS = {
    name: "int" if int in get_args(kind) else "float"
    for name, kind in get_type_hints(Layer).items()
    if name != "alibi_slopes"
}
_NUMBERS = ", ".join(f"{kind}? {name}" for name, kind in _KINDS.items())


def _layer(slopes: Tensor | None, numbers: Any) -> Layer:
    """The layer's options: slopes are a tensor of the operator's, whose values a graph does not know."""
    return Layer(**dict(zip(_KINDS, numbers, strict=True)), alibi_slopes=slopes_of("alibi_slopes", slopes))


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks"
attention = _operator(
    "attention",
    f"{_INPUTS}, bool largest, Tensor? seed, Tensor? slopes, Tensor? keys",
    "Tensor, Tensor, Tensor",
    lambda q, k, v, sinks, largest, seed, slopes, keys, packing, context, *numbers: _forward(
        _batch(packing, context), q, k, v, sinks, largest, seed, keys, _layer(slopes, numbers)
    ),
    _results,
)
attention_backward = _operator(
    "attention_backward",
    f"Tensor? d_o, {_INPUTS}, Tensor o, Tensor lse, Tensor? d_lse, Tensor? seed, Tensor? slopes, Tensor? keys",
    "Tensor, Tensor, Tensor, Tensor",
    lambda d_o, q, k, v, sinks, o, lse, d_lse, seed, slopes, keys, packing, context, *numbers: _backward(
        _batch(packing, context), d_o, q, k, v, sinks, o, lse, d_lse, seed, keys, _layer(slopes, numbers)
    ),
    _gradients,
)
attention.register_autograd(_attention_backward, setup_context=_save)


class AllToAll(torch.autograd.Function):
    """From this rank's tokens and all heads to all tokens and its own heads, or back. The gradient of one is the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rank: Rank | Executor, number: int, plan: Plan, side: Side, to_heads: bool
    ) -> Tensor:
        ctx.rest, x = (rank, number, plan, side, not to_heads), _rows(x)
        share = plan.share(number)
        heads = share.q_head_end - share.q_head_begin if side == Side.Q else share.kv_head_end - share.kv_head_begin
        tokens, every = (share.q_tokens, plan.heads) if side == Side.Q else (share.k_tokens, plan.kv_heads)
        # The ring is 1, so that the ring share is the whole batch.
        info = plan.describe()
        of_share, of_batch = (info.q_tokens if side == Side.Q else info.k_tokens, heads), (tokens, every)
        to = x.new_empty(*(of_share if to_heads else of_batch), x.shape[2])
        (rank.to_heads if to_heads else rank.to_tokens)(
            plan, side, x if to_heads else x.contiguous(), to, _stream(rank, x)
        )
        return to

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return AllToAll.apply(gradient, *ctx.rest), *(None,) * 5  # type: ignore[no-untyped-call]
