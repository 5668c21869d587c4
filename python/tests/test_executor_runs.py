# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a run of the executor does besides its results: whom it waits for, in which order it enqueues, how it fails."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import threading
import types
import unittest
import unittest.mock
from typing import Any

import numpy as np
import torch
from mail import Office, Post, Talk, group, on_all
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import cpattn
from cpattn import Plan, Side
from cpattn.schedule import Lane
from cpattn.torch import choice
from cpattn.torch.dtypes import TORCH_DTYPES
from cpattn.torch.executor import Executor, explain, recording
from cpattn.torch.executor.partials import merge
from cpattn.torch.executor.program import Streams
from cpattn.torch.kernels import Math, Scratch, find

CU, HEADS, KV, DIM = [0, 9, 9, 31, 64], 4, 2, 8
MATH = find("math", "cpu")
OPTIONS: list[dict[str, Any]] = [
    {"ring": 4, "layout": "zigzag", "sinks": 1},
    {"ulysses": 2, "ring": 2, "sinks": 2, "softcap": 2.0},
    {"ring": 4, "circulate": "queries", "circulate_forward": "queries"},
    {"ulysses": 2, "ring": 2, "gather": "together", "passes": 2},
    {"ring": 4, "ranks_per_node": 2, "layout": "balanced", "layout_parameter": 2},
]


def plan_of(options: dict[str, Any]) -> Plan:
    return Plan(CU, HEADS, DIM, kv_heads=KV, **({"world": 4} | options))


def tensors(plan: Plan, number: int) -> dict[str, Tensor]:
    """Those of a forward and a backward on a rank."""
    random = torch.Generator().manual_seed(number)
    q, k = (len(plan.tokens(side, number)) for side in (Side.Q, Side.K))
    shapes = {"q": (q, HEADS, DIM), "k": (k, KV, DIM), "v": (k, KV, DIM), "d_o": (q, HEADS, DIM)}
    made = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    if sinks := plan.settings.get("sinks"):
        made["sinks"] = torch.linspace(-1, 1, HEADS * sinks).view(HEADS, sinks)
    return made


def step(plan: Plan, number: int, rank: Executor, made: dict[str, Tensor], d_lse: Tensor | None = None) -> list[Tensor]:
    """A forward and a backward."""
    q, more = made["q"], {name: made[name] for name in made if name == "sinks"}
    results = {"o": torch.empty_like(q), "lse": torch.empty(HEADS, len(q))}
    inputs = {name: made[name] for name in ("q", "k", "v")} | more
    rank.forward(plan, **inputs, **results)
    of_inputs = {"d" + name: torch.empty_like(x) for name, x in inputs.items()}
    rank.backward(plan, **inputs, **results, **of_inputs, d_o=made["d_o"], d_lse=d_lse)
    return [*results.values(), *of_inputs.values()]


