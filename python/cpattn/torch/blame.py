# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which rank is at fault when a gloo group fails, found by asking every rank through the store of the process group.

gloo names the peer whose connection closed or whose message did not come. That peer may itself wait for another one, or have
closed its connections because of it. So a thread of each rank waits for a question in the store, which costs nothing while
nothing fails. The rank that fails first puts a question to every rank; each answers with what it waits for, and closes its
connections. Who is at fault follows from the answers: from the rank that asked, along the ranks that wait for each other, to
one that does not answer, has left, or waits for no other. Where all wait for each other it is the one that has waited for much
less than the timeout: it came late, or was stopped, and time in which a process does not run is no time in which it waits. The
first verdict counts on every rank.

Nothing here waits without a limit: `ask` gives up after `limit` seconds, and the thread has a connection to the store of its own.
A call into the store has no limit where the process that holds it is stopped or dead, so each is made on a thread that nobody has
to wait for (`within`).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch.distributed import distributed_c10d as c10d

from .._interruptible import Job

T = TypeVar("T")
_FOREVER = timedelta(days=30)
SAME = "all ranks of a group must make the same calls in the same order, with the same documents and options"
STORE = 10.0  # seconds that the store has to answer in at least: its process may share a core with many that start
_SHOWN = 8  # ranks in one text
_SILENT = "gives no answer: it was killed, is stopped, or is cut off"
_JOINING = "joining"  # in place of the rank that asks, where none waits for another in particular yet


class Wait(NamedTuple):
    """What a rank waits for, and what it runs."""

    call: str
    doing: str
    peer: int
    bytes: int
    run: str


# While the group is being formed: for no rank in particular.
MEETING = Wait("making the transport", "connecting", -1, 0, "no plan")


class Verdict(NamedTuple):
    """The rank at fault, None where that cannot be told, and why. Of two ranks that differ each names the `other`."""

    peer: int | None
    text: str
    other: int | None = None
    differ: bool = False  # in what they run

    def on(self, rank: int) -> int | None:
        """The rank that `rank` names."""
        return self.other if rank == self.peer and self.other is not None else self.peer


def running(direction: int, fingerprint: int) -> str:
    """What a rank runs, in words; see `Transport.run`."""
    return f"the {('forward', 'backward')[direction - 1]} of plan {fingerprint:016x}" if direction else "no plan"


class NoAnswer(RuntimeError):
    """A call into the store did not return in time."""


def within(seconds: float, every: float, job: Callable[[], T]) -> T:
    """What `job` returns or raises, on a daemon thread; NoAnswer where it does neither in so many seconds, in which case it is
    left to itself. Ctrl-C ends the wait. A process that is stopped meanwhile loses `every` seconds at most."""
    given = Job(job)
    threading.Thread(target=given.run, daemon=True).start()
    for _ in range(math.ceil(seconds / every)):
        if given.wait(every):
            return given.outcome()
    raise NoAnswer(f"no answer within {seconds:.1f} s")


class Pulse(threading.Thread):
    """Counts the time in which this process runs: a clock that stands still while it is stopped, or gets no core."""

    def __init__(self, every: float) -> None:
        super().__init__(daemon=True)
        self.every, self._lost, self._seen = every, 0.0, time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()

    def run(self) -> None:
        while not self._over.wait(self.every):
            self.time()

    def time(self) -> float:
        """In seconds."""
        with self._lock:
            now = time.monotonic()
            if self.is_alive() and now - self._seen > 3 * self.every + 0.05:
                self._lost += now - self._seen
            self._seen = now
            return now - self._lost

    def close(self) -> None:
        """It stops counting."""
        self._over.set()


