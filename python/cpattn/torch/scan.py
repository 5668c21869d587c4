# SPDX-License-Identifier: MIT OR Apache-2.0
"""States of recurrent layers passed on along documents: `Batch.segments` and `Batch.scan`.

A rank runs a layer's own kernel over each of its segments from a zero state, and `scan` gives it the state before each. What travels
are states, whose size does not depend on the tokens. The gradient of a scan is a scan the other way, so both are one operator, which
torch.compile keeps in its graphs as it keeps attention. Both are calls of all ranks, so a rank whose decays and states are constants
takes part in the backward pass too.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._library.effects import EffectType

from ..arguments import flag, one_of
from ..errors import InvalidArgument
from ..options import ScanForm
from ..plan import Plan, Segment
from . import operators
from .executor.moves import product

if TYPE_CHECKING:
    from .context import Batch, Context


def _scan(batch: Batch, decay: Tensor, state: Tensor, matrix: bool, reverse: bool, form: ScanForm) -> Tensor:
    """The initial states of this rank's segments, from compact tensors of `Rank.scan`."""
    decay, state = decay.detach().contiguous(), state.detach().contiguous()
    initial = torch.empty_like(state)
    tensors = {"decay": decay, "state": state, "initial_state": initial}
    with torch.autocast(state.device.type, enabled=False):  # kernels of PyTorch keep to the type of the states
        batch.context.rank.scan(batch.plan, **tensors, matrix=matrix, reverse=reverse, form=form)
    return initial


