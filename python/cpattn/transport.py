# SPDX-License-Identifier: MIT OR Apache-2.0
"""A communicator of the caller's own as a transport, written in Python.

The library calls C functions (`cpattn_transport_table` in the header, where the contract is); here they become the methods of
a `Transport`. What has to hold on the way:

- No exception enters C. ctypes would print it and return whatever lies in memory, 0 perhaps, which means success. Each
  callback catches everything, keeps the first exception and returns RAISED. The call of the library that needed it fails,
  and the Python call behind that one (`Rank.forward`, ...) raises the kept exception itself.
- Handlers of signals run on the main thread, where they could raise before a callback's first line, which nothing keeps. So
  no callback runs on the main thread: calls that may wait for other ranks are made on another one (`_interruptible.py`).
- What failed once stays failed. After the first exception the transport is aborted, so that peers do not wait for this
  rank, and every later callback returns FAILED_BEFORE without asking the transport.
- Callbacks outlive the rank. ctypes does not keep them alive; a module-level set does, until the library has destroyed the
  rank. They are not freed inside the library's call of `release`, since that very function is then running.

`exchange` is called on a thread of the library's, the others also on the callers' threads, `poll` and `abort` at any time.
"""

from __future__ import annotations

import abc
import ctypes
import hashlib
import struct
from collections.abc import Sequence
from ctypes import byref, c_ssize_t, c_void_p, py_object
from typing import Any, NamedTuple

from . import _header, errors
from ._library import call

