# SPDX-License-Identifier: MIT OR Apache-2.0
"""The caller's own communicator as a transport, written in Python.

The library calls C functions (`cpattn_transport_table` in the header, which has the contract). Here they call the methods of a
`Transport`. The rules here:

- No exception enters C. ctypes would print it and return an arbitrary value, perhaps 0, which means success. Each callback catches
  everything, keeps the first exception and returns RAISED. The library's call fails, and the Python call behind it
  (`Rank.forward`, ...) raises that exception.
- Signal handlers run on the main thread, and may raise before a callback's first line, where no callback can catch it. So no
  callback runs on the main thread: calls that may wait for other ranks run on another one (`_interruptible.py`).
- A failed transport stays failed. After the first exception the transport is aborted, so that peers do not wait for this rank, and
  every later callback returns FAILED_BEFORE without a call of the transport.
- Callbacks outlive the rank. ctypes does not keep them alive; a module-level set does, until the library has destroyed the rank.
  They are not freed inside the library's call of `release`, which is one of them.

`exchange` is called on a thread of the library, the other methods also on callers' threads, `poll` and `abort` at any time.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_size_t, c_ssize_t, c_uint64, c_void_p, py_object
from typing import Any, NamedTuple

from . import _header, errors
from .arguments import RANGES, whole
from ._library import call
from ._signature import resolved

# Results of a callback whose method raised, and of a callback after an earlier one raised. The library's messages contain
# them: "rank 0, fetch, step 1 of the forward of plan …: rank 2 failed: the transport's exchange returned 1".
RAISED = 1
FAILED_BEFORE = 2

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = py_object, [c_void_p, c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200
_MOST = 2**63 - 1


def memory_at(address: int, bytes: int) -> memoryview:
    """A view of memory of the library or of a caller, which must not outlive the memory."""
    view: memoryview = _view(address, bytes, _WRITABLE)
    return view


@resolved
class Message(NamedTuple):
    """Contiguous bytes to or from `peer`. On a device, a device address."""

    peer: int
    address: int
    bytes: int

    def memory(self) -> memoryview:
        """The bytes on the CPU, until the exchange ends. Only read the bytes of a send."""
        return memory_at(whole("address", self.address, *RANGES[c_size_t]), whole("bytes", self.bytes, 0, _MOST))


class Transport(abc.ABC):
    """The operations of a communicator; the header has the contract. A method that raises fails the rank for good.

    A PeerError with a `peer` blames that rank; after any other exception the rank blames itself.
    """

    rank: int
    world: int

    @abc.abstractmethod
    def agree(self, first: int, end: int, number: int) -> Sequence[int]:
        """An all-gather over ranks first ... end - 1: their numbers, in rank order."""

    @abc.abstractmethod
    def exchange(
        self, operation: str, step: int, sends: Sequence[Message], recvs: Sequence[Message], stream: int | None
    ) -> None:
        """Moves a batch of messages. After it returns or raises, their memory is no longer accessed."""

    @abc.abstractmethod
    def poll(self) -> None:
        """Raises if anything has failed so far. Never waits."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends the run on every rank. It may be called any number of times."""

    def release(self) -> None:
        """The transport is no longer used."""


class FirstFailure:
    """The first exception of the caller's code. The Python call behind the callback raises it."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._raised = False

    def keep(self, failure: BaseException) -> bool:
        """Keeps the first exception. Returns whether this is the first."""
        first = self.failure is None
        if first:
            self.failure = failure
        return first

    def call(self, name: str, *arguments: Any) -> None:
        """Calls cpattn_`name`. If it fails, raises the exception that belongs to its error."""
        try:
            call(name, *arguments)
        except errors.Error as error:
            raise self.exception(error)

    def exception(self, error: errors.Error) -> BaseException:
        """The exception that the Python call raises for an error of the library's."""
        if self.failure is None or not isinstance(error, errors.PeerError):
            return error
        if self._raised:
            error.__cause__ = self.failure
            # The library does not get the rank at fault again, and blames this one.
            if isinstance(self.failure, errors.PeerError):
                error.peer = self.failure.peer
            return error
        self._raised = True
        self.failure.__cause__ = self.failure.__cause__ or error
        return self.failure


class Callbacks(FirstFailure):
    """The callbacks of a transport, kept as long as the library may call them, and the first exception of one."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self.transport = transport
        functions = _header.callbacks(
            _header.TransportTable,
            agree=self._asked(self._agree),
            exchange=self._asked(self._exchange),
            poll=self._asked(lambda: self.transport.poll()),
            abort=self._call(lambda: self.transport.abort()),
            release=self._call(lambda: self.transport.release()),
        )
        self._table = _header.TransportTable(rank=transport.rank, world=transport.world, **functions)

    def create(self) -> c_void_p:
        """Makes the library's handle of the transport."""
        handle = c_void_p()
        call("transport_create", byref(self._table), byref(handle))
        _in_use.add(self)
        return handle

    def leave(self) -> None:
        """After the library has destroyed the transport or its rank."""
        _in_use.discard(self)

    def _keep(self, failure: BaseException, blame: Any = None) -> int:
        with suppress(BaseException):  # the first failure is reported
            first = self.keep(failure)
            if blame and isinstance(failure, errors.PeerError) and failure.peer is not None:
                blame[0] = failure.peer
            if first:
                self.transport.abort()
        return RAISED

    def _asked(self, job: Callable[..., None]) -> Callable[..., int]:
        """A callback that returns a status. Its last argument is the place for the rank at fault."""

        def callback(_context: Any, *arguments: Any) -> int:
            try:
                if self.failure is not None:
                    return FAILED_BEFORE
                job(*arguments[:-1])
                return _header.OK
            except BaseException as failure:  # noqa: BLE001 (nothing may enter C)
                return self._keep(failure, arguments[-1])

        return callback

    def _call(self, job: Callable[[], None]) -> Callable[[Any], None]:
        """A callback without a result."""

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


_in_use: set[Callbacks] = set()


def _messages(first: Any, count: int) -> list[Message]:
    return [Message(m.peer, m.data, m.bytes) for m in first[:count]] if count else []
