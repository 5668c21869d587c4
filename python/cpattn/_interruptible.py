# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls into C that wait for other ranks, so that Ctrl-C ends them.

Python runs the handlers of signals on the main thread, between two instructions of Python. While that thread is inside C, no
handler runs, for as long as a deadline is. So a call of the main thread's runs on a second thread, and the main thread waits
for it in Python.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from .errors import InvalidHandle

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Future[Any]]

# Seconds that an interrupted call has to end in. It goes on by itself after that, and keeps what it works with.
ENDING = 10.0

# What threading raises where a handler of a signal raised between the release of a lock and taking it again.
UNLOCKED = ("release unlocked lock", "cannot release un-acquired lock")


class Interruptible:
    """A thread for the calls of one rank or transport; it begins with the first call of the main thread's."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._process = os.getpid()

    def check_process(self) -> None:
        """Refuses calls of a forked child: it has none of the threads behind a rank, and would wait without a limit."""
        if os.getpid() != self._process:
            raise InvalidHandle(
                f"this rank belongs to process {self._process}, from which this process, {os.getpid()}, was forked: use the rank in "
                f"process {self._process}, or make a new rank here"
            )

    def __call__(self, job: Callable[[], T], interrupt: Callable[[], None]) -> T:
        """What `job` returns or raises. If a handler of a signal raises meanwhile, `interrupt` has to make the job end."""
        self.check_process()
        if threading.current_thread() is not threading.main_thread():
            return job()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            weakref.finalize(self, self._jobs.put, None)
            # Not threading's: its start waits in Python, where a handler that raises is met as below.
            _thread.start_new_thread(_work, (self._jobs,))
        outcome: Future[T] = Future()
        self._jobs.put((job, outcome))
        try:
            wait([outcome])
        except BaseException as error:
            self.close()  # the next call does not queue behind this one
            interrupt()
            wait([outcome], ENDING)
            # What a handler raises inside threading's locks becomes one of these.
            if isinstance(error, RuntimeError) and str(error) in UNLOCKED and error.__context__ is not None:
                raise error.__context__ from None
            raise
        try:
            return outcome.result()
        finally:
            del outcome  # which refers to an exception that refers to this frame

    def close(self) -> None:
        """The thread ends after its call."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (given := jobs.get()) is not None:
        job, outcome = given
        try:
            outcome.set_result(job())
        except BaseException as error:  # noqa: BLE001 (raised where the call was made)
            outcome.set_exception(error)
        del given, job, outcome  # not until the next call
