# SPDX-License-Identifier: MIT OR Apache-2.0
"""The attention of one rank as an operation of JAX, and the meeting of the ranks of a process.

A rank is a device of a mesh axis, and attention needs all ranks at the same time. A callback that waits for callbacks of other
devices can deadlock: it holds a thread that another device needs (with `jax.pure_callback` and large arrays it does, on two cores).
So no callback waits for a device. There are three steps:

1. `_deposit`, on each device: keeps the rank's tensors under a number, and returns the number.
2. An all-gather of the numbers over the axis, by XLA, which does the waiting. Each device then knows which deposits belong together,
   in any order of independent calls.
3. `_collect`, on each device: all deposits exist. The first call runs all ranks, on separate threads; the others wait for it.

Single steps must not be merged, dropped or moved. For JAX, which may save one result and recompute another, the steps are one
operation without an effect; for XLA both callbacks have a side effect.

A failed deposit is a deposit too: otherwise the other devices would wait in the all-gather.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..arguments import attempt, refused
from ..errors import InvalidArgument, Unsupported
from ..packing import Layer, Packing, sinks_of
from ..plan import Plan
from ..rank import Rank
from ..slices import Slice
from ..tensors import Memory

if TYPE_CHECKING:
    from .context import Context


def array_of(packing: Packing) -> Any:
    """Documents and slices as int32. cu_seqlens begins with 0, and this with -1: then the low and the high half of each number."""
    halves = np.array(packing.numbers(), np.int64).view(np.int32)
    return np.concatenate([np.array([-1], np.int32), halves])


def packing_of(numbers: Sequence[int], slices: tuple[Slice, ...] | None) -> Packing:
    """The packing of an argument `cu_seqlens`, which may be an array of `array_of`, and of slices."""
    if not numbers or numbers[0] != -1:
        return Packing(tuple(numbers), slices=slices)
    if slices is not None:
        raise InvalidArgument("slices are given, and the batch's packing has slices: give one of the two")
    found = attempt(lambda: Packing.from_numbers(np.array(numbers[1:], np.int32).view(np.int64).tolist()))
    if found is None:
        raise refused("cu_seqlens", numbers, "0 and the ends of documents, or Batch.packing, is needed")
    return found


class Call(NamedTuple):
    """The arguments that are equal on all ranks. The operands are q, k, v, cu_seqlens (or `Batch.packing`), sinks if any, and for the
    backward o, lse, d_o, and d_lse if lse was asked for."""

    context: Context
    layer: Layer
    slices: tuple[Slice, ...] | None
    sinks: int  # of each head
    lse: bool
    backward: bool


class Deposit(NamedTuple):
    rank: int
    arrays: Sequence[Any]
    failure: BaseException | None


class _Meeting:
    def __init__(self, deposits: list[Deposit]) -> None:
        self.deposits, self.left = deposits, len(deposits)
        self.results: Future[list[list[Any]]] = Future()


_lock = threading.Lock()
_numbers = count()
_deposits: dict[int, Deposit] = {}
_meetings: dict[tuple[int, ...], _Meeting] = {}


def _deposit(_call: Any, out: Any, rank: Any, *operands: Any) -> None:
    arrays, failure, mine = [], None, -1
    try:
        mine = int(np.asarray(rank))
        # A copy, since XLA may reuse their memory.
        arrays = [np.asarray(x).copy() for x in operands]
    except BaseException as error:  # noqa: BLE001 (raised by `_collect`)
        failure = error
    with _lock:
        number = next(_numbers) % 2**31
        _deposits[number] = Deposit(mine, arrays, failure)
    np.asarray(out)[...] = number


def _collect(_call: Any, out: Any, rank: Any, numbers: Any, *, call: Call) -> None:
    together = tuple(map(int, np.asarray(numbers)))
    with _lock:
        first = together not in _meetings
        if first:
            _meetings[together] = _Meeting([_deposits.pop(number) for number in together])
        meeting = _meetings[together]
        meeting.left -= 1
        if not meeting.left:
            del _meetings[together]
    if first:
        try:
            meeting.results.set_result(_run_all(call, meeting.deposits))
        except BaseException as error:  # noqa: BLE001 (raised on all devices)
            meeting.results.set_exception(error)
        meeting.deposits.clear()
    _fill(out, meeting.results.result()[int(np.asarray(rank))])


def _alone(_call: Any, out: Any, *operands: Any, call: Call) -> None:
    """The operation of a context with one rank."""
    _fill(out, _run_all(call, [Deposit(0, [np.asarray(x) for x in operands], None)])[0])


def _fill(out: Any, results: Sequence[Any]) -> None:
    for buffer, result in zip(out, results, strict=True):
        np.asarray(buffer)[...] = result


def _run_all(call: Call, deposits: Sequence[Deposit]) -> list[list[Any]]:
    """The results of each rank's operation."""
    if failure := next((deposit.failure for deposit in deposits if deposit.failure), None):
        raise failure
    assert [deposit.rank for deposit in deposits] == list(range(call.context.world)), (
        "the all-gather is in the axis' order"
    )
    q, k, v, ends = deposits[0].arrays[:4]
    for deposit in deposits:
        if not np.array_equal(deposit.arrays[3], ends):
            mine, theirs = (_in_words(x.tolist()) for x in (ends, deposit.arrays[3]))
            raise InvalidArgument(
                f"{mine} on rank 0 and {theirs.removeprefix('cu_seqlens is ')} on rank {deposit.rank}: give the same to all ranks"
            )
    batch = call.context._batch_of(packing_of(ends.tolist(), call.slices))
    batch.check_rows(len(q))
    plan = batch.layer(q, k, v, call.sinks, call.layer)
    operation = functools.partial(_backward, call) if call.backward else _forward
    return call.context.on_ranks(lambda number, rank: operation(plan, number, rank, *deposits[number].arrays))


