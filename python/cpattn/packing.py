# SPDX-License-Identifier: MIT OR Apache-2.0
"""The common part of the frameworks' `Context` and `Batch`: packed documents with one distribution of tokens, and a plan for each
kind of layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ._check import attempt, refused
from .errors import InvalidArgument, InvalidHandle
from .plan import Dtype, Plan, at_least_1, checked

B = TypeVar("B")

# window_left, window_right, scale and softcap of a layer; None: the value of the context.
Told = tuple[int | None, int | None, float | None, float | None]
_TOLD = ("window_left", "window_right", "scale", "softcap")


class Shaped(Protocol):
    """A tensor of any library."""

    @property
    def shape(self) -> Sequence[int]: ...


def ends_of(cu_seqlens: Any) -> tuple[int, ...]:
    """The documents of a batch, as a key of a cache."""
    numbers = attempt(lambda: tuple(map(operator.index, cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)))
    if numbers is None:
        raise refused("cu_seqlens", cu_seqlens, "a sequence of whole numbers is needed")
    return numbers


def over_all(plan: Plan) -> Plan:
    """Refuses a plan with several replicas."""
    info = plan.describe()
    if info.replicas != 1:
        raise InvalidArgument(
            f"ulysses {info.ulysses} x ring {info.ring} uses {info.ulysses * info.ring} of the group's {plan.world} ranks, all are needed: "
            "give each replica its own process group"
        )
    return plan


def kind_of(q: Shaped, k: Shaped, v: Shaped, dtype: Dtype, sinks: bool, told: Sequence[Any]) -> dict[str, Any]:
    """The keywords of `Plan` for a layer with these tensors. Refuses invalid values."""
    kind = checked({name: value for name, value in zip(_TOLD, told) if value is not None}, q.shape[1])  # type: ignore[arg-type]
    shape = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "value_dim": v.shape[2], "dtype": dtype}
    return {**kind, **shape, **({"sinks": True} if sinks else {})}


class PackedContext:
    """The last `plans` batches of a context that is not closed."""

    def __init__(self, plans: int) -> None:
        self._limit, self._closed = at_least_1("plans", plans), False
        self._batches: dict[tuple[int, ...], Any] = {}  # least recently used first

    def check_open(self) -> None:
        """Raises InvalidHandle after `close`."""
        if self._closed:
            raise InvalidHandle("the context is closed: make a new one, on all ranks of a group")

    def _cached(self, cu_seqlens: Any, make: Callable[[tuple[int, ...]], B]) -> B:
        self.check_open()
        key = ends_of(cu_seqlens)
        batch: B = self._batches.pop(key, None) or make(key)
        self._batches[key] = batch
        if len(self._batches) > self._limit:
            del self._batches[next(iter(self._batches))]
        return batch


class Packed:
    """A plan, and plans with its tokens for other kinds of layers."""

    def __init__(self, plan: Plan, common: Mapping[str, Any]) -> None:
        """`common` are the default keywords of `Plan` for a layer."""
        self.plan, self._common = plan, common
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def _plan_of(self, kind: Mapping[str, Any]) -> Plan:
        key = tuple(sorted(kind.items()))
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = Plan.with_tokens_of(self.plan, **{**self._common, **kind})
        return plan
