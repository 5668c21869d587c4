# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks: forward and backward over a plan, and groups of ranks as threads of this process."""

from __future__ import annotations

import enum
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_int32, c_size_t, c_uint8, c_uint64, c_void_p, pointer
from functools import partial
from typing import Any, TypeVar

from . import _header, errors
from .arguments import RANGES, c_array, flag, instance, instances, one_of, refused, whole
from ._interruptible import ENDING, Interruptible, no_thread
from ._library import call, status_of
from .engine import EngineTransport
from .options import CombineTo, Direction, Dtype, LseBase, ScanForm, Side
from .plan import Plan, scan_of
from .ring import Link
from .tensors import Array, Given, all_given, whole_numbers
from .trace import Event
from .transport import Callbacks, FirstFailure, Transport

T = TypeVar("T")


class Isa(enum.IntEnum):
    """An instruction set of the CPU kernels. AUTO: the best one of the machine, or the one in the environment
    variable CPATTN_CPU_ISA. One that the machine lacks is refused."""

    AUTO, PORTABLE, NEON, AVX2, AVX512, AVX512_BF16, AMX = range(7)


class Rank:
    """One participant. It runs many plans, one call at a time. Any thread may call `poll` and `abort`."""

    def __init__(self, transport: Transport | c_void_p, *, workers: int = 1, isa: Isa = Isa.AUTO) -> None:
        """Takes ownership of the transport: one written in Python, or a handle of the C interface.

        `workers` are threads of the CPU kernels, more than one in a library built with the feature rayon; `isa` is the
        instruction set of the CPU kernels.
        """
        workers, isa = whole("workers", workers, 1, 1024), one_of("isa", isa, Isa)
        if not isinstance(transport, Transport | c_void_p):
            needed = "a Transport or a handle is needed; for an Engine, use EngineTransport(engine, timeout)"
            raise refused("transport", transport, needed)
        self._transport = transport if isinstance(transport, Transport) else None
        self._first_failure, self._interruptible = FirstFailure(), Interruptible()
        owner: Callbacks | EngineTransport | None = None
        if isinstance(transport, EngineTransport):
            owner, self._first_failure, transport = transport, transport.first_failure, transport.share()
        elif isinstance(transport, Transport):
            owner = self._first_failure = Callbacks(transport)
            transport = owner.create()
        # Without options, a rank has the device of its transport.
        chosen = workers != 1 or isa != Isa.AUTO
        options = byref(_header.RankOptions(workers=workers, isa=isa)) if chosen else None
        self._handle = c_void_p()
        try:
            call("rank_create", transport, options, byref(self._handle))
        except errors.Error:
            destroy("transport_destroy", transport, owner, os.getpid())
            raise
        # Also at the end of the program, while Python can still run callbacks.
        self._end = weakref.finalize(self, destroy, "rank_destroy", self._handle, owner, os.getpid())

    def close(self) -> None:
        """Leaves the group: peers that still need this rank get an error. Further calls are refused."""
        self._end()
        self._interruptible.close()

    def prepare(self, plan: Plan, direction: Direction) -> None:
        """Does everything that may allocate or wait for forward or backward passes; otherwise the first run does it. The first run of an
        all-to-all, a combine or a scan prepares itself."""
        self._run("rank_prepare", _handle(plan), one_of("direction", direction, Direction).value, None)

    def forward(
        self,
        plan: Plan,
        stream: int | c_void_p | None = None,
        *,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        sinks: Array | None = None,
        max_logit: Array | None = None,
        dropout_seed: int | None = None,
        block_table: Array | None = None,
        page_size: int | None = None,
        page_stride: int | None = None,
        key_indices: Array | None = None,
        lse_base: LseBase | str = "natural",
    ) -> None:
        """Writes o and lse of this rank's tokens. On a device it returns when the work is enqueued on `stream` (a cudaStream_t; None
        is the default stream).

        `max_logit`, [heads] f32, is written too, if given: the largest score of each head over the pairs that this rank computed,
        -inf where there is none. The largest over the ranks is that of the batch.

        A plan with dropout needs a `dropout_seed`, from 0 to 2^64 - 1: another one for each layer and step, the same on all ranks, which
        is checked as plans are.

        With `block_table`, int32 [documents, pages] on the rank's device, k and v lie in pages and are not copied: they have the rows of
        all pages, [rows, kv_heads, dim], and row i of this rank's k rows of document d, in its order, is row
        block_table[d, i // page_size] * page_stride + i % page_size (None: page_size). A plan that copies or sends k and v is
        refused: a ring needs circulate_forward="queries", and no Ulysses ranks. Dropout refuses it. On a device entries are not checked:
        those of a document's rows must be pages of k and v.

        With `key_indices`, int32 [tokens, heads, entries] on the CPU, each of this rank's q tokens attends only to the keys that it lists:
        positions in its document, each at most once, that the mask allows; -1 is none. heads is 1, for lists that all kv heads share, or
        the kv heads. All ranks give the same heads and entries. Rows that no token lists may hold anything. In a ring either the listed
        rows of k and v move or those that the mask allows: the plan's option `key_rows`. A ring needs
        circulate_forward="keys" (backward: circulate="keys"). Devices, slices, pages and reproducible plans refuse it.

        `lse` is a natural logarithm, or with `lse_base="base_2"` one to base 2, which devices refuse."""
        operands = all_given({"o", "lse", "max_logit"}, q=q, k=k, v=v, sinks=sinks, o=o, lse=lse, max_logit=max_logit)
        keys = None
        if block_table is not None:
            if key_indices is not None:
                raise errors.Unsupported("key_indices and block_table are both given: gather the pages into k and v")
            keys = _pages(operands, block_table, page_size, page_stride)
        elif lonely := [
            f"{name} is {value!r}"
            for name, value in (("page_size", page_size), ("page_stride", page_stride))
            if value is not None
        ]:
            raise errors.InvalidArgument(f"block_table is None, and {lonely[0]}: give both, or none")
        elif key_indices is not None:
            keys = _lists(operands, key_indices)
        self._attend("forward", _header.ForwardArgs, plan, stream, operands, dropout_seed, keys, lse_base)

    def backward(
        self,
        plan: Plan,
        stream: int | c_void_p | None = None,
        *,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        d_o: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        sinks: Array | None = None,
        dsinks: Array | None = None,
        d_lse: Array | None = None,
        dropout_seed: int | None = None,
        key_indices: Array | None = None,
        lse_base: LseBase | str = "natural",
    ) -> None:
        """Writes dq, dk, dv (and dsinks, summed over all ranks) from d_o and the inputs and outputs of the forward. `d_lse`, [heads,
        tokens], is the gradient of lse, if something was computed from lse too; it is not used where lse is -inf. `dropout_seed` and
        `key_indices` are those of the forward; rows of k and v that no token lists get gradients 0. `lse_base` is that of `lse`, and of
        the lse that `d_lse` is the gradient of."""
        tensors = dict(
            q=q, k=k, v=v, sinks=sinks, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv, dsinks=dsinks, d_lse=d_lse
        )
        operands = all_given({"dq", "dk", "dv", "dsinks"}, **tensors)
        keys = None if key_indices is None else _lists(operands, key_indices)
        self._attend("backward", _header.BackwardArgs, plan, stream, operands, dropout_seed, keys, lse_base)

    def _attend(
        self,
        name: str,
        struct: Any,
        plan: Plan,
        stream: Any,
        operands: dict[str, Given],
        seed: int | None,
        keys: Any,
        lse_base: LseBase | str,
    ) -> None:
        stream, members = _address("stream", stream), {name for name, *_ in struct._fields_}
        args = struct(
            stream=stream,
            lse_base=one_of("lse_base", lse_base, LseBase),
            **{name: g.pointer for name, g in operands.items() if name in members},
        )
        if seed is not None:
            args.dropout_seed = pointer(c_uint64(whole("dropout_seed", seed, *RANGES[c_uint64])))
        if keys is not None:
            args.keys = pointer(keys)
        try:
            self._run(name, _handle(plan), byref(args), keep=operands, stream=stream)
        except errors.InvalidArgument as error:
            if ".dtype is " not in str(error):
                raise
            raise errors.InvalidArgument(f"{error}: convert the tensor, or make the Plan with another dtype") from error

    def to_heads(
        self, plan: Plan, side: Side | str, source: Array, to: Array, stream: int | c_void_p | None = None
    ) -> None:
        """For your own kernel that mixes whole sequences (linear attention, state space models): from this rank's tokens and all
        heads, [own tokens, heads, dim], to all tokens of the ring share, in the layout's order, and this rank's heads (`Plan.share`),
        [tokens, own heads, dim]. `to` is compact. All ranks of the group call it."""
        self._all_to_all("rank_to_heads", plan, side, source, to, stream)

    def to_tokens(
        self, plan: Plan, side: Side | str, source: Array, to: Array, stream: int | c_void_p | None = None
    ) -> None:
        """The inverse of `to_heads`. `source` is compact. If several ranks hold a kv head, `to` gets the sum over them, as for
        gradients."""
        self._all_to_all("rank_to_tokens", plan, side, source, to, stream)

    def _all_to_all(self, name: str, plan: Plan, side: Side | str, source: Array, to: Array, stream: Any) -> None:
        side, stream = one_of("side", side, Side), _address("stream", stream)
        operands = Given("source", source), Given("to", to, written=True)
        self._run(name, _handle(plan), side.value, *(g.pointer for g in operands), stream, keep=operands, stream=stream)

    def combine(
        self,
        plan: Plan,
        to: CombineTo | str = "all",
        stream: int | c_void_p | None = None,
        *,
        partial_o: Array,
        partial_lse: Array,
        o: Array,
        lse: Array,
        sinks: Array | None = None,
        lse_base: LseBase | str = "natural",
    ) -> None:
        """Merges partial results of the same queries over the ring of the plan's mesh: decode context parallelism, where each rank
        has attended to its own part of a cache with any kernel that returns lse. All ranks of the group call it.

        `partial_o`, [tokens, own heads, value_dim], is of all q tokens of the plan's batch and of the heads of `Plan.share` (all of
        them without Ulysses), without sinks; `partial_lse`, [own heads, tokens], is -inf in a row without keys. `o` and `lse` get what
        `to` says: "all" rows, the same bits on every rank; "heads", own heads j*H//R to (j+1)*H//R of ring rank j of R; or "tokens",
        likewise. A row without keys on any rank gets o 0 and lse -inf, or the sink's value. On a device value_dim is a multiple of 8, and
        rows of o begin at multiples of 16 bytes; a graph may hold the call once the same call was made outside of a capture. With
        `lse_base="base_2"`, which devices refuse, both lse are to base 2."""
        to, stream = one_of("to", to, CombineTo), _address("stream", stream)
        operands = all_given({"o", "lse"}, partial_o=partial_o, partial_lse=partial_lse, sinks=sinks, o=o, lse=lse)
        args = _header.CombineArgs(
            stream=stream,
            lse_base=one_of("lse_base", lse_base, LseBase),
            **{name: g.pointer for name, g in operands.items()},
        )
        self._run("rank_combine", _handle(plan), to.value, byref(args), keep=operands, stream=stream)

    def scan(
        self,
        plan: Plan,
        *,
        decay: Array,
        state: Array,
        initial_state: Array,
        matrix: bool = False,
        reverse: bool = False,
        form: ScanForm | str = "auto",
    ) -> None:
        """Passes states of a recurrent layer on along the documents: `initial_state[next] = decay · initial_state + state` from segment to
        segment (`Plan.segments`), in the order of positions, and zeros before the first. All ranks of the group call it, whatever the
        mesh, and give a row for each of their own segments. On the CPU alone.

        `decay` is [segments, heads, key_dim] and `state` [segments, heads, key_dim·value_dim], f32 or f64: a number of the decay scales
        value_dim numbers of the state. With `matrix`, `decay` is [segments, heads, key_dim·key_dim], matrices that are multiplied by the
        state. `initial_state` gets the shape of `state`. All are compact.

        With `reverse`, from the last segment of a document to the first. The gradient of a scan is the reverse scan of the gradient of
        initial_state, with transposed matrices: it gives the gradient of each state."""
        operands = {
            "decay": Given("decay", decay),
            "state": Given("state", state),
            "initial_state": Given("initial_state", initial_state, written=True),
        }
        shapes = {name: _shape(g, name) for name, g in operands.items()}
        of = scan_shape(shapes["decay"], shapes["state"], flag("matrix", matrix))
        bits = operands["state"].pointer.contents.dtype.bits
        scan = scan_of(*of, matrix, reverse, form, Dtype.F64 if bits == 64 else Dtype.F32)
        self._run("rank_scan", _handle(plan), byref(scan), *(g.pointer for g in operands.values()), keep=operands)

    def check_ring(self, bytes: int = 4 << 20) -> list[Link]:
        """Sends bytes over each link and checks them, around the ring in both directions, one link at a time.

        All ranks call it, between runs, with the same number of bytes. Rank 0 gets all links in the order in which they were
        measured, other ranks get the links before their last turn. A PeerError names the link that failed, if this rank was at it,
        and what to try. The group has failed then.
        """
        count, bytes = c_size_t(), ring_bytes(bytes)
        self._call("rank_ring_check", bytes, None, 0, byref(count))
        links = (_header.Link * count.value)()
        job = partial(call, "rank_ring_check", self._handle, bytes, links, len(links), byref(count))
        try:
            self._interruptible(job, self._transport.abort) if self._transport else job()
        except errors.Error as error:
            # The library's message names the link; the exception of a Python transport is the cause.
            failure = self._first_failure.failure
            if isinstance(error, errors.PeerError) and isinstance(failure, errors.PeerError):
                error.peer = failure.peer
            raise error from failure
        return [
            Link(getattr(link, "from"), link.to, link.latency, link.bytes_per_second) for link in links[: count.value]
        ]

    def record(self, capacity: int = 1 << 16) -> None:
        """Starts to record this rank's operations, at most `capacity` of them; 0 stops."""
        self._call("rank_record", capacity)

    def trace(self) -> list[Event]:
        """Returns the recorded events and removes them. Times are on this process's clock (`clock`)."""
        count = c_size_t()
        self._call("rank_trace", None, 0, byref(count))
        events = (_header.Event * count.value)()
        self._call("rank_trace", events, len(events), byref(count))
        return [
            Event(e.rank, e.lane, e.name.decode(), e.phase.decode(), e.step, e.start_ns, e.end_ns, e.bytes)
            for e in events[: count.value]
        ]

    def gather_trace(self) -> list[Event]:
        """On rank 0: returns the recorded events of all ranks and removes them, with times on rank 0's clock. On other ranks: an
        empty list. All ranks call it, between runs, over any transport.

        Clocks are compared over the transport. The error is at most half of the quickest of 16 round trips."""
        self._run("rank_gather_trace")
        return self.trace()

    def shift(self, plan: Plan, by: int, fill: Array, rows: Array, out: Array) -> None:
        """Writes to `out`, for each of this rank's q tokens, the row of `rows` of the token that is `by` tokens later in the document,
        which another rank may hold; `fill` where the document has no such token. All ranks call it, between runs.

        `rows` and `out` have one row for each of this rank's tokens, and `fill` is a tensor of one element, which may differ between
        ranks. All three are on the CPU, also for a rank on a device."""
        handle, operands = _handle(plan), (Given("fill", fill), Given("rows", rows), Given("out", out, written=True))
        one, of = (tensor.pointer.contents for tensor in operands[:2])
        count, kinds = (
            math.prod(one.shape[: one.ndim]),
            [(t.dtype.code, t.dtype.bits, t.device.device_type) for t in (one, of)],
        )
        if kinds[0] != kinds[1] or count != 1:
            found, needed = (
                f"DLPack type {code}, {bits} bits, on device type {device}" for code, bits, device in kinds
            )
            raise errors.InvalidArgument(
                f"fill has {count} elements of {found}, and rows has {needed}: give fill 1 element of the type of rows"
            )
        address = c_void_p(one.data + one.byte_offset)
        self._run("rank_shift", handle, by, address, operands[1].pointer, operands[2].pointer, keep=operands)

    def poll(self) -> None:
        """Raises if anything has failed so far on any rank. Never waits."""
        self._call("rank_poll")

    def abort(self) -> None:
        """Ends the run on every rank, for good."""
        self._call("rank_abort")

    def _run(self, name: str, *arguments: object, keep: object = None, stream: object = None) -> None:
        """A call that may wait for other ranks, and that Ctrl-C ends. `keep` stays alive during the call, also after an interrupt."""
        if self._transport is None or stream is not None:
            return self._call(name, *arguments)

        def job(_keep: object = keep) -> None:
            self._call(name, *arguments)

        self._interruptible(job, self._transport.abort)

    def _call(self, name: str, *arguments: object) -> None:
        if not self._handle:
            raise errors.InvalidHandle(f"cpattn_{name}: this rank is closed: make a new one")
        self._interruptible.check_process()
        self._first_failure.call(name, self._handle, *arguments)


