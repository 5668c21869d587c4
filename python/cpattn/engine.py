# SPDX-License-Identifier: MIT OR Apache-2.0
"""An engine of sends and receives as a transport, for a framework with a process group and a store.

The library calls C functions (`cpattn_engine_table` in the header, which has the contract). Here they call the methods of an
`Engine`. The library does packets, deadlines and the search for the rank at fault. The rules here:

- No exception enters C. An exception of `Engine.failures` is a failure of a peer or a connection: its text goes to the library. Any
  other exception is a failure of this rank: it is kept, ends the group, and the Python call behind the callback raises it.
- The library's threads may be inside a callback while a store does not answer. So the callbacks are functions of this module, which
  are never freed. They find their engine by a number, until `release`.
- Calls that may wait for other ranks run on a separate thread, so that Ctrl-C ends them (`_interruptible.py`).
"""

from __future__ import annotations

import abc
import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_uint64, c_void_p
from datetime import timedelta
from itertools import count
from typing import Any

from . import _header
from .arguments import c_structs, instance, number, refused, whole
from ._interruptible import ENDING, Interruptible
from ._library import call, status_of
from .errors import InvalidArgument
from .transport import FirstFailure, Message, Transport, memory_at


class Engine(abc.ABC):
    """The operations of a process group. Several threads call them at the same time. The contract is at `cpattn_engine_table` in
    include/cpattn.h."""

    rank: int
    world: int
    failures: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError)

    @abc.abstractmethod
    def open(self) -> None:
        """Makes two connections to the store: one for `wait_for`, one for the other calls, which run at the same time. If it fails,
        the group works, but errors do not name the rank at fault."""

    @abc.abstractmethod
    def connect(self) -> None:
        """Waits until all ranks are connected."""

    @abc.abstractmethod
    def post(self, receive: bool, peer: int, tag: int, data: memoryview) -> Any:
        """Begins to receive or to send. From one rank to another, sends and receives of one tag match in the order in which they
        are posted. A message may have fewer bytes than the receive has room for."""

    @abc.abstractmethod
    def wait(self, request: Any, seconds: float) -> None:
        """Waits until the message of a request of `post` has moved. Fails at once if the engine is closed or the peer is gone."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all posted messages and all waits, and all access to their memory. Any thread may call it, any number of times."""

    @abc.abstractmethod
    def put(self, key: str, value: bytes) -> bytes:
        """Writes a key unless it exists, and returns the value in the store. Values have 1 to 4096 bytes."""

    @abc.abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value of a key, or None."""

    @abc.abstractmethod
    def wait_for(self, key: str) -> None:
        """Waits until a key exists, without a time limit."""

    def release(self) -> None:
        """The engine is no longer used."""


def checked_timeout(timeout: float) -> float:
    """A timeout in seconds."""
    if isinstance(timeout, timedelta):
        raise refused("timeout", timeout, f"a number of seconds is needed: {timeout.total_seconds()}")
    timeout = number("timeout", timeout)
    if not 1e-3 <= timeout <= 1e9:
        raise InvalidArgument(f"timeout is {timeout} seconds, 0.001 to 1e9 seconds are needed")
    return timeout


class EngineTransport(Transport):
    """This rank of a group over an engine. All ranks make one at the same time. `timeout` is in seconds: a call fails if none of
    its messages moves for that time."""

    def __init__(self, engine: Engine, timeout: float) -> None:
        timeout = checked_timeout(timeout)
        instance("engine", engine, Engine, "an Engine is needed")
        self.engine, self.rank, self.world = engine, engine.rank, engine.world
        self.first_failure, self._interruptible = FirstFailure(), Interruptible()
        self._calls: list[str] = []  # in progress
        self._handle, context = c_void_p(), next(_numbers)
        _engines[context] = _Entry(engine, self.first_failure)
        table = _header.EngineTable(context=context, rank=engine.rank, world=engine.world, **_callbacks)
        call("engine_group", byref(table), max(1, round(timeout * 1000)), byref(self._handle))
        # Also at the end of the program, before the interpreter ends.
        self._end = weakref.finalize(self, _destroy, self._handle, self._calls, os.getpid())
        try:
            self._call("engine_connect")
        except BaseException:
            self.release()
            raise

    def _call(self, name: str, *arguments: Any) -> None:
        """A call that may wait for other ranks."""
        self._calls.append(name)
        try:
            # The library notifies the others if it cannot connect for want of threads.
            connects = name == "engine_connect"
            self._interruptible(
                lambda: self.first_failure.call(name, self._handle, *arguments), self.abort, needs_thread=not connects
            )
        finally:
            self._calls.remove(name)

    def share(self) -> c_void_p:
        """Another C handle of this transport."""
        handle = c_void_p()
        call("engine_share", self._handle, byref(handle))
        return handle

    def agree(self, first: int, end: int, number: int) -> Sequence[int]:
        first, end = whole("first", first, 0, self.world), whole("end", end, 0, self.world)
        numbers = (c_uint64 * max(end - first, 0))()
        self._call("engine_agree", first, end, number, numbers)
        return list(numbers)

    def exchange(
        self, operation: str, step: int, sends: Sequence[Message], recvs: Sequence[Message], stream: int | None = None
    ) -> None:
        instance("operation", operation, str)
        if stream is not None:
            raise refused("stream", stream, "None is needed: an engine moves CPU memory")
        out = c_structs("sends", _header.Message, sends, Message, address="data")
        into = c_structs("recvs", _header.Message, recvs, Message, address="data")
        self._call("engine_exchange", step, out, len(out), into, len(into))

    def poll(self) -> None:
        call("engine_poll", self._handle)

    def abort(self) -> None:
        if self._handle:
            call("engine_abort", self._handle)

    def release(self) -> None:
        """Leaves the group: peers that still need this rank get an error."""
        self._end()
        self._interruptible.close()

    leave = release


def _destroy(handle: c_void_p, calls: list[str], process: int) -> None:
    """Ends calls of other threads first: they must not call Python while the interpreter ends."""
    mine, handle.value, end = c_void_p(handle.value), None, time.monotonic() + ENDING
    # A forked child has the handle, but not its threads.
    if os.getpid() == process:
        if calls:
            status_of("engine_abort", mine)
        while calls and time.monotonic() < end:
            time.sleep(0.01)
        status_of("transport_destroy", mine)


class _Entry:
    """An engine while the library may call it, and its open requests."""

    def __init__(self, engine: Engine, first_failure: FirstFailure) -> None:
        self.engine, self.first_failure, self.numbers = engine, first_failure, count()
        self.requests: dict[int, Any] = {}


_numbers = count(1)
_engines: dict[int, _Entry] = {}
_OWN = 2


def _guarded(job: Callable[..., None]) -> Callable[..., int]:
    """A callback. Its first argument is the engine's number, its last one a buffer for the text of an error."""

    def callback(context: int, *arguments: Any) -> int:
        try:
            job(_engines[context], *arguments[:-1])
            return _header.OK
        except BaseException as failure:  # noqa: BLE001 (nothing may enter C)
            return _report(context, failure, arguments[-1])

    return callback


