# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls into C that wait for other ranks, so that Ctrl-C ends them.

Python runs the handlers of signals on the main thread, between two instructions of Python. While that thread is inside C, no
handler runs, for as long as a deadline is. So a call of the main thread's runs on a second thread, and the main thread waits
for it in Python.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds that an interrupted call has to end in. It goes on by itself after that, and keeps what it works with.
ENDING = 10.0

_Job = tuple[Callable[[], Any], "SimpleQueue[tuple[bool, Any]]"]


class Interruptible:
    """A thread for the calls of one rank or transport; it begins with the first call of the main thread's."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None

    def __call__(self, job: Callable[[], T], interrupt: Callable[[], None]) -> T:
        """What `job` returns or raises. If a handler of a signal raises meanwhile, `interrupt` has to make the job end."""
        if threading.current_thread() is not threading.main_thread():
            return job()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            weakref.finalize(self, self._jobs.put, None)
            threading.Thread(target=_work, args=[self._jobs], daemon=True).start()
        done: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._jobs.put((job, done))
        try:
            well, outcome = done.get()
        except BaseException:
            self.close()  # the next call does not queue behind this one
            interrupt()
            try:
                done.get(timeout=ENDING)
            except Empty:
                pass
            raise
        if well:
            result: T = outcome
            return result
        try:
            raise outcome
        finally:
            del outcome  # which refers to this frame

    def close(self) -> None:
        """The thread ends after its call."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (given := jobs.get()) is not None:
        job, done = given
        try:
            answer = (True, job())
        except BaseException as error:  # noqa: BLE001 (raised where the call was made)
            answer = (False, error)
        done.put(answer)
        del given, job, done, answer  # not until the next call
