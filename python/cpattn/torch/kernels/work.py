# SPDX-License-Identifier: MIT OR Apache-2.0
"""All attention of one operation of a schedule, by any kernel.

A `Work` is made once for a plan, on the host: tables of rows and limits go to the device then, and a run only calls PyTorch. It
computes the rows of the operation's q ranges, in their order; `rows` says which rows of the q view these are. What the modes of
ranges ask for, storing, merging with earlier parts and sinks, is not done here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import InvalidArgument, Unsupported
from ...schedule import Gradients, Op, View
from .kernel import Kernel
from .math import accumulator
from .packed import ByRectangles
from .rows import Rows, groups_of
from .scratch import Fresh


F = TypeVar("F", bound=Callable[..., Any])


def without_gradients(method: F) -> F:
    """As `torch.no_grad`, which makes two objects in each call, 4 µs, also where gradients are off, as they are in every run of the
    executor."""

    @wraps(method)
    def called(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return method(*arguments, **named)
        with torch.no_grad():
            return method(*arguments, **named)

    return called  # type: ignore[return-value]


class Work:
    """`slopes` of ALiBi are those of all heads of the model, [heads], or [documents, heads]. Results are in memory of `room` (None: of their
    own), which its owner begins.

    `calls` describes each call of the kernel, for `explain`."""

    rows: Tensor | slice
    count: int
    calls: list[dict[str, Any]]

    def __init__(
        self,
        kernel: Kernel,
        op: Op,
        device: torch.device | str,
        dtype: torch.dtype,
        slopes: Tensor | None = None,
        room: Fresh | None = None,
    ):
        if op.q is None or op.k is None or op.v is None:
            raise InvalidArgument(f"op.kind is {op.kind.name}, ATTEND or ATTEND_BACKWARD is needed")
        self.kernel, self.op, self.device, self.dtype = kernel.of(dtype), op, torch.device(device), dtype
        self.room, self.accumulator = room or Fresh(self.device), accumulator(dtype)
        self.q, self.k, self.v = op.q, op.k, op.v
        self.rows, self.count = rows_of(op, self.device)
        self.gradients, self.kv = gradients_of(op), kv_of(op, op.q)
        self._runner = (ByRows if self.kernel.form == "rows" else ByRectangles)(self, slopes)
        self.calls = self._runner.calls

    @without_gradients
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """o [rows, heads, value dim] and lse [heads, rows], in f32 (f64 for f64), of `rows`, from the views of q, k and v. Rows without
        keys have o = 0 and lse = -inf."""
        return self._runner.forward(q, k, v)

    @without_gradients
    def forward_with_max(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `forward`, with the largest score of each head, -inf without any. For kernels that honour `max_logit`."""
        if not isinstance(self._runner, ByRows) or not self.kernel.honours.max_logit:
            raise Unsupported(
                f"kernels={self.kernel.name!r} returns no largest scores: return_max_logit is True, False is needed"
            )
        return self._runner.forward_with_max(q, k, v)

    @without_gradients
    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        delta: Tensor,
        lse_gradient: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dq of `rows`, and dk and dv of all rows of the k view, in f32 (f64 for f64). Rows without pairs have zeros; gradients that the
        operation does not have are None. dk and dv have the heads of q with `per_q_head`.

        d_o [rows, heads, value dim], lse and delta [rows, heads] are the operation's q view, of any strides: final ones, delta less the
        gradient of lse. `lse_gradient` says that the loss has one, without which delta is 0 where d_o is. `o` is not used."""
        dq, dk, dv = self._runner.backward(d_o, q, k, v, lse, delta, lse_gradient)
        queries, keys = self.gradients
        return dq if queries else None, dk if keys else None, dv if keys else None

    def mine(self, x: Tensor) -> Tensor:
        """The rows of a q view that this work computes, in its order."""
        return self.room.take(x, self.rows)


class ByRows:
    """Calls of a kernel whose form is "rows": one for the operation."""

    def __init__(self, work: Work, slopes: Tensor | None):
        self.work, self.kernel, op = work, work.kernel, work.op
        queries, keys = work.gradients
        groups = groups_of(op, work.device, slopes)
        score = op.score
        self.call = Rows(
            groups,
            work.kv.to(work.device),
            work.k.heads,
            score.scale,
            score.softcap,
            bool(op.per_q_head),
            queries,
            keys,
        )
        self.kernel.prepare(self.call)
        rows = sum(len(group.rows) for group in groups)
        self.calls = [{"kernel": self.kernel.name, "rows": rows, "groups": len(groups)}] if groups else []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(self.work.mine(q), k, v, self.call)

    def forward_with_max(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kernel: Any = self.kernel
        result: tuple[Tensor, Tensor, Tensor] = kernel.forward_with_max(self.work.mine(q), k, v, self.call)
        return result

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lse_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_o, q, lse, delta = (self.work.mine(x) for x in (d_o, q, lse, delta))
        return self.kernel.backward(d_o, q, k, v, None, lse.T, self.call, delta=delta.T)


def kv_of(op: Op, q: View) -> Tensor:
    """The kv head of the call that each q head of the call uses."""
    return (
        torch.div(torch.arange(q.heads, device="cpu") + op.heads.q_offset, op.heads.group, rounding_mode="floor")
        - op.heads.kv_offset
    )


def gradients_of(op: Op) -> tuple[bool, bool]:
    """Whether the operation has dq, and dk and dv."""
    return op.gradients != Gradients.KEYS, op.gradients != Gradients.QUERIES


def rows_of(op: Op, device: torch.device) -> tuple[Tensor | slice, int]:
    """The rows of the q view in all q ranges, in their order: a slice if they lie end to end."""
    ranges = [q.range for q in op.ranges if q.range.len]
    count = sum(r.len for r in ranges)
    if all(a.row + a.len == b.row for a, b in zip(ranges, ranges[1:])):
        first = ranges[0].row if ranges else 0
        return slice(first, first + count), count
    return torch.cat([torch.arange(r.row, r.row + r.len, device="cpu") for r in ranges]).to(device), count
