# SPDX-License-Identifier: MIT OR Apache-2.0
"""A transport that records its exchanges and can delay them, for measuring attention and exchanges separately."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

import cpattn
import torch.distributed as dist
from cpattn import Message, Transport
from cpattn.torch import Context

TAG = 16
PHASES = ("attention", "exchanges", "both")
Batch = tuple[str, int, list[Message], list[Message]]


class Tap(Transport):
    """Takes the place of a context's transport; `benches/overlap/tap.rs` says how a run is held back."""

    def __init__(self, context: Context) -> None:
        self.mode, self.under, self.kept = "through", context.transport, context.rank
        self.rank, self.world = self.under.rank, self.under.world
        self.batches: list[Batch] = []
        # The last tag that this rank sent, or would have, and whether that was in this run.
        self.tag, self.fresh = bytes(TAG), False
        context.rank = cpattn.Rank(self)

    def agree(self, first: int, end: int, number: int) -> Sequence[int]:
        return self.under.agree(first, end, number)

    def exchange(
        self, operation: str, step: int, sends: Sequence[Message], recvs: Sequence[Message], stream: int | None = None
    ) -> None:
        for m in sends:
            if m.bytes == TAG:
                self.tag, self.fresh = bytes(m.memory()), True
        if self.mode == "hold":
            for m in recvs:
                if m.bytes == TAG:
                    if not self.fresh:
                        plan, run = struct.unpack("<QQ", self.tag)
                        self.tag, self.fresh = struct.pack("<QQ", plan, run + 1), True
                    m.memory()[:] = self.tag
            return
        if self.mode == "record":
            self.batches.append((operation, step, list(sends), list(recvs)))
        self.under.exchange(operation, step, sends, recvs)

    def poll(self) -> None:
        self.under.poll()

    def abort(self) -> None:
        self.under.abort()

    def release(self) -> None:
        self.kept.close()

    def set(self, mode: str) -> None:
        """Sets how the exchanges of the next run are treated."""
        self.mode, self.fresh = mode, False

    def again(self) -> None:
        for batch in self.batches:
            self.under.exchange(*batch)

    def phases(self, run: Callable[[], object]) -> list[tuple[float, float]]:
        """Wall and CPU seconds of each of PHASES, of a run whose exchanges were written down; all ranks together."""
        row = []
        for phase in PHASES:
            self.set("hold" if phase == "attention" else "through")
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            self.again() if phase == "exchanges" else run()
            wall = time.perf_counter() - wall
            dist.barrier()
            row.append((wall, time.process_time() - cpu))
        return row
