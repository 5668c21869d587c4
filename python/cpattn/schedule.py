# SPDX-License-Identifier: MIT OR Apache-2.0
"""Schedules: what a rank does in one direction of a plan, as data, for programs that execute it on their own streams and
communicator (`Plan.schedule`).

The header explains each field (`cpattn_op` and what it refers to). All is copied out of the library: a schedule needs neither the
plan nor a handle. `examples/python/execute_schedule.py` executes schedules with PyTorch alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from ctypes import byref, c_void_p, cast, sizeof
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import _header
from .arguments import one_of
from ._library import call, status_of
from ._signature import resolved
from .options import AllToAll, CombineTo, Direction, Dtype, Side, at_least_1, dtype_of
from .plan import Plan


class Tensor(enum.IntEnum):
    """The caller's tensors, [tokens, heads, dim]. LSE, D_LSE and PARTIAL_LSE are [tokens, heads, 1], MAX_LOGIT [1, heads, 1]. SINKS and
    DSINKS are [1, heads, n] for n sinks of each head; in a reproducible plan the buffers before SINK_TOTAL are [1, heads, 28·n]: exact
    sums of 28 words for each sink. OWN_... are of an all-to-all, PARTIAL_... of a combine, the last three of a scan."""

    Q, K, V, O, LSE, D_O, DQ, DK, DV, SINKS, DSINKS, D_LSE, MAX_LOGIT, OWN_TOKENS, OWN_HEADS, PARTIAL_O, PARTIAL_LSE = (
        range(17)
    )
    DECAY, STATE, INITIAL_STATE = range(17, 20)


class OpKind(enum.IntEnum):
    """DELTA: delta = rowsum(d_o·o). SINK_GRADIENT: dsinks = -sum of exp(sink - lse)·delta over rows. SINK_TOTAL, SUM: `sums`. MERGE:
    `sums` in pairs, o and then its lse. EXCHANGE: `messages`. ATTEND, ATTEND_BACKWARD: `ranges`.
    COMBINE: `sums`, one of o and one of its lse: all sources are merged in order, and the sinks applied. COMPOSE, COMPOSE_MATRIX: `sums`,
    each dst = source 0 · source 1, plus source 2 if there is one; source 0 is a decay, of numbers or a matrix."""

    DELTA, SINK_GRADIENT, SINK_TOTAL, SUM, MERGE, EXCHANGE, ATTEND, ATTEND_BACKWARD, COMBINE = range(9)
    COMPOSE, COMPOSE_MATRIX = 9, 10


class Lane(enum.IntEnum):
    COMPUTE, COMMUNICATION = range(2)


class Mode(enum.IntEnum):
    """How a q range's result is stored. FIRST writes the running result, MERGE merges into it; LAST and ONLY apply the sink and write o and
    lse, LAST after a merge. In the backward FIRST and ONLY write dq, MERGE and LAST add to it."""

    FIRST, MERGE, LAST, ONLY = range(4)

    @property
    def continues(self) -> bool:
        return self in (Mode.MERGE, Mode.LAST)

    @property
    def finishes(self) -> bool:
        return self in (Mode.LAST, Mode.ONLY)


class Gradients(enum.IntEnum):
    """The gradients that a call computes: all, dq only, dk and dv only."""

    ALL, QUERIES, KEYS = range(3)


@resolved
class Buffer(NamedTuple):
    """[rows, heads, dim]: a tensor of the caller, or one in the workspace, compact, from byte `offset` on."""

    name: str
    tensor: Tensor | None
    dtype: Dtype
    rows: int
    heads: int
    dim: int
    offset: int
    written: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.heads, self.dim


@resolved
class View(NamedTuple):
    """Rows and heads of a buffer: `buffers[view.buffer][view.place]`."""

    row: int
    rows: int
    buffer: int
    head: int
    heads: int

    @property
    def place(self) -> tuple[slice, slice]:
        return slice(self.row, self.row + self.rows), slice(self.head, self.head + self.heads)


@resolved
class OpMessage(NamedTuple):
    """Whole rows of a buffer, contiguous in a compact one: `bytes` bytes from `offset` on. `tag` counts the messages of the schedule from
    the sender to the receiver; both have the same."""

    view: View
    offset: int
    bytes: int
    peer: int
    tag: int
    send: bool


@resolved
class Sum(NamedTuple):
    """`dst` = the sum of `sources`, in f32 or f64; zeros without any. Sums of one part run in any order, parts one after another."""

    dst: View
    sources: tuple[View, ...]
    part: int


@resolved
class Range(NamedTuple):
    """Rows of a view: row `row + i` has the position pos + (i // block)·period + i % block in document `doc`."""

    row: int
    pos: int
    len: int
    block: int
    period: int
    doc: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.len)


