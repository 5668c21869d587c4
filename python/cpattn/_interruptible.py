# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls into C that wait for other ranks, so that Ctrl-C ends them.

Python runs signal handlers on the main thread, between two Python instructions. While the main thread is inside C, no handler
runs, possibly until the deadline. So a call from the main thread runs on a second thread, and the main thread waits in Python.

If the second thread cannot start, the call is not made: other ranks are notified, and the next call tries again.
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

from .errors import DeviceError, InvalidHandle

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Future[Any]]

# Seconds to wait for an interrupted call. A call that takes longer continues on its thread, and its memory stays allocated.
ENDING = 10.0

# Messages of the errors that threading raises if a signal handler raised between the release of a lock and taking it again.
UNLOCKED = ("release unlocked lock", "cannot release un-acquired lock")


class Interruptible:
    """A thread for the calls of one rank or transport. It starts with the first call from the main thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._process = os.getpid()

    def check_process(self) -> None:
        """Refuses calls of a forked child, which has none of the rank's threads and would wait without a limit."""
        if os.getpid() != self._process:
            raise InvalidHandle(
                f"this rank belongs to process {self._process}, from which this process, {os.getpid()}, was forked: use the rank in "
                f"process {self._process}, or make a new rank here"
            )

    def __call__(self, job: Callable[[], T], interrupt: Callable[[], None], *, needs_thread: bool = True) -> T:
        """Runs `job`. If a signal handler raises meanwhile, `interrupt` must make the job end. If the thread cannot start, `interrupt`
        ends the group, or a job that needs no thread runs here."""
        self.check_process()
        if threading.current_thread() is not threading.main_thread():
            return job()
        if self._jobs is None:
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            weakref.finalize(self, jobs.put, None)
            try:
                # Not threading.Thread: its start waits in Python, where a signal handler may raise.
                _thread.start_new_thread(_work, (jobs,))
            except RuntimeError as error:
                if not needs_thread:
                    return job()
                interrupt()
                raise no_thread("the calls of this rank", error) from error
            self._jobs = jobs
        outcome: Future[T] = Future()
        self._jobs.put((job, outcome))
        try:
            wait([outcome])
        except BaseException as error:
            self.close()  # the next call does not queue behind this one
            interrupt()
            wait([outcome], ENDING)
            # The exception of a handler inside threading's locks is replaced by one of these.
            if isinstance(error, RuntimeError) and str(error) in UNLOCKED and error.__context__ is not None:
                raise error.__context__ from None
            raise
        try:
            return outcome.result()
        finally:
            del outcome  # breaks a cycle: outcome, its exception, this frame

    def close(self) -> None:
        """Ends the thread after its current call."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def no_thread(whose: str, error: RuntimeError) -> DeviceError:
    """The error of a thread that did not start."""
    return DeviceError(
        f"the thread of {whose} did not start ({error}): allow this process more threads (ulimit -u, pids.max)"
    )


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, outcome = entry
        try:
            outcome.set_result(job())
        except BaseException as error:  # noqa: BLE001 (raised where the call was made)
            outcome.set_exception(error)
        del entry, job, outcome  # do not keep them until the next call
