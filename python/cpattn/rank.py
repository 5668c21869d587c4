# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks: forward and backward over a plan, and groups of ranks that are threads of this process."""

from __future__ import annotations

import enum
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int32, c_size_t, c_uint8, c_void_p
from typing import TypeVar

from . import _header, errors
from ._check import flag, one_of, whole
from ._interruptible import Interruptible
from ._library import call, error_of, status_of
from .plan import Direction, Plan
from .ring import Link
from .tensors import Array, Given
from .trace import Event
from .transport import Callbacks, Transport

T = TypeVar("T")


class Isa(enum.IntEnum):
    """An instruction set of the CPU kernels. AUTO: the best of the machine, or what the environment variable
    CPATTN_CPU_ISA names. One that the machine lacks is refused."""

    AUTO, PORTABLE, NEON, AVX2, AVX512, AVX512_BF16, AMX = range(7)


class Rank:
    """One participant. It lives long and runs many plans, one call at a time; `poll` and `abort` are for any thread."""

    def __init__(self, transport: Transport | c_void_p, *, workers: int = 1, isa: Isa = Isa.AUTO) -> None:
        """Takes the transport over: one written in Python, or a handle of the C interface's.

        `workers` are threads of the CPU kernels, more than one in a library built with the feature rayon; `isa` is the
        instruction set of the CPU kernels.
        """
        workers, isa = whole("workers", workers, 1, 1024), one_of("isa", isa, Isa)
        self._callbacks: Callbacks | None = None
        self._interruptible = Interruptible()
        if isinstance(transport, Transport):
            self._callbacks = Callbacks(transport)
            transport = self._callbacks.create()
        # The options also name a device; without them a rank has that of its transport.
        chosen = workers != 1 or isa != Isa.AUTO
        options = byref(_header.RankOptions(workers=workers, isa=isa)) if chosen else None
        self._handle = c_void_p()
        try:
            call("rank_create", transport, options, byref(self._handle))
        except errors.Error:
            destroy("transport_destroy", transport, self._callbacks, os.getpid())
            raise
        # Also at the end of the program, while Python can still run callbacks.
        self._end = weakref.finalize(self, destroy, "rank_destroy", self._handle, self._callbacks, os.getpid())

    def close(self) -> None:
        """The rank leaves: peers that still need it get an error. Further calls are refused."""
        self._end()
        self._interruptible.close()
        self._handle = c_void_p()

    def prepare(self, plan: Plan, direction: Direction) -> None:
        """Does all that may allocate or wait; the first run does it otherwise."""
        direction = one_of("direction", direction, Direction)
        self._run(direction, plan, "rank_prepare", direction)

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
    ) -> None:
        """Writes o and lse of this rank's tokens. On a device it returns when that is enqueued on `stream` (a
        cudaStream_t; None is the default stream)."""
        given = _given(q=q, k=k, v=v, sinks=sinks, o=o, lse=lse)
        stream = _address("stream", stream)
        args = _header.ForwardArgs(stream=stream, **{name: g.pointer for name, g in given.items()})
        self._run(Direction.FORWARD, plan, "forward", byref(args), keep=given, stream=stream)

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
    ) -> None:
        """Writes dq, dk, dv (and dsinks, summed over all ranks), from what the forward was given and wrote."""
        given = _given(
            q=q, k=k, v=v, sinks=sinks, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv, dsinks=dsinks
        )
        stream = _address("stream", stream)
        args = _header.BackwardArgs(stream=stream, **{name: g.pointer for name, g in given.items()})
        self._run(Direction.BACKWARD, plan, "backward", byref(args), keep=given, stream=stream)

    def check_ring(self, bytes: int = 4 << 20) -> list[Link]:
        """Sends stamped bytes over each link, all the way round the ring and back, one link at a time; between runs.

        All ranks call it with the same number of bytes. Rank 0 gets all links in the order in which they were measured, other
        ranks those before their last turn. A PeerError names the link that failed, as far as this rank was at it, and what to
        try; the group has failed then.
        """
        count, bytes = c_size_t(), whole("bytes", bytes, 1, (1 << 48) - 1)
        self._call("rank_ring_check", bytes, None, 0, byref(count))
        links = (_header.Link * count.value)()

        def check() -> errors.Error | None:
            # What it says names the link; what a transport of Python's raised is the cause.
            status = status_of("rank_ring_check", self._handle, bytes, links, len(links), byref(count))
            return error_of("rank_ring_check", status) if status else None

        callbacks = self._callbacks
        if said := self._interruptible(check, callbacks.transport.abort) if callbacks else check():
            failure = callbacks.failure if callbacks else None
            if isinstance(said, errors.PeerError):
                said.peer = getattr(failure, "peer", None)
            raise said from failure
        return [Link(getattr(link, "from"), link.to, link.latency, link.bytes_per_second) for link in links[: count.value]]

    def record(self, capacity: int = 1 << 16) -> None:
        """Records what this rank does from now on, for at most so many operations; 0 stops."""
        self._call("rank_record", whole("capacity", capacity, 0, 1 << 24))

    def trace(self) -> list[Event]:
        """Takes what was recorded; times are on this process's clock (`clock`)."""
        count = c_size_t()
        self._call("rank_trace", None, 0, byref(count))
        events = (_header.Event * count.value)()
        self._call("rank_trace", events, len(events), byref(count))
        return [
            Event(e.rank, e.lane, e.name.decode(), e.phase.decode(), e.step, e.start_ns, e.end_ns, e.bytes)
            for e in events[: count.value]
        ]

    def poll(self) -> None:
        """Raises if anything has failed so far, on any rank; never waits."""
        self._call("rank_poll")

    def abort(self) -> None:
        """Ends the run on every rank, for good."""
        self._call("rank_abort")

    def _run(
        self, direction: Direction, plan: Plan, name: str, argument: object, *, keep: object = None, stream: object = None
    ) -> None:
        """A call that may wait for other ranks. `keep` lives as long as it does, also where it is interrupted."""
        if self._callbacks is None or stream is not None:
            self._call(name, plan.handle, argument)
            return
        transport = self._callbacks.transport
        transport.run = (direction + 1, plan.fingerprint)
        try:
            self._interruptible(lambda _keep=keep: self._call(name, plan.handle, argument), transport.abort)  # type: ignore[misc]
        finally:
            transport.run = (0, 0)

    def _call(self, name: str, *arguments: object) -> None:
        if not self._handle:
            raise errors.InvalidHandle(f"cpattn_{name}: this rank was closed, which no call is for: make a new one")
        status = status_of(name, self._handle, *arguments)
        if status:
            said = error_of(name, status)
            raise self._callbacks.exception(said) if self._callbacks else said