# What a callback returns to the library when its method raised, and when an earlier one had. The messages of the library
# carry them: "rank 0, exchange, step 1: rank 2 failed: the transport's exchange returned 1".
RAISED = 1
FAILED_BEFORE = 2

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = py_object, [c_void_p, c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200

Buffer = bytearray | memoryview


class Message(NamedTuple):
    """Contiguous bytes that go to `peer`, or come from it. On a device, a device address."""

    peer: int
    address: int
    bytes: int

    def memory(self) -> memoryview:
        """The bytes, of the CPU; those of a send are only read. They are the library's, until the exchange is over."""
        view: memoryview = _view(self.address, self.bytes, _WRITABLE)
        return view


class Packet:
    """Messages to or from one peer that travel as one. Several are copied on both sides, a single one is not."""

    def __init__(self, first: Message) -> None:
        self.peer, self.messages = first.peer, [first]

    @property
    def bytes(self) -> int:
        """Of all its messages."""
        return sum(m.bytes for m in self.messages)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The bytes of all its messages, how many those are, and 64 bits of a hash of the size of each, in their order:
        packets whose messages have different sizes differ in this."""
        each = [m.bytes for m in self.messages]
        digest = hashlib.blake2b(struct.pack(f"<{len(each)}Q", *each), digest_size=8).digest()
        return sum(each), len(each), int.from_bytes(digest, "little")

    def gather(self) -> Buffer:
        """What to send."""
        views = [m.memory() for m in self.messages]
        return views[0] if len(views) == 1 else bytearray().join(views)

    def room(self) -> Buffer:
        """Where to receive."""
        return self.messages[0].memory() if len(self.messages) == 1 else bytearray(self.bytes)

    def scatter(self, room: Buffer) -> None:
        """Puts what has arrived in a `room` of this packet's where the messages lie."""
        if len(self.messages) > 1:
            self.put(memoryview(room))

    def put(self, view: memoryview) -> None:
        """Copies bytes from elsewhere to where the messages lie."""
        at = 0
        for m in self.messages:
            m.memory()[:] = view[at : at + m.bytes]
            at += m.bytes


def packets(messages: Sequence[Message], *, below: int) -> list[Packet]:
    """Joins neighbouring messages of each peer that are smaller than `below` bytes, for engines to which a message costs
    more than a copy. Sender and receiver cut alike, since sizes and order agree between them."""
    done: list[Packet] = []
    growing: dict[int, Packet] = {}
    for m in messages:
        if m.bytes >= below:
            growing.pop(m.peer, None)
            done.append(Packet(m))
        elif m.peer in growing:
            growing[m.peer].messages.append(m)
        else:
            growing[m.peer] = Packet(m)
            done.append(growing[m.peer])
    return done


def check_list(rank: int, world: int, argument: str, messages: Sequence[Message]) -> None:
    """Refuses a list that breaks the contract, before anything of it is begun. `argument` is `sends` or `recvs`."""
    for at, m in enumerate(messages):
        if not 0 <= m.peer < world:
            raise errors.InvalidArgument(f"{argument}[{at}].peer is {m.peer}, a rank from 0 to {world - 1} is needed")
        if m.peer == rank:
            raise errors.InvalidArgument(
                f"{argument}[{at}].peer is {m.peer}, which is this rank: another one from 0 to {world - 1} is needed; "
                "copy what a rank sends to itself"
            )
        if m.bytes < 1:
            raise errors.InvalidArgument(
                f"{argument}[{at}].bytes is {m.bytes}, at least 1 is needed; leave empty messages out, on both sides"
            )
        if not m.address:
            raise errors.InvalidArgument(f"{argument}[{at}].address is {m.address}, the address of memory is needed")


class Transport(abc.ABC):
    """What a communicator has to do; the header holds the contract. A method that raises fails the rank for good.

    A PeerError with a `peer` blames that rank; after any other exception the rank blames itself.

    `run` is the direction (1 forward, 2 backward) and the fingerprint of the plan that the rank runs just now, (0, 0) where
    that is none: a `Rank` writes it before it calls. A transport may compare it over ranks and put it into errors.
    """

    rank: int
    world: int
    run: tuple[int, int] = (0, 0)

    @abc.abstractmethod
    def agree(self, first: int, end: int, number: int) -> Sequence[int]:
        """An all-gather over ranks first ... end - 1: what each of them gave, in their order."""

    @abc.abstractmethod
    def exchange(
        self, operation: str, step: int, sends: Sequence[Message], recvs: Sequence[Message], stream: int | None
    ) -> None:
        """Moves a batch. When it returns, or raises, nobody touches the memory any more."""

    @abc.abstractmethod
    def poll(self) -> None:
        """Raises if anything has failed so far. Never waits."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends the run on every rank. Any number of times."""

    def release(self) -> None:
        """The rank is gone."""


class Callbacks:
    """The callbacks of a transport, kept for as long as the library may call them, and the first exception that one raised."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.failure: BaseException | None = None
        self._raised = False
        self._table = _header.TransportTable(
            rank=transport.rank,
            world=transport.world,
            agree=_header.Agree(self._agree),
            exchange=_header.Exchange(self._exchange),
            poll=_header.Poll(self._poll),
            abort=_header.Abort(self._abort),
            release=_header.Release(self._release),
        )

    def create(self) -> c_void_p:
        """The library's handle of the transport."""
        handle = c_void_p()
        call("transport_create", byref(self._table), byref(handle))
        _kept.add(self)
        return handle

    def leave(self) -> None:
        """After the library has destroyed the transport or its rank."""
        _kept.discard(self)

    def exception(self, said: errors.Error) -> BaseException:
        """What the Python call raises when the library says this."""
        if self.failure is None or not isinstance(said, errors.PeerError):
            return said
        if self._raised:
            said.__cause__ = self.failure
            # The first failure says which rank is at fault; the library has that number only from exchanges.
            said.peer = getattr(self.failure, "peer", None) if said.peer is None else said.peer
            return said
        self._raised = True
        self.failure.__cause__ = self.failure.__cause__ or said
        return self.failure

    def _keep(self, failure: BaseException, blame: Any = None) -> int:
        try:
            first = self.failure is None
            if first:
                self.failure = failure
            if blame and isinstance(failure, errors.PeerError) and failure.peer is not None:
                blame[0] = failure.peer
            if first:
                self.transport.abort()
        except BaseException:  # noqa: BLE001 (the first failure is the one to tell)
            pass
        return RAISED

    def _agree(self, _context: Any, first: int, end: int, number: int, all_: Any, blame: Any) -> int:
        try:
            if self.failure is not None:
                return FAILED_BEFORE
            numbers = self.transport.agree(first, end, number)
            if len(numbers) != end - first:
                raise errors.InvalidArgument(f"agree returned {len(numbers)} numbers, {end - first} are needed")
            for i, theirs in enumerate(numbers):
                all_[i] = theirs
            return _header.OK
        except BaseException as failure:  # noqa: BLE001 (nothing may enter C)
            return self._keep(failure, blame)

    def _exchange(
        self,
        _context: Any,
        operation: bytes,
        step: int,
        sends: Any,
        send_count: int,
        recvs: Any,
        recv_count: int,
        stream: int | None,
        blame: Any,
    ) -> int:
        try:
            if self.failure is not None:
                return FAILED_BEFORE
            self.transport.exchange(
                operation.decode(), step, _messages(sends, send_count), _messages(recvs, recv_count), stream
            )
            return _header.OK
        except BaseException as failure:  # noqa: BLE001
            return self._keep(failure, blame)

    def _poll(self, _context: Any, blame: Any) -> int:
        try:
            if self.failure is not None:
                return FAILED_BEFORE
            self.transport.poll()
            return _header.OK
        except BaseException as failure:  # noqa: BLE001
            return self._keep(failure, blame)

    def _abort(self, _context: Any) -> None:
        try:
            self.transport.abort()
        except BaseException as failure:  # noqa: BLE001
            self._keep(failure)

    def _release(self, _context: Any) -> None:
        try:
            self.transport.release()
        except BaseException as failure:  # noqa: BLE001
            self._keep(failure)


_kept: set[Callbacks] = set()


def _messages(first: Any, count: int) -> list[Message]:
    return [Message(m.peer, m.data, m.bytes) for m in first[:count]] if count else []