def _report(context: int, failure: BaseException, text: Any) -> int:
    with suppress(BaseException):  # without a text, the failure is still reported
        entry = _engines[context]
        known = isinstance(failure, entry.engine.failures)
        message = (str(failure) if known else f"{type(failure).__name__}: {failure}").encode()[
            : _header.ENGINE_TEXT - 1
        ]
        ctypes.memmove(text, message, len(message))
        if known:
            return _header.ENGINE_GROUP
        entry.first_failure.keep(failure)
    return _OWN


def _post(entry: _Entry, receive: int, peer: int, tag: int, data: int, bytes: int, request: Any) -> None:
    number = next(entry.numbers)
    entry.requests[number] = entry.engine.post(bool(receive), peer, tag, memory_at(data, bytes))
    request[0] = number


def _wait(entry: _Entry, request: int, timeout_ms: int) -> None:
    entry.engine.wait(entry.requests[request], timeout_ms / 1000)
    del entry.requests[request]  # a failed one stays: its memory may still be accessed


def _give(value: bytes, there: int, there_bytes: Any) -> None:
    if len(value) > _header.ENGINE_VALUE:
        raise InvalidArgument(
            f"a value of the store has {len(value)} bytes, at most {_header.ENGINE_VALUE} are allowed"
        )
    ctypes.memmove(there, value, len(value))
    there_bytes[0] = len(value)


def _put(entry: _Entry, key: bytes, value: int, bytes: int, there: int, there_bytes: Any) -> None:
    _give(entry.engine.put(key.decode(), ctypes.string_at(value, bytes)), there, there_bytes)


def _get(entry: _Entry, key: bytes, there: int, there_bytes: Any) -> None:
    _give(entry.engine.get(key.decode()) or b"", there, there_bytes)


def _close(context: int) -> None:
    with suppress(BaseException):  # C takes no error here
        _engines[context].engine.close()


def _release(context: int) -> None:
    with suppress(BaseException):
        _engines.pop(context).engine.release()


_callbacks = _header.callbacks(
    _header.EngineTable,
    open=_guarded(lambda entry: entry.engine.open()),
    connect=_guarded(lambda entry: entry.engine.connect()),
    post=_guarded(_post),
    wait=_guarded(_wait),
    close=_close,
    put=_guarded(_put),
    get=_guarded(_get),
    wait_for=_guarded(lambda entry, key: entry.engine.wait_for(key.decode())),
    release=_release,
)
