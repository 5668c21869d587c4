# SPDX-License-Identifier: MIT OR Apache-2.0
"""The processes of a torch.distributed group as a transport, for tensors of the CPU.

It makes a gloo group of its own with the ranks of the user's, whatever backend that has: a run and the user's collectives
overlap in time and must not meet, and a group that failed is closed, which the user's must not be. `dist.new_group` would
not do: it gives the name of a group that was destroyed to the next one, whose ranks then find addresses of the dead.

- Agreements and exchanges of different ranks overlap, so they have different tags. Between two ranks, messages of one tag
  meet in the order in which they are posted.
- The deadline goes to `Work.wait`: a call fails once it has waited that long without one of its messages moving.
- Each packet begins with a header: its size, the number and sizes of its messages, and what its sender runs. It is received
  into room for the largest packet that travels with its header; a larger one follows by itself, once its receiver has compared
  the sizes. gloo does not compare them: it ends the process that receives more than it has room for, and says nothing where
  less comes.
- After any failure the group is closed (`abort`) on every rank: what was posted ends with an error, so that nothing writes
  into the library's memory afterwards. It stays failed. Errors name the rank at fault where that can be told (`blame.py`),
  which takes half the deadline more, 0.5 s at least and 5 s at most.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import rank
from .._check import number
from .._interruptible import Interruptible
from ..errors import Disagreement, Error, InvalidArgument, PeerError, Unsupported
from ..ring import Link
from ..transport import Buffer, Message, Packet, Transport, check_list, packets
from .blame import MEETING, SAME, Blame, NoAnswer, Verdict, Wait, running

# Messages to one peer below this many bytes travel together, copied, and packets up to it with their header: a message of its
# own costs gloo 50 to 100 us.
SMALL = 64 << 10

# How many transports each group of global ranks has had.
_made: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
_AGREE, _EXCHANGE, _BODY, _NEVER = 7001, 7002, 7003, 7004
# The sizes of the packet behind it (`Packet.sizes`: bytes, number of messages, a hash); direction and fingerprint of what the
# sender runs.
_HEADER = struct.Struct("<QQQQQ")


class GlooTransport(Transport):
    """Every rank of `group` makes one, at the same time; None is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument("torch.distributed has no process group: call init_process_group first")
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        if not (group is None or group is outside or isinstance(group, dist.ProcessGroup)):
            raise InvalidArgument(f"group is {group!r}, a process group or None is needed")
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if not dist.is_gloo_available():
            raise Unsupported("this PyTorch was built without gloo, over which tensors of the CPU travel")
        if self.rank < 0:
            raise InvalidArgument(f"group: process {dist.get_rank()} is none of its {self.world} ranks")
        timeout = number("timeout", timeout)
        if not 1e-3 <= timeout <= 1e9:
            raise InvalidArgument(f"timeout is {timeout} seconds, 0.001 to 1e9 are needed")
        self._timeout = timedelta(seconds=timeout)
        self._failed: str | None = None
        self._kept: list[object] = []
        self._interruptible = Interruptible()
        members = tuple(dist.get_process_group_ranks(group))
        # Members make their transports in the same order, so that all of them arrive at the same name.
        name = f"cpattn/{','.join(map(str, members))}/{next(_made[members])}"
        began = time.monotonic()
        self._group: Any = None
        self._blame = Blame(name, self.rank, self.world, timeout)
        if self._blame.silent:
            what = f"no transport was made, after {time.monotonic() - began:.1f} s (timeout {timeout:g} s)"
            raise self._error(what, self._blame.verdict)
        if late := self._blame.late:
            raise self._error("the others gave up before this rank made its transport", late)
        # Also at the end of the program, before a thread can meet an interpreter that ends.
        self._leave = weakref.finalize(self, self._blame.close)
        over = weakref.WeakMethod(self._over)
        self._blame.listen(lambda: (method := over()) and method())
        try:
            self._blame.waits = MEETING
            # It waits for the others to come and to connect, in the store, which heeds no timeout where its process is stopped.
            self._group = self._blame.within(partial(self._connect, name), 2 * timeout)
            self._blame.waits = None
        except RuntimeError as error:
            what = f"not all ranks made their transport, after {time.monotonic() - began:.1f} s (timeout {timeout:g} s)"
            raise self._error(what, self._blame.ask(joining=True), None if isinstance(error, NoAnswer) else error) from error
        except BaseException:
            self.abort()
            raise

    def _connect(self, name: str) -> Any:
        """The group, over a connection to the store of its own: where the wait is interrupted, this goes on until the timeout, and
        a wait in a store holds up all other calls over the same connection."""
        store: Any = c10d._get_default_store()
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            store = store.clone()  # not with the stores of every PyTorch
        return c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), self.rank, self.world, self._timeout)

    def agree(self, first: int, end: int, number: int) -> Sequence[int]:
        if not 0 <= first <= self.rank < end <= self.world:
            raise InvalidArgument(
                f"first and end are {first} and {end}, ranks from 0 to {self.world - 1} with rank {self.rank} among them are needed"
            )
        mine, peers = struct.pack("<Q", number), [peer for peer in range(first, end) if peer != self.rank]
        theirs = {peer: bytearray(8) for peer in peers}

        def run(moves: _Moves) -> None:
            moves.wait(
                *[moves.post("receiving", peer, theirs[peer], _AGREE) for peer in peers],
                *[moves.post("sending", peer, bytearray(mine), _AGREE) for peer in peers],
            )

        self._move("agreement", run)
        return [struct.unpack("<Q", theirs.get(peer, mine))[0] for peer in range(first, end)]

    def exchange(
        self, operation: str, step: int, sends: Sequence[Message], recvs: Sequence[Message], stream: int | None = None
    ) -> None:
        check_list(self.rank, self.world, "sends", sends)
        check_list(self.rank, self.world, "recvs", recvs)

        def move(moves: _Moves) -> None:
            heads = []
            for packet in packets(recvs, below=SMALL):
                room = bytearray(_HEADER.size + SMALL)
                heads.append((packet, room, moves.post("receiving", packet.peer, room, _EXCHANGE, packet.bytes)))
            sent = []
            for packet in packets(sends, below=SMALL):
                head, bytes = bytearray(_HEADER.pack(*packet.sizes, *self.run)), packet.bytes
                if bytes <= SMALL:
                    head += packet.gather()
                sent.append(moves.post("sending", packet.peer, head, _EXCHANGE, bytes))
                if bytes > SMALL:
                    sent.append(moves.post("sending", packet.peer, packet.gather(), _BODY))
            bodies = []
            for packet, room, posted in heads:
                moves.wait(posted)
                self._compare(packet, _HEADER.unpack_from(room), f"{operation}, step {step}")
                if packet.bytes <= SMALL:
                    packet.put(memoryview(room)[_HEADER.size :])
                else:
                    body = packet.room()
                    bodies.append((packet, body, moves.post("receiving", packet.peer, body, _BODY)))
            for packet, body, posted in bodies:
                moves.wait(posted)
                packet.scatter(body)
            moves.wait(*sent)

        self._move(f"{operation}, step {step}", move)

    def _compare(self, packet: Packet, theirs: tuple[int, ...], what: str) -> None:
        """What a peer sends, and runs, with what this rank expects of it."""
        peer, sent, expected, run = packet.peer, theirs[:3], packet.sizes, theirs[3:]
        if sent == expected and run == self.run:
            return
        others = " of other sizes" if sent[:2] == expected[:2] and sent != expected else ""
        text = (
            f"rank {peer} sends {_counted(*sent)} and runs {running(*run)}, rank {self.rank} expects "
            f"{_counted(*expected)}{others} ({what}) and runs {running(*self.run)}: {SAME}"
        )
        raise _Differs(Verdict(peer, text, self.rank, run != self.run))

    def poll(self) -> None:
        # It does not wait: a failure is told once the ranks know which of them is at fault.
        if self._failed is not None and not self._blame.is_asking:
            raise self._failed_before()

    def _failed_before(self) -> Error:
        return self._error(f"the group failed before: {self._failed}", self._blame.settled())

    def abort(self) -> None:
        if self._failed is None:
            self._failed = self._blame.ended = "aborted the run"
            self._blame.alarm()
        self._close()

    def release(self) -> None:
        self._failed = self._failed or "this rank was closed"
        self._leave()
        self._interruptible.close()
        self._group = None  # which closes the connections

    def _close(self) -> None:
        if (group := self._group) is not None and self.world > 1:
            # gloo has no call for it: an expired wait closes all connections of the group, and ends whoever waits here.
            with suppress(RuntimeError):
                never = torch.empty(1, dtype=torch.uint8)
                group.recv([never], (self.rank + 1) % self.world, _NEVER).wait(timedelta(milliseconds=1))

    def _over(self) -> None:
        """The group has failed on some rank."""
        self._failed = self._failed or "another rank ended it"
        self._close()

    def _error(self, what: str, verdict: Verdict | None, error: object = None) -> Error:
        told = [what, *([verdict.text] if verdict else []), *([f"gloo: {error}"] if error else [])]
        text = f"rank {self.rank} of {self.world}: {'; '.join(told)}"
        kind = Disagreement if verdict and verdict.differ else PeerError
        return kind(text, verdict.on(self.rank) if verdict else None)

    def _move(self, what: str, run: Callable[[_Moves], None]) -> None:
        if self._failed is not None:
            raise self._failed_before()
        self._interruptible(lambda: self._wait_for(what, run), self.abort)

    def _wait_for(self, what: str, run: Callable[[_Moves], None]) -> None:
        began, blame = time.monotonic(), self._blame
        moves = _Moves(self, what)
        try:
            run(moves)
        except BaseException as error:
            # Whatever becomes of what was posted, its memory is not reused while it is known here.
            self._kept.append(moves.posted)
            if isinstance(error, _Differs):
                self._failed = self._failed or error.verdict.text
                verdict = blame.ask(found=error.verdict)
                self._close()
                raise self._error(what, verdict) from None
            if not isinstance(error, RuntimeError) or (wait := blame.waits) is None:
                blame.ended = f"failed by itself ({type(error).__name__})"
                self._failed = self._failed or blame.ended
                blame.alarm()
                self._close()
                raise
            text = (
                f"{what}: {wait.doing} {wait.bytes} bytes, rank {wait.peer} failed or did not answer, "
                f"after {time.monotonic() - began:.1f} s (timeout {self._timeout.total_seconds():g} s)"
            )
            self._failed = self._failed or text
            self._close()
            raise self._error(text, blame.ask(), error) from error
        finally:
            blame.waits = None


