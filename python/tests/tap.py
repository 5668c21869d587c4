# SPDX-License-Identifier: MIT OR Apache-2.0
"""A transport that writes down what goes through it, and can hold it back: for measuring attention and exchanges apart."""

from __future__ import annotations

import struct
import time
from typing import Any, Callable

import torch.distributed as dist
from cpattn.transport import Message

TAG = 16
PHASES = ("attention", "exchanges", "both")
Batch = tuple[str, int, list[Message], list[Message]]


class Tap:
    """Writes down what goes through a transport, and can hold it back; `benches/overlap/tap.rs` says how a run is held back."""

    def __init__(self, transport: Any) -> None:
        self.mode, self.move = "through", transport.exchange
        self.batches: list[Batch] = []
        # The last tag that this rank sent, or would have, and whether that was in this run.
        self.tag, self.fresh = bytes(TAG), False
        transport.exchange = self.exchange

    def exchange(
        self, operation: str, step: int, sends: list[Message], recvs: list[Message], stream: int | None = None
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
        self.move(operation, step, sends, recvs)

    def set(self, mode: str) -> None:
        """What becomes of the exchanges of the next run."""
        self.mode, self.fresh = mode, False

    def again(self) -> None:
        for batch in self.batches:
            self.move(*batch)

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
