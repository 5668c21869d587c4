# SPDX-License-Identifier: MIT OR Apache-2.0
"""The NCCL communicator of a context on a CUDA device: one of its own, or that of PyTorch's process group.

PyTorch makes the communicator of a group at the group's first collective and owns it: it is never aborted or freed here. NCCL runs
the operations of a communicator one after the other, in the order in which they were enqueued, whatever streams they are in, so that
order must be the same on all ranks. PyTorch compares it between ranks for its own collectives if TORCH_DISTRIBUTED_DEBUG is DETAIL;
then calls of a context do so too. Tensors are ordered by the current stream: PyTorch's collectives and the calls of a context
begin after what is in it, and what comes later in it waits for the context's calls, and for collectives once they are waited for.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..arguments import attempt, refused
from ..engine import EngineTransport
from ..errors import Disagreement, Error, InvalidArgument, InvalidHandle, Unsupported
from ..rank import Rank, nccl_group, nccl_transport, nccl_unique_id

CHOICES = ("own", "torch")
_OTHERWISE = "or communicator='own'"


def checked(communicator: Any, device: torch.device) -> str:
    """The argument `communicator`."""
    if attempt(CHOICES.index, communicator) is None:
        raise refused("communicator", communicator, "'own' or 'torch' is needed")
    chosen: str = communicator
    if chosen == "torch" and device.type != "cuda":
        raise InvalidArgument(
            f"communicator is 'torch', 'own' is needed on {device}: only CUDA tensors are sent over NCCL"
        )
    return chosen


def rank_on(device: torch.device, communicator: str, transport: EngineTransport, group: Any, timeout: float) -> Rank:
    """A rank over NCCL. `transport`, between the same ranks, carries what they agree on. All ranks call it. If it is refused on
    one rank, it raises on all of them."""
    number, world, deadline = transport.rank, transport.world, max(1, int(timeout * 1000))
    chosen = transport.agree(0, world, CHOICES.index(communicator))
    if len(set(chosen)) > 1:
        other = next(rank for rank, word in enumerate(chosen) if word != chosen[number])
        found = f"communicator is {communicator!r} on rank {number} and {CHOICES[chosen[other]]!r} on rank {other}"
        raise InvalidArgument(f"{found}: all ranks of the group need the same")
    if communicator == "own":
        return nccl_group(_unique_id(transport), rank=number, world=world, device=device.index, deadline_ms=deadline)
    backend, failure = None, None
    try:
        backend = _backend(group, device)
        _check_version()
    except Error as error:  # raised after the other ranks know
        failure = error
    failed = transport.agree(0, world, int(failure is not None))
    if failure:
        raise failure
    if any(failed):
        raise Unsupported(f"communicator='torch' is refused on rank {failed.index(1)}: see the error of that rank")
    comm = _address(backend, device) or _connected(backend, device)
    handle = nccl_transport(None, comm, False, rank=number, world=world, device=device.index, deadline_ms=deadline)
    return Borrowing(handle, backend, device, comm, transport)


def _unique_id(transport: EngineTransport) -> bytes:
    """The id that rank 0 makes."""
    unique_id, failure = bytes(128), None
    if transport.rank == 0:
        try:
            unique_id = nccl_unique_id()
        except Error as error:  # raised after the other ranks know
            failure = error
    words = [transport.agree(0, transport.world, word)[0] for word in struct.unpack("16Q", unique_id)]
    if failure:
        raise failure
    if not any(words):
        raise Unsupported(f"rank {transport.rank}: cpattn_nccl_unique_id failed on rank 0: see the error of rank 0")
    return struct.pack("16Q", *words)


class Borrowing(Rank):
    """A rank over the communicator of a process group, which PyTorch may end earlier. `between` carries what the ranks compare."""

    def __init__(
        self, transport: ctypes.c_void_p, backend: Any, device: torch.device, comm: int, between: EngineTransport
    ) -> None:
        super().__init__(transport)
        self._backend, self._device, self._comm, self._between = backend, device, comm, between

    def _run(self, name: str, *arguments: object, keep: object = None, stream: object = None) -> None:
        if attempt(_address, self._backend, self._device) != self._comm:
            raise InvalidHandle(
                "PyTorch has ended the NCCL communicator of the context: close a context before dist.destroy_process_group, and make a new "
                "one, on all ranks, for a new group"
            )
        # A rank may prepare a plan by itself.
        if name != "rank_prepare" and c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
            self._compare_order(name)
        super()._run(name, *arguments, keep=keep, stream=stream)

    def _compare_order(self, name: str) -> None:
        """Waits for all ranks. By PyTorch's own count of collectives, which all ranks make."""
        ours, mine = self._between, self._backend._get_sequence_number_for_group()
        counts = ours.agree(0, ours.world, mine)
        if (other := next((rank for rank, count in enumerate(counts) if count != mine), None)) is not None:
            raise Disagreement(
                f"cpattn_{name} comes after {mine} collectives of the process group on rank {ours.rank} and after {counts[other]} on rank "
                f"{other}: enqueue collectives and calls of the context in the same order on all ranks, {_OTHERWISE}",
                other,
            )


