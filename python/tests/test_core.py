# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package without PyTorch: the library found or not, plans, and transports written in Python, whatever they raise."""

from __future__ import annotations

import ctypes
import ctypes.util
import datetime
import gc
import os
import queue
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpattn
import numpy as np
from cpattn import transport as transports
from cpattn.transport import Message, Transport

HEADS, DIM, WORLD, DOCUMENTS = 2, 4, 3, [0, 5, 12]


class Mail(Transport):
    """Ranks that are threads, over queues."""

    def __init__(self, rank: int, boxes: dict[Any, queue.Queue[Any]], world: int = WORLD) -> None:
        self.rank, self.world, self.boxes, self.calls = rank, world, boxes, 0
        self.broken: BaseException | None = None
        self.patience = 20.0
        self.failed = False
        self.released = False

    def box(self, kind: str, source: int, target: int) -> queue.Queue[Any]:
        return self.boxes.setdefault((kind, source, target), queue.Queue())

    def take(self, kind: str, source: int) -> Any:
        try:
            answer = self.box(kind, source, self.rank).get(timeout=self.patience)
        except queue.Empty:
            raise cpattn.PeerError(f"rank {source} said nothing", source) from None
        if isinstance(answer, str):
            raise cpattn.PeerError(answer, source)
        return answer

    def agree(self, first: int, end: int, number: int) -> Sequence[int]:
        for peer in range(first, end):
            self.box("agree", self.rank, peer).put(number)
        return [self.take("agree", peer) for peer in range(first, end)]

    def exchange(
        self, operation: str, step: int, sends: Sequence[Message], recvs: Sequence[Message], stream: int | None
    ) -> None:
        self.calls += 1
        assert operation and step >= 0 and stream is None
        if self.broken:
            raise self.broken
        for m in sends:
            self.box("data", self.rank, m.peer).put(bytes(m.memory()))
        for m in recvs:
            m.memory()[:] = self.take("data", m.peer)

    def poll(self) -> None:
        if self.failed:
            raise cpattn.PeerError("aborted")

    def abort(self) -> None:
        self.failed = True
        for peer in range(self.world):
            for kind in ("agree", "data"):
                self.box(kind, self.rank, peer).put(f"rank {self.rank} aborted")

    def release(self) -> None:
        self.released = True


def tensors(n: int) -> tuple[dict[str, cpattn.Memory], list[Any]]:
    """Tensors of n tokens, and the objects that own their memory."""
    kept, made = [], {}
    for name, shape in (
        ("q", (n, HEADS, DIM)),
        ("k", (n, HEADS, DIM)),
        ("v", (n, HEADS, DIM)),
        ("o", (n, HEADS, DIM)),
        ("lse", (HEADS, n)),
    ):
        count = 1
        for length in shape:
            count *= length
        values = (ctypes.c_float * max(count, 1))(*(0.01 * i for i in range(count)))
        kept.append(values)
        made[name] = cpattn.Memory(ctypes.addressof(values), shape, 32)
    return made, kept


def plan(**options: Any) -> cpattn.Plan:
    return cpattn.Plan(DOCUMENTS, HEADS, DIM, world=WORLD, ring=WORLD, ulysses=1, **options)


def forward(rank: cpattn.Rank, number: int, the_plan: cpattn.Plan | None = None, stream: Any = None) -> list[float]:
    the_plan = the_plan or plan()
    made, kept = tensors(the_plan.share(number).q_tokens)
    rank.forward(the_plan, stream, **made)
    return list(kept[3])


def group() -> tuple[list[Mail], list[cpattn.Rank]]:
    boxes: dict[Any, queue.Queue[Any]] = {}
    mails = [Mail(rank, boxes) for rank in range(WORLD)]
    return mails, [cpattn.Rank(mail) for mail in mails]


def attempt(number: int, rank: cpattn.Rank) -> BaseException | None:
    try:
        forward(rank, number)
    except BaseException as error:  # noqa: BLE001 (looked at)
        return error
    return None


