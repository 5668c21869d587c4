# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks of the executor as threads of one process: a network and a transport without sockets, so that thousands of plans run in a test.

A message is copied when it is posted, and a receive is filled when it is waited for: what an executor reads too early is NaN, and
what it writes too early is found when it waits. Memory that operations share is NaN when one begins.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from cpattn.errors import PeerError
from cpattn.schedule import Lane
from cpattn.torch.executor import Executor, Network
from cpattn.torch.kernels import Kernel, Memory

SECONDS = 120.0


class Office:
    """What the ranks of a group share."""

    def __init__(self, world: int) -> None:
        self.world, self.mail = world, defaultdict(queue.Queue)  # type: ignore[var-annotated]
        self.numbers, self.barrier, self.lock = [0] * world, threading.Barrier(world), threading.Lock()

    def box(self, key: tuple[int, int, int]) -> queue.Queue[Tensor]:
        with self.lock:
            return self.mail[key]

    def take(self, box: queue.Queue[Tensor]) -> Tensor:
        """A message; an error where it does not come and a rank has failed, as a timeout is one."""
        end = time.monotonic() + SECONDS
        while True:
            over = self.barrier.broken or time.monotonic() > end
            try:
                return box.get(timeout=0.02)
            except queue.Empty:
                if over:
                    raise RuntimeError("no message came") from None


class Receipt:
    def __init__(self, office: Office, box: queue.Queue[Tensor], into: Tensor) -> None:
        self._office, self._box, self._into = office, box, into
        into.view(torch.uint8).fill_(255)

    def wait(self, *_: Any) -> None:
        found = self._office.take(self._box)
        assert found.shape == self._into.shape and found.dtype == self._into.dtype, (found.shape, self._into.shape)
        self._into.copy_(found)


class Sent:
    """A message that must stay as it is until it is waited for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.copy = tensor, tensor.clone()

    def wait(self, *_: Any) -> None:
        # Not by PyTorch, whose calls some tests count or refuse.
        now, then = (x.view(torch.uint8).numpy().tobytes() for x in (self._tensor, self.copy))
        assert now == then, "what is sent was overwritten before it was waited for"


class Post(Network):
    def __init__(self, office: Office, rank: int, device: torch.device | str = "cpu") -> None:
        self._office, self.rank, self.world, self.device = office, rank, office.world, torch.device(device)
        self.posted = 0

    def batch(self, messages: Sequence[tuple[Tensor, int, int, bool]]) -> list[Any]:
        return list(messages)

    def post(self, batch: list[Any]) -> list[Any]:
        works = []
        for tensor, peer, tag, send in batch:
            assert tensor.is_contiguous() and peer != self.rank
            self.posted += 1
            key = (self.rank, peer, tag) if send else (peer, self.rank, tag)
            box = self._office.box(key)
            if send:
                works.append(sent := Sent(tensor))
                box.put(sent.copy)
            else:
                works.append(Receipt(self._office, box, tensor))
        return works

    def wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()


class Talk:
    """A transport that only agrees."""

    def __init__(self, office: Office, rank: int) -> None:
        self._office, self.rank, self.world, self.calls = office, rank, office.world, 0

    def agree(self, first: int, end: int, number: int) -> list[int]:
        office, self.calls = self._office, self.calls + 1
        office.numbers[self.rank] = number
        try:
            office.barrier.wait(SECONDS)
            said = office.numbers[first:end]
            office.barrier.wait(SECONDS)
        except threading.BrokenBarrierError as error:
            raise PeerError("another rank has failed") from error
        return said

    def poll(self) -> None:
        pass

    def abort(self) -> None:
        self._office.barrier.abort()


class Poison(Memory):
    """NaN when an operation begins."""

    def settle(self) -> None:
        super().settle()
        self.bytes.fill_(255)


class Poisoned(Executor):
    """Its workspace is NaN before each run."""

    def __init__(self, transport: Any, network: Network, kernel: Kernel) -> None:
        super().__init__(transport, network, kernel)
        self._memories = {lane: Poison(self.device) for lane in Lane}

    def _room(self, size: int) -> None:
        super()._room(size)
        self._workspace.fill_(255)


def group(world: int, kernel: Kernel) -> list[Executor]:
    office = Office(world)
    return [Poisoned(Talk(office, rank), Post(office, rank), kernel) for rank in range(world)]


def on_all(ranks: Sequence[Executor], job: Callable[[int, Executor], Any]) -> list[Any]:
    """The results of a job on each rank, all at once; raises the first error."""

    def guarded(number: int, rank: Executor) -> Any:
        try:
            return job(number, rank)
        except BaseException:
            rank.abort()
            raise

    if len(ranks) == 1:
        return [job(0, ranks[0])]
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(guarded, *pair) for pair in enumerate(ranks)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda one: isinstance(one, PeerError)):
        raise error
    return [future.result() for future in futures]
