# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank records of its operations, and the events of all ranks on the clock of rank 0.

On the CPU the times are those of the host, and an exchange ends where the rank waits for it, which may be later than its last byte.
On a device each operation is between two timed events of its lane's stream, so that nothing waits while it is recorded. A driver
returns the milliseconds between two events as f32, which are quarters of a millisecond after an hour. So an operation is measured from
the event at the beginning of its run, and the beginning of a run from that of the run before. The first beginning, and one that comes
a second after another, is measured between two events whose times the host knows (bases): one is made where a recording begins, and
one whenever it is taken. Next to a base that is exact, and the clocks may run at different rates.
Clocks of ranks are compared over the transport: a rank reads its own between two agreements, and so does rank 0 around them. The error
is half the time of the two that were fastest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import Disagreement
from ...schedule import Op
from ...trace import Event, clock
from ..agree import digest
from .messages import Network

# The number that ranks compare before they gather, and how often clocks are compared.
_GATHER = digest(b"trace of the executor 1")
_ROUNDS = 16
# The distance of two runs from which on it is not measured: by then f32 has lost 30 ns.
_GAP_NS = 10**9
MOST = 1 << 24


class Timed(NamedTuple):
    """An operation between two events of a device."""

    op: Op
    begin: Any
    end: Any


class Run(NamedTuple):
    """The operations of a run, and an event that comes before them in both streams."""

    begin: Any
    ops: list[Timed]


class Base(NamedTuple):
    """An event of a device, and its time on the host's clock."""

    event: Any
    ns: int


class Recording:
    """At most `capacity` operations of one rank until they are taken. On a device `mark` records an event in an idle stream."""

    def __init__(self, rank: int, capacity: int, mark: Callable[[], Any] | None) -> None:
        self.rank, self.capacity = rank, capacity
        self._mark, self._base = mark, None if mark is None else _base(mark)
        self._events: list[Event] = []
        self._runs: list[Run] = []
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count >= self.capacity

    def add(self, op: Op, start_ns: int, end_ns: int) -> None:
        """An operation that the host has seen."""
        if not self.full:
            self._count += 1
            self._events.append(self._event(op, start_ns, end_ns))

    def begin_run(self, begin: Any) -> None:
        """A run of a device begins, after an event that was recorded."""
        self._runs.append(Run(begin, []))

    def add_timed(self, op: Op, begin: Any, end: Any) -> None:
        """An operation of that run between two events that were recorded: a failed one has no end."""
        self._count += 1
        self._runs[-1].ops.append(Timed(op, begin, end))

    def _event(self, op: Op, start_ns: int, end_ns: int) -> Event:
        return Event(self.rank, int(op.lane), op.name, op.phase, op.step, start_ns, end_ns, moved(op, self.rank))

    def take(self) -> list[Event]:
        """What was recorded since the last call. On a device it waits for what was enqueued. What it cannot read is gone."""
        found, runs = self._events, [run for run in self._runs if run.ops]
        self._events, self._runs, self._count = [], [], 0
        if self._mark is None or self._base is None:
            return found
        before, after = self._base, _base(self._mark)
        self._base = after
        for event in (one for run in runs for op in run.ops for one in (run.begin, op.end)):
            event.synchronize()
        if not runs:
            return found
        at, last = _on_host(runs[0].begin, before, after), runs[0].begin
        for run in runs:
            gap = _between(last, run.begin)
            at, last = at + gap if gap < _GAP_NS else _on_host(run.begin, before, after), run.begin
            for op, begin, end in run.ops:
                start = max(at + _between(run.begin, begin), 0)
                found.append(self._event(op, start, start + _between(begin, end)))
        return found


def _on_host(event: Any, before: Base, after: Base) -> int:
    """The time on the host's clock of an event between two bases."""
    ahead, back = _between(before.event, event), _between(event, after.event)
    return before.ns + round((after.ns - before.ns) * (ahead / max(ahead + back, 1)))


def _base(mark: Callable[[], Any]) -> Base:
    """An event whose time is in the middle of what the host has waited for it. First it waits for what is in the stream."""
    mark().synchronize()
    since = clock()
    event = mark()
    event.synchronize()
    return Base(event, (since + clock()) // 2)


def _between(earlier: Any, later: Any) -> int:
    """Nanoseconds. Not every driver takes events in another order."""
    return 0 if earlier is later else max(round(1e6 * earlier.elapsed_time(later)), 0)


def moved(op: Op, rank: int) -> int:
    """Bytes sent and received."""
    return sum(message.bytes for message in op.messages if message.peer != rank)


def gather(transport: Any, network: Network, mine: Sequence[Event]) -> list[Event]:
    """On rank 0: the events of all ranks, ordered by start, on its clock. On other ranks none. All ranks call it."""
    if network.world == 1:
        return sorted(mine, key=lambda event: event.start_ns)
    answers = transport.agree(0, network.world, _GATHER)
    if others := [rank for rank, one in enumerate(answers) if one != _GATHER]:
        raise Disagreement(f"ranks {others} make another call while rank {network.rank} gathers a trace", others[0])
    offsets = differences(transport, network.world)
    data = torch.tensor(list(json.dumps([] if network.rank == 0 else mine).encode()), dtype=torch.uint8)
    sizes = transport.agree(0, network.world, len(data))
    at_0 = network.rank == 0
    arriving = [size if at_0 and peer else 0 for peer, size in enumerate(sizes)]
    leaving = [0 if at_0 or peer else len(data) for peer in range(network.world)]
    to = torch.empty(sum(arriving), dtype=torch.uint8, device=network.device)
    sent = data[: sum(leaving)].to(network.device)
    network.all_to_all(to, sent, arriving, leaving, 2)
    if not at_0:
        return []
    events = list(mine)
    for part, offset in zip(torch.split(to.cpu(), arriving), offsets):
        for row in json.loads(bytes(part.tolist()) or b"[]"):
            event = Event(*row)
            start, end = (max(time + offset, 0) for time in (event.start_ns, event.end_ns))
            events.append(event._replace(start_ns=start, end_ns=end))
    return sorted(events, key=lambda event: event.start_ns)


def differences(transport: Any, world: int) -> list[int]:
    """What rank 0 adds to times of each rank.

    A rank reads its clock after it has left a round, which rank 0 has entered by then, and before it enters the next one, which rank 0
    leaves later."""
    entered, best, found = clock(), 1 << 62, [0] * world
    transport.agree(0, world, 0)
    for _ in range(_ROUNDS):
        between = clock()
        clocks = transport.agree(0, world, clock())
        left = clock()
        if left - entered < best:
            best = left - entered
            found = [(entered + left) // 2 - one for one in clocks]
            found[0] = 0
        entered = between
    return found