@resolved
class Band(NamedTuple):
    """A q row at position x and a k row at y are a pair if q_begin <= x < q_end, k_begin <= y < k_end, low <= y - x + shift <= high, and the
    window of the score allows this distance too."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    low: int
    high: int
    shift: int


@resolved
class QRange(NamedTuple):
    """Rows of q, the tokens of q and k of their whole document, how their result is stored, and the k ranges that they attend to."""

    range: Range
    document: tuple[int, int]
    mode: Mode
    pairs: tuple[tuple[Range, Band], ...]


@resolved
class HeadMap(NamedTuple):
    """q head h of the call is head q_offset + h of the model, and uses kv head (q_offset + h) // group - kv_offset of the call."""

    q_offset: int
    kv_offset: int
    group: int


@resolved
class Score(NamedTuple):
    scale: float
    softcap: float
    window_left: int
    window_right: int


@resolved
@dataclass(frozen=True)
class Op:
    """One operation. Lists and views that its kind does not have are empty and None.

    It begins after the operation before it on its lane, and after operation `after` of the other lane, if there is one.
    """

    kind: OpKind
    lane: Lane
    after: int | None
    name: str
    phase: str
    step: int
    messages: tuple[OpMessage, ...]
    sums: tuple[Sum, ...]
    q: View | None
    k: View | None
    v: View | None
    running: View | None
    running_lse: View | None
    o: View | None
    lse: View | None
    d_o: View | None
    delta: View | None
    dq: View | None
    dk: View | None
    dv: View | None
    sinks: View | None
    dsinks: View | None
    heads: HeadMap
    aligned: bool
    accumulate_keys: bool
    per_q_head: bool
    gradients: Gradients
    score: Score
    ranges: tuple[QRange, ...]
    k_ranges: tuple[Range, ...]