def _of_rows(x: Tensor, rows: int) -> Tensor:
    """[segments, heads, dim] as matrices of so many rows."""
    return x.reshape(*x.shape[:2], rows, x.shape[2] // rows)


def _transposed(decay: Tensor, matrix: bool) -> Tensor:
    """Decays of the reverse scan: transposed matrices."""
    if not matrix:
        return decay
    rows = math.isqrt(decay.shape[2])
    return _of_rows(decay, rows).transpose(2, 3).flatten(2)


def _decay_gradient(of_state: Tensor, initial: Tensor, decay: Tensor, matrix: bool) -> Tensor:
    """The gradient of decays, from that of the states and the initial states."""
    rows = math.isqrt(decay.shape[2]) if matrix else decay.shape[2]
    of_state, initial = _of_rows(of_state, rows), _of_rows(initial, rows)
    if matrix:
        return product(of_state, initial.transpose(2, 3)).flatten(2)
    return (of_state * initial).sum(3)


class _Scanned(torch.autograd.Function):
    """A scan in eager mode. Its backward is a scan too, and so may be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, state: Tensor, batch: Batch, matrix: bool, reverse: bool, form: ScanForm
    ) -> Tensor:
        initial = _scan(batch, decay, state, matrix, reverse, form)
        ctx.save_for_backward(decay, initial)
        ctx.rest = batch, matrix, reverse, form
        return initial

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (decay, initial), (batch, matrix, reverse, form) = ctx.saved_tensors, ctx.rest
        transposed = _transposed(decay, matrix)
        of_state = _Scanned.apply(transposed, gradient, batch, matrix, not reverse, form)  # type: ignore[no-untyped-call]
        wanted = ctx.needs_input_grad[0]
        of_decay = _decay_gradient(of_state, initial, decay, matrix) if wanted else None
        return of_decay, of_state, None, None, None, None


def _operator() -> Any:
    schema = "(Tensor decay, Tensor state, bool matrix, bool reverse, int form, Tensor packing, int context) -> Tensor"

    def run(
        decay: Tensor, state: Tensor, matrix: bool, reverse: bool, form: int, packing: Tensor, context: int
    ) -> Tensor:
        return _scan(operators._batch(packing, context), decay, state, matrix, reverse, ScanForm(form))

    operator = torch.library.custom_op("cpattn::scan", run, mutates_args=(), schema=schema)
    operator.register_effect(EffectType.ORDERED)

    def shapes(decay: Tensor, state: Tensor, *_: Any) -> Tensor:
        operators._keep_order()
        return state.new_empty(state.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        decay, _, *ctx.numbers, packing, ctx.context = inputs
        ctx.save_for_backward(decay, output, packing)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        decay, initial, packing = ctx.saved_tensors
        matrix, reverse, form = ctx.numbers
        of_state = operator(_transposed(decay, matrix), gradient, matrix, not reverse, form, packing, ctx.context)
        return _decay_gradient(of_state, initial, decay, matrix), of_state, *(None,) * 5

    operator.register_fake(shapes)
    operator.register_autograd(backward, setup_context=save)
    return operator


scan_operator = _operator()


class Scanning:
    """The methods of a batch for layers whose states travel."""

    context: Context
    plan: Plan
    _numbers: Tensor

    @cached_property
    def _anchor(self) -> Tensor:
        """A zero that requires grad: what it is added to does too, in graphs as well."""
        with torch.inference_mode(False):
            return torch.zeros((), device=self.context.device, requires_grad=True)

    def segments(self) -> tuple[Segment, ...]:
        """This rank's segments, in the order of its tokens: as many tokens as follow one another in one document, positions `begin` to
        `end` - 1 of `document`. A recurrent layer runs over each of them without a break."""
        return self._own_segments

    @cached_property
    def _own_segments(self) -> tuple[Segment, ...]:
        return self.plan.segments(self.context.number)

    def scan(
        self, decay: Tensor, state: Tensor, *, matrix: bool = False, form: ScanForm | str = ScanForm.AUTO
    ) -> Tensor:
        """The state before each of this rank's segments, for a recurrent layer that was run over each from a zero state. Along a
        document, in the order of positions, `initial[next] = decay · initial + state` from segment to segment, and zeros before the first.
        Differentiable. All ranks call it, with the same dims.

        The backward pass is a call of all ranks too: on each rank the loss must depend on the result, also with [0, ...] tensors:
        `loss + 0 * initial.sum()`. With gradients enabled the result requires grad on every rank, even where decay and state are constants,
        since other ranks may need this one. For layers that no gradient goes through on any rank, call it under `torch.no_grad()`.

        `state` is [segments, ...], the end state of each segment, float32 or float64. `decay` is what a segment leaves of the state before it: of
        the same number of dims, it multiplies the state element by element, and dims of 1 are for all of the state's. With `matrix`, `state` is
        [segments, ..., K, V], and `decay`, [segments, ..., K, K], is multiplied by it. The result has the shape of `state`. The decay of
        a document's first segment is not read, and neither are decay and state of its last.

        `form` says how states travel; the default takes the least time by counts of bytes and products over the link of one node.
        "direct" is refused for more than 1,024 segments of a document, every form for more than 4,096.
        """
        from .context import Batch

        assert isinstance(self, Batch)
        matrix, form = flag("matrix", matrix), one_of("form", form, ScanForm)
        decay, state, shape = self._compact(decay, state, matrix)
        if torch.is_grad_enabled() and not (decay.requires_grad or state.requires_grad):
            state = state + self._anchor.to(state.dtype)
        if torch.compiler.is_compiling():
            initial: Tensor = scan_operator(decay, state, matrix, False, form.value, self._numbers, self.context.key)
        else:
            initial = _Scanned.apply(decay, state, self, matrix, False, form)  # type: ignore[no-untyped-call]
        return initial.reshape(shape)

    def _compact(self, decay: Tensor, state: Tensor, matrix: bool) -> tuple[Tensor, Tensor, torch.Size]:
        """Decays and states as `Rank.scan` takes them, and the shape of the states."""
        for name, tensor in (("decay", decay), ("state", state)):
            operators.on_device(self.context, name, tensor)
        if state.dtype not in (torch.float32, torch.float64) or decay.dtype != state.dtype:
            raise InvalidArgument(
                f"state.dtype is {state.dtype} and decay.dtype {decay.dtype}, torch.float32 or torch.float64 is needed, one for both: "
                "states are sums over whole documents, convert both to float32"
            )
        shape = state.shape
        least = 3 if matrix else 1
        if state.ndim < least or decay.ndim != state.ndim:
            needed = "[segments, ..., K, V] and [segments, ..., K, K]" if matrix else "as many dims"
            raise InvalidArgument(f"state.ndim is {state.ndim} and decay.ndim {decay.ndim}, {needed} are needed")
        # A graph serves batches with other numbers of segments, which the library checks.
        count = shape[0] if torch.compiler.is_compiling() else len(self._own_segments)
        if shape[0] != count or decay.shape[0] != count:
            raise InvalidArgument(
                f"state has {shape[0]} rows and decay {decay.shape[0]}, {count} are needed: one for each segment of this rank (batch.segments)"
            )
        if not all(shape[1:]):
            raise InvalidArgument(f"state has the shape {tuple(shape)}, at least one number for each segment is needed")
        free = state.ndim - 2 if matrix else state.ndim
        fits = all(d in (1, s) for d, s in zip(decay.shape[:free], shape[:free], strict=True))
        if not fits or (matrix and tuple(decay.shape[free:]) != (shape[free], shape[free])):
            needed = "[segments, ..., K, K] to [segments, ..., K, V]" if matrix else "dims of 1 or as those of state"
            raise InvalidArgument(
                f"decay has the shape {tuple(decay.shape)} and state {tuple(shape)}, {needed} is needed"
            )
        if matrix:
            heads = math.prod(shape[1:free])
            decay = decay.expand(*shape[:free], *decay.shape[free:]).reshape(count, heads, shape[free] ** 2)
            return decay, state.reshape(count, heads, math.prod(shape[free:])), shape
        # The last dims that a number of the decay is for.
        kept = 1
        for at in range(1, free):
            kept = at + 1 if decay.shape[at] != 1 else kept
        rows = math.prod(shape[1:kept])
        decay = decay.expand(*shape[:kept], *decay.shape[kept:]).reshape(count, 1, rows)
        return decay, state.reshape(count, 1, math.prod(shape[1:])), shape
