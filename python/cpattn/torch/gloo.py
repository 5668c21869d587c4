# SPDX-License-Identifier: MIT OR Apache-2.0
"""A transport over the processes of a torch.distributed group, for tensors on the CPU.

It makes its own gloo group with the ranks of the user's group, for two reasons. A run and the user's collectives may overlap in
time, and their messages must not be mixed up. And after a failure the group is closed, which must not happen to the user's group.
`dist.new_group` is not suitable: it reuses the name of a destroyed group for the next one, whose ranks then find the addresses of
the old one in the store.

gloo does not compare sizes: it ends a process that receives more than it has room for, and does not report a shorter message. The
library compares sizes, and receives a message only if it fits.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import rank
from ..arguments import attempt, refused, whole
from ..engine import Engine, EngineTransport, checked_timeout
from ..errors import InvalidArgument, Unsupported
from ..ring import Link

# The number of transports that each group of global ranks has made.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
# A group of PyTorch's, or None, the default group, or the global ranks of one.
Members = dist.ProcessGroup | Sequence[int] | None
_FOREVER = timedelta(days=30)
# Seconds after which a connection to the store is slow.
SLOW = 2.0
_NEVER = 7000  # a tag that no message uses


def members_of(group: Members) -> tuple[int, ...]:
    """The global ranks of a group. This process must be one of them."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument(
            "torch.distributed has no process group: start with torchrun and call init_process_group first"
        )
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    members: tuple[int, ...] | None
    if group is outside:
        members = ()
    elif group is None or isinstance(group, dist.ProcessGroup):
        members = tuple(dist.get_process_group_ranks(group)) if dist.get_rank(group) >= 0 else ()
    else:
        ranks: Any = group
        members = attempt(lambda: tuple(whole("group", rank, 0, dist.get_world_size() - 1) for rank in ranks))
        if not members or any(b <= a for a, b in pairwise(members)):
            needed = f"a process group, None or ascending global ranks below {dist.get_world_size()} are needed"
            raise refused("group", group, needed)
    if dist.get_rank() not in members:
        raise InvalidArgument(
            f"process {dist.get_rank()} is not a member of group: call this on the members of group only"
        )
    return members


def _next_name(members: tuple[int, ...]) -> str:
    """A name that no other group has. Members make their groups in the same order, so all of them compute the same name."""
    return f"cpattn/{','.join(map(str, members))}/{next(_numbers[members])}"


def another(store: Any) -> Any:
    """A store over a connection of its own. PyTorch asks a name server for the names of both ends: that takes 5 seconds or more where it
    does not answer, which is said meanwhile, since nothing else would tell why a program stands still."""
    notice = threading.Timer(SLOW, _say)
    notice.daemon = True
    with suppress(RuntimeError):  # no thread can start
        notice.start()
    try:
        return store.clone()
    finally:
        notice.cancel()


def _say() -> None:
    warnings.warn(
        f"connecting to the store of torch.distributed takes longer than {SLOW:g} s: PyTorch asks the machine's name server about each connection, and "
        "a context makes three. If it does not answer: RES_OPTIONS='timeout:1 attempts:1' in the environment, or the address in /etc/hosts",
        RuntimeWarning,
        stacklevel=2,
    )


def connected(name: str, rank: int, world: int, timeout: timedelta) -> Any:
    """A gloo group, once all its ranks are connected. Its connections are closed with its last reference.

    gloo returns on a rank whose own connections are made: if this rank closed the group now, as a refusal of a later argument does,
    another rank that is still connecting would fail instead of being refused. Hence the barrier.

    Uses a separate connection to the store: an interrupted call still continues until the timeout, and a wait in a store blocks all
    other calls over the same connection."""
    store: Any = c10d._get_default_store()
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        store = another(store)
    group: Any = c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, world, timeout)
    group.barrier().wait()
    return group


