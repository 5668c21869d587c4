# SPDX-License-Identifier: MIT OR Apache-2.0
"""One of two ranks over the communicator of a process group, on the stand-ins for the CUDA driver and for NCCL: what
test_communicator starts. PyTorch's own backend needs a real device, so another one owns the communicator here, makes it at the same time
and ends it as PyTorch does, and sums over it on a stream of its own.

    communicator.py RANK FILE
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

# The first with this name is the one that the library gets.
NCCL = ctypes.CDLL("libnccl.so.2")
NUMBER, FILE, WORLD = int(sys.argv[1]), sys.argv[2], 2

# PyTorch may get this one too. It lacks functions, none of which is called.
sys.setdlopenflags(os.RTLD_LAZY)
import torch
import torch.distributed as dist

import cpattn
from cpattn.torch import Context, nccl
from cuda_ranks import DEVICE, DIM, DOCUMENTS, HEADS, KV_HEADS, Driver, batch, on_cpu, part, report

SHAPE: dict[str, Any] = {
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_dim": DIM,
    "dtype": torch.float16,
    "ring": WORLD,
    "ulysses": 1,
}
FLOAT, SUM = 7, 0


def did(code: int) -> None:
    assert code == 0, f"NCCL's result is {code}"


class Owner:
    """As much of ProcessGroupNCCL as a context needs."""

    def __init__(self, store: Any, driver: Driver) -> None:
        self.store, self.driver, self.connects = store, driver, 0
        self.comm, self.collectives = ctypes.c_void_p(), 0

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives

    def _comm_ptr(self) -> int:
        return self.comm.value or 0

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", DEVICE)
        self.connects += 1
        unique_id = (ctypes.c_uint8 * 128)()
        if NUMBER == 0:
            did(NCCL.ncclGetUniqueId(unique_id))
            self.store.set(f"id{self.connects}", bytes(unique_id))
        unique_id[:] = self.store.get(f"id{self.connects}")

        class Id(ctypes.Structure):
            _fields_ = (("bytes", ctypes.c_uint8 * 128),)

        did(NCCL.ncclCommInitRank(ctypes.byref(self.comm), WORLD, Id(unique_id), NUMBER))

    def sum(self, number: float) -> Any:
        """Enqueues a sum over the ranks, on a stream of its own; nothing waits for it. Returns its memory."""
        stream = ctypes.c_void_p()
        self.collectives += 1
        self.driver.call("cuStreamCreate", ctypes.byref(stream), 1)
        array = self.driver.array((4,), 32)
        address = ctypes.c_uint64(array.tensor.data)
        self.driver.call("cuMemcpyHtoDAsync_v2", address, struct.pack("4f", *[number] * 4), ctypes.c_size_t(16), stream)
        did(NCCL.ncclAllReduce(address, address, ctypes.c_size_t(4), FLOAT, SUM, self.comm, stream))
        return array, stream

    def summed(self, array: Any, stream: Any) -> tuple[float, ...]:
        self.driver.call("cuStreamSynchronize", stream)
        return struct.unpack("4f", self.driver.read(array))

    def end(self, how: str = "ncclCommDestroy") -> None:
        did(getattr(NCCL, how)(self.comm))
        self.comm = ctypes.c_void_p()


def refused(kind: type[cpattn.Error], words: str, job: Callable[[], Any]) -> None:
    try:
        job()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused, {words} is needed")


def over_torch(**more: Any) -> Context:
    return Context(**{**SHAPE, "device": "cuda", "kernels": "cpattn", "communicator": "torch", "timeout": 60.0, **more})


def refusals() -> None:
    """Each before anything waits for the other rank, and on both ranks."""
    refused(
        cpattn.InvalidArgument,
        "communicator is 'nccl', 'own' or 'torch' is needed",
        lambda: over_torch(communicator="nccl"),
    )
    refused(cpattn.InvalidArgument, "communicator is 'torch', 'own' is needed on cpu", lambda: over_torch(device="cpu"))
    refused(cpattn.InvalidArgument, "group is [0, 1], a process group is needed", lambda: over_torch(group=[0, 1]))
    refused(cpattn.Unsupported, "group has the backend ProcessGroupGloo for cuda, and torch.__version__ is", over_torch)
    mine, other = ("own", "torch")[NUMBER], ("torch", "own")[NUMBER]
    found = f"communicator is {mine!r} on rank {NUMBER} and {other!r} on rank {1 - NUMBER}"
    refused(cpattn.InvalidArgument, found, lambda: over_torch(communicator=mine))


def runs(owner: Owner, driver: Driver, whole: dict[str, bytes], want: dict[str, bytes]) -> None:
    """Attention and sums take turns over one communicator, and give what the CPU gives."""
    contexts = [over_torch() for _ in range(2)]
    assert owner.connects == 1, "the second context finds the communicator of the first"
    for at, context in enumerate(contexts):
        before = owner.sum(NUMBER + 1)
        errors = part(driver, context.plan(DOCUMENTS), whole, want, NUMBER, context.rank)
        after = owner.sum(NUMBER + 10)
        report(NUMBER, errors)
        assert owner.summed(*before) == (3.0,) * 4 and owner.summed(*after) == (21.0,) * 4
        if at == 0:
            context.close()
    dist.barrier()
    # PyTorch ends its communicator first: nothing is called with it any more.
    owner.end()
    time.sleep(0.2)
    (context,) = contexts[1:]
    context.rank.poll()
    words = "PyTorch has ended the NCCL communicator of the context"
    refused(
        cpattn.InvalidHandle, words, lambda: part(driver, context.plan(DOCUMENTS), whole, want, NUMBER, context.rank)
    )
    context.close()


def orders(owner: Owner, driver: Driver, whole: dict[str, bytes], want: dict[str, bytes]) -> None:
    """Where PyTorch compares the order of collectives, another order is refused on both ranks, and nothing was enqueued."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    context, sums = over_torch(), []
    plan = context.plan(DOCUMENTS)
    if NUMBER == 0:
        context.rank.prepare(plan, cpattn.Direction.FORWARD)  # waits for no other rank
        sums.append(owner.sum(1))
    counts = (owner.collectives, owner.collectives + 1) if NUMBER else (owner.collectives, owner.collectives - 1)
    words = f"after {counts[0]} collectives of the process group on rank {NUMBER} and after {counts[1]} on rank {1 - NUMBER}: enqueue"
    refused(cpattn.Disagreement, words, context.trace)
    if NUMBER == 1:
        sums.append(owner.sum(2))
    # In one order again: the sum, then the call.
    report(NUMBER, part(driver, plan, whole, want, NUMBER, context.rank))
    assert owner.summed(*sums[0]) == (3.0,) * 4
    dist.barrier()
    context.close()
    dist.set_debug_level(dist.DebugLevel.OFF)