def _shape(given: Given, name: str) -> tuple[int, ...]:
    """The shape of a tensor of a scan."""
    of = given.pointer.contents
    if of.ndim != 3:
        raise errors.InvalidArgument(f"{name}.ndim is {of.ndim}, 3 is needed: [segments, heads, dim]")
    return tuple(of.shape[: of.ndim])


def scan_shape(decay: Sequence[int], state: Sequence[int], matrix: bool) -> tuple[int, int, int]:
    """Heads, key_dim and value_dim of a scan of these shapes."""
    key_dim = math.isqrt(decay[2]) if matrix else decay[2]
    if key_dim < 1 or (matrix and key_dim**2 != decay[2]) or state[2] < 1 or state[2] % key_dim or decay[1] != state[1]:
        needed = "[segments, heads, key_dim·key_dim]" if matrix else "[segments, heads, key_dim]"
        raise errors.InvalidArgument(
            f"decay has the shape {tuple(decay)} and state {tuple(state)}, {needed} and [segments, heads, key_dim·value_dim] are needed"
        )
    return state[1], key_dim, state[2] // key_dim


def _pages(operands: dict[str, Given], block_table: Array, page_size: int | None, page_stride: int | None) -> Any:
    """k and v in pages, for C; the table is kept in `operands`."""
    size = whole("page_size", page_size, 1, (1 << 31) - 1)
    stride = size if page_stride is None else whole("page_stride", page_stride, 1, (1 << 31) - 1)
    operands["block_table"] = table = Given("block_table", block_table)
    # A missing k is refused by the library.
    device = operands["k"].pointer.contents.device.device_type if "k" in operands else _header.DEVICE_CPU
    address, documents, pages = whole_numbers("block_table", table.pointer.contents, ("documents", "pages"), device)
    members = dict(documents=documents, pages_per_document=pages, page_size=size, page_stride=stride)
    return _header.Keys(kind=_header.KEYS_PAGES, block_table=address, **members)


