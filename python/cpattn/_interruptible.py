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
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Seconds that an interrupted call has to end in. It goes on by itself after that, and keeps what it works with.
ENDING = 10.0


class Job(Generic[T]):
    """A call for another thread, and its outcome for this one."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._answer: tuple[bool, Any] | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """On the other thread."""
        assert self._job
        try:
            self._answer = (True, self._job())
        except BaseException as error:  # noqa: BLE001 (raised where the call was made)
            self._answer = (False, error)
        self._job = None  # and what it refers to
        self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is over, after so many seconds at most."""
        return self._done.wait(timeout)

    def outcome(self) -> T:
        """What the call returned or raised, once it is over."""
        assert self._answer
        (well, outcome), self._answer = self._answer, None
        if well:
            result: T = outcome
            return result
        try:
            raise outcome
        finally:
            del outcome  # which refers to this frame


class Interruptible:
    """A thread for the calls of one rank or transport; it begins with the first call of the main thread's."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] | None = None

    def __call__(self, job: Callable[[], T], interrupt: Callable[[], None]) -> T:
        """What `job` returns or raises. If a handler of a signal raises meanwhile, `interrupt` has to make the job end."""
        if threading.current_thread() is not threading.main_thread():
            return job()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            weakref.finalize(self, self._jobs.put, None)
            threading.Thread(target=_work, args=[self._jobs], daemon=True).start()
        mine = Job(job)
        self._jobs.put(mine)
        try:
            mine.wait()
        except BaseException:
            self.close()  # the next call does not queue behind this one
            interrupt()
            mine.wait(ENDING)
            raise
        return mine.outcome()

    def close(self) -> None:
        """The thread ends after its call."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _work(jobs: SimpleQueue[Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # not until the next call