class Transports(unittest.TestCase):
    def test_results_are_those_of_the_library_s_own(self) -> None:
        mails, ranks = group()
        got = cpattn.on_all(ranks, lambda number, rank: forward(rank, number))
        want = cpattn.on_all(cpattn.local_group(WORLD), lambda number, rank: forward(rank, number))
        self.assertEqual(got, want)
        self.assertTrue(all(mail.calls for mail in mails))

    def test_instruction_sets_are_forced_or_refused(self) -> None:
        found = {}
        for isa in cpattn.Isa:
            try:
                ranks = cpattn.local_group(WORLD, isa=isa)
            except cpattn.Unsupported as error:
                self.assertIn("instruction set", str(error))
            else:
                found[isa] = cpattn.on_all(ranks, lambda number, rank: forward(rank, number))
        self.assertLess({cpattn.Isa.AUTO, cpattn.Isa.PORTABLE}, set(found))
        self.assertNotIn(cpattn.Isa.NEON if cpattn.Isa.AVX2 in found else cpattn.Isa.AVX2, found)
        # A fused multiply-add rounds less often.
        fused = cpattn.Isa.AVX2 if cpattn.Isa.AVX2 in found else cpattn.Isa.NEON
        self.assertNotEqual(found[cpattn.Isa.PORTABLE], found[fused])
        for wrong in (7, -1, 1 << 32, "avx", None):
            with self.assertRaisesRegex(
                cpattn.InvalidArgument, f"isa is {wrong!r}, one of 'auto', .* or a member of cpattn.Isa"
            ):
                cpattn.local_group(1, isa=wrong)  # type: ignore[arg-type]

    def test_callbacks_live_as_long_as_the_rank(self) -> None:
        boxes: dict[Any, queue.Queue[Any]] = {}
        ranks = [cpattn.Rank(Mail(rank, boxes)) for rank in range(WORLD)]
        for _ in range(3):
            gc.collect()
            cpattn.on_all(ranks, lambda number, rank: forward(rank, number))
        before = len(transports._in_use)
        mails = [callbacks.transport for callbacks in transports._in_use if callbacks.transport.boxes is boxes]  # type: ignore[attr-defined]
        self.assertEqual(len(mails), WORLD)
        ranks[0].close()
        ranks[0].close()
        del ranks
        gc.collect()
        self.assertEqual(len(transports._in_use), before - WORLD)
        self.assertTrue(all(mail.released for mail in mails))  # type: ignore[attr-defined]

    def test_what_a_callback_raises_is_raised_by_the_call(self) -> None:
        """The rank that raised gets its own exception, caused by the library's error; the others get an error that blames it."""
        for broken in (
            KeyError("mine"),
            KeyboardInterrupt(),
            SystemExit(3),
            MemoryError(),
            cpattn.PeerError("lost", 2),
        ):
            mails, ranks = group()
            mails[1].broken = broken
            began = time.monotonic()
            threads = [
                threading.Thread(target=lambda n=n: errors.__setitem__(n, attempt(n, ranks[n]))) for n in range(WORLD)
            ]
            errors: dict[int, BaseException | None] = {}
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertLess(time.monotonic() - began, 10, "peers were told")
            self.assertIs(errors[1], broken)
            cause = broken.__cause__
            self.assertIsInstance(cause, cpattn.PeerError)
            self.assertIn(f"the transport's exchange returned {cpattn.RAISED}", str(cause))
            blamed = 2 if isinstance(broken, cpattn.PeerError) else 1
            self.assertIn(f"rank {blamed} failed", str(cause))
            for other in (0, 2):
                self.assertIsInstance(errors[other], cpattn.PeerError)
            # A failed transport stays failed, without a further call of its methods.
            mails[1].broken = None
            calls = mails[1].calls
            again = attempt(1, ranks[1])
            self.assertIsInstance(again, cpattn.PeerError)
            self.assertIs(again.__cause__, broken)
            self.assertRaises(cpattn.PeerError, ranks[1].poll)
            self.assertEqual(mails[1].calls, calls)

    def test_agree_poll_abort_and_release_may_raise(self) -> None:
        for function in ("agree", "poll", "abort", "release"):
            with self.subTest(function):
                boxes: dict[Any, queue.Queue[Any]] = {}
                mail = Mail(0, boxes)

                def raising(*_: Any) -> Any:
                    raise ValueError(function)

                setattr(mail, function, raising)
                rank = cpattn.Rank(mail)
                if function in ("agree", "poll"):
                    self.assertRaisesRegex(
                        ValueError, function, lambda: forward(rank, 0) if function == "agree" else rank.poll()
                    )
                    self.assertRaises(cpattn.PeerError, rank.poll)
                else:
                    rank.abort() if function == "abort" else None
                rank.close()

    def test_agree_of_the_wrong_length(self) -> None:
        mail = Mail(0, {})
        mail.agree = lambda first, end, number: [number]  # type: ignore[method-assign]
        self.assertRaisesRegex(
            cpattn.InvalidArgument, "the result of agree has length 1, 3 is needed", forward, cpattn.Rank(mail), 0
        )

    def test_a_timeout_is_a_number_of_seconds(self) -> None:
        engine: Any = None
        with self.assertRaisesRegex(
            cpattn.InvalidArgument, r"timeout is datetime.timedelta\(seconds=90\), a number of seconds is needed: 90.0"
        ):
            cpattn.EngineTransport(engine, datetime.timedelta(minutes=1.5))  # type: ignore[arg-type]

    def test_an_interrupt_in_agree(self) -> None:
        """A signal's handler may raise anywhere in a callback of the main thread, also before its first line, where Python
        can only print it; the run fails all the same."""
        import signal

        class Stop(Exception):
            pass

        def handler(*_: Any) -> None:
            raise Stop

        old, sys.unraisablehook = signal.signal(signal.SIGALRM, handler), lambda _: None
        try:
            for delay in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2) * 5:
                mail = Mail(0, {})
                # At some places Python can only print the exception of a signal handler; then this rank waits.
                mail.patience = 0.5
                rank = cpattn.Rank(mail)
                the_plan = plan()
                made, kept = tensors(the_plan.share(0).q_tokens)
                # Nobody else is there: without the signal this would wait.
                with self.assertRaises((Stop, cpattn.Disagreement, cpattn.PeerError)):
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    rank.forward(the_plan, **made)
                    self.fail("a run without peers ended well")
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, old)
            sys.unraisablehook = sys.__unraisablehook__

    def test_what_a_handler_raises_inside_a_lock(self) -> None:
        """The caller gets the exception unchanged, also a RuntimeError of the handler."""
        from concurrent.futures import Future
        from unittest import mock

        from cpattn import _interruptible

        for message, expected in (("release unlocked lock", KeyboardInterrupt), ("the handler's own", RuntimeError)):
            interrupted: list[bool] = []

            def wait(_: list[Future[Any]], timeout: float | None = None, message: str = message) -> None:
                if timeout is None:
                    try:
                        raise KeyboardInterrupt
                    finally:
                        raise RuntimeError(message)

            with mock.patch.object(_interruptible, "wait", wait), self.assertRaises(expected):
                _interruptible.Interruptible()(lambda: None, lambda: interrupted.append(True))  # noqa: B023
            self.assertEqual(interrupted, [True])

    def test_a_thread_that_cannot_start(self) -> None:
        from unittest import mock

        from cpattn import _interruptible

        none = RuntimeError("can't start new thread")
        calls, ended = _interruptible.Interruptible(), mock.Mock()
        with mock.patch.object(_interruptible._thread, "start_new_thread", side_effect=none):
            for attempt in (1, 2):
                with self.assertRaisesRegex(cpattn.DeviceError, "the thread of the calls of this rank did not start"):
                    calls(lambda: 5, ended)
                self.assertEqual(ended.call_count, attempt)
            self.assertEqual(calls(lambda: 5, ended, needs_thread=False), 5)
        # The limit is lifted.
        self.assertEqual((calls(lambda: 5, ended), ended.call_count), (5, 2))
        calls.close()

        # The second of the ranks of `on_all` has no thread: the first one does not wait for it.
        start, started = threading.Thread.start, []

        def limited(thread: threading.Thread) -> None:
            if started:
                raise none
            started.append(thread)
            start(thread)

        ranks, began = cpattn.local_group(2), time.monotonic()
        the_plan = cpattn.Plan([0, 6], HEADS, DIM, world=2, ring=2, ulysses=1)
        with (
            mock.patch.object(threading.Thread, "start", limited),
            self.assertRaisesRegex(cpattn.DeviceError, "the thread of rank 1 did not start"),
        ):
            cpattn.on_all(ranks, lambda number, rank: forward(rank, number, the_plan))
        self.assertLess(time.monotonic() - began, 30.0)

    def test_disagreement_is_no_failure(self) -> None:
        mails, ranks = group()
        odd = cpattn.Plan([0, 6, 12], HEADS, DIM, world=WORLD, ring=WORLD, ulysses=1)

        def job(number: int, rank: cpattn.Rank) -> None:
            try:
                forward(rank, number, odd if number == 1 else None)
            except cpattn.Disagreement:
                forward(rank, number)
            else:
                raise AssertionError("different plans ran")

        cpattn.on_all(ranks, job)

    def test_a_forked_child_leaves_the_rank_alone(self) -> None:
        mails, ranks = group()
        child = os.fork()
        if child == 0:
            # Destroying it here would wait for a thread that the child does not have, and so would a run.
            refused = 0
            for call in (lambda: forward(ranks[0], 0), ranks[0].poll):
                try:
                    call()
                except cpattn.InvalidHandle as error:
                    refused += "forked" in str(error)
            ranks[0].close()
            os._exit(0 if not mails[0].released and refused == 2 else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        cpattn.on_all(ranks, lambda number, rank: forward(rank, number))

    def test_open_ranks_at_the_end_of_a_program(self) -> None:
        code = (
            f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
            "import test_core, cpattn\n"
            "mails, ranks = test_core.group()\n"
            "cpattn.on_all(ranks, lambda number, rank: test_core.forward(rank, number))\n"
            "import atexit; atexit.register(lambda: print([m.released for m in mails]))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


class Plans(unittest.TestCase):
    def test_lengths(self) -> None:
        with self.assertRaisesRegex(cpattn.InvalidArgument, "cu_seqlens_k has length 3, 2 is needed"):
            cpattn.Plan([0, 3], 2, 4, cu_seqlens_k=[0, 3, 4])
        with self.assertRaisesRegex(cpattn.InvalidArgument, "alibi_slopes has length 1, 2 is needed"):
            cpattn.Plan([0, 3], 2, 4, alibi_slopes=[0.5])
        with self.assertRaisesRegex(cpattn.InvalidArgument, "q_start has length 2, 1 is needed"):
            cpattn.Plan([0, 3], 2, 4, cu_seqlens_k=[0, 4], q_start=[0, 1])
        with self.assertRaisesRegex(cpattn.InvalidArgument, "cu_seqlens has length 0"):
            cpattn.Plan([], 2, 4)
        with self.assertRaisesRegex(cpattn.InvalidArgument, r"cu_seqlens\[1\] is 4294967299"):
            cpattn.Plan([0, 2**32 + 3], 2, 4)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "heads is 4294967298"):
            cpattn.Plan([0, 3], 2**32 + 2, 4)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "ring is -1"):
            cpattn.Plan([0, 3], 2, 4, ring=-1)
        self.assertRaises(cpattn.InvalidArgument, cpattn.Plan, [0, 3], 3, 4, kv_heads=2)

    def test_refused_by_name(self) -> None:
        """Values that ctypes would refuse without a name, round, or misread."""
        gathers = "one of 'auto', 'others', 'steps', 'together' is needed, or a member of cpattn.Gather"
        layouts = "one of 'auto', 'contiguous', 'zigzag', 'zigzag_pack', 'striped', 'balanced' is needed, or a member of cpattn.Layout"
        for words, options in (
            ("heads is 2.5, a whole number is needed", {"heads": 2.5}),
            ("heads is True, a whole number is needed", {"heads": True}),
            ("heads is 0, at least 1 is needed", {"heads": 0}),
            ("head_dim is 'x', a whole number is needed", {"head_dim": "x"}),
            ("world is None, a whole number is needed", {"world": None}),
            ("kv_heads is 0, at least 1 is needed", {"kv_heads": 0}),
            ("value_dim is 0, at least 1 is needed", {"value_dim": 0}),
            ("kv_heads is 1.0, a whole number is needed", {"kv_heads": 1.0}),
            ("ring is 4294967297, at most 4294967295 is needed", {"ring": 2**32 + 1}),
            ("window_left is -1, at least 0 is needed", {"window_left": -1}),
            ("window_right is None, at least 0 is needed; for no limit give cpattn.UNLIMITED", {"window_right": None}),
            ("scale is nan, a finite number is needed", {"scale": float("nan")}),
            ("scale is 0.0, a number other than 0 is needed", {"scale": 0.0}),
            ("softcap is '3', a finite number is needed", {"softcap": "3"}),
            ("softcap is True, a finite number is needed", {"softcap": True}),
            ("pack_inputs is 'no', True or False is needed", {"pack_inputs": "no"}),
            ("ranks_per_node is -1, at least 0 is needed", {"ranks_per_node": -1}),
            (f"gather is 'no', {gathers}", {"gather": "no"}),
            ("sinks is 4097, at most 4096 is needed", {"sinks": 4097}),
            (f"layout is 'zigzap', {layouts}", {"layout": "zigzap"}),
            (f"layout is 6, {layouts}", {"layout": 6}),
            (f"layout is None, {layouts}", {"layout": None}),
            (
                "dtype is 'f8', one of 'f16', 'bf16', 'f32', 'f64' is needed, or a member of cpattn.Dtype",
                {"dtype": "f8"},
            ),
            ("cu_seqlens[1] is 3.5, a whole number is needed", {"cu_seqlens": [0, 3.5]}),
            ("cu_seqlens is 7, a sequence of numbers is needed", {"cu_seqlens": 7}),
            ("alibi_slopes[1] is 'x', a finite number is needed", {"alibi_slopes": [0.5, "x"]}),
            (
                "nonsense is no argument of Plan; its arguments are alibi_slopes, circulate, circulate_forward, cu_seqlens, cu_seqlens_k, ",
                {"nonsense": 1},
            ),
            ("cu_seqlen_k is no argument of Plan: is cu_seqlens_k meant?; its arguments are ", {"cu_seqlen_k": [0, 3]}),
            ("is_causal is no argument of Plan: attention is causal unless window_right is given", {"is_causal": True}),
        ):
            with self.subTest(words), self.assertRaises(cpattn.InvalidArgument) as caught:
                cpattn.Plan(**{"cu_seqlens": [0, 3], "heads": 2, "head_dim": 4, **options})
            self.assertTrue(str(caught.exception).startswith(words), caught.exception)
        the_plan = plan()
        for words, call in (
            ("rank is 0.5, a whole", lambda: the_plan.share(0.5)),
            ("rank is -1, at least 0", lambda: the_plan.tokens("q", -1)),
            ("side is 'v', one of 'q', 'k' is needed", lambda: the_plan.tokens("v", 0)),
            ("direction is 2, one of 'forward', 'backward'", lambda: the_plan.workspace(0, 2)),
            ("whole cannot be read through DLPack: list", lambda: the_plan.shard(cpattn.Side.Q, 0, [1.0], [1.0])),
            ("world is 2.0, a whole", lambda: cpattn.local_group(2.0)),
            ("workers is True, a whole", lambda: cpattn.local_group(2, workers=True)),
            (
                "cpattn_local_group: CPATTN_INVALID: deadline_ms is 0, expected at least 1",
                lambda: cpattn.local_group(2, 0),
            ),
            ("devices[1] is 'cuda', a whole", lambda: cpattn.peer_group([0, "cuda"])),
            ("unique_id is 'x', bytes are needed", lambda: cpattn.nccl_group("x", rank=0, world=1, device=0)),
            ("rank is None, a whole", lambda: cpattn.nccl_group(bytes(128), rank=None, world=1, device=0)),
            ("comm is 'x', a whole", lambda: cpattn.nccl_group(comm="x", rank=0, world=1, device=0)),
            ("capacity is 2.5, a whole", lambda: cpattn.local_group(1)[0].record(2.5)),
            (
                "stream is 'x', a whole",
                lambda: forward(cpattn.local_group(1)[0], 0, cpattn.Plan([0, 5], HEADS, DIM), stream="x"),
            ),
        ):
            with self.subTest(words), self.assertRaises(cpattn.InvalidArgument) as caught:
                call()  # type: ignore[no-untyped-call]
            self.assertTrue(str(caught.exception).startswith(words), caught.exception)

    def test_nodes(self) -> None:
        self.assertEqual(cpattn.ranks_per_node([4, 4, 1, 1]), 2)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "node of size 1, expected a node of size 2"):
            cpattn.ranks_per_node([0, 0, 1])
        two, one = (cpattn.Plan([0, 64], 2, 8, world=4, ring=4, ranks_per_node=n) for n in (2, 0))
        two.verify()
        self.assertNotEqual(two.fingerprint, one.fingerprint)
        self.assertEqual(cpattn.Plan.with_tokens_of(two, 2, 8).fingerprint, two.fingerprint)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "ranks_per_node is 3, expected a divisor of the 4 ranks"):
            cpattn.Plan([0, 64], 2, 8, world=4, ring=4, ranks_per_node=3)

    def test_q_circulates_in_the_forward(self) -> None:
        """One new token of each of two sequences, over slots of a cache."""
        cache = {"cu_seqlens_k": [0, 64, 128], "q_start": [40, 7], "layout": "striped", "layout_parameter": 4}
        keys, queries = (
            cpattn.Plan([0, 1, 2], 6, 8, kv_heads=2, world=4, ring=4, circulate_forward=side, **cache)  # type: ignore[arg-type]
            for side in ("keys", "queries")
        )
        queries.verify()
        self.assertNotEqual(keys.fingerprint, queries.fingerprint)
        self.assertNotEqual(keys.explain(), queries.explain())
        self.assertEqual(keys.tokens("k", 1), queries.tokens("k", 1))
        auto = cpattn.Plan([0, 1, 2], 6, 8, kv_heads=2, world=4, ring=4, **cache)  # type: ignore[arg-type]
        auto.verify()
        self.assertRegex(auto.explain(), "forward: q circulates, .*: fewer bytes: all ranks receive")
        with self.assertRaisesRegex(cpattn.Unsupported, "options.passes with circulate_forward queries"):
            cpattn.Plan([0, 64], 6, 8, kv_heads=2, world=4, ring=4, circulate_forward="queries", passes=2)

    def test_names_of_members(self) -> None:
        """Strings, as PyTorch has them for its own options, are the members of these names; None is nothing given."""
        want = plan(layout=cpattn.Layout.ZIGZAG_PACK, circulate=cpattn.Circulate.KEYS, dtype=cpattn.Dtype.BF16)
        got = plan(
            layout="zigzag_pack",
            circulate="Keys",
            dtype="bf16",
            kv_heads=None,
            value_dim=None,
            scale=None,
            softcap=None,
        )
        self.assertEqual(got.fingerprint, want.fingerprint)
        self.assertEqual(got.describe().layout, cpattn.Layout.ZIGZAG_PACK)
        for spelt in ("float16", np.float16, np.dtype("float16")):
            self.assertEqual(plan(dtype=spelt).dtype, cpattn.Dtype.F16)
        with self.assertRaisesRegex(
            cpattn.InvalidArgument, "dtype is <class 'numpy.int32'>, one of 'f16', 'bf16', 'f32', 'f64' is needed"
        ):
            plan(dtype=np.int32)
        self.assertEqual(got.tokens("q", 1), want.tokens(cpattn.Side.Q, 1))
        for truth, member in ((True, cpattn.Gather.OTHERS), (False, "steps")):
            self.assertEqual(plan(gather=truth).fingerprint, plan(gather=member).fingerprint)
        self.assertEqual(len({plan(gather=member).fingerprint for member in cpattn.Gather}), len(cpattn.Gather))

    def test_tokens_of_another(self) -> None:
        lengths, how = [0, 32, 64, 512], {"layout": "balanced", "layout_parameter": 4, "gather": "others"}
        base = cpattn.Plan(lengths, 4, 8, world=4, ring=4, dtype="bf16", **how)  # type: ignore[arg-type]
        alone = cpattn.Plan(lengths, 4, 8, world=4, ring=4, dtype="bf16", window_left=7, **how)  # type: ignore[arg-type]
        plan = cpattn.Plan.with_tokens_of(base, 4, 8, window_left=7)
        for side in cpattn.Side:
            held = [[p.tokens(side, r) for r in range(4)] for p in (base, alone, plan)]
            self.assertEqual(held[0], held[2])
            self.assertNotEqual(held[0], held[1])
        self.assertEqual((plan.distribution, plan.dtype), (base.distribution, base.dtype))
        self.assertNotEqual(plan.distribution, alone.distribution)
        self.assertNotEqual(plan.fingerprint, alone.fingerprint)
        self.assertEqual(cpattn.Plan.with_tokens_of(plan, 4, 8).fingerprint, base.fingerprint)
        # How it runs is the base's, unless given.
        steps = cpattn.Plan(lengths, 4, 8, world=4, ring=4, dtype="bf16", layout="balanced", layout_parameter=4)
        self.assertEqual(cpattn.Plan.with_tokens_of(base, 4, 8, gather="auto").fingerprint, steps.fingerprint)
        plan.verify()
        self.assertIn(f"distribution {plan.distribution:016x}", plan.explain())
        with self.assertRaisesRegex(cpattn.InvalidArgument, "options.layout is zigzag"):
            cpattn.Plan.with_tokens_of(base, 4, 8, layout="zigzag")

    def test_plans_of_a_model(self) -> None:
        lengths, shape = [0, 32, 64, 512], {"heads": 4, "head_dim": 8}
        kinds = [(1, shape), (5, {**shape, "window_left": 7, "dtype": "bf16"})]
        full, windowed = cpattn.Plan.auto_for(lengths, kinds, world=4, dtype="f32", gather="others")
        self.assertEqual((full.distribution, full.dtype), (windowed.distribution, cpattn.Dtype.F32))
        self.assertEqual(windowed.dtype, cpattn.Dtype.BF16)
        full.verify()
        windowed.verify()
        # One kind is chosen for as by itself.
        alone = cpattn.Plan(lengths, 4, 8, world=4, window_left=7)
        self.assertEqual(
            cpattn.Plan.auto_for(lengths, [(3, {**shape, "window_left": 7})], world=4)[0].fingerprint, alone.fingerprint
        )
        for wrong, said in (
            ([], "kinds is none"),
            ([(0, shape)], "layers is 0"),
            ([(1, {"heads": 4})], "no head_dim"),
            ([(1, {**shape, "layout": "zigzag"}), (1, shape)], "a kind of layer has layout"),
            ([(1, {**shape, "gather": "others"}), (1, shape)], "a kind of layer has gather"),
            ([shape], "kinds is"),
        ):
            with self.assertRaisesRegex(cpattn.InvalidArgument, said):
                cpattn.Plan.auto_for(lengths, wrong, world=4)  # type: ignore[arg-type]
        with self.assertRaisesRegex(cpattn.InvalidArgument, "options.layout is 2, expected 0"):
            cpattn.Plan.auto_for(lengths, kinds, world=4, layout="zigzag")

    def test_a_machine_chooses(self) -> None:
        machine = (Path(__file__).parents[2] / "machines/h100_8x400g.machine").read_text()
        given = cpattn.Plan.auto_on([0, 40000, 65536], 8, 128, machine, dtype="bf16", world=16, kv_heads=2)
        self.assertIn("H100", given.explain())
        chosen = given.describe()
        again = cpattn.Plan(
            [0, 40000, 65536],
            8,
            128,
            dtype="bf16",
            world=16,
            kv_heads=2,
            ulysses=chosen.ulysses,
            ring=chosen.ring,
            layout=cpattn.Layout(chosen.layout),
            layout_parameter=chosen.layout_parameter,
            ranks_per_node=chosen.ranks_per_node,
        )
        self.assertEqual(again.fingerprint, given.fingerprint)
        # One long document on 16 ranks crosses to each node once, and so do the layers made from it. Nodes that are given stay.
        shape: dict[str, Any] = {"dtype": "bf16", "kv_heads": 8}
        two = cpattn.Plan.auto_on([0, 1 << 18], 32, 128, machine, world=16, **shape)
        self.assertEqual(two.describe().ranks_per_node, 8)
        self.assertIn("two levels (ranks_per_node)", two.explain())
        self.assertEqual(cpattn.Plan.with_tokens_of(two, 32, 128, kv_heads=8).fingerprint, two.fingerprint)
        one = cpattn.Plan.auto_on([0, 1 << 18], 32, 128, machine, world=16, ranks_per_node=16, **shape)
        self.assertEqual(one.describe().ranks_per_node, 16)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "line 1"):
            cpattn.Plan.auto_on([0, 5], 8, 128, "nothing")
        with self.assertRaisesRegex(cpattn.InvalidArgument, "machine has a zero byte"):
            cpattn.Plan.auto_on([0, 5], 8, 128, machine + "\0memory = 1", dtype="bf16", world=2)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "options.ulysses is 2, expected 0"):
            cpattn.Plan.auto_on([0, 5], 8, 128, machine, dtype="bf16", world=2, ulysses=2)

    def test_what_it_says(self) -> None:
        the_plan = plan(layout=cpattn.Layout.STRIPED, layout_parameter=2)
        info = the_plan.describe()
        self.assertEqual((info.world, info.layout), (3, cpattn.Layout.STRIPED))
        self.assertEqual((info.ring, info.ulysses, info.replicas, info.q_tokens), (3, 1, 1, 12))
        self.assertEqual(list(the_plan.tokens(cpattn.Side.Q, 1)), [2, 3, 8, 9])
        self.assertEqual(list(the_plan.positions(cpattn.Side.Q, 1)), [2, 3, 3, 4])
        two = cpattn.Plan([0, 1], 2, 4, world=2, ring=2)
        self.assertEqual(sorted(list(two.tokens(cpattn.Side.K, rank)) for rank in range(2)), [[], [0]])
        self.assertIn("ring 3", the_plan.explain())
        the_plan.verify()
        self.assertGreater(the_plan.workspace(0, cpattn.Direction.BACKWARD), 0)
        self.assertNotEqual(info.fingerprint, plan().describe().fingerprint)


class Library(unittest.TestCase):
    def load(self, **environment: str) -> str:
        """What importing the package says in an environment."""
        done = subprocess.run(
            [sys.executable, "-c", "import sys; sys.path[:0] = sys.argv[1:]\nimport cpattn", *sys.path],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stderr

    def test_a_library_that_is_not_there(self) -> None:
        said = self.load(CPATTN_LIBRARY="/nowhere/libcpattn.so")
        self.assertIn("LibraryError: no cpattn library was found", said)
        self.assertIn("/nowhere/libcpattn.so", said)
        self.assertIn("capi/build", said)

    def test_a_library_of_something_else(self) -> None:
        said = self.load(CPATTN_LIBRARY=ctypes.util.find_library("c") or "libc.so.6")
        self.assertIn("cpattn_version", said)


if __name__ == "__main__":
    unittest.main()
