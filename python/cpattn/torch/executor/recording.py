# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank records of its operations, and the events of all ranks on the clock of rank 0.

On the CPU the times are those of the host, and an exchange ends where the rank waits for it, which may be later than its last byte.
On a device each operation is between two timed events of its lane's stream, so that nothing waits while it is recorded; the device's
clock is compared with the host's where a recording begins. Clocks of ranks are compared over the transport: a rank reads its own
between two agreements, and so does rank 0 around them. The error is half the time of the two that were fastest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
MOST = 1 << 24


class Timed(NamedTuple):
    """An operation between two events of a device."""

    op: Op
    begin: Any
    end: Any


class Recording:
    """At most `capacity` operations of one rank until they are taken."""

    def __init__(self, rank: int, capacity: int) -> None:
        self.rank, self.capacity = rank, capacity
        self.events: list[Event] = []
        self.timed: list[Timed] = []
        self._base: Any = None
        self._base_ns = 0

    @property
    def full(self) -> bool:
        return len(self.events) + len(self.timed) >= self.capacity

    def add(self, op: Op, start_ns: int, end_ns: int) -> None:
        """An operation that the host has seen."""
        if not self.full:
            self.events.append(self._event(op, start_ns, end_ns))

    def _event(self, op: Op, start_ns: int, end_ns: int) -> Event:
        return Event(self.rank, int(op.lane), op.name, op.phase, op.step, start_ns, end_ns, moved(op, self.rank))

    def align(self, base: Any) -> None:
        """Compares the clocks: `base` is an event that was recorded on an idle stream just now."""
        base.synchronize()
        self._base, self._base_ns = base, clock()

    def take(self) -> list[Event]:
        """What was recorded since the last call. On a device it waits for it."""
        for op, begin, end in self.timed:
            end.synchronize()
            start, stop = (self._base_ns + round(1e6 * self._base.elapsed_time(one)) for one in (begin, end))
            self.events.append(self._event(op, max(start, 0), max(start, stop, 0)))
        found, self.events, self.timed = self.events, [], []
        return found


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