def _in_words(numbers: Sequence[int]) -> str:
    """The documents and slices of a batch, for messages."""
    packing = packing_of(numbers, None)
    slices = (
        "" if packing.slices is None else f" with {len(packing.slices)} slices {[tuple(s) for s in packing.slices]}"
    )
    return f"cu_seqlens is {list(packing.cu_seqlens)}{slices}"


def _memory(array: Any) -> Memory:
    """A compact array, also of a type that NumPy does not export. The caller keeps the array alive."""
    return Memory(
        array.ctypes.data, array.shape, 8 * array.dtype.itemsize, code=4 if array.dtype.name == "bfloat16" else 2
    )


def _tensors(**arrays: Any) -> dict[str, Any]:
    return {name: _memory(array) for name, array in arrays.items()}


def _accumulator(dtype: Any) -> Any:
    return np.float64 if dtype.name == "float64" else np.float32


def _forward(plan: Plan, number: int, rank: Rank, q: Any, k: Any, v: Any, _ends: Any, *sinks: Any) -> list[Any]:
    rows, tokens = len(q), plan.share(number).q_tokens
    # The rank's tokens come first, then padding rows.
    o = np.zeros((rows, q.shape[1], v.shape[2]), q.dtype)
    lse = np.empty((q.shape[1], tokens), _accumulator(q.dtype))
    operands = _tensors(q=q[:tokens], k=k[:tokens], v=v[:tokens], o=o[:tokens], lse=lse)
    rank.forward(plan, **operands, sinks=_memory(*sinks) if sinks else None)
    return [o, np.pad(lse, ((0, 0), (0, rows - tokens)))[:, :, None]]


def _backward(
    call: Call, plan: Plan, number: int, rank: Rank, q: Any, k: Any, v: Any, _ends: Any, *more: Any
) -> list[Any]:
    *sinks, o, lse, d_o = more[:-1] if call.lse else more
    tokens = plan.share(number).q_tokens
    inputs = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o}
    gradients = {f"d{name}": np.zeros_like(x) for name, x in zip("qkv", (q, k, v))}
    lse = lse[:, :tokens, 0].copy()
    operands = _tensors(**{name: x[:tokens] for name, x in (inputs | gradients).items()}, lse=lse)
    results = list(gradients.values())
    if call.lse:
        d_lse = more[-1][:, :tokens].copy()
        operands |= _tensors(d_lse=d_lse)
    if sinks:
        dsinks = np.empty(sinks[0].shape, lse.dtype)
        operands |= _tensors(sinks=sinks[0], dsinks=dsinks)
    rank.backward(plan, **operands)
    if sinks:
        # dsinks is already the sum over all ranks, and jax.shard_map sums the results of the ranks.
        results.append(dsinks.astype(np.float32) if number == 0 else np.zeros(dsinks.shape, np.float32))
    return results


