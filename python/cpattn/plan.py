# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans: the computation that all ranks agree on, and which rank holds which tokens.

A plan is a value. It is made from the documents of a batch, the same on every rank, and runs any number of times. The terms
are those of the header (`include/cpattn.h`). `PlanOptions` explains each option.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t, c_uint64, c_void_p, pointer
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _header
from .arguments import c_array, flag, instance, one_of, refused
from ._header import UNLIMITED
from ._library import call, status_of, text_of
from ._signature import named, resolved, spelled
from .errors import InvalidArgument
from .options import (
    RUNS,
    AllToAll,
    CombineTo,
    Direction,
    Dtype,
    Layout,
    PlanOptions,
    ScanForm,
    Side,
    at_least_1,
    checked,
    dtype_of,
    kinds_of,
)
from .slices import Slice, c_slices
from .slices import checked as checked_slices
from .tensors import Array, Given

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .schedule import Schedule


def _documents(cu_seqlens: Any, cu_seqlens_k: Any, q_start: Any, slices: Any, world: int) -> dict[str, Any]:
    ends = c_array("cu_seqlens", c_int32, cu_seqlens)
    if not len(ends):
        raise InvalidArgument("cu_seqlens has length 0, at least 1 is needed: give [0] for no documents")
    ends_k = None if cu_seqlens_k is None else c_array("cu_seqlens_k", c_int32, cu_seqlens_k, len(ends))
    for name, first in (("cu_seqlens", ends), ("cu_seqlens_k", ends_k)):
        if first is not None and first[0] != 0:
            raise InvalidArgument(
                f"{name}[0] is {first[0]}, 0 is needed: {name} are offsets (0, the end of the first document, ..., the number of tokens), not lengths"
            )
    members: dict[str, Any] = {"cu_seqlens_q": ends, "documents": len(ends) - 1, "world": at_least_1("world", world)}
    if ends_k is not None:
        members["cu_seqlens_k"] = ends_k
    if q_start is not None:
        members["q_start"] = c_array("q_start", c_int64, q_start, len(ends) - 1)
    return members | _slices(slices)


def _slices(slices: Iterable[Slice] | None) -> dict[str, Any]:
    if slices is None:
        return {}
    every = checked_slices("slices", slices)
    rows = c_slices(every)
    return {"of_slices": every, "slices": rows, "slice_count": len(rows)}


@resolved
class Segment(NamedTuple):
    """As many of a rank's tokens, in its order, as follow one another in one document: positions `begin` to `end` - 1 of `document`."""

    document: int
    begin: int
    end: int


def scan_of(
    heads: int, key_dim: int, value_dim: int, matrix: bool, reverse: bool, form: ScanForm | str, dtype: Any
) -> _header.Scan:
    """A scan, for C."""
    return _header.Scan(
        decay=_header.DECAY_MATRIX if flag("matrix", matrix) else _header.DECAY_DIAGONAL,
        heads=at_least_1("heads", heads),
        key_dim=at_least_1("key_dim", key_dim),
        value_dim=at_least_1("value_dim", value_dim),
        dtype=dtype_of(dtype).value,
        reverse=int(flag("reverse", reverse)),
        form=one_of("form", form, ScanForm).value,
    )


@resolved
class PlanInfo(NamedTuple):
    """What `Plan.describe` returns.

    world ranks are `replicas` times ring times ulysses. layout is the one in use, never AUTO. ranks_per_node is as in
    `PlanOptions`: given there, or by the machine. q_tokens and k_tokens are of the whole batch. Equal plans have equal fingerprints.
    """

    world: int
    replicas: int
    ring: int
    ulysses: int
    layout: Layout
    layout_parameter: int
    ranks_per_node: int
    q_tokens: int
    k_tokens: int
    fingerprint: int