def check_ring(group: dist.ProcessGroup | None = None, *, timeout: float = 60.0, bytes: int = 4 << 20) -> list[Link]:
    """`cpattn.check_ring` over a gloo group of its own with the ranks of `group`; all of them call it."""
    return rank.check_ring(GlooTransport(group, timeout=timeout), bytes)


def _counted(bytes: int, messages: int, _hash: int) -> str:
    """The sizes of a packet, in words."""
    return f"{bytes} bytes in {messages} message{'s' * (messages != 1)}"


class _Differs(Exception):
    """A peer sends something else than this rank expects."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict


_Posted = tuple[Wait, torch.Tensor, dist.Work]


class _Moves:
    """What one call has posted."""

    def __init__(self, transport: GlooTransport, what: str) -> None:
        self.transport, self.what, self.posted = transport, what, list[_Posted]()

    def post(self, doing: str, peer: int, data: Buffer, tag: int, bytes: int | None = None) -> _Posted:
        """Begins to send or to receive; `bytes` is what errors say."""
        own, tensor = self.transport, torch.frombuffer(data, dtype=torch.uint8)
        wait = Wait(self.what, doing, peer, len(data) if bytes is None else bytes, running(*own.run))
        own._blame.waits = wait
        post = own._group.recv if doing == "receiving" else own._group.send
        self.posted.append((wait, tensor, post([tensor], peer, tag)))
        return self.posted[-1]

    def wait(self, *all_: _Posted) -> None:
        """For each of them, at most the timeout."""
        for self.transport._blame.waits, _, work in all_:
            work.wait(self.transport._timeout)