def _address(name: str, value: object) -> int | None:
    """Of something of C's; None is NULL."""
    value = value.value if isinstance(value, c_void_p) else value
    return None if value is None else whole(name, value, 0, 2**64 - 1)


def _deadline(ms: int) -> int:
    return whole("deadline_ms", ms, 1, 2**64 - 1)


def _given(**arrays: Array | None) -> dict[str, Given]:
    return {name: Given(name, array) for name, array in arrays.items() if array is not None}


def destroy(function: str, handle: c_void_p, callbacks: Callbacks | None, process: int) -> None:
    # A forked child has the handle, but not the threads behind it.
    if os.getpid() == process and status_of(function, handle) == _header.OK and callbacks:
        callbacks.leave()


def check_ring(transport: Transport, bytes: int = 4 << 20) -> list[Link]:
    """`Rank.check_ring` over a transport, which it takes over."""
    rank = Rank(transport)
    try:
        return rank.check_ring(bytes)
    finally:
        rank.close()


def local_group(world: int, deadline_ms: int = 60_000, workers: int = 1, isa: Isa = Isa.AUTO) -> list[Rank]:
    """Ranks that are threads of this process, each with so many threads for its kernels."""
    transports = (c_void_p * whole("world", world, 1, 4096))()
    # Before there are transports, which would have to be destroyed.
    workers, isa = whole("workers", workers, 1, 1024), one_of("isa", isa, Isa)
    call("local_group", world, _deadline(deadline_ms), transports)
    return [Rank(c_void_p(t), workers=workers, isa=isa) for t in transports]


def peer_group(devices: Sequence[int], deadline_ms: int = 60_000) -> list[Rank]:
    """Ranks that are threads of this process, rank r with tensors on CUDA device devices[r]."""
    numbers = [whole(f"devices[{at}]", device, 0, 2**31 - 1) for at, device in enumerate(devices)]
    transports = (c_void_p * len(numbers))()
    call("peer_group", len(numbers), (c_int32 * len(numbers))(*numbers), _deadline(deadline_ms), transports)
    return [Rank(c_void_p(t)) for t in transports]


def nccl_unique_id() -> bytes:
    """What the ranks of an NCCL group have in common: one rank makes it and brings it to the others."""
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

    It meets the others that have this `unique_id`, or uses a communicator that exists (`comm`, the address of an
    ncclComm_t), which it aborts after a failure only if it `may_abort`.
    """
    if not (unique_id is None or isinstance(unique_id, bytes | bytearray)):
        raise errors.InvalidArgument(f"unique_id is {unique_id!r}, bytes are needed")
    if unique_id is not None and len(unique_id) != 128:
        raise errors.InvalidArgument(f"unique_id has {len(unique_id)} bytes, 128 are needed")
    transport = c_void_p()
    shared = (c_uint8 * 128)(*unique_id) if unique_id is not None else None
    rank, world = whole("rank", rank, 0, 2**32 - 1), whole("world", world, 1, 2**32 - 1)
    device, may_abort = whole("device", device, 0, 2**31 - 1), flag("may_abort", may_abort)
    call("nccl_group", shared, _address("comm", comm), may_abort, rank, world, device, _deadline(deadline_ms), byref(transport))
    return Rank(transport)


def on_all(ranks: Sequence[Rank], job: Callable[[int, Rank], T]) -> list[T]:
    """Runs job(number, rank) on a thread of each rank; raises what the first that failed raised."""

    def guarded(number: int, rank: Rank) -> T:
        try:
            return job(number, rank)
        except BaseException:
            rank.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(guarded, number, rank) for number, rank in enumerate(ranks)]
    failed = [error for error in (f.exception() for f in futures) if error]
    # What the others raise only says that this one aborted.
    failed.sort(key=lambda error: isinstance(error, errors.PeerError))
    if failed:
        raise failed[0]
    return [f.result() for f in futures]