@named("cu_seqlens, heads=8, kv_heads=2, head_dim=128", PlanOptions)
class Plan:
    """One attention over one packed batch, and how `world` ranks share it.

    `cu_seqlens` has one entry more than there are documents: 0, the end of the first, ..., the number of tokens. Attention is causal
    unless `window_right` is given. A sliding window of W tokens that includes the query itself is `window_left=W - 1`.

    With `slices` (`cpattn.slices` makes those of common masks) a query attends to what these say and to nothing else, also across
    documents. Documents are then what layouts cut, what positions count in and where labels end. A window applies inside each
    slice, by its positions; without one, slices are not cut.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        heads: int,
        head_dim: int,
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> None:
        members = _documents(cu_seqlens, cu_seqlens_k, q_start, slices, world)
        call("plan_create", *self._describe(members, heads, head_dim, dtype, options), byref(self.handle))

    @classmethod
    @spelled(PlanOptions)
    def auto_on(
        cls,
        cu_seqlens: Sequence[int],
        heads: int,
        head_dim: int,
        machine: str,
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """A plan with the mesh and the layout that are predicted to take the least time on a machine. `machine` is the text of the
        machine's description, as in the folder machines, the same on every rank. ulysses, ring and layout are chosen, not given.
        Without `ranks_per_node`, schedules of one level and of two levels over the machine's nodes are compared; `ranks_per_node`
        equal to `world` means one level. `explain` lists the candidates. This takes longer than `Plan`: for the next batch, give
        `Plan` the mesh, the layout and the `ranks_per_node` of `describe`.
        """
        if not isinstance(machine, str):
            raise refused("machine", machine, "the text of a machine's description is needed")
        if "\0" in machine:  # a C string would end there
            raise InvalidArgument("machine has a zero byte: remove it, the text of a machine's description has none")
        plan, members = cls.__new__(cls), _documents(cu_seqlens, cu_seqlens_k, q_start, slices, world)
        described = plan._describe(members, heads, head_dim, dtype, options)
        call("plan_create_on", *described, machine.encode(), byref(plan.handle))
        plan._how["ranks_per_node"] = plan.describe().ranks_per_node
        return plan

    @classmethod
    @spelled(PlanOptions)
    def with_tokens_of(
        cls,
        base: Plan,
        heads: int,
        head_dim: int,
        *,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object | None = None,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """A plan for another kind of layer over the documents of `base`, with the same tokens on each rank, in the same order. Two
        plans that are made separately may give a rank different tokens, often in equal numbers, so that no shape differs.

        Mesh and layout are those of `base`. So are, unless given, dtype, gather, passes, circulate, circulate_forward, key_rows, wire,
        reproducible, pack_inputs and ranks_per_node. Mask, score and dims have the defaults of `Plan`. Without `slices` the plan has
        those of `base`, if there are any; for a causal layer over such a base give `cpattn.slices.documents(cu_seqlens)`.
        """
        plan, members = cls.__new__(cls), {**instance("base", base, Plan)._how, "world": base.world}
        members |= {"of_slices": base.slices} if slices is None else _slices(slices)
        described = plan._describe(members, heads, head_dim, base.dtype if dtype is None else dtype, options)
        call("plan_with_tokens_of", base.handle, *described, byref(plan.handle))
        return plan

    @classmethod
    @spelled(PlanOptions)
    def auto_for(
        cls,
        cu_seqlens: Sequence[int],
        kinds: Sequence[tuple[int, Mapping[str, Any]]],
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> list[Plan]:
        """The plans of a model with several kinds of layers. A kind is a number of layers and its own keywords of `Plan` (heads,
        head_dim, window_left, slices, ...). `options` are common to all kinds, and `slices` to those that have none of their own. All plans have the same mesh and the same tokens on each rank,
        with the least cost of all layers together. ulysses, ring and layout are chosen, not given.
        """
        members = _documents(cu_seqlens, cu_seqlens_k, q_start, slices, world)
        plans, problems, how, counted = [], [], pointer(_header.Options()), kinds_of("kinds", kinds)
        for _, kind in counted:
            plan, own = cls.__new__(cls), {"dtype": dtype, **options, **kind}
            for name in ("heads", "head_dim"):
                if name not in own:
                    raise InvalidArgument(f"kinds: a kind of layer has no {name}: give each kind its {name}")
            of_kind = members | _slices(own.pop("slices", None))
            heads, head_dim, kind_dtype = own.pop("heads"), own.pop("head_dim"), own.pop("dtype")
            problem, how = plan._describe(of_kind, heads, head_dim, kind_dtype, own)  # type: ignore[arg-type]
            problems.append(problem)
            plans.append(plan)
        layers = (c_uint64 * len(plans))(*(count for count, _ in counted))
        handles = (c_void_p * len(plans))()
        call("plan_auto_for", (POINTER(_header.Problem) * len(plans))(*problems), layers, len(plans), how, handles)
        for plan, handle in zip(plans, handles):
            plan.handle.value = handle
        return plans

    def _describe(
        self, members: dict[str, Any], heads: int, head_dim: int, dtype: Any, options: PlanOptions
    ) -> list[Any]:
        """Pointers to problem and options for the library, from checked arguments. The plan keeps some of them, and gets a handle."""
        self.heads, self.head_dim, self.world = (
            at_least_1("heads", heads),
            at_least_1("head_dim", head_dim),
            members["world"],
        )
        members |= checked(options, self.heads)
        self.settings: dict[str, Any] = {**{name: members[name] for name in RUNS & members.keys()}, **options}
        self.slices: tuple[Slice, ...] | None = members.get("of_slices")
        if self.slices is not None:
            members.setdefault("window_right", UNLIMITED)
        self.kv_heads, self.value_dim = members.get("kv_heads", self.heads), members.get("value_dim", self.head_dim)
        self.dtype = dtype_of(dtype)
        self._how = {name: members[name] for name in RUNS & members.keys()}
        members |= {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        self.handle = c_void_p()
        weakref.finalize(self, status_of, "plan_destroy", self.handle)
        structs = _header.Problem, _header.Options
        return [
            pointer(struct(**{name: members[name] for name, *_ in struct._fields_ if name in members}))
            for struct in structs
        ]

    def describe(self) -> PlanInfo:
        """The plan's mesh, layout, tokens and fingerprint: see `PlanInfo`."""
        info = _header.PlanInfo()
        call("plan_describe", self.handle, byref(info))
        own = {"world": self.world, "layout": Layout(info.layout)}
        return PlanInfo(**{name: own[name] if name in own else getattr(info, name) for name in PlanInfo._fields})

    @cached_property
    def fingerprint(self) -> int:
        """The number by which ranks compare their plans."""
        return self.describe().fingerprint

    @cached_property
    def distribution(self) -> int:
        """A hash of who holds which tokens: equal for two plans exactly if their documents are equal and each rank holds the
        same tokens in the same order. A tensor may be used with every plan of its distribution, and with no other plan."""
        name = c_uint64()
        call("plan_distribution", self.handle, byref(name))
        return name.value

    def share(self, rank: int) -> _header.Share:
        """A rank's place in the mesh, its tokens (q_tokens, k_tokens) and its heads between the two all-to-alls."""
        share = _header.Share()
        call("plan_share", self.handle, rank, byref(share))
        return share

    def explain(self) -> str:
        """A text with the reasons for this mesh, the tokens of each rank, bytes per step, imbalance and workspace."""
        return text_of("plan_explain", self.handle)

    def verify(self) -> None:
        """Verifies the schedules of all ranks. For tests: it takes time and memory."""
        call("plan_verify", self.handle)

    def workspace(self, rank: int, direction: Direction | str) -> int:
        """The bytes of workspace of a run on a rank."""
        size = c_uint64()
        call("plan_workspace", self.handle, rank, one_of("direction", direction, Direction).value, byref(size))
        return size.value

    def schedule(self, rank: int, direction: Direction | str) -> Schedule:
        """What a rank does in one direction, to be executed by your own program: see `cpattn.schedule`."""
        from .schedule import Schedule

        return Schedule.of(self, rank, direction)

    def all_to_all_schedule(
        self, rank: int, direction: AllToAll | str, side: Side | str, dim: int, dtype: Dtype | str | object
    ) -> Schedule:
        """The same for the all-to-all of one tensor with the tokens and heads of a side."""
        from .schedule import Schedule

        return Schedule.of_all_to_all(self, rank, direction, side, dim, dtype)

    def combine_schedule(self, rank: int, to: CombineTo | str, partial: Dtype | str | object) -> Schedule:
        """The same for a combine (`Rank.combine`) of partial results of a type."""
        from .schedule import Schedule

        return Schedule.of_combine(self, rank, to, partial)

    def scan_schedule(
        self,
        rank: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        matrix: bool = False,
        reverse: bool = False,
        form: ScanForm | str = ScanForm.AUTO,
        dtype: Dtype | str | object = Dtype.F32,
    ) -> Schedule:
        """The same for a scan (`Rank.scan`) of states of these heads and dims."""
        from .schedule import Schedule

        return Schedule.of_scan(self, rank, scan_of(heads, key_dim, value_dim, matrix, reverse, form, dtype))

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments of a rank's q tokens, in the rank's order: as many as follow one another in one document."""
        count = c_size_t()
        call("plan_segments", self.handle, rank, None, 0, byref(count))
        every = (_header.Segment * count.value)()
        call("plan_segments", self.handle, rank, every, len(every), byref(count))
        return tuple(Segment(s.document, s.position, s.position + s.tokens) for s in every)

    def tokens(self, side: Side | str, rank: int) -> array[int]:
        """The indices in the batch of a rank's tokens, in the rank's order."""
        return self._numbers("plan_tokens", side, rank)

    def positions(self, side: Side | str, rank: int) -> array[int]:
        """The positions of a rank's tokens in their documents, for example for rotary embeddings."""
        return self._numbers("plan_positions", side, rank)

    def shard(self, side: Side | str, rank: int, whole: Array, local: Array) -> None:
        """Copies a rank's rows of `whole` into `local`, both on the CPU."""
        w, l = Given("whole", whole), Given("local", local, written=True)
        call("plan_shard", self.handle, one_of("side", side, Side).value, rank, w.pointer, l.pointer)

    def unshard(self, side: Side | str, rank: int, local: Array, whole: Array) -> None:
        """Copies a rank's rows in `local` to their places in `whole`, both on the CPU."""
        w, l = Given("whole", whole, written=True), Given("local", local)
        call("plan_unshard", self.handle, one_of("side", side, Side).value, rank, l.pointer, w.pointer)

    def _numbers(self, name: str, side: Side | str, rank: int) -> array[int]:
        share, of = self.share(rank), one_of("side", side, Side)
        numbers = array("q", bytes(8 * (share.q_tokens if of == Side.Q else share.k_tokens)))
        # from_buffer refuses an empty array.
        room = (c_int64 * len(numbers)).from_buffer(numbers) if numbers else (c_int64 * 0)()
        call(name, self.handle, of.value, rank, room, len(numbers))
        return numbers
