# SPDX-License-Identifier: MIT OR Apache-2.0
"""A rank's schedule in one direction of a plan as a list of steps, made once, and their order at run time.

An operation begins after the one before it on its lane and after operation `after` of the other lane. On a device each lane is a
stream, and each `after` an event: the host enqueues all and waits for nothing. On the CPU the order is that of the list, and an
exchange is under way until the next operation that must come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import PeerError
from ...schedule import Lane, Op, OpKind, Schedule
from ...schedule import Tensor as Of
from ...trace import clock
from ..dtypes import TORCH_DTYPES
from ..kernels import Kernel, Memory, Scratch
from .attention import Attend, AttendBackward, Delta, SinkGradient
from .messages import Exchange, Flight, Network, failure
from .moves import Joins, Merges, Sums
from .recording import Recording
from .rows import Buffers


class Attention(NamedTuple):
    """What computes the attention of a plan."""

    kernel: Kernel
    dtype: torch.dtype
    slopes: Tensor | None
    lse_gradient: bool


# What a caller knows a tensor by.
_NAMES = {Of.OWN_TOKENS: "x", Of.OWN_HEADS: "x", Of.PARTIAL_O: "o", Of.PARTIAL_LSE: "lse"}
_LSES = (Of.LSE, Of.D_LSE, Of.PARTIAL_LSE)


class OfCaller(NamedTuple):
    """A tensor that a call has to have: the number of its buffer, the name for errors, and what it has to be."""

    number: int
    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    is_lse: bool
    is_sinks: bool


class Streams(NamedTuple):
    """The stream of the communication lane, and what makes events and finds the current stream. `timed` makes events with a time."""

    communication: Any
    event: Callable[[], Any]
    current: Callable[[], Any]
    timed: Callable[[], Any]

    @classmethod
    def of(cls, device: torch.device) -> Streams | None:
        """None for a device without streams."""
        if device.type == "cpu":
            return None
        try:
            stream = torch.Stream(device=device)
        except RuntimeError:
            return None
        return cls(
            stream,
            lambda: torch.Event(device=device),
            lambda: torch.accelerator.current_stream(device),
            lambda: torch.Event(device=device, enable_timing=True),
        )

    def mark(self) -> Any:
        """A timed event, recorded in the current stream after the host has waited for what was in it."""
        stream, event = self.current(), self.timed()
        stream.synchronize()
        event.record(stream)
        return event


class Program:
    """The steps of a schedule on this rank's device."""

    def __init__(
        self,
        schedule: Schedule,
        network: Network,
        salt: int,
        attention: Attention | None,
        memories: Mapping[Lane, Memory],
    ) -> None:
        self.schedule, self._network, self._memories = schedule, network, memories
        self._rooms: list[Scratch] = []
        self.buffers = Buffers(schedule.buffers)
        self._workspace: Tensor | None = None
        self.tensors = {
            b.tensor.name.lower(): OfCaller(
                at,
                _NAMES.get(b.tensor, b.tensor.name.lower()),
                b.shape,
                TORCH_DTYPES[b.dtype],
                b.tensor in _LSES,
                b.tensor in (Of.SINKS, Of.DSINKS),
            )
            for at, b in enumerate(schedule.buffers)
            if b.tensor is not None
        }
        of_lse = [at for at, b in enumerate(schedule.buffers) if b.tensor == Of.LSE]
        self._lse = of_lse[0] if of_lse else None
        self.steps = [self._step(op, salt, attention) for op in schedule.ops]
        self.sends = any(isinstance(step, Exchange) and bool(step.peers) for step in self.steps)
        self._on_host = host_order(schedule.ops, self.steps)
        # What another lane waits for.
        self._awaited = {op.after for op in schedule.ops if op.after is not None}
        self._events: dict[int, Any] = {}

    def _step(self, op: Op, salt: int, attention: Attention | None) -> Any:
        buffers, room = self.schedule.buffers, Scratch(self._memories[op.lane])
        self._rooms.append(room)
        if op.kind == OpKind.EXCHANGE:
            return Exchange(op, buffers, self._network, salt, room)
        if op.kind in (OpKind.SUM, OpKind.SINK_TOTAL):
            return Sums(op, buffers, room)
        if op.kind in (OpKind.COMPOSE, OpKind.COMPOSE_MATRIX):
            return Joins(op)
        if op.kind in (OpKind.MERGE, OpKind.COMBINE):
            return Merges(op, buffers, room)
        if op.kind == OpKind.DELTA:
            return Delta(op, self._lse, room)
        if op.kind == OpKind.SINK_GRADIENT:
            return SinkGradient(op, room)
        assert attention is not None
        kernel, dtype, slopes, lse_gradient = attention
        if op.kind == OpKind.ATTEND:
            return Attend(op, buffers, kernel, dtype, slopes, room)
        return AttendBackward(op, buffers, kernel, dtype, slopes, room, lse_gradient)

    def place(self, workspace: Tensor) -> None:
        """Puts the workspace of the schedule into this memory."""
        if self._workspace is not workspace:
            self.buffers.place(workspace, TORCH_DTYPES)  # type: ignore[arg-type]
            self._workspace = workspace

    def displace(self) -> None:
        """Lets go of the workspace, and of what operations need besides."""
        self.buffers.displace()
        self._workspace = None
        for room in self._rooms:
            room.release()

    def renew(self) -> None:
        """Lets go of earlier memory of operations."""
        for room in self._rooms:
            room.renew()

    def run(self, streams: Streams | None, recording: Recording | None = None) -> None:
        """Runs on tensors that `buffers` has, and records its operations. A failure to send or receive raises PeerError. After an error the streams are joined too, so
        that the tensors may be let go of."""
        if streams is not None:
            self._on_streams(streams, recording)
            return
        if recording is not None:
            self._recorded(recording)
            return
        flights: dict[int, Flight] = {}
        for at, step, lands in self._on_host:
            if lands is not None and (flight := flights.pop(lands, None)) is not None:
                self._land(lands, flight)
            if step is not None and (begun := self._run(at, step)) is not None:
                flights[at] = begun

    def _recorded(self, recording: Recording) -> None:
        """As `run` on the CPU. One exchange at most is under way."""
        flights: dict[int, tuple[Flight, int]] = {}
        for at, step, lands in self._on_host:
            if lands is not None and lands in flights:
                flight, start = flights.pop(lands)
                self._land(lands, flight)
                recording.add(self.schedule.ops[lands], start, clock())
            if step is not None:
                start = clock()
                if (begun := self._run(at, step)) is not None:
                    flights[at] = begun, start
                else:
                    recording.add(self.schedule.ops[at], start, clock())

    def _on_streams(self, streams: Streams, recording: Recording | None) -> None:
        lanes, events = {Lane.COMPUTE: streams.current(), Lane.COMMUNICATION: streams.communication}, self._events
        compute, communication = lanes[Lane.COMPUTE], lanes[Lane.COMMUNICATION]
        # The communication stream comes after all earlier runs, whatever streams their callers had: they share the workspace.
        self._after(compute, communication, -1, streams)
        if recording is not None and not recording.full:
            begin = streams.timed()
            begin.record(compute)
            recording.begin_run(begin)
        self._after(communication, compute, -2, streams)
        try:
            for at, (op, step) in enumerate(zip(self.schedule.ops, self.steps)):
                lane = lanes[op.lane]
                if op.after is not None:
                    lane.wait_event(events[op.after])
                timed = None
                if recording is not None and not recording.full:
                    timed = streams.timed(), streams.timed()
                    timed[0].record(lane)
                with lane:
                    if (flight := self._run(at, step)) is not None:
                        self._land(at, flight)
                if recording is not None and timed is not None:
                    timed[1].record(lane)
                    recording.add_timed(op, *timed)
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

    def _run(self, at: int, step: Any) -> Flight | None:
        if not isinstance(step, Exchange):
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
        return failure(
            self._network, f"operation {at} ({op.name}, {op.phase}, step {op.step})", self.steps[at].peers, error
        )


def host_order(ops: Sequence[Op], steps: Sequence[Any]) -> list[tuple[int, Any, int | None]]:
    """The steps with their numbers, each with that of an exchange which has to land before; at the end the last exchange, if any."""
    order: list[tuple[int, Any, int | None]] = []
    flight: int | None = None
    for at, (op, step) in enumerate(zip(ops, steps, strict=True)):
        lands = (
            flight
            if flight is not None and (op.lane == Lane.COMMUNICATION or (op.after is not None and op.after >= flight))
            else None
        )
        flight = None if lands is not None else flight
        order.append((at, step, lands))
        if isinstance(step, Exchange) and step.peers:
            flight = at
    return order if flight is None else [*order, (len(ops), None, flight)]
