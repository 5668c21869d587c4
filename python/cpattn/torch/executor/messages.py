# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages between the ranks of a process group: point-to-point batches of `torch.distributed`, over whatever backend the group has.

Backends that have tags (gloo, MPI) match a message by its tag, which is made of the plan and the number of the message: should ranks
run different plans, their messages never meet, and the run ends with the timeout, not with other ranks' bytes. Backends without
tags (NCCL) match by order, and ranks that run different plans may get each other's bytes: `Executor` compares plans before their
first runs, and each run under TORCH_DISTRIBUTED_DEBUG=DETAIL.

On the CPU a wait is the host's, with the context's timeout. On a device it is the stream's: the host goes on, and the timeout is
the group's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PeerError, Unsupported
from ...schedule import Buffer, Op, OpMessage
from ..kernels import Fresh
from .rows import Buffers

# Tags of backends whose limit may be the least that MPI allows.
_SMALL_TAGS, _TAGS = 1 << 15, 1 << 30


Message = tuple[Tensor, int, int, bool]
"""A tensor, the rank of its peer, a tag, and whether it is sent."""


class Network:
    """The group's own backend for tensors of a device. All ranks make one. `tagged`: messages of different plans never meet."""

    tagged = True

    def __init__(
        self, group: dist.ProcessGroup | None, members: Sequence[int], device: torch.device, timeout: float
    ) -> None:
        every: Any = dist.group.WORLD if group is None else group
        self.group, self.rank, self.world, self.device = every, members.index(dist.get_rank()), len(members), device
        self._members = members
        self._wait: tuple[timedelta, ...] = (timedelta(seconds=timeout),) if device.type == "cpu" else ()
        try:
            backend = every._get_backend(torch.device(device.type))
        except RuntimeError as error:
            raise Unsupported(
                f"group has no backend for {device.type}: give init_process_group one for this device, such as 'cpu:gloo,cuda:nccl'"
            ) from error
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a group that checks calls around it.
        name = type(getattr(backend, "wrapped_pg", backend)).__name__
        of_cpu = "gloo" in name.lower()
        if of_cpu and device.type != "cpu" and self.world > 1:
            raise Unsupported(
                f"group has the backend {name} for {device.type}, and device is {device}: a backend whose messages are in the order of a stream is needed. "
                f"Call init_process_group with one for this device, such as 'cpu:gloo,{device.type}:nccl'"
            )
        self._tags = _TAGS if of_cpu else _SMALL_TAGS
        self.tagged = of_cpu or "mpi" in name.lower()
        if device.type != "cpu" and self.world > 1:
            # A communicator is made by its first collective, in which all ranks must take part.
            dist.all_reduce(torch.zeros(1, device=device), group=every)

    def batch(self, messages: Sequence[Message]) -> list[Any]:
        """What `post` moves: tensors, each with the rank of its peer, a tag, and whether it is sent."""
        return [
            dist.P2POp(dist.isend if send else dist.irecv, tensor, self._members[peer], self.group, tag % self._tags)
            for tensor, peer, tag, send in messages
        ]

    def post(self, batch: list[Any]) -> list[Any]:
        """Begins to move tensors."""
        works: list[Any] = dist.batch_isend_irecv(batch)
        return works

    def wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(*self._wait)

    def all_to_all(self, to: Tensor, data: Tensor, arriving: Sequence[int], leaving: Sequence[int], tag: int) -> None:
        """Sends parts of a contiguous tensor, of these lengths, to each rank, and receives one from each."""
        into, out = torch.split(to, list(arriving)), torch.split(data, list(leaving))
        into[self.rank].copy_(out[self.rank])
        others = [peer for peer in range(self.world) if peer != self.rank]
        messages = [(out[peer], peer, tag, True) for peer in others if leaving[peer]] + [
            (into[peer], peer, tag, False) for peer in others if arriving[peer]
        ]
        if messages:
            self.wait(self.post(self.batch(messages)))


class Arrival(NamedTuple):
    """A message that came to memory which no backend can write: rows of the caller with strides."""

    there: Tensor
    from_peer: Tensor


class Flight:
    """Messages under way: `land` waits for them."""

    def __init__(self, network: Network, works: list[Any], arrivals: list[Arrival]) -> None:
        self._network, self._works, self._arrivals = network, works, arrivals

    def land(self) -> None:
        self._network.wait(self._works)
        for there, from_peer in self._arrivals:
            there.copy_(from_peer)


class Exchange:
    """EXCHANGE. Strided tensors move by compact ones, which nothing else uses before the exchange has landed: `room` is of the
    communication lane."""

    def __init__(self, op: Op, buffers: Sequence[Buffer], network: Network, salt: int, room: Fresh) -> None:
        self._network, self._room, own = network, room, network.rank
        self._messages = [(m.view, m.peer, salt + m.tag, m.send) for m in op.messages if m.peer != own]
        self._copies = copies([m for m in op.messages if m.peer == own])
        self.peers = sorted({peer for _, peer, _, _ in self._messages})
        # Messages of the workspace are the same in all runs.
        self._stays = all(buffers[view.buffer].tensor is None for view, *_ in self._messages)

    def run(self, buffers: Buffers) -> Flight | None:
        """Begins the exchange; what it moves must not be touched before `land`."""
        for dst, source in self._copies:
            buffers.at(dst).copy_(buffers.at(source))
        if not self._messages:
            return None
        arrivals: list[Arrival] = []
        if (batch := buffers.fixed.get(self)) is None:
            self._room.begin()
            batch = self._network.batch(self._moved(buffers, arrivals))
            if self._stays and all(buffers.at(view).is_contiguous() for view, *_ in self._messages):
                buffers.fixed[self] = batch
        return Flight(self._network, self._network.post(batch), arrivals)

    def _moved(self, buffers: Buffers, arrivals: list[Arrival]) -> list[Message]:
        moved = []
        for view, peer, tag, send in self._messages:
            tensor = buffers.at(view)
            if not tensor.is_contiguous():
                compact = self._room.empty(tensor.shape, tensor.dtype)
                if send:
                    compact.copy_(tensor)
                else:
                    arrivals.append(Arrival(tensor, compact))
                tensor = compact
            moved.append((tensor, peer, tag, send))
        return moved


def copies(messages: Sequence[OpMessage]) -> list[tuple[Any, Any]]:
    """Messages of a rank to itself, by their tags: destination and source."""
    sources = {m.tag: m.view for m in messages if m.send}
    return [(m.view, sources[m.tag]) for m in messages if not m.send]


def failure(network: Network, place: str, peers: Sequence[int], error: BaseException) -> PeerError:
    """What PyTorch knows of a failed exchange: one peer, or one of several."""
    of = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {', '.join(map(str, peers))}"
    return PeerError(f"rank {network.rank}: {place} with {of} failed: {error}", peers[0] if len(peers) == 1 else None)