def _lists(operands: dict[str, Given], key_indices: Array) -> Any:
    """The keys that each token lists, for C; the lists are kept in `operands`."""
    operands["key_indices"] = lists = Given("key_indices", key_indices)
    address, tokens, heads, entries = whole_numbers(
        "key_indices", lists.pointer.contents, ("tokens", "heads", "entries")
    )
    return _header.Keys(kind=_header.KEYS_LISTED, key_indices=address, tokens=tokens, heads=heads, entries=entries)


def _address(name: str, value: object) -> int | None:
    """An address for C; None is NULL."""
    value = value.value if isinstance(value, c_void_p) else value
    return None if value is None else whole(name, value, *RANGES[c_size_t])


def ring_bytes(bytes: int) -> int:
    """The size of the large message of a check."""
    return whole("bytes", bytes, 1, (1 << 48) - 1)


def _handle(plan: Plan) -> c_void_p:
    return instance("plan", plan, Plan).handle


def destroy(function: str, handle: c_void_p, owner: Callbacks | EngineTransport | None, process: int) -> None:
    """Destroys a handle. Ends a call of another thread first: it must not call Python while the interpreter ends."""
    # A forked child has the handle, but not its threads.
    if os.getpid() != process:
        return
    mine, handle.value, end = c_void_p(handle.value), None, time.monotonic() + ENDING
    while (status := status_of(function, mine)) == _header.BUSY and time.monotonic() < end:
        status_of("rank_abort", mine)
        time.sleep(0.01)
    if status == _header.OK and owner:
        owner.leave()