def _shapes(q: Any, k: Any, v: Any, _ends: Any, *more: Any, call: Call) -> list[Any]:
    """The shapes of the results, made from those of q, k, v and sinks, so that they vary over the same axes of a mesh."""
    if call.backward:
        return [q, k, v, *more[: -4 if call.lse else -3]]
    accumulator = _accumulator(np.dtype(q.dtype))
    return [
        q.update(shape=(*q.shape[:2], v.shape[2])),
        q.update(shape=(q.shape[1], q.shape[0], 1), dtype=np.dtype(accumulator)),
    ]


def _steps(*operands: Any, call: Call) -> Any:
    avals = _shapes(*map(jax.typeof, operands), call=call)
    results = [_shape(aval.shape, aval.dtype) for aval in avals]
    axis = call.context.axis
    if axis is None:
        return _callback(functools.partial(_alone, call=call), results)(*operands)
    rank = jax.lax.axis_index(axis)
    number = _callback(_deposit, _shape((), np.int32))(rank, *operands)
    numbers = jax.lax.all_gather(number, axis)
    return _callback(functools.partial(_collect, call=call), results)(rank, numbers)


def _callback(function: Any, results: Any) -> Any:
    return buffer_callback(function, results, has_side_effect=True)


def _no_vmap(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "attention does not support jax.vmap: pack the sequences into one batch [tokens, heads, dim], with the end of each in "
        "cu_seqlens"
    )


def _no_derivative(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "attention is differentiable once, in reverse mode, and its gradients were differentiated: use jax.lax.stop_gradient on "
        "them, or compute second derivatives without cpattn"
    )


_shape: Any = jax.ShapeDtypeStruct
operation: Any = Primitive("cpattn_attention")
operation.multiple_results = True
operation.def_abstract_eval(_shapes)
_compiled = jax.jit(operation.bind, static_argnames=("call",))


def _eagerly(*operands: Any, call: Call) -> Any:
    # Callbacks must be compiled, also under jax.disable_jit.
    with jax.disable_jit(False):
        return _compiled(*operands, call=call)


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    if (devices := getattr(ctx.module_context.axis_context, "num_devices", 1)) > 1:
        raise Unsupported(
            f"attention of one rank was called where the compiler divides arrays over {devices} devices, but it cannot divide attention: "
            "give Context the mesh and an axis, or call attention inside jax.shard_map over these devices"
        )
    return _lowering(ctx, *operands, call=call)


_lowering: Any = mlir.lower_fun(_steps, multiple_results=True)
operation.def_impl(_eagerly)
mlir.register_lowering(operation, _lower, platform="cpu")
batching.primitive_batchers[operation] = _no_vmap
ad.primitive_jvps[operation] = _no_derivative


Slices = tuple[Slice, ...] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def attention(
    context: Context, layer: Layer, slices: Slices, with_lse: bool, q: Any, k: Any, v: Any, ends: Any, sinks: Any
) -> Any:
    """o, or o and lse [heads, rows]."""
    return _attend(context, layer, slices, with_lse, q, k, v, ends, sinks)[0]


def _attend(context: Context, layer: Layer, slices: Slices, with_lse: bool, *inputs: Any) -> Any:
    *operands, sinks = inputs
    operands += () if sinks is None else (sinks,)
    o, lse = operation.bind(*operands, call=Call(context, layer, slices, sinks_of(sinks), False, False))
    return (o, lse[:, :, 0]) if with_lse else o, (*operands, o, lse)


def _gradients(context: Context, layer: Layer, slices: Slices, with_lse: bool, residuals: Any, cotangents: Any) -> Any:
    sinks = residuals[4] if len(residuals) == 7 else None
    call = Call(context, layer, slices, sinks_of(sinks), with_lse, True)
    dq, dk, dv, *dsinks = operation.bind(*residuals, *(cotangents if with_lse else (cotangents,)), call=call)
    return dq, dk, dv, None, dsinks[0] if dsinks else None


attention.defvjp(_attend, _gradients)