class NoWaits(TorchDispatchMode):
    """Refuses what would make a host wait for its device."""

    refused = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "unique",
        "is_nonzero",
        "_pin_memory",
        "bincount",
    )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not any(name.startswith(one) for one in self.refused), f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(x is not None and x.dtype == torch.bool for x in args[1]), (
                "a mask as an index waits for the device"
            )
        assert "device" not in (kwargs or {}) or name != "_to_copy", "a copy between devices waits"
        return function(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """Refuses operators that allocate, except within `others`: a kernel's, and those of the network's double."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.seen = 0, 0

    def others(self, function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.within += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.within -= 1

        return wrapped

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if not self.within:
            inputs, outputs = (
                [x for x in tree_flatten(of)[0] if isinstance(x, Tensor)] for of in ((args, kwargs), found)
            )
            there = {x.untyped_storage().data_ptr() for x in inputs}
            assert all(not x.numel() or x.untyped_storage().data_ptr() in there for x in outputs), (
                f"{function} allocates"
            )
            self.seen += 1
        return found


class Stream:
    """A stream that notes what it is told."""

    def __init__(self, lane: Lane, log: list[tuple[str, Lane, Any]]) -> None:
        self.lane, self.log = lane, log

    def wait_event(self, event: Any) -> None:
        assert event.recorded
        self.log.append(("wait", self.lane, event.recorded))

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        self.log.append(("enter", self.lane, None))

    def __exit__(self, *_: Any) -> None:
        pass


class Event:
    recorded: Any = None

    def record(self, stream: Stream) -> None:
        self.recorded = object()
        stream.log.append(("record", stream.lane, self.recorded))


HOUR = 3600 * 10**9


class TimedEvent(Event):
    """On a clock of its own, an hour ahead. As a driver it returns milliseconds in f32, and of two events that were recorded in this
    order."""

    at = real = 0

    def record(self, stream: Stream) -> None:
        self.at = cpattn.clock() + HOUR

    def synchronize(self) -> None:
        if not self.at:
            raise RuntimeError("the event was not recorded")

    def elapsed_time(self, later: TimedEvent) -> float:
        self.synchronize()
        later.synchronize()
        assert self.at <= later.at, "the order of events"
        return float(np.float32((later.at - self.at) / 1e6))


class Ticks(threading.local):
    """A thread's clock on which each look takes a while, and a device's that is hours ahead of it and loses time."""

    NS = 37_000

    def __init__(self) -> None:
        self.now, self.ahead, self.enqueued = HOUR, 3 * HOUR, 0

    def __call__(self) -> int:
        self.now += self.NS
        return self.now

    def pass_by(self, ns: int) -> None:
        self.now += ns
        self.ahead -= ns // 7200

    def record(self, event: TimedEvent, _: Stream) -> None:
        event.real = self()
        event.at = event.real + self.ahead

    def synchronize(self) -> None:
        self.now, self.enqueued = self.now + self.enqueued, 0


def on_streams(rank: Executor) -> list[tuple[str, Lane, Any]]:
    """Makes a rank of the CPU enqueue on two streams with timed events. The log of the streams."""
    log: list[tuple[str, Lane, Any]] = []
    compute, communication = (Stream(lane, log) for lane in (Lane.COMPUTE, Lane.COMMUNICATION))
    rank._streams = Streams(communication, Event, lambda: compute, TimedEvent)
    rank._workspace.record_stream = lambda stream: None  # type: ignore[method-assign]
    return log


def sent(op: Any, number: int) -> int:
    return sum(message.bytes for message in op.messages if message.peer != number)


class Runs(unittest.TestCase):
    def test_no_wait_of_the_host(self) -> None:
        for options in OPTIONS:
            plan = plan_of(options)

            def job(number: int, rank: Executor, plan: Plan = plan) -> None:
                made, d_lse = tensors(plan, number), torch.ones(HEADS, len(plan.tokens(Side.Q, number)))
                first = step(plan, number, rank, made, d_lse)
                with NoWaits():
                    again = step(plan, number, rank, made, d_lse)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

            with self.subTest(options=options):
                on_all(group(4, MATH), job)
        with self.assertRaisesRegex(AssertionError, "waits for the device"), NoWaits():
            torch.ones(1).item()

    def test_no_allocation_in_a_second_run(self) -> None:
        """But the kernel's, whatever it takes and returns: other strides, other dims, parts that are merged."""
        more: list[dict[str, Any]] = [
            {"window_left": 7}, {"ring": 4, "layout": "striped", "layout_parameter": 3}, {"ring": 4, "dtype": "bfloat16"}, {"scale": -0.5},
            {"ulysses": 4, "gather": "together"},
        ]  # fmt: skip
        for options in OPTIONS + more:
            for name in ("math", "torch"):
                if name == "torch" and "softcap" in options:
                    continue
                plan, kernel = plan_of(options), find(name, "cpu")

                def job(number: int, rank: Executor, plan: Plan = plan, kernel: Any = kernel) -> None:
                    made = tensors(plan, number)
                    made = {key: x.to(TORCH_DTYPES[plan.dtype]) for key, x in made.items()}
                    inputs = {key: made[key] for key in made if key != "d_o"}
                    results = {"o": torch.empty_like(made["q"]), "lse": torch.empty(HEADS, len(made["q"]))}
                    d_lse = torch.ones(HEADS, len(made["q"]))
                    of_inputs = {"d" + key: torch.empty_like(x) for key, x in inputs.items()}
                    source = torch.randn(len(made["q"]), HEADS, 3)
                    to = torch.empty(CU[-1], HEADS // 4, 3) if plan.settings.get("ulysses") == 4 else None

                    def run() -> None:
                        rank.forward(plan, **inputs, **results)
                        rank.backward(plan, **inputs, **results, **of_inputs, d_o=made["d_o"], d_lse=d_lse)
                        if to is not None:
                            rank.to_heads(plan, Side.Q, source, to)

                    run()
                    counting, network = Allocations(), rank.network
                    moves = {key: counting.others(getattr(network, key)) for key in ("post", "wait")}
                    double = copy.copy(kernel)
                    double.forward, double.backward = counting.others(kernel.forward), counting.others(kernel.backward)
                    for program in rank._programs[plan].values():
                        for step in program.steps:
                            if (work := getattr(step, "work", None)) is not None:
                                work._runner.kernel = double
                    with unittest.mock.patch.multiple(network, **moves), counting:
                        run()
                    assert counting.seen

                with self.subTest(options=options, kernel=name):
                    on_all([Executor(rank.transport, rank.network, kernel) for rank in group(4, kernel)], job)
        with self.assertRaisesRegex(AssertionError, "allocates"), Allocations():
            torch.ones(1) + 1

    def test_the_double_sees_what_is_sent_overwritten(self) -> None:
        network, x = Post(Office(2), 0), torch.zeros(3)
        for value in (0.0, 1.0):
            works = network.post(network.batch([(x, 1, 0, True)]))
            x.fill_(value)
            if value:
                with self.assertRaisesRegex(AssertionError, "what is sent was overwritten"):
                    network.wait(works)
            else:
                network.wait(works)

    def test_a_workspace_that_stays(self) -> None:
        """Also where plans of several sizes take turns."""
        plans = [plan_of(options) for options in OPTIONS[:3]]

        def job(number: int, rank: Executor) -> None:
            for plan in plans:
                step(plan, number, rank, tensors(plan, number))
            there = rank._workspace.data_ptr()
            for plan in plans:
                step(plan, number, rank, tensors(plan, number))
            assert rank._workspace.data_ptr() == there
            assert rank._workspace.numel() == max(
                plan.workspace(number, way) for plan in plans for way in cpattn.Direction
            )

        on_all(group(4, MATH), job)

    def test_a_workspace_that_grows(self) -> None:
        """No program holds an earlier one."""
        rank = group(1, MATH)[0]
        plans = [Plan([0, tokens], HEADS, DIM, kv_heads=KV) for tokens in (8, 40, 200)]
        for plan in plans:
            step(plan, 0, rank, tensors(plan, 0))
            address = rank._workspace.data_ptr()
            for program in [program for of_plan in rank._programs.values() for program in of_plan.values()]:
                fixed = [x for x in tree_flatten(list(program.buffers.fixed.values()))[0] if isinstance(x, Tensor)]
                views = [
                    *fixed,
                    *(
                        x
                        for x, b in zip(program.buffers.tensors, program.buffers.buffers, strict=True)
                        if b.tensor is None
                    ),
                ]
                self.assertEqual(bool(fixed), program._workspace is not None)
                for x in views:
                    assert not x.numel() or x.untyped_storage().data_ptr() == address
        self.assertEqual(len({plan.workspace(0, cpattn.Direction.BACKWARD) for plan in plans}), 3)
        for plan in plans:
            step(plan, 0, rank, tensors(plan, 0))

    def test_memory_of_a_first_run(self) -> None:
        """What operations need besides is not held in each size that it had, nor by plans of earlier runs."""
        for options in ({"world": 1}, {"world": 2, "ring": 2, "layout": "zigzag"}):
            plans = [
                Plan([0, tokens, 4 * tokens], HEADS, DIM, kv_heads=KV, dtype="bf16", **options)
                for tokens in (8, 32, 20)
            ]  # type: ignore[arg-type]

            ranks, before = group(options["world"], find("torch", "cpu")), Scratch.empty

            def empty(room: Scratch, *arguments: Any, ranks: list[Executor] = ranks, before: Any = before) -> Tensor:
                found: Tensor = before(room, *arguments)
                mine = next(rank for rank in ranks if room._memory in rank._memories.values())
                # Earlier sizes of a memory are those of other plans, and of smaller operations of this one.
                most = 2.5 * sum(memory.wanted for memory in mine._memories.values())
                assert sum(held(mine).values()) <= most, (held(mine), most)
                return found

            def job(number: int, rank: Executor, plans: list[Plan] = plans) -> None:
                for plan in plans:
                    step(plan, number, rank, {name: x.to(torch.bfloat16) for name, x in tensors(plan, number).items()})
                    assert set(held(rank)) == {
                        memory.bytes.untyped_storage().data_ptr() for memory in rank._memories.values()
                    }

            with self.subTest(options=options), unittest.mock.patch.object(Scratch, "empty", empty):
                on_all(ranks, job)

    def test_another_default_device(self) -> None:
        """What is made without a device would be there, as in models that are built on meta."""
        for name in ("math", "torch"):
            for options in ({}, {"window_left": 7}, {"layout": "striped", "layout_parameter": 3}):
                plan, results = Plan(CU, HEADS, DIM, kv_heads=KV, **options), []  # type: ignore[arg-type]
                made = tensors(plan, 0)
                for device in ("cpu", "meta"):
                    rank = Executor(Talk(Office(1), 0), Post(Office(1), 0), find(name, "cpu"))  # type: ignore[arg-type]
                    to = {"o": torch.empty(64, HEADS, DIM), "lse": torch.empty(HEADS, 64)}
                    of_inputs = {"d" + name: torch.empty_like(made[name]) for name in "qkv"}
                    d_o, inputs = made["d_o"], {name: made[name] for name in "qkv"}
                    with torch.device(device):
                        rank.forward(plan, **inputs, **to)
                        rank.backward(
                            plan, **inputs, **to, **of_inputs, d_o=d_o, d_lse=torch.ones(HEADS, 64, device="cpu")
                        )
                    results.append([*to.values(), *of_inputs.values()])
                with self.subTest(name=name, options=options):
                    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_order_of_streams(self) -> None:
        """Each operation comes after the one that it is to come after, by an event, and the caller's stream after all."""
        for options in OPTIONS:
            plan = plan_of(options)

            def job(number: int, rank: Executor, plan: Plan = plan) -> None:
                made = tensors(plan, number)
                want = step(plan, number, rank, made)
                log: list[tuple[str, Lane, Any]] = []
                compute, communication = (Stream(lane, log) for lane in (Lane.COMPUTE, Lane.COMMUNICATION))
                rank._streams = Streams(communication, Event, lambda: compute, Event)
                rank._workspace.record_stream = lambda stream: None  # type: ignore[method-assign]
                for a, b in zip(want, step(plan, number, rank, made), strict=True):
                    assert torch.equal(a, b)
                for program in rank._programs[plan].values():
                    ops = program.schedule.ops
                    check(log[: entries(log, len(ops))], ops)
                    del log[: entries(log, len(ops))]
                assert not log

            with self.subTest(options=options):
                on_all(group(4, MATH), job)

    def test_recorded(self) -> None:
        """Each operation once, in the order of its lane, with the bytes that it moved; at most as many as were wanted; and the same
        results. On the CPU by the host's clock, and by events of two streams."""
        for options in OPTIONS[:2]:
            plan = plan_of(options)

            def job(number: int, rank: Executor, plan: Plan = plan) -> list[Any]:
                made = tensors(plan, number)
                want = step(plan, number, rank, made)
                ops = [op for program in rank._programs[plan].values() for op in program.schedule.ops]
                expected = sorted((op.lane, op.name, op.phase, op.step, sent(op, number)) for op in ops)
                taken = []
                for streams in (False, True):
                    if streams:
                        on_streams(rank)
                    for capacity in (3, 1 << 10):
                        rank.record(capacity)
                        since = cpattn.clock()
                        for a, b in zip(want, step(plan, number, rank, made), strict=True):
                            assert torch.equal(a, b)
                        until = cpattn.clock()
                        assert rank._recording is not None
                        events = rank._recording.take()
                        assert all(event.start_ns <= event.end_ns for event in events)
                        # The other clock is an hour ahead, and was compared.
                        assert all(since - 10**9 < event.start_ns and event.end_ns < until + 10**9 for event in events)
                        found = sorted((e.lane, e.name, e.phase, e.step, e.bytes) for e in events)
                        assert len(found) == capacity if capacity == 3 else found == expected, (found, expected)
                        for lane in Lane:
                            starts = [event.start_ns for event in events if event.lane == lane]
                            assert starts == sorted(starts)
                    step(plan, number, rank, made)
                    taken.append(rank.gather_trace())
                rank.record(0)
                step(plan, number, rank, made)
                assert rank.gather_trace() == []
                return [len(ops), taken]

            with self.subTest(options=options):
                results = on_all(group(4, MATH), job)
                total = sum(count for count, _ in results)
                for number, (_, taken) in enumerate(results):
                    for events in taken:
                        self.assertEqual(len(events), 0 if number else total)
                        self.assertEqual({event.rank for event in events}, set() if number else set(range(4)))

    def test_times_hours_later(self) -> None:
        """A driver's milliseconds are f32: since an event two hours ago they are multiples of half a millisecond."""
        plan, clock = plan_of(OPTIONS[0]), Ticks()

        def job(number: int, rank: Executor) -> None:
            made = tensors(plan, number)
            step(plan, number, rank, made)
            on_streams(rank)
            rank.record()
            assert rank._recording is not None
            for before, between, after in (
                (0, 0, 0), (2 * HOUR, 0, 0), (0, 0, 2 * HOUR), (0, 2 * HOUR, 0), (HOUR, 0, 2 * HOUR), (0, 0, 0)
            ):  # fmt: skip
                clock.pass_by(before)
                step(plan, number, rank, made)
                clock.pass_by(between)
                step(plan, number, rank, made)
                ops = [op for run in rank._recording._runs for op in run.ops]
                real = [(op.begin.real, op.end.real) for op in ops]
                clock.pass_by(after)
                clock.enqueued = 5_000_000
                found = rank._recording.take()
                assert {event.lane for event in found} == set(Lane) and len(found) == len(real) > 20, found
                errors = np.array([(event.start_ns, event.end_ns) for event in found]) - np.array(real)
                # Far from both bases all times have one error.
                assert np.ptp(errors) < 1000, (before, between, after, errors)
                assert abs(errors).max() < (250_000 if before and after else 2000), (before, between, after, errors)
                for lane in Lane:
                    times = [at for event in found if event.lane == lane for at in (event.start_ns, event.end_ns)]
                    assert times == sorted(times), (lane, times)

        with (
            unittest.mock.patch.object(recording, "clock", clock),
            unittest.mock.patch.object(TimedEvent, "record", lambda event, stream: clock.record(event, stream)),
            unittest.mock.patch.object(Stream, "synchronize", lambda stream: clock.synchronize()),
        ):
            on_all(group(4, MATH), job)

    def test_a_failed_operation_is_not_recorded(self) -> None:
        """A trace has what came before it and after it."""
        failing = False

        class Fails(Math):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                if failing:
                    raise RuntimeError("no memory")
                return super().forward(*args, **kwargs)

        plan, rank = plan_of({"world": 1}), group(1, Fails())[0]
        made = tensors(plan, 0)
        step(plan, 0, rank, made)
        on_streams(rank)
        rank.record()
        step(plan, 0, rank, made)
        once = len(rank.gather_trace())
        self.assertGreater(once, 2)
        for _ in range(2):
            step(plan, 0, rank, made)
            failing = True
            with self.assertRaisesRegex(RuntimeError, "no memory"):
                step(plan, 0, rank, made)
            failing = False
            step(plan, 0, rank, made)
            self.assertEqual(len(rank.gather_trace()), 2 * once)

    def test_a_device_without_times(self) -> None:
        """A rank that cannot read its events tells the others, which wait for what it has recorded."""
        plan, ranks = plan_of(OPTIONS[0]), group(4, MATH)

        def job(number: int, rank: Executor) -> str:
            made = tensors(plan, number)
            step(plan, number, rank, made)
            on_streams(rank)
            rank.record()
            step(plan, number, rank, made)
            with contextlib.ExitStack() as patched:
                if number == 2:
                    assert rank._recording is not None
                    patched.enter_context(
                        unittest.mock.patch.object(rank._recording, "take", side_effect=RuntimeError("device lost"))
                    )
                try:
                    rank.gather_trace()
                except cpattn.PeerError as error:
                    return str(error)
            return ""

        for number, text in enumerate(on_all(ranks, job)):
            self.assertIn("failed on rank 2: device lost" if number == 2 else "another rank has failed", text)

    def test_refused_by_name(self) -> None:
        plan, rank = Plan(CU, HEADS, DIM, kv_heads=KV), group(1, MATH)[0]
        made = tensors(plan, 0) | {"o": torch.empty(64, HEADS, DIM), "lse": torch.empty(HEADS, 64)}
        del made["d_o"]
        for words, changed in (
            (
                "q has the shape \\(63, 4, 8\\), \\(64, 4, 8\\) is needed: \\[tokens, heads, dim\\]",
                {"q": made["q"][1:]},
            ),
            ("lse has the shape \\(64, 4\\), \\(4, 64\\) is needed: \\[heads, tokens\\]", {"lse": made["lse"].t()}),
            ("k.dtype is torch.float64, torch.float32 is needed", {"k": made["k"].double()}),
            ("v.device is meta, cpu is needed", {"v": made["v"].to("meta")}),
            ("v is None, a tensor is needed", {"v": None}),
        ):
            with self.assertRaisesRegex(cpattn.InvalidArgument, words):
                rank.forward(plan, **{**made, **changed})
        for words, options in (("reproducible is True", {"reproducible": True}), ("dropout is 0.1", {"dropout": 0.1})):
            with self.assertRaisesRegex(cpattn.Unsupported, words):
                rank.forward(Plan(CU, HEADS, DIM, kv_heads=KV, **options), **made)  # type: ignore[arg-type]
        for name in ("sinks", "nonsense"):
            with self.assertRaisesRegex(
                cpattn.InvalidArgument,
                f"{name} is set, None is needed: this plan with kernels='math' has only k, lse, o, q, v",
            ):
                rank.forward(plan, **made, **{name: torch.zeros(HEADS, 1)})
            rank.forward(plan, **made, **{name: None})
        with self.assertRaisesRegex(cpattn.Unsupported, "key_indices is set"):
            rank.forward(plan, **made, key_indices=torch.zeros(64, 1, 3, dtype=torch.int32))
        rank.forward(plan, **made)

    def test_arguments_of_other_ranks(self) -> None:
        """What `Rank` takes besides tensors is honoured or refused, in each call that takes it."""
        plan, rank = Plan(CU, HEADS, DIM, kv_heads=KV), group(1, MATH)[0]
        made = tensors(plan, 0) | {"o": torch.empty(64, HEADS, DIM), "lse": torch.empty(HEADS, 64)}
        of_forward = {name: made[name] for name in ("q", "k", "v", "o", "lse")}
        of_backward = made | {"d" + name: torch.empty_like(made[name]) for name in "qkv"}
        x, wide = torch.empty(64, HEADS, DIM), torch.empty(1, HEADS, 64)
        calls: dict[str, Any] = {
            "forward": lambda **more: rank.forward(plan, **of_forward, **more),
            "backward": lambda **more: rank.backward(plan, **of_backward, **more),
            "to_heads": lambda **more: rank.to_heads(plan, Side.Q, x, torch.empty_like(x), **more),
            "to_tokens": lambda **more: rank.to_tokens(plan, Side.Q, x, torch.empty_like(x), **more),
            "combine": lambda **more: rank.combine(
                plan,
                cpattn.CombineTo.ALL,
                partial_o=x,
                partial_lse=wide[0],
                o=torch.empty_like(x),
                lse=torch.empty(HEADS, 64),
                **more,
            ),
        }
        taken = {
            "dropout_seed": ("forward backward", 3, 'dropout_seed is 3, None is needed.* Use kernels="cpattn"[^.]*$'),
            "key_indices": (
                "forward backward",
                torch.zeros(64, 1, 3, dtype=torch.int32),
                "key_indices is set, None is needed",
            ),
            "block_table": ("forward", torch.zeros(4, 1, dtype=torch.int32), "block_table is set, None is needed"),
            "page_size": ("forward", 16, "page_size is 16, None is needed"),
            "page_stride": ("forward", 16, "page_stride is 16, None is needed"),
            "lse_base": ("forward backward combine", "base_2", "lse_base is 'base_2', 'natural' is needed"),
            "stream": (" ".join(calls), 5, "stream is 5, None is needed: cpu has no streams"),
        }
        for name, (names, value, words) in taken.items():
            for call in names.split():
                with self.subTest(call=call, argument=name), self.assertRaisesRegex(cpattn.Unsupported, words):
                    calls[call](**{name: value})
        for call in ("forward", "backward", "combine"):
            calls[call](lse_base="natural", stream=None)
        # No argument of `Rank` is missing above: the others are tensors, which `_bind` takes, or honoured.
        tensors_of = {
            "q",
            "k",
            "v",
            "o",
            "lse",
            "sinks",
            "d_o",
            "dq",
            "dk",
            "dv",
            "dsinks",
            "d_lse",
            "max_logit",
            "partial_o",
            "partial_lse",
            "source",
            "to",
        }
        for call in calls:
            names_of_rank = (
                set(inspect.signature(getattr(cpattn.Rank, call)).parameters) - {"self", "plan", "side"} - tensors_of
            )
            self.assertEqual(names_of_rank, {name for name, (names, *_) in taken.items() if call in names.split()})
        with self.assertRaisesRegex(cpattn.Unsupported, "dropout is 0.1, 0 is needed; dropout_seed is 3"):
            rank.forward(Plan(CU, HEADS, DIM, kv_heads=KV, dropout=0.1), **of_forward, dropout_seed=3)
        for capacity in (-1, 1.5, (1 << 24) + 1):
            with self.assertRaisesRegex(cpattn.InvalidArgument, f"capacity is {capacity}"):
                rank.record(capacity)  # type: ignore[arg-type]

    def test_a_stream_of_the_call(self) -> None:
        """Its operations are enqueued there, not on the current stream."""
        plan, rank, log = plan_of(OPTIONS[0] | {"ring": 1, "world": 1}), group(1, MATH)[0], []
        current: list[Any] = []

        class Own(Stream):
            device = torch.device("cpu")

            def __enter__(self) -> None:
                super().__enter__()
                current.append(self)

            def __exit__(self, *_: Any) -> None:
                current.pop()

        usual, own, communication = (Own(lane, log) for lane in (Lane.COMPUTE, Lane.COMPUTE, Lane.COMMUNICATION))
        rank._streams, current = Streams(communication, Event, lambda: current[-1], Event), [usual]
        rank._workspace = torch.empty(plan.workspace(0, cpattn.Direction.FORWARD), dtype=torch.uint8)
        rank._room = lambda size: None  # type: ignore[method-assign]
        q, k, v = (tensors(plan, 0)[name] for name in "qkv")
        used: list[Any] = []
        record = Event.record

        def noted(event: Event, stream: Stream) -> None:
            used.append(stream)
            record(event, stream)

        with unittest.mock.patch.object(Event, "record", noted):
            for stream, other in ((None, own), (own, usual)):
                used.clear()
                sinks = torch.zeros(HEADS, 1)
                rank.forward(
                    plan, stream, q=q, k=k, v=v, sinks=sinks, o=torch.empty_like(q), lse=torch.empty(HEADS, len(q))
                )
                self.assertIn(usual if stream is None else own, used)
                self.assertNotIn(other, used)
        self.assertEqual(current, [usual])
        with self.assertRaisesRegex(cpattn.InvalidArgument, "stream is 5, a torch.Stream or None is needed"):
            rank.forward(plan, 5)
        own.device = torch.device("cuda", 1)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "stream.device is cuda:1, cpu is needed"):
            rank.forward(plan, own)

    def test_tables_are_of_the_communication_stream(self) -> None:
        """Each run is joined with it; the stream that was current may be no later run's."""
        made_on: list[Lane] = []

        class Noting(Math):
            def prepare(self, call: Any) -> None:
                made_on.append(log[-1][1])
                super().prepare(call)

        plan, rank = Plan(CU, HEADS, DIM, kv_heads=KV), group(1, Noting())[0]
        log: list[tuple[str, Lane, Any]] = [("enter", Lane.COMPUTE, None)]
        compute, communication = (Stream(lane, log) for lane in (Lane.COMPUTE, Lane.COMMUNICATION))
        rank._streams = Streams(communication, Event, lambda: compute, Event)
        for direction in cpattn.Direction:
            rank.prepare(plan, direction)
        self.assertEqual(made_on, [Lane.COMMUNICATION] * 2)

    def test_a_capture_is_refused(self) -> None:
        """Before anything is compared or allocated; by the module of the device."""
        plan, rank = Plan(CU, HEADS, DIM, kv_heads=KV), group(1, MATH)[0]
        rank._streams = Streams(None, Event, lambda: None, Event)
        module = types.SimpleNamespace(is_current_stream_capturing=lambda: True)
        with unittest.mock.patch("torch.get_device_module", lambda device: module):
            for call in (
                lambda: step(plan, 0, rank, tensors(plan, 0)),
                lambda: rank.exchange(torch.empty(1), torch.empty(1), [1], [1]),
            ):
                with self.assertRaisesRegex(
                    cpattn.Unsupported,
                    "a graph is captured on cpu, which kernels='math' cannot be in: .* outside of the capture",
                ):
                    call()
        self.assertFalse(rank._programs)
        rank._streams = None
        step(plan, 0, rank, tensors(plan, 0))

    def test_groups_of_an_ended_default_group(self) -> None:
        """An id may be that of an earlier group; none of its groups is used again."""
        made: list[object] = []

        def new_group(*_: Any, **__: Any) -> object:
            made.append(object())
            return made[-1]

        fake = types.SimpleNamespace(
            group=types.SimpleNamespace(WORLD=object()),
            get_world_size=lambda: 4,
            new_group=new_group,
            ProcessGroup=torch.distributed.ProcessGroup,
        )
        with unittest.mock.patch.multiple(
            choice, create=True, dist=fake, members_of=tuple, id=lambda _: 1, _groups=type(choice._groups)()
        ):
            first = choice.process_group([0, 2])
            self.assertIs(choice.process_group([0, 2]), first)
            self.assertIsNot(choice.process_group([0, 1]), first)
            fake.group.WORLD = object()
            self.assertIsNot(choice.process_group([0, 2]), first)
        self.assertEqual(len(made), 3)

    def test_other_ranks_hear_of_a_refusal(self) -> None:
        """One rank's plan is refused, or another one: all ranks raise before anything moves, and go on."""
        good, other, odd = (
            plan_of(OPTIONS[0]),
            plan_of({"ring": 4, "layout": "contiguous", "sinks": 1}),
            Plan(CU, HEADS, DIM, kv_heads=KV, world=4, ring=4, reproducible=True),
        )
        for wrong, kinds, words in (
            (odd, (cpattn.Unsupported, cpattn.Disagreement), "ranks \\[2\\] of this group refused the call"),
            (other, (cpattn.Disagreement, cpattn.Disagreement), "rank . runs another plan than rank"),
        ):

            def job(number: int, rank: Executor, wrong: Plan = wrong, kinds: Any = kinds, words: str = words) -> None:
                plan = wrong if number == 2 else good
                made = tensors(good, number)
                with self.assertRaises(kinds[number != 2]) as caught:
                    step(plan, number, rank, made)
                if number != 2:
                    self.assertRegex(str(caught.exception), words)
                assert isinstance(rank.network, Post) and not rank.network.posted
                step(good, number, rank, made)

            on_all(group(4, MATH), job)

    def test_deterministic_mode_after_the_first_run(self) -> None:
        """It is refused as before it, by kernels that do not honour it; others go on with the same program."""
        plan = plan_of(OPTIONS[0] | {"ring": 2, "world": 2})

        class Other(Math):
            honours = dataclasses.replace(Math.honours, deterministic=False)

        def job(number: int, rank: Executor) -> None:
            made = tensors(plan, number)
            step(plan, number, rank, made)
            there = dict(rank._programs[plan])
            barrier.wait(60)
            torch.use_deterministic_algorithms(True)
            if isinstance(rank.kernel, Other):
                with self.assertRaisesRegex(
                    cpattn.Unsupported, "kernels='math' honours no such call: deterministic is True, False is needed"
                ):
                    step(plan, number, rank, made)
            else:
                step(plan, number, rank, made)
            assert rank._programs[plan] == there
            barrier.wait(60)
            torch.use_deterministic_algorithms(False)
            step(plan, number, rank, made)

        for kernel in (Other(), MATH):
            barrier = threading.Barrier(2)
            try:
                with self.subTest(kernel=type(kernel).__name__):
                    on_all(group(2, kernel), job)
            finally:
                torch.use_deterministic_algorithms(False)

    def test_each_run_is_compared_in_detail(self) -> None:
        """Where messages have no tags, a rank that runs another known plan would get other bytes."""
        one, other = plan_of(OPTIONS[0]), plan_of({"ring": 4, "layout": "contiguous", "sinks": 1})
        for tagged, level, calls in (
            (False, c10d.DebugLevel.DETAIL, 4),
            (False, c10d.DebugLevel.INFO, 0),
            (True, c10d.DebugLevel.DETAIL, 0),
        ):

            def job(number: int, rank: Executor, tagged: bool = tagged, calls: int = calls) -> None:
                rank.network.tagged = tagged
                assert isinstance(rank.transport, Talk) and isinstance(rank.network, Post)
                for plan in (one, other):
                    step(plan, number, rank, tensors(plan, number))
                before = rank.transport.calls
                for plan in (one, other):
                    step(plan, number, rank, tensors(plan, number))
                self.assertEqual(rank.transport.calls, before + calls)
                if calls:
                    posted, plan = rank.network.posted, other if number == 2 else one
                    with self.assertRaisesRegex(cpattn.Disagreement, "runs another plan than rank"):
                        step(plan, number, rank, tensors(plan, number))
                    self.assertEqual(rank.network.posted, posted)

            with (
                self.subTest(tagged=tagged, level=level),
                unittest.mock.patch.object(c10d, "get_debug_level", lambda level=level: level),
            ):
                on_all(group(4, MATH), job)

    def test_a_kernel_that_raises(self) -> None:
        """The error is the kernel's; a rank that was to get its messages is not left in doubt about who failed."""

        class Broken(Math):
            def forward(self, *_: Any) -> Any:
                raise ValueError("a kernel's own words")

        rank = Executor(Talk(Office(1), 0), Post(Office(1), 0), Broken())  # type: ignore[arg-type]
        plan = Plan(CU, HEADS, DIM, kv_heads=KV)
        with self.assertRaisesRegex(ValueError, "a kernel's own words"):
            step(plan, 0, rank, tensors(plan, 0))

    def test_a_kernel_that_raises_in_the_middle(self) -> None:
        """Messages of the run are under way: neither rank may run again, since the next run would get them."""
        plan = plan_of(OPTIONS[0] | {"ring": 2, "world": 2})

        class Broken(Math):
            calls = 0

            def forward(self, *arguments: Any) -> Any:
                self.calls += 1
                if self.calls == at:
                    raise kind("a kernel's own words")
                return super().forward(*arguments)

        def job(number: int, rank: Executor) -> None:
            made = tensors(plan, number)
            if number == 1:
                rank.kernel = Broken()
                with self.assertRaisesRegex(kind, "a kernel's own words"):
                    step(plan, number, rank, made)
                expected = "the group has failed.*first error was: .*a kernel's own words"
            else:
                with self.assertRaises(cpattn.PeerError):
                    for _ in range(2):
                        step(plan, number, rank, made)
                expected = ""
            for _ in range(2):
                with self.assertRaisesRegex(cpattn.PeerError, expected):
                    step(plan, number, rank, made)

        for at, kind in ((1, ValueError), (2, torch.OutOfMemoryError), (2, KeyboardInterrupt)):
            with self.subTest(at=at, kind=kind):
                on_all(group(2, MATH), job)

    def test_streams_are_joined_after_an_error(self) -> None:
        """The caller's tensors are let go of when neither stream uses them any more."""
        plan, log = plan_of(OPTIONS[0] | {"ring": 1, "world": 1}), []

        class Broken(Math):
            def forward(self, *_: Any) -> Any:
                raise ValueError("a kernel's own words")

        rank = group(1, Broken())[0]
        compute, communication = (Stream(lane, log) for lane in (Lane.COMPUTE, Lane.COMMUNICATION))
        rank._streams = Streams(communication, Event, lambda: compute, Event)
        rank._workspace.record_stream = lambda stream: None  # type: ignore[method-assign]
        rank._room = lambda size: None  # type: ignore[method-assign]
        rank._workspace = torch.empty(plan.workspace(0, cpattn.Direction.FORWARD), dtype=torch.uint8)
        with self.assertRaises(ValueError):
            step(plan, 0, rank, tensors(plan, 0))
        self.assertEqual(
            [entry[:2] for entry in log[-4:]],
            [
                ("record", Lane.COMMUNICATION),
                ("wait", Lane.COMPUTE),
                ("record", Lane.COMPUTE),
                ("wait", Lane.COMMUNICATION),
            ],
        )
        self.assertIn("enter", [what for what, *_ in log])

    def test_explained(self) -> None:
        """The calls of a kernel, what is done outside, and what it does not honour."""
        plan, cpu = (
            Plan(CU, HEADS, DIM, kv_heads=KV, world=4, ring=4, layout="zigzag", dtype="bfloat16"),
            torch.device("cpu"),
        )
        text = explain(plan, 1, find("torch", cpu), cpu)
        for words in (
            "kernels='torch' on rank 1",
            "half a bit is lost",
            "forward: 4 operations with a kernel",
            "rows merged into earlier parts",
            "operation 2, attend",
        ):
            self.assertIn(words, text)
        self.assertNotIn("half a bit", explain(plan, 1, MATH, cpu))
        with self.assertRaisesRegex(cpattn.Unsupported, "softcap is 2.0"):
            explain(Plan(CU, HEADS, DIM, kv_heads=KV, world=4, softcap=2.0), 1, find("torch", cpu), cpu)

    def test_merges_of_large_scores(self) -> None:
        """Two words of an lse keep weights exact where one would err by |lse|·2⁻²⁴."""
        random = torch.Generator().manual_seed(3)
        values = torch.randn(6, 5, 2, 4, generator=random)
        logs = 4000 + torch.randn(6, 5, 2, dtype=torch.float64, generator=random)
        high = logs.float()
        lse = torch.stack([high, (logs - high).float()], -1)
        o, of_o = values[0], lse[0]
        for at in range(1, 6):
            o, value, error = merge([(o, of_o), (values[at], lse[at])])
            of_o = torch.stack([value, error], -1)
        weights = (logs - logs.logsumexp(0)).exp()
        self.assertLess((o - (weights[..., None] * values).sum(0)).abs().max().item(), 1e-6)
        self.assertLess((of_o.double().sum(-1) - logs.logsumexp(0)).abs().max().item(), 1e-6)


def held(rank: Executor) -> dict[int, int]:
    """The memory that a rank holds for its operations: sizes by addresses."""
    rooms = [room for of_plan in rank._programs.values() for program in of_plan.values() for room in program._rooms]
    of_rooms = [x for room in rooms for x in (room._of, *(piece.tensor for piece in room._tensors))]
    storages = [x.untyped_storage() for x in (*of_rooms, *(memory.bytes for memory in rank._memories.values()))]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def entries(log: list[tuple[str, Lane, Any]], ops: int) -> int:
    """How many entries a run of so many operations has: up to the second wait after its last operation."""
    # Two waits after it: the caller's stream for the other one, and that one for the caller's.
    entered = [at for at, (what, *_) in enumerate(log) if what == "enter"][ops - 1]
    return [at for at in range(entered, len(log)) if log[at][0] == "wait"][1] + 1


def check(log: list[tuple[str, Lane, Any]], ops: Any) -> None:
    """Each lane's clock has what happened before: a number of operations of each lane."""
    clocks: dict[Lane, dict[Lane, int]] = {lane: dict.fromkeys(Lane, -1) for lane in Lane}
    events: dict[Any, dict[Lane, int]] = {}
    at = 0
    for what, lane, event in log:
        if what == "record":
            events[event] = dict(clocks[lane])
        elif what == "wait":
            clocks[lane] = {one: max(clocks[lane][one], events[event][one]) for one in Lane}
        else:
            op = ops[at]
            assert op.lane == lane
            assert op.after is None or clocks[lane][ops[op.after].lane] >= op.after, at
            clocks[lane][lane] = at
            at += 1
    last = [number for number, op in enumerate(ops) if op.lane == Lane.COMMUNICATION]
    assert at == len(ops) and clocks[Lane.COMPUTE][Lane.COMMUNICATION] == (last[-1] if last else -1)
    assert clocks[Lane.COMMUNICATION][Lane.COMPUTE] == max(
        number for number, op in enumerate(ops) if op.lane == Lane.COMPUTE
    )


if __name__ == "__main__":
    unittest.main()