def check_ring(transport: Transport, bytes: int = 4 << 20) -> list[Link]:
    """`Rank.check_ring` over a transport, of which it takes ownership."""
    bytes, rank = ring_bytes(bytes), Rank(transport)
    try:
        return rank.check_ring(bytes)
    finally:
        rank.close()


def local_group(world: int, deadline_ms: int = 60_000, workers: int = 1, isa: Isa = Isa.AUTO) -> list[Rank]:
    """Ranks as threads of this process. `workers` is the number of CPU threads of the kernels of each rank."""
    transports = (c_void_p * whole("world", world, 1, 4096))()
    # Checked before transports exist, which would have to be destroyed.
    workers, isa = whole("workers", workers, 1, 1024), one_of("isa", isa, Isa)
    call("local_group", world, deadline_ms, transports)
    return [Rank(c_void_p(t), workers=workers, isa=isa) for t in transports]


def peer_group(devices: Sequence[int], deadline_ms: int = 60_000) -> list[Rank]:
    """Ranks as threads of this process, rank r with tensors on CUDA device devices[r]."""
    numbers = c_array("devices", c_int32, devices)
    transports = (c_void_p * len(numbers))()
    call("peer_group", len(numbers), numbers, deadline_ms, transports)
    return [Rank(c_void_p(t)) for t in transports]


