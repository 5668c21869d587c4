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
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_ssize_t, c_uint64, c_void_p, py_object
from typing import Any, NamedTuple

from . import _header, errors
from ._check import RANGES, whole
from ._library import call

# What a callback returns to the library when its method raised, and when an earlier one had. The messages of the library
# carry them: "rank 0, exchange, step 1: rank 2 failed: the transport's exchange returned 1".
RAISED = 1
FAILED_BEFORE = 2

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = py_object, [c_void_p, c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200
_MOST = 2**63 - 1


def memory_at(address: int, bytes: int) -> memoryview:
    """Memory of the library's or of a caller's, for as long as that is there."""
    view: memoryview = _view(address, bytes, _WRITABLE)
    return view


class Message(NamedTuple):
    """Contiguous bytes that go to `peer`, or come from it. On a device, a device address."""

    peer: int
    address: int
    bytes: int

    def memory(self) -> memoryview:
        """The bytes, of the CPU; those of a send are only read. They are the library's, until the exchange is over."""
        return memory_at(whole("address", self.address, *RANGES[c_size_t]), whole("bytes", self.bytes, 0, _MOST))


class Transport(abc.ABC):
    """What a communicator has to do; the header holds the contract. A method that raises fails the rank for good.

    A PeerError with a `peer` blames that rank; after any other exception the rank blames itself.
    """

    rank: int
    world: int

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


class Kept:
    """The first exception of the caller's code, which the Python call raises that needed it."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._raised = False

    def keep(self, failure: BaseException) -> bool:
        """Whether it is the first."""
        first = self.failure is None
        if first:
            self.failure = failure
        return first

    def exception(self, said: BaseException) -> BaseException:
        """What the Python call raises when the library says this."""
        if self.failure is None or not isinstance(said, errors.PeerError):
            return said
        if self._raised:
            said.__cause__ = self.failure
            # Without a rank at fault the library blames this one.
            if isinstance(self.failure, errors.PeerError):
                said.peer = self.failure.peer
            return said
        self._raised = True
        self.failure.__cause__ = self.failure.__cause__ or said
        return self.failure


class Callbacks(Kept):
    """The callbacks of a transport, kept for as long as the library may call them, and the first exception that one raised."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self.transport = transport
        functions = _header.callbacks(
            _header.TransportTable,
            agree=self._asked(self._agree),
            exchange=self._asked(self._exchange),
            poll=self._asked(lambda: self.transport.poll()),
            abort=self._told(lambda: self.transport.abort()),
            release=self._told(lambda: self.transport.release()),
        )
        self._table = _header.TransportTable(rank=transport.rank, world=transport.world, **functions)

    def create(self) -> c_void_p:
        """The library's handle of the transport."""
        handle = c_void_p()
        call("transport_create", byref(self._table), byref(handle))
        _kept.add(self)
        return handle

    def leave(self) -> None:
        """After the library has destroyed the transport or its rank."""
        _kept.discard(self)

    def _keep(self, failure: BaseException, blame: Any = None) -> int:
        try:
            first = self.keep(failure)
            if blame and isinstance(failure, errors.PeerError) and failure.peer is not None:
                blame[0] = failure.peer
            if first:
                self.transport.abort()
        except BaseException:  # noqa: BLE001 (the first failure is the one to tell)
            pass
        return RAISED

    def _asked(self, job: Callable[..., None]) -> Callable[..., int]:
        """A callback that says how it went, and gets the place for the rank at fault last."""

        def callback(_context: Any, *arguments: Any) -> int:
            try:
                if self.failure is not None:
                    return FAILED_BEFORE
                job(*arguments[:-1])
                return _header.OK
            except BaseException as failure:  # noqa: BLE001 (nothing may enter C)
                return self._keep(failure, arguments[-1])

        return callback

    def _told(self, job: Callable[[], None]) -> Callable[[Any], None]:
        """A callback that says nothing."""

        def callback(_context: Any) -> None:
            try:
                job()
            except BaseException as failure:  # noqa: BLE001
                self._keep(failure)

        return callback

    def _agree(self, first: int, end: int, number: int, all_: Any) -> None:
        numbers = self.transport.agree(first, end, number)
        if len(numbers) != end - first:
            raise errors.InvalidArgument(f"the result of agree has length {len(numbers)}, {end - first} is needed")
        for i, theirs in enumerate(numbers):
            all_[i] = whole(f"number {i} of the result of agree", theirs, *RANGES[c_uint64])

    def _exchange(
        self, operation: bytes, step: int, sends: Any, send_count: int, recvs: Any, recv_count: int, stream: int | None
    ) -> None:
        out, into = _messages(sends, send_count), _messages(recvs, recv_count)
        self.transport.exchange(operation.decode(), step, out, into, stream)


_kept: set[Callbacks] = set()


def _messages(first: Any, count: int) -> list[Message]:
    return [Message(m.peer, m.data, m.bytes) for m in first[:count]] if count else []