class Blame:
    """This rank's part. `ended` is why it takes part in nothing any more."""

    def __init__(self, name: str, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.pulse = Pulse(min(max(timeout / 32, 0.01), 1.0))
        self._waits: Wait | None = None
        self._since = self.pulse.time()  # it waits, or waits for nothing
        self.ended: str | None = None
        self.verdict: Verdict | None = None
        # An answer takes as long as a thread of that rank needs to get a core.
        self.grace = min(max(timeout / 2, 0.5), 5.0)
        self.limit = 2 * self.grace + 1.0
        self._known, self._closed, self._process = threading.Event(), False, os.getpid()
        self._thread: threading.Thread | None = None
        self._question: threading.Thread | None = None
        # The others gave up before this rank came; the store does not answer, so that there can be no group.
        self.late: Verdict | None = None
        self.silent = False
        try:
            base: Any = c10d._get_default_store()
            self._heard, self._said, late = self.within(lambda: self._connect(name, base), timeout)
            self.late = self.verdict = Verdict(*json.loads(late)) if late else None
        except NoAnswer as error:
            self.silent = True
            self.verdict = Verdict(
                None, f"which rank is at fault cannot be told: the process that holds the store does not answer ({error})"
            )
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            self.verdict = Verdict(None, f"which rank is at fault cannot be told: the store has no second connection ({error})")

    def within(self, job: Callable[[], T], seconds: float) -> T:
        """What `job` returns or raises; NoAnswer where it does neither in so many seconds and the grace, `STORE` at least."""
        return within(max(seconds + self.grace, STORE), self.pulse.every, job)

    def _connect(self, name: str, base: Any) -> tuple[Any, Any, bytes]:
        """One connection for the thread, which waits in it, one for questions, as the process group's own may be in use; and
        the verdict, if there is one already."""
        heard, said = (c10d.PrefixStore(f"{name}/blame", base.clone()) for _ in range(2))
        said.set(f"here/{self.rank}", "")
        return heard, said, said.get("verdict") if said.check(["verdict"]) else b""

    @property
    def waits(self) -> Wait | None:
        """What it waits for just now."""
        return self._waits

    @waits.setter
    def waits(self, waits: Wait | None) -> None:
        self._waits, self._since = waits, self.pulse.time()

    def listen(self, over: Callable[[], None]) -> None:
        """From now on this rank answers; `over` is called, on another thread, when the group has failed on some rank."""
        if self.world > 1 and self.verdict is None:
            self._thread = threading.Thread(target=self._listen, args=[over], daemon=True)
            self._thread.start()
            self.pulse.start()

    def ask(self, joining: bool = False, found: Verdict | None = None) -> Verdict:
        """What the ranks find out together, after a failure on this one; `joining`: while the group was being formed; `found`:
        by this rank already."""
        if not self._known.is_set() and self.alarm(joining, found):
            self._wait_until_known()
        return self.verdict or found or Verdict(
            None,
            f"which rank is at fault cannot be told: the store of the process group did not answer within {self.limit:.1f} s; "
            "see whether the process that holds it runs",
        )

    @property
    def is_asking(self) -> bool:
        """The group has failed somewhere, and the ranks may still find out which of them is at fault."""
        return self._thread is not None and not self._known.is_set()

    def settled(self) -> Verdict | None:
        """The verdict, for which this waits while the ranks look for it, `limit` seconds at most."""
        if self.is_asking:
            self._wait_until_known()
        return self.verdict

    def _wait_until_known(self) -> None:
        """At most `limit` seconds, of which those do not count in which the process does not run."""
        end = self.pulse.time() + self.limit
        while not self._known.wait(self.pulse.every) and self.pulse.time() < end:
            pass

    def alarm(self, joining: bool = False, found: Verdict | None = None) -> bool:
        """Puts the question to all ranks, and before it an answer, where that is found, and waits for nothing; False where no
        rank can be asked."""

        def question() -> None:
            # What cannot be asked for is not answered either.
            with suppress(RuntimeError):
                if found:
                    self._agree(self._said, found)
                mine = _JOINING if joining else str(self.rank)
                first = self._said.compare_set("asker", "", mine).decode()
                for rank in range(self.world) if first == mine else [self.rank]:
                    self._said.set(f"ask/{rank}", "")

        if self._thread is None:
            return False
        # Not on this thread: it might never return, where the store's process is stopped.
        self._question = threading.Thread(target=question, daemon=True)
        try:
            self._question.start()
        except RuntimeError:  # the interpreter ends
            return False
        return True

    def close(self) -> None:
        """This rank leaves; ranks that still need it find that out when they ask."""
        self._closed, self.ended = True, self.ended or "has left the group"
        self.pulse.close()
        threads = [t for t in (self._thread, self._question) if t and t.is_alive() and t is not threading.current_thread()]
        # A forked child has no such threads.
        if not threads or os.getpid() != self._process:
            return
        if self._question not in threads:  # which may have hold of the store
            with suppress(RuntimeError):
                self._say(self._said)
                self._said.set(f"ask/{self.rank}", "")
        for thread in threads:
            thread.join(1.0)

    def _say(self, store: Any) -> None:
        seconds = self.pulse.time() - self._since
        store.set(f"says/{self.rank}", json.dumps([self.ended, self.waits, seconds]))

    def _listen(self, over: Callable[[], None]) -> None:
        store = self._heard
        try:
            store.wait([f"ask/{self.rank}"], _FOREVER)
            if not self._closed:
                self._say(store)
                over()
                self._agree(store, self._find(store))
        except RuntimeError as error:
            text = "which rank is at fault cannot be told: the store of the process group, or the process that holds it, is gone"
            self.verdict = self.verdict or Verdict(None, f"{text} ({error})")
        finally:
            self._known.set()

    def _agree(self, store: Any, found: Verdict) -> Verdict:
        """The first verdict is that of all."""
        self.verdict = Verdict(*json.loads(store.compare_set("verdict", "", json.dumps(found))))
        return self.verdict

    def _find_joining(self, store: Any) -> Verdict:
        """Of all ranks those that have not come, or else the first that came and does not answer, or else the one that has been
        there for much less time than others."""
        missing = [rank for rank in range(self.world) if not store.check([f"here/{rank}"])]
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
            return Verdict(missing[0], f"rank {shown} did not come")
        there = []
        for rank in range(self.world):
            if (said := self._answer(store, rank)) is None:
                return Verdict(rank, f"rank {rank} {_SILENT}")
            there.append(said[2])
        if max(there) - min(there) > self.timeout / 2:
            rank = there.index(min(there))
            return Verdict(rank, f"rank {rank} came late, or was stopped: it has been there for {min(there):.1f} s, others {max(there):.1f} s")
        return Verdict(None, "all ranks came, and their connections were not made: which is at fault cannot be told")

    def _find(self, store: Any) -> Verdict:
        if store.check(["verdict"]):
            return Verdict(None, "")  # which is not the first
        asker = store.get("asker").decode()
        if asker == _JOINING:
            return self._find_joining(store)
        at, chain, waits, waited = int(asker), [], dict[int, Wait](), dict[int, float]()
        while True:
            said = self._answer(store, at)
            if said is None:
                end = Verdict(at, f"rank {at} {_SILENT}")
            elif said[0] is not None:
                end = Verdict(at, f"rank {at} {said[0]}")
            elif said[1] is None:
                end = Verdict(at, f"rank {at} is in no call of the group, while others wait for it")
                if said[2] < self.timeout / 2 and waited:
                    end = self._late(waited) or end
            else:
                wait = Wait(*said[1])
                if wait.peer < 0:
                    chain.append(f"rank {at} was {wait.call}")
                    end = self._find_joining(store)
                    return end._replace(text="; ".join([end.text, *chain]))
                chain.append(f"rank {at} waited for rank {wait.peer} ({wait.call}: {wait.doing} {wait.bytes} bytes)")
                waits[at], waited[at] = wait, said[2]
                if wait.peer in waits:
                    end = self._circle(waits, waited)
                else:
                    at = wait.peer
                    continue
            shown = chain if len(chain) <= _SHOWN else [*chain[: _SHOWN - 1], "...", chain[-1]]
            return end._replace(text="; ".join([end.text, *shown]))

    def _late(self, waited: dict[int, float], part: int = 2) -> Verdict | None:
        """The rank that has waited least, if that is little."""
        rank = min(waited, key=lambda rank: waited[rank])
        if waited[rank] > self.timeout / part:
            return None
        return Verdict(rank, f"rank {rank} came late: it has waited for {waited[rank]:.1f} s, was in no call or stopped before")

    def _circle(self, waits: dict[int, Wait], waited: dict[int, float]) -> Verdict:
        """Ranks that wait for each other: one that came late, or two that run different things, if there are."""
        first, *others = waits.items()
        for rank, wait in others:
            if (wait.call, wait.run) != (first[1].call, first[1].run):
                said = [f"rank {r} is in {w.call} of {w.run}" for r, w in (first, (rank, wait))]
                differ = Verdict(rank, f"{', '.join(said)}: {SAME}", first[0], True)
                # Those that run different things have all waited for about as long.
                return self._late(waited, 4) or differ
        return self._late(waited) or Verdict(None, "which rank is at fault cannot be told: ranks wait for each other")

    def _answer(self, store: Any, rank: int) -> Any:
        """What a rank says, None if it says nothing in time or another rank has a verdict already."""
        end = self.pulse.time() + self.grace
        while not self._closed:
            over = self.pulse.time() > end  # and one more look
            if store.check([f"says/{rank}"]):
                return json.loads(store.get(f"says/{rank}"))
            if over or store.check(["verdict"]):
                break
            time.sleep(0.01)
        return None