def nccl_unique_id() -> bytes:
    """The id of an NCCL group: one rank makes it and sends it to the others."""
    unique_id = (c_uint8 * 128)()
    call("nccl_unique_id", unique_id)
    return bytes(unique_id)


def nccl_group(
    unique_id: bytes | None = None,
    *,
    comm: int | None = None,
    may_abort: bool = False,
    rank: int,
    world: int,
    device: int,
    deadline_ms: int = 60_000,
) -> Rank:
    """This process or thread as a rank over NCCL, with tensors on CUDA device `device`.

    It joins the ranks with the same `unique_id`, or uses an existing communicator (`comm`, the address of an ncclComm_t), which it
    aborts after a failure only with `may_abort`.
    """
    return Rank(
        nccl_transport(unique_id, comm, may_abort, rank=rank, world=world, device=device, deadline_ms=deadline_ms)
    )


def nccl_transport(
    unique_id: bytes | None, comm: int | None, may_abort: bool, *, rank: int, world: int, device: int, deadline_ms: int
) -> c_void_p:
    """The transport of `nccl_group`, which has no owner yet."""
    if unique_id is not None and len(instance("unique_id", unique_id, bytes | bytearray, "bytes are needed")) != 128:
        raise errors.InvalidArgument(f"unique_id has length {len(unique_id)}, 128 is needed")
    transport = c_void_p()
    shared = (c_uint8 * 128)(*unique_id) if unique_id is not None else None
    device, abort = whole("device", device, 0, 2**31 - 1), int(flag("may_abort", may_abort))
    call("nccl_group", shared, _address("comm", comm), abort, rank, world, device, deadline_ms, byref(transport))
    return transport