@resolved
@dataclass(frozen=True)
class Schedule:
    """A rank's operations in one direction; None for a combine and a scan. Views name buffers by their index in `buffers`."""

    rank: int
    direction: Direction | AllToAll | None
    workspace_bytes: int
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]

    @classmethod
    def of(cls, plan: Plan, rank: int, direction: Direction | str) -> Schedule:
        """The schedule of a plan: `Plan.schedule`."""
        way, handle = one_of("direction", direction, Direction), c_void_p()
        call("schedule_create", plan.handle, rank, way.value, byref(handle))
        return cls._copied(handle, rank, way)

    @classmethod
    def of_all_to_all(
        cls, plan: Plan, rank: int, direction: AllToAll | str, side: Side | str, dim: int, dtype: Any
    ) -> Schedule:
        """The schedule of an all-to-all: `Plan.all_to_all_schedule`."""
        way, handle = one_of("direction", direction, AllToAll), c_void_p()
        of = way.value, one_of("side", side, Side).value, at_least_1("dim", dim), dtype_of(dtype).value
        call("schedule_create_all_to_all", plan.handle, rank, *of, byref(handle))
        return cls._copied(handle, rank, way)

    @classmethod
    def of_combine(cls, plan: Plan, rank: int, to: CombineTo | str, partial: Any) -> Schedule:
        """The schedule of a combine: `Plan.combine_schedule`."""
        handle, of = c_void_p(), (one_of("to", to, CombineTo).value, dtype_of(partial, "partial").value)
        call("schedule_create_combine", plan.handle, rank, *of, byref(handle))
        return cls._copied(handle, rank, None)

    @classmethod
    def of_scan(cls, plan: Plan, rank: int, scan: _header.Scan) -> Schedule:
        """The schedule of a scan: `Plan.scan_schedule`."""
        handle = c_void_p()
        call("schedule_create_scan", plan.handle, rank, byref(scan), byref(handle))
        return cls._copied(handle, rank, None)

    @classmethod
    def _copied(cls, handle: c_void_p, rank: int, way: Direction | AllToAll | None) -> Schedule:
        """What a handle has, which is destroyed."""
        info = _header.ScheduleInfo()
        try:
            call("schedule_describe", handle, byref(info))
            buffers = tuple(
                Buffer(
                    b.name.decode(),
                    None if b.tensor < 0 else Tensor(b.tensor),
                    Dtype(b.dtype),
                    b.rows,
                    b.heads,
                    b.dim,
                    b.offset,
                    bool(b.written),
                )
                for b in _array(info.buffers, info.buffer_count)
            )
            ops = tuple(_op(handle, index) for index in range(info.op_count))
        finally:
            status_of("schedule_destroy", handle)
        return cls(rank, way, info.workspace_bytes, buffers, ops)


def _array(first: Any, count: int, size: int = 0) -> Iterator[Any]:
    """The structs of an array of the library, whose elements may be larger than this header's."""
    start, kind = cast(first, c_void_p).value or 0, first._type_
    return (kind.from_address(start + at * (size or sizeof(kind))) for at in range(count))


def _tuple(of: Any, struct: Any) -> Any:
    return of(*(getattr(struct, field) for field in of._fields))


def _view(struct: Any) -> View:
    view: View = _tuple(View, struct)
    return view


def _op(handle: c_void_p, index: int) -> Op:
    op = _header.Op()
    call("schedule_op", handle, index, byref(op))
    messages = (
        OpMessage(_view(m.view), m.offset, m.bytes, m.peer, m.tag, bool(m.send))
        for m in _array(op.messages, op.message_count)
    )
    sources = [_view(v) for v in _array(op.sources, op.source_count)]
    sums = (
        Sum(_view(s.dst), tuple(sources[s.sources_begin : s.sources_end]), s.part)
        for s in _array(op.sums, op.sum_count)
    )
    lists = op.ranges
    k: tuple[Range, ...] = tuple(_tuple(Range, r) for r in _array(lists.k, lists.k_count))
    bands: list[Band] = [_tuple(Band, b) for b in _array(lists.bands, lists.band_count)]
    pairs = [(k[p.k], bands[p.band]) for p in _array(lists.pairs, lists.pair_count, op.pair_size)]
    ranges = (
        QRange(_tuple(Range, q.range), tuple(q.document), Mode(q.mode), tuple(pairs[q.keys_begin : q.keys_end]))
        for q in _array(lists.q, lists.q_count, op.q_range_size)
    )
    names = "q k v running running_lse o lse d_o delta dq dk dv sinks dsinks".split()
    views = {name: _view(found) if (found := getattr(op, name)).heads else None for name in names}
    return Op(
        kind=OpKind(op.kind),
        lane=Lane(op.lane),
        after=None if op.after < 0 else op.after,
        name=op.name.decode(),
        phase=op.phase.decode(),
        step=op.step,
        messages=tuple(messages),
        sums=tuple(sums),
        heads=_tuple(HeadMap, op.heads),
        aligned=bool(op.aligned),
        accumulate_keys=bool(op.accumulate_keys),
        per_q_head=bool(op.per_q_head),
        gradients=Gradients(op.gradients),
        score=_tuple(Score, op.score),
        ranges=tuple(ranges),
        k_ranges=k,
        **views,
    )
