# SPDX-License-Identifier: MIT OR Apache-2.0
"""The common part of the frameworks' `Context` and `Batch`: packed documents with one distribution of tokens, and a plan for each
kind of layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

from .arguments import attempt, refused
from .errors import InvalidArgument, InvalidHandle
from .options import Dtype, at_least_1, checked
from .plan import Plan
from .slices import Slice
from .slices import checked as checked_slices
from .slopes import Slopes

B = TypeVar("B")


class Layer(NamedTuple):
    """Options of a layer, as a key of a cache, by the keywords of `Plan`. None: the value of the context."""

    window_left: int | None
    window_right: int | None
    scale: float | None
    softcap: float | None
    dropout: float | None
    alibi_slopes: Slopes | None


class Shaped(Protocol):
    """A tensor of any library."""

    @property
    def shape(self) -> Sequence[int]: ...


def numbers_of(name: str, values: Any) -> tuple[int, ...]:
    """Whole numbers of a sequence, or of an array of any library."""
    numbers = attempt(lambda: tuple(map(operator.index, values.tolist() if hasattr(values, "tolist") else values)))
    if numbers is None:
        raise refused(name, values, "a sequence of whole numbers is needed")
    return numbers


class Packing(NamedTuple):
    """What a batch is, as a key of a cache: its documents, its slices (None: each document attends to itself), and the packing whose
    tokens it has, if that is another one."""

    cu_seqlens: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...] | None = None
    q_start: tuple[int, ...] | None = None
    slices: tuple[Slice, ...] | None = None
    tokens_of: Packing | None = None

    @classmethod
    def of(
        cls, cu_seqlens: Any, cu_seqlens_k: Any = None, q_start: Any = None, slices: Iterable[Slice] | None = None
    ) -> Packing:
        """From arguments, which are refused by their names."""
        ends = numbers_of("cu_seqlens", cu_seqlens)
        of_k = None if cu_seqlens_k is None else numbers_of("cu_seqlens_k", cu_seqlens_k)
        starts = None if q_start is None else numbers_of("q_start", q_start)
        return cls(ends, of_k, starts, None if slices is None else checked_slices("slices", slices))

    @property
    def documents(self) -> dict[str, Any]:
        """The keywords of `Plan` besides cu_seqlens."""
        return {"cu_seqlens_k": self.cu_seqlens_k, "q_start": self.q_start, "slices": self.slices}

    def numbers(self) -> list[int]:
        """The packing as one list: the length of each part, or -1 without it, then the part's numbers."""
        slices = None if self.slices is None else [number for s in self.slices for number in s]
        parts = (self.cu_seqlens, self.cu_seqlens_k, self.q_start, slices, self.tokens_of and self.tokens_of.numbers())
        return [number for part in parts for number in ([-1] if part is None else [len(part), *part])]

    @classmethod
    def from_numbers(cls, numbers: Iterable[int]) -> Packing:
        """The inverse of `numbers`."""
        left = iter(numbers)
        cu_seqlens, cu_seqlens_k, q_start, slices, tokens_of = (_part(left) for _ in cls._fields)
        assert cu_seqlens is not None
        every = None if slices is None else tuple(Slice(*slices[at : at + 7]) for at in range(0, len(slices), 7))
        return cls(cu_seqlens, cu_seqlens_k, q_start, every, None if tokens_of is None else cls.from_numbers(tokens_of))


def _part(numbers: Iterator[int]) -> tuple[int, ...] | None:
    length = next(numbers)
    return None if length < 0 else tuple(islice(numbers, length))


def over_all(plan: Plan) -> Plan:
    """Refuses a plan with several replicas."""
    info = plan.describe()
    if info.replicas != 1:
        raise InvalidArgument(
            f"ulysses {info.ulysses} x ring {info.ring} uses {info.ulysses * info.ring} of the group's {plan.world} ranks, all are needed: "
            "give each replica its own process group"
        )
    return plan


def sinks_of(sinks: Shaped | None) -> int:
    """The number of sinks of each head: `sinks` is [heads] or [heads, n]."""
    return 0 if sinks is None else 1 if len(sinks.shape) < 2 else sinks.shape[1]


def kind_of(q: Shaped, k: Shaped, v: Shaped, dtype: Dtype, sinks: int, layer: Layer) -> dict[str, Any]:
    """The keywords of `Plan` for a layer with these tensors and as many sinks for each head. Refuses invalid values."""
    if q.shape[1] and q.shape[1] % max(k.shape[1], 1):
        more = ": are q and k exchanged?" if k.shape[1] > q.shape[1] else ""
        raise InvalidArgument(
            f"q is of shape {tuple(q.shape)} and k of {tuple(k.shape)}, [tokens, heads, head_dim]: the {q.shape[1]} heads of q are no "
            f"multiple of the {k.shape[1]} kv_heads of k{more}"
        )
    options = {name: value for name, value in layer._asdict().items() if value is not None}
    kind = checked(options, q.shape[1])  # type: ignore[arg-type]
    if kind.pop("alibi_rows", None) is not None:
        kind["alibi_slopes"] = layer.alibi_slopes  # as a key, which an array of C is not
    shape = {
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[2],
        "value_dim": v.shape[2],
        "dtype": dtype,
    }
    return {**kind, **shape, **({"sinks": sinks} if sinks else {})}


class PackedContext:
    """The last `plans` batches of a context that is not closed."""

    def __init__(self, plans: int) -> None:
        self._limit, self._closed = at_least_1("plans", plans), False
        self._batches: dict[Packing, Any] = {}  # least recently used first

    def check_open(self) -> None:
        """Raises InvalidHandle after `close`."""
        if self._closed:
            raise InvalidHandle("the context is closed: make a new one, on all ranks of a group")

    def _cached(self, key: Packing, make: Callable[[Packing], B]) -> B:
        self.check_open()
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