class Collectives:
    """Sums and broadcasts over a gloo group of its own with these global ranks, in the manner of torch.distributed, until `close`."""

    device = torch.device("cpu")

    def __init__(self, members: tuple[int, ...], timeout: float) -> None:
        self._group = connected(
            _next_name(members), members.index(dist.get_rank()), len(members), timedelta(seconds=timeout)
        )

    def sum(self, host: torch.Tensor) -> None:
        """Adds up a contiguous tensor, in place."""
        self._group.allreduce([host]).wait()

    def exchange(self, to: torch.Tensor, sent: torch.Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Sends the parts of a contiguous tensor, of these lengths, to each member, and receives one from each."""
        self._group.alltoall_base(to, sent, arriving, leaving).wait()

    def broadcast(self, message: Any, root: int) -> Any:
        """An object of the member number `root`, on all members."""
        group = self._group
        data = (
            torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
            if group.rank() == root
            else torch.empty(0, dtype=torch.uint8)
        )
        length = torch.tensor([len(data)])
        group.broadcast(length, root).wait()
        data = data if group.rank() == root else torch.empty(int(length), dtype=torch.uint8)
        group.broadcast(data, root).wait()
        return message if group.rank() == root else pickle.loads(data.numpy().tobytes())

    def close(self) -> None:
        """Leaves the group, which must not be used afterwards."""
        self._group = None


class Gloo(Engine):
    """A gloo group, and the store of the process group."""

    failures = (RuntimeError,)

    def __init__(self, name: str, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self._name = rank, world, name
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = None

    def open(self) -> None:
        base: Any = c10d._get_default_store()
        try:
            self._waiting, self._reports = (c10d.PrefixStore(f"{self._name}/blame", another(base)) for _ in range(2))
        except AttributeError as error:  # stores of some versions have no clone
            raise RuntimeError(str(error)) from error

    def connect(self) -> None:
        self._group = connected(self._name, self.rank, self.world, self._timeout)

    def post(self, receive: bool, peer: int, tag: int, data: memoryview) -> Any:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        return (self._group.recv if receive else self._group.send)([tensor], peer, tag), tensor

    def wait(self, request: Any, seconds: float) -> None:
        request[0].wait(timedelta(seconds=seconds))

    def close(self) -> None:
        if (group := self._group) is not None and self.world > 1:
            # gloo has no call for this. A wait that times out closes all connections of the group and ends all other waits.
            with suppress(RuntimeError):
                never = torch.empty(1, dtype=torch.uint8)
                group.recv([never], (self.rank + 1) % self.world, _NEVER).wait(timedelta(milliseconds=1))

    def put(self, key: str, value: bytes) -> bytes:
        there: bytes = self._reports.compare_set(key, "", value.decode())
        return there

    def get(self, key: str) -> bytes | None:
        return self._reports.get(key) if self._reports.check([key]) else None

    def wait_for(self, key: str) -> None:
        self._waiting.wait([key], _FOREVER)

    def release(self) -> None:
        self._group = None  # closes the connections


class GlooTransport(EngineTransport):
    """A transport over gloo. Every rank of `group` makes one, at the same time; None is the default group, and a group can be given by
    its global ranks. `timeout` is in seconds: if none of the messages of a call moves for that time, the group fails."""

    def __init__(self, group: Members = None, *, timeout: float) -> None:
        self.members = members_of(group)
        if not dist.is_gloo_available():
            raise Unsupported("this PyTorch was built without gloo, which CPU tensors need: use a PyTorch with gloo")
        timeout = checked_timeout(timeout)
        engine = Gloo(_next_name(self.members), self.members.index(dist.get_rank()), len(self.members), timeout)
        super().__init__(engine, timeout)


def check_ring(group: Members = None, *, timeout: float = 60.0, bytes: int = 4 << 20) -> list[Link]:
    """Runs `cpattn.check_ring` over a new gloo group with the ranks of `group`. All ranks of `group` call it. `timeout` is in
    seconds, `bytes` is the size of the large message."""
    # Refused before anything is connected.
    bytes = rank.ring_bytes(bytes)
    return rank.check_ring(GlooTransport(group, timeout=timeout), bytes)
