# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a framework's `Context` and `Batch` have in common: packed documents with one distribution of tokens, on which layers of
several kinds work, each with a plan of its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ._check import attempt, refused
from .errors import InvalidArgument
from .plan import Dtype, Plan, checked

B = TypeVar("B")

# window_left, window_right, scale and softcap of a layer; None: as the context was told.
Told = tuple[int | None, int | None, float | None, float | None]
_TOLD = ("window_left", "window_right", "scale", "softcap")


class Shaped(Protocol):
    """A tensor of whichever library."""

    @property
    def shape(self) -> Sequence[int]: ...


def ends_of(cu_seqlens: Any) -> tuple[int, ...]:
    """The documents of a batch as a key."""
    numbers = attempt(lambda: tuple(map(operator.index, cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)))
    if numbers is None:
        raise refused("cu_seqlens", cu_seqlens, "a sequence of whole numbers is needed")
    return numbers


def recent(batches: dict[tuple[int, ...], B], key: tuple[int, ...], limit: int, make: Callable[[], B]) -> B:
    """The batch of a key; of the last `limit` that were asked for, it is not made again."""
    batch = batches.pop(key, None) or make()
    batches[key] = batch
    if len(batches) > limit:
        del batches[next(iter(batches))]
    return batch


def over_all(plan: Plan) -> Plan:
    """Refuses a plan that leaves ranks over for other batches."""
    info = plan.describe()
    if info.replicas != 1:
        raise InvalidArgument(
            f"ulysses {info.ulysses} x ring {info.ring} uses {info.ulysses * info.ring} of the group's {plan.world} ranks, all are needed: "
            "give each replica its own process group"
        )
    return plan


def kind_of(q: Shaped, k: Shaped, v: Shaped, dtype: Dtype, sinks: bool, told: Sequence[Any]) -> dict[str, Any]:
    """Of a layer with such tensors, as keywords of `Plan`. Refuses values that no plan has."""
    kind = checked({name: value for name, value in zip(_TOLD, told) if value is not None}, q.shape[1])  # type: ignore[arg-type]
    shape = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "value_dim": v.shape[2], "dtype": dtype}
    return {**kind, **shape, **({"sinks": True} if sinks else {})}


class Packed:
    """A plan, and those of layers of other kinds with its tokens."""

    def __init__(self, plan: Plan, common: Mapping[str, Any]) -> None:
        """`common` are the keywords of `Plan` that a layer has unless it says otherwise."""
        self.plan, self._common = plan, common
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def _plan_of(self, kind: Mapping[str, Any]) -> Plan:
        key = tuple(sorted(kind.items()))
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = Plan.with_tokens_of(self.plan, **{**self._common, **kind})
        return plan
