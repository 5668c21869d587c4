# SPDX-License-Identifier: MIT OR Apache-2.0
"""A rank's schedule in one direction of a plan as a list of steps, made once, and their order at run time.

An operation begins after the one before it on its lane and after operation `after` of the other lane. On a device each lane is a
stream, and each `after` an event: the host enqueues all and waits for nothing. On the CPU the order is that of the list, and an
exchange is under way until the next operation that must come after it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import PeerError
from ...schedule import Lane, Op, OpKind, Schedule
from ...schedule import Tensor as Of
from ..dtypes import TORCH_DTYPES
from ..kernels import Kernel
from .attention import Attend, AttendBackward, Delta, SinkGradient
from .messages import Exchange, Flight, Network, failure
from .moves import Merges, Sums
from .rows import Buffers


class Attention(NamedTuple):
    """What computes the attention of a plan."""

    kernel: Kernel
    dtype: torch.dtype
    slopes: Tensor | None
    lse_gradient: bool


class Streams(NamedTuple):
    """The stream of the communication lane, and what makes events and finds the current stream."""

    communication: Any
    event: Callable[[], Any]
    current: Callable[[], Any]

    @classmethod
    def of(cls, device: torch.device) -> Streams | None:
        """None for a device without streams."""
        if device.type == "cpu":
            return None
        try:
            stream = torch.Stream(device=device)
        except RuntimeError:
            return None
        return cls(stream, lambda: torch.Event(device=device), lambda: torch.accelerator.current_stream(device))


class Program:
    """The steps of a schedule on this rank's device."""

    def __init__(self, schedule: Schedule, network: Network, salt: int, attention: Attention | None) -> None:
        self.schedule, self._network = schedule, network
        self.buffers = Buffers(schedule.buffers)
        self._workspace: Tensor | None = None
        of_lse = [at for at, b in enumerate(schedule.buffers) if b.tensor == Of.LSE]
        self._lse = of_lse[0] if of_lse else None
        self.steps = [self._step(op, salt, attention) for op in schedule.ops]
        self.sends = any(isinstance(step, Exchange) and bool(step.peers) for step in self.steps)
        # What another lane waits for.
        self._awaited = {op.after for op in schedule.ops if op.after is not None}
        self._events: dict[int, Any] = {}

    def _step(self, op: Op, salt: int, attention: Attention | None) -> Any:
        buffers, device = self.schedule.buffers, self._network.device
        if op.kind == OpKind.EXCHANGE:
            return Exchange(op, self._network, salt)
        if op.kind in (OpKind.SUM, OpKind.SINK_TOTAL):
            return Sums(op, buffers, device)
        if op.kind in (OpKind.MERGE, OpKind.COMBINE):
            return Merges(op, buffers, device)
        if op.kind == OpKind.DELTA:
            return Delta(op, self._lse)
        if op.kind == OpKind.SINK_GRADIENT:
            return SinkGradient(op)
        assert attention is not None
        kernel, dtype, slopes, lse_gradient = attention
        if op.kind == OpKind.ATTEND:
            return Attend(op, buffers, kernel, dtype, slopes, device)
        return AttendBackward(op, buffers, kernel, dtype, slopes, device, lse_gradient)

    def place(self, workspace: Tensor) -> None:
        """Puts the workspace of the schedule into this memory."""
        if self._workspace is not workspace:
            self.buffers.place(workspace, TORCH_DTYPES)  # type: ignore[arg-type]
            self._workspace = workspace

    def displace(self) -> None:
        """Lets go of the workspace."""
        self.buffers.displace()
        self._workspace = None

    def run(self, streams: Streams | None) -> None:
        """Runs on tensors that `buffers` has. A failure to send or receive raises PeerError. After an error the streams are joined too, so
        that the tensors may be let go of."""
        if streams is None:
            self._on_host()
        else:
            self._on_streams(streams)

    def _on_host(self) -> None:
        flight: tuple[int, Flight] | None = None
        for at, (op, step) in enumerate(zip(self.schedule.ops, self.steps, strict=True)):
            if flight and (op.lane == Lane.COMMUNICATION or (op.after is not None and op.after >= flight[0])):
                self._land(*flight)
                flight = None
            if (begun := self._run(at, op, step)) is not None:
                flight = at, begun
        if flight:
            self._land(*flight)

    def _on_streams(self, streams: Streams) -> None:
        lanes, events = {Lane.COMPUTE: streams.current(), Lane.COMMUNICATION: streams.communication}, self._events
        compute, communication = lanes[Lane.COMPUTE], lanes[Lane.COMMUNICATION]
        # The communication stream comes after all earlier runs, whatever streams their callers had: they share the workspace.
        self._after(compute, communication, -1, streams)
        self._after(communication, compute, -2, streams)
        try:
            for at, (op, step) in enumerate(zip(self.schedule.ops, self.steps, strict=True)):
                lane = lanes[op.lane]
                if op.after is not None:
                    lane.wait_event(events[op.after])
                with lane:
                    if (flight := self._run(at, op, step)) is not None:
                        self._land(at, flight)
                if at in self._awaited:
                    self._event(at, streams).record(lane)
        except BaseException:
            with suppress(Exception):  # the first error is raised
                self._join(compute, communication, streams)
            raise
        self._join(compute, communication, streams)

    def _join(self, compute: Any, communication: Any, streams: Streams) -> None:
        """What comes later in either stream waits for what is in both."""
        self._after(compute, communication, -3, streams)
        self._after(communication, compute, -4, streams)

    def _event(self, name: int, streams: Streams) -> Any:
        if name not in self._events:
            self._events[name] = streams.event()
        return self._events[name]

    def _after(self, later: Any, earlier: Any, name: int, streams: Streams) -> None:
        """What comes later in one stream waits for what is in another."""
        event = self._event(name, streams)
        event.record(earlier)
        later.wait_event(event)

    def _run(self, at: int, op: Op, step: Any) -> Flight | None:
        if op.kind != OpKind.EXCHANGE:
            step.run(self.buffers)
            return None
        try:
            flight: Flight | None = step.run(self.buffers)
            return flight
        except RuntimeError as error:
            raise self._failure(at, error) from error

    def _land(self, at: int, flight: Flight) -> None:
        try:
            flight.land()
        except RuntimeError as error:
            raise self._failure(at, error) from error

    def _failure(self, at: int, error: RuntimeError) -> PeerError:
        op = self.schedule.ops[at]
        return failure(self._network, f"operation {at} ({op.name}, {op.phase}, step {op.step})", self.steps[at].peers, error)