def _backend(group: Any, device: torch.device) -> Any:
    """The NCCL backend of a group."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise refused(
            "group",
            group,
            f"a process group is needed for communicator='torch': make one with dist.new_group, {_OTHERWISE}",
        )
    every: Any = c10d._get_default_group() if group is None else group
    if (backend := attempt(every._get_backend, torch.device(device.type))) is None:
        raise Unsupported(
            f"group has no backend for {device.type}: give init_process_group the backend 'cpu:gloo,cuda:nccl', {_OTHERWISE}"
        )
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a group that checks calls around it.
    backend = getattr(backend, "wrapped_pg", backend)
    if not hasattr(backend, "_comm_ptr"):
        found = f"group has the backend {type(backend).__name__} for {device.type}, and torch.__version__ is {torch.__version__}"
        raise Unsupported(
            f"{found}: ProcessGroupNCCL with _comm_ptr is needed: give init_process_group the backend 'cpu:gloo,cuda:nccl', {_OTHERWISE}"
        )
    return backend


def _check_version() -> None:
    """Refuses an NCCL that is linked into PyTorch, if the loader gives another version: they may differ in what a communicator is."""
    try:
        get = ctypes.CDLL("libnccl.so.2").ncclGetVersion
    except (OSError, AttributeError) as error:
        raise Unsupported(f"communicator is 'torch', which needs libnccl.so.2: {error}") from error
    code = ctypes.c_int()
    get(ctypes.byref(code))
    major, rest = divmod(code.value, 10_000)
    found, of_torch = (major, *divmod(rest, 100)), _of_torch()
    if of_torch not in (None, found):
        versions = (
            f"PyTorch has NCCL {'.'.join(map(str, of_torch or ()))}, and libnccl.so.2 is {'.'.join(map(str, found))}"
        )
        raise Unsupported(
            f"{versions}: communicator='torch' needs one library for both: put that of PyTorch first on the loader's path, {_OTHERWISE}"
        )


def _of_torch() -> tuple[int, ...] | None:
    """The version of PyTorch's NCCL, or None if PyTorch does not tell."""
    every: Any = dist
    return attempt(lambda: tuple(every.ProcessGroupNCCL.get_runtime_nccl_version()))


def _address(backend: Any, device: torch.device) -> int:
    """The address of the communicator of a device; 0 before its first collective and after its end."""
    with _current(device):
        address: int = backend._comm_ptr()
    return address


def _connected(backend: Any, device: torch.device) -> int:
    """Makes the communicator, as the group's first collective would. All ranks call it."""
    try:
        backend.eager_connect_single_device(device)
        address = _address(backend, device)
    except RuntimeError as error:
        raise Unsupported(f"PyTorch made no NCCL communicator: {error}") from error
    if not address:
        raise Unsupported(
            f"PyTorch made no NCCL communicator for {device}: use one collective of the group before, {_OTHERWISE}"
        )
    return address


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """The device for which `_comm_ptr` answers."""
    return torch.cuda.device(device)
