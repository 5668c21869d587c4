# SPDX-License-Identifier: MIT OR Apache-2.0
"""The processes of a torch.distributed group as a transport, for tensors of the CPU.

It makes a gloo group of its own with the ranks of the user's, whatever backend that has: a run and the user's collectives
overlap in time and must not meet, and a group that failed is closed, which the user's must not be. `dist.new_group` would
not do: it gives the name of a group that was destroyed to the next one, whose ranks then find addresses of the dead.

- Agreements and exchanges of different ranks overlap, so they have different tags. Between two ranks, messages of one tag
  meet in the order in which they are posted.
- The deadline goes to `Work.wait`: a call fails once it has waited that long without one of its messages moving.
- After any failure the group is closed (`abort`) on every rank: what was posted ends with an error, so that nothing writes
  into the library's memory afterwards. It stays failed. Errors name the rank at fault where that can be told (`blame.py`),
  which takes half the deadline more, 0.5 s at least and 5 s at most.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import InvalidArgument, PeerError, Unsupported
from ..transport import Buffer, Message, Transport, packets
from .blame import Blame, Verdict, Wait

# Messages to one peer below this many bytes travel together, copied: a message of its own costs gloo 50 to 100 us.
SMALL = 64 << 10

# How many transports each group of global ranks has had.
_made: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
_AGREE, _EXCHANGE, _NEVER = 7001, 7002, 7003


class GlooTransport(Transport):
    """Every rank of `group` makes one, at the same time; None is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument("torch.distributed has no process group: call init_process_group first")
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if not dist.is_gloo_available():
            raise Unsupported("this PyTorch was built without gloo, over which tensors of the CPU travel")
        if self.rank < 0:
            raise InvalidArgument(f"group: process {dist.get_rank()} is none of its {self.world} ranks")
        if not timeout > 0:
            raise InvalidArgument(f"timeout is {timeout} s, more than 0 is needed")
        self._timeout = timedelta(seconds=timeout)
        self._failed: str | None = None
        self._kept: list[object] = []
        members = tuple(dist.get_process_group_ranks(group))
        # Members make their transports in the same order, so that all of them arrive at the same name.
        name = f"cpattn/{','.join(map(str, members))}/{next(_made[members])}"
        began = time.monotonic()
        self._group: Any = None
        self._blame = Blame(name, self.rank, self.world, timeout)
        if late := self._blame.late():
            raise self._error("the others gave up before this rank made its transport", late)
        # Also at the end of the program, before a thread can meet an interpreter that ends.
        self._leave = weakref.finalize(self, self._blame.close)
        over = weakref.WeakMethod(self._over)
        self._blame.listen(lambda: (method := over()) and method())
        try:
            store = c10d.PrefixStore(name, c10d._get_default_store())
            self._group = c10d.ProcessGroupGloo(store, self.rank, self.world, self._timeout)
        except RuntimeError as error:
            what = f"not all ranks made their transport, after {time.monotonic() - began:.1f} s (timeout {timeout:g} s)"
            raise self._error(what, self._blame.ask(joining=True), error) from error

    def agree(self, first: int, end: int, number: int) -> Sequence[int]:
        mine, theirs = struct.pack("<Q", number), {peer: bytearray(8) for peer in range(first, end) if peer != self.rank}
        self._move("agreement", _AGREE, [(peer, bytearray(mine)) for peer in theirs], list(theirs.items()))
        return [struct.unpack("<Q", theirs.get(peer, mine))[0] for peer in range(first, end)]

    def exchange(
        self, operation: str, step: int, sends: Sequence[Message], recvs: Sequence[Message], stream: int | None = None
    ) -> None:
        outgoing, incoming = packets(sends, below=SMALL), packets(recvs, below=SMALL)
        gathered = [(p.peer, p.gather()) for p in outgoing]
        rooms = [(p.peer, p.room()) for p in incoming]
        self._move(f"{operation}, step {step}", _EXCHANGE, gathered, rooms)
        for packet, (_, room) in zip(incoming, rooms, strict=True):
            packet.scatter(room)

    def poll(self) -> None:
        # It does not wait: a failure is told once the ranks know which of them is at fault.
        if self._failed is not None and not self._blame.is_asking:
            raise self._failed_before()

    def _failed_before(self) -> PeerError:
        return self._error(f"the group failed before: {self._failed}", self._blame.settled())

    def abort(self) -> None:
        if self._failed is None:
            self._failed = self._blame.ended = "aborted the run"
            self._blame.alarm()
        self._close()

    def release(self) -> None:
        self._failed = self._failed or "this rank was closed"
        self._leave()
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

    def _error(self, what: str, verdict: Verdict | None, error: object = None) -> PeerError:
        told = [what, *([verdict.text] if verdict else []), *([f"gloo: {error}"] if error else [])]
        return PeerError(f"rank {self.rank} of {self.world}: {'; '.join(told)}", verdict.peer if verdict else None)

    def _move(self, what: str, tag: int, sends: list[tuple[int, Buffer]], recvs: list[tuple[int, Buffer]]) -> None:
        if self._failed is not None:
            raise self._failed_before()
        began, blame = time.monotonic(), self._blame
        posted: list[tuple[Wait, torch.Tensor, dist.Work]] = []
        try:
            for doing, list_, post in (("receiving", recvs, self._group.recv), ("sending", sends, self._group.send)):
                for peer, data in list_:
                    tensor = torch.frombuffer(data, dtype=torch.uint8)
                    blame.waits = Wait(what, doing, peer, tensor.numel())
                    posted.append((blame.waits, tensor, post([tensor], peer, tag)))
            for blame.waits, _, work in posted:
                work.wait(self._timeout)
        except BaseException as error:
            # Whatever becomes of what was posted, its memory is not reused while it is known here.
            self._kept.append(posted)
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