def on_all(ranks: Sequence[Rank], job: Callable[[int, Rank], T]) -> list[T]:
    """Runs job(number, rank) on a thread for each rank, and returns the results. If a job fails, raises its exception. If a thread
    cannot start, raises DeviceError, and the ranks whose threads have started are aborted."""

    def guarded(number: int, rank: Rank) -> T:
        try:
            return job(number, rank)
        except BaseException:
            rank.abort()
            raise

    if not callable(job):
        raise refused("job", job, "a function of a rank's number and a Rank is needed")
    if not (ranks := instances("ranks", ranks, Rank)):
        raise errors.InvalidArgument("ranks has length 0, at least 1 is needed")
    futures: list[Future[T]] = []
    with ThreadPoolExecutor(len(ranks)) as pool:
        try:
            futures.extend(pool.submit(guarded, number, rank) for number, rank in enumerate(ranks))
        except RuntimeError as error:
            # The pool has queued the job whose thread did not start.
            pool.shutdown(wait=False, cancel_futures=True)
            for rank in ranks:
                rank.abort()
            raise no_thread(f"rank {len(futures)}", error) from error
    failed = [error for error in (f.exception() for f in futures) if error]
    # Errors of the other ranks only say that this rank aborted.
    failed.sort(key=lambda error: isinstance(error, errors.PeerError))
    if failed:
        raise failed[0]
    return [f.result() for f in futures]