def a_rank_is_missing(owner: Owner, driver: Driver, whole: dict[str, bytes], want: dict[str, bytes]) -> None:
    """The call fails at the deadline on the rank that waits, and its stream goes on once the owner has aborted the communicator."""
    context = over_torch(timeout=1.0)
    plan = context.plan(DOCUMENTS)
    dist.barrier()
    if NUMBER == 0:
        refused(
            cpattn.PeerError,
            "rank 1 did not answer within",
            lambda: part(driver, plan, whole, want, NUMBER, context.rank),
        )
        assert owner._comm_ptr(), "the communicator of the group is not aborted"
        owner.end("ncclCommAbort")
    dist.barrier()
    if NUMBER == 1:
        owner.end("ncclCommAbort")
    context.close()


def main() -> None:
    dist.init_process_group("gloo", store=dist.FileStore(FILE, WORLD), rank=NUMBER, world_size=WORLD)
    driver = Driver()
    driver.enter()
    refusals()
    owner = Owner(dist.FileStore(f"{FILE}.ids", WORLD), driver)
    every: Any = dist.ProcessGroup
    every._get_backend = lambda _, device: owner
    current: Any = nccl
    current._current = lambda _: nullcontext()  # which asks PyTorch's CUDA
    current._of_torch = lambda: (2, 14 + NUMBER, 3)
    os.environ["CPATTN_NCCL_VERSION"] = "21403"
    words = (
        "PyTorch has NCCL 2.15.3, and libnccl.so.2 is 2.14.3"
        if NUMBER
        else "communicator='torch' is refused on rank 1: see the error"
    )
    refused(cpattn.Unsupported, words, over_torch)
    current._of_torch = lambda: (2, 14, 3)
    whole = batch()
    given = owner, driver, whole, on_cpu(whole)
    orders(*given)
    runs(*given)
    a_rank_is_missing(*given)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
