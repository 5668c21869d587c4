# SPDX-License-Identifier: MIT OR Apache-2.0
"""One trial of each kind of fault, and the rank that is blamed. `faults.py` runs any number of trials."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import faults
import processes
import torch
import torch.distributed as dist
from processes import run, start
from torch.distributed import distributed_c10d as c10d

import cpattn
from cpattn.torch import Context, GlooTransport
from cpattn.torch.gloo import Collectives, Gloo
from cpattn.transport import Message

TIMEOUT = 2.0


def chain(rank: int, world: int, how: str) -> str:
    """Each rank waits for a message of the next one, and begins later than the one before; the last one sends nothing."""
    transport, room = GlooTransport(timeout=TIMEOUT), torch.zeros(4)
    dist.barrier()
    if rank == world - 1 and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        if rank == world - 1 and how == "busy":
            time.sleep(TIMEOUT + 3)
            transport.poll()
            return "no error"
        time.sleep(0.4 * TIMEOUT * rank if how != "circle" else 0)
        transport.exchange("ring", 3, [], [Message((rank + 1) % world, room.data_ptr(), 16)])
    except cpattn.PeerError as failure:
        return f"{failure.peer}: {failure}"
    return "no error"


def sizes(rank: int, world: int, sent: int, expected: int) -> str:
    """Rank 0 sends another number of bytes than rank 1 expects, for which rank 2 waits."""
    transport, out, room = (
        GlooTransport(timeout=20.0),
        torch.ones(sent, dtype=torch.uint8),
        torch.zeros(expected, dtype=torch.uint8),
    )
    dist.barrier()
    messages = {
        0: ([Message(1, out.data_ptr(), sent)], []),
        1: ([], [Message(0, room.data_ptr(), expected)]),
        2: ([], [Message(1, room.data_ptr(), expected)]),
    }
    said = []
    for _ in range(2):  # a small message may leave before the sizes are compared
        try:
            transport.exchange("ring", 3, *messages[rank])
        except cpattn.PeerError as failure:
            said.append(f"{failure.peer}: {failure}")
        dist.barrier()
        if rank == 0:
            messages[0] = ([], [Message(1, room.data_ptr(), expected)])
    assert not room.any(), "memory was written"
    return said[0]


def cuts(rank: int, world: int, sent: list[int], expected: list[int]) -> str:
    """Rank 0 sends messages of other sizes than rank 1 expects, and of the same total."""
    transport, here, there = GlooTransport(timeout=20.0), [sent, expected][rank], 1 - rank
    tensors = [torch.full((size,), 1 - rank, dtype=torch.uint8) for size in here]
    messages = [Message(there, t.data_ptr(), t.nbytes) for t in tensors]
    dist.barrier()
    said = []
    for lists in ((messages, []), ([], messages)):  # small messages may leave before the sizes are compared
        try:
            transport.exchange("ring", 3, *(lists if rank == 0 else lists[::-1]))
        except cpattn.PeerError as failure:
            said.append(f"{failure.peer}: {failure}")
        dist.barrier()
    assert rank == 0 or not any(t.any() for t in tensors), "memory was written"
    return said[0]


def refused(rank: int, world: int) -> str:
    """Lists that break the contract are refused before anything moves, and the group works as before."""
    transport, memory = GlooTransport(timeout=20.0), torch.full((16,), rank, dtype=torch.uint8)
    address, other = memory.data_ptr(), 1 - rank
    good = Message(other, address, 8)
    for bad, words in (
        (Message(2, address, 8), "[1].peer is 2, expected a rank below 2"),
        (Message(7, address, 8), "[1].peer is 7, expected a rank below 2"),
        (Message(rank, address, 8), f"[1].peer is {rank}, expected another rank"),
        (Message(other, address, 0), "[1].bytes is 0, expected at least 1"),
        (Message(other, 0, 8), "[1].ptr is null, expected an address"),
    ):
        for argument, lists in (("sends", ([good, bad], [])), ("recvs", ([], [good, bad]))):
            try:
                transport.exchange("ring", 3, *lists)
            except cpattn.InvalidArgument as failure:
                assert f": {argument}{words}" in str(failure), failure
            else:
                return f"{bad} in {argument} was not refused"
    for first, end, words in (
        (0, 3, "end is 3, at most 2"),
        (-1, 2, "first is -1, at least 0"),
        (other, other + 1, f"group is {other}..{other + 1}, expected a range within 0..2 that contains rank {rank}"),
        (rank, rank, f"group is {rank}..{rank}, "),
    ):
        try:
            transport.agree(first, end, 5)
        except cpattn.InvalidArgument as failure:
            assert words in str(failure), failure
        else:
            return f"agree over {first} ... {end} was not refused"
    room = torch.zeros(16, dtype=torch.uint8)
    transport.exchange("ring", 4, [Message(other, address, 16)], [Message(other, room.data_ptr(), 16)])
    assert room.tolist() == [other] * 16 and transport.agree(0, 2, rank) == [0, 1]
    return "refused"


def plans(rank: int, world: int, how: str) -> str:
    """After its first runs a rank goes on with another batch than the others: one that was agreed on, or a new one."""
    context = Context(heads=2, head_dim=4, ring=3, timeout=TIMEOUT)
    batches = [context.batch(documents) for documents in ([0, 9], [0, 4, 9])]
    q = torch.randn(3, 2, 4, requires_grad=True)
    for batch in batches:
        batch.attention(q, q, q).sum().backward()
    new = context.batch([0, 2, 3, 9])
    batch = (new if how == "new" else batches[1]) if rank == 1 else batches[0]
    dist.barrier()
    try:
        batch.attention(q, q, q)
    except cpattn.Disagreement as failure:
        try:
            batch.attention(q, q, q)
        except cpattn.Disagreement as again:
            assert again.peer == failure.peer, f"{failure}, then {again}"
            return f"{failure.peer} {batch.plan.fingerprint:016x} {failure}"
    return "no error"


def interrupted(rank: int, world: int, how: str) -> str:
    """Ctrl-C on rank 0 while it waits for rank 1, which comes once rank 0 was interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell disables it for background processes
    context = Context(heads=2, head_dim=4, timeout=30.0)
    batch, q = context.batch([0, 8]), torch.randn(4, 2, 4)
    if how == "exchange":
        batch.attention(q, q, q)  # agreed
    dist.barrier()
    call = (lambda: batch.labels(torch.zeros(4))) if how == "labels" else (lambda: batch.attention(q, q, q))
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            call()
        except KeyboardInterrupt:
            took = time.monotonic() - began
            assert 0.4 < took < 20, f"after {took:.1f} s"
        else:
            return "not interrupted"
        c10d._get_default_store().set("interrupted", "1")
    else:
        c10d._get_default_store().wait(["interrupted"], timedelta(seconds=60))
    try:
        call()
    except cpattn.PeerError as failure:
        return f"{failure.peer}: {failure}"
    return "no error"


@contextmanager
def holder() -> Iterator[tuple[int, int]]:
    """A process that holds a store: its port, and the process to stop or kill."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = processes.fork(_holds, theirs)
    try:
        assert mine.poll(processes.JOINING), "no store was made"
        yield mine.recv(), process.pid
    finally:
        process.kill()
        process.join()


def _holds(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(200)


def orphan(rank: int, world: int, port: int, of: int, number: int, interrupt: bool) -> str:
    """A context is made when the process that holds the store has been killed or stopped; `interrupt`: and Ctrl-C."""
    timeout, kind = (30.0, KeyboardInterrupt) if interrupt else (1.0, cpattn.PeerError)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    os.kill(of, number)
    if interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        with mock.patch.object(c10d, "_get_default_store", lambda: store):
            Context(heads=2, head_dim=4, timeout=timeout)
    except kind as failure:
        took = time.monotonic() - began
        assert 0.4 < took < (6 if interrupt else 25), f"after {took:.1f} s"
        return f"{getattr(failure, 'peer', None)}: {failure}"
    return "no error"


def waits_for_ever(rank: int, world: int) -> str:
    """Ctrl-C while a context is made to which the other rank does not come. The default store, which other parts of the job use,
    is free at once: whatever goes on of the context has a connection of its own."""
    if rank == 1:
        dist.barrier()
        return ""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        Context(heads=2, head_dim=4, timeout=40.0)
    except KeyboardInterrupt:
        took = time.monotonic() - began
        assert 0.9 < took < 6, f"after {took:.1f} s"
    began = time.monotonic()
    store: Any = c10d._get_default_store()
    store.set("free", "1")
    value = store.get("free").decode()
    took = time.monotonic() - began
    dist.barrier()
    return f"{value} {'at once' if took < 6 else f'after {took:.1f} s'}"


# Programs of two ranks, of which rank 0 ends while a daemon thread of its own waits for rank 1, and rank 1 soon after: each a fork of one
# that has imported everything, since what is tested is how an interpreter ends, and which writes how they ended.
DAEMON = """
import os, sys, threading, time
import torch, torch.distributed as dist
from cpattn.torch import Context, GlooTransport
from cpattn.transport import Message
started = []
for what, port in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    for rank in range(2):
        if not (child := os.fork()):
            break
        started.append((child, f"{what} {rank}"))
    else:
        continue
    break
else:
    for child, name in started:
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit()
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=2)
room, q = torch.zeros(4), torch.zeros(4, 2, 4)
if what == "attention":
    batch = Context(heads=2, head_dim=4, timeout=60.0).batch([0, 8])
    batch.attention(q, q, q)
    wait = lambda: batch.attention(q, q, q)
elif what == "exchange":
    transport = GlooTransport(timeout=60.0)
    wait = lambda: transport.exchange("ring", 0, [], [Message(1, room.data_ptr(), 16)])
else:
    wait = lambda: GlooTransport(timeout=60.0)
dist.barrier()
if rank == 0:
    threading.Thread(target=wait, daemon=True).start()
time.sleep(1)
"""


class Ends(unittest.TestCase):
    def test_a_program_whose_daemon_thread_waits(self) -> None:
        kinds = ("attention", "exchange", "connect")
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in kinds]
        arguments = [word for what, store in zip(kinds, stores, strict=True) for word in (what, str(store.port))]
        with subprocess.Popen(
            [sys.executable, "-c", DAEMON, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as program:
            try:
                ended, said = program.communicate(timeout=200)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
        lines = [line for line in ended.splitlines() if line.startswith(kinds)]  # PyTorch 2.10 writes there too
        self.assertEqual(lines, [f"{what} {rank} 0" for what in kinds for rank in range(2)], said)
        self.assertNotIn("terminate called", said)


class Faults(unittest.TestCase):
    def test_an_interrupt_lets_go_of_the_store(self) -> None:
        self.assertEqual(run(waits_for_ever, 2)[0], "1 at once")

    def test_an_interrupt_ends_a_wait(self) -> None:
        for how in ("agreement", "exchange", "labels"):
            with self.subTest(how):
                said = run(interrupted, 2, how)
                self.assertRegex(said[0], "^0: .*rank 0 (aborted the run|failed)")
                self.assertRegex(said[1], "^0: .*rank 0 aborted the run")

    def test_sizes_that_differ(self) -> None:
        for sent, expected in ((50, 3), (3, 50), (200_000, 3), (3, 200_000), (300_000, 200_000), (200_000, 300_000)):
            with self.subTest(sent=sent, expected=expected):
                for rank, said in enumerate(run(sizes, 3, sent, expected)):
                    self.assertRegex(said, f"^{(1, 0, 0)[rank]}: .*rank {rank}, exchange, step 3: ")
                    self.assertIn(f"rank 0 sends {sent} bytes in 1 message and runs no plan", said)
                    self.assertIn(
                        f"rank 1 expects {expected} bytes in 1 message (exchange, step 3) and runs no plan", said
                    )
                    self.assertIn("must make the same calls", said)

    def test_sizes_that_differ_in_a_packet(self) -> None:
        for sent, expected, others in (
            ([10, 20], [20, 10], " of other sizes"),
            ([10, 20], [30], ""),
            ([10, 20, 30], [30, 30], ""),
            ([60_000, 50_000], [50_000, 60_000], " of other sizes"),
            ([40_000, 40_000], [80_000], ""),
        ):
            with self.subTest(sent=sent, expected=expected):
                texts = [
                    f"{sum(sizes)} bytes in {len(sizes)} message{'s' * (len(sizes) > 1)}" for sizes in (sent, expected)
                ]
                for rank, said in enumerate(run(cuts, 2, sent, expected)):
                    self.assertRegex(said, f"^{1 - rank}: .*rank {rank}, exchange, step 3: ")
                    self.assertIn(
                        f"rank 0 sends {texts[0]} and runs no plan, rank 1 expects {texts[1]}{others} (exchange, step 3)",
                        said,
                    )

    def test_lists_that_break_the_contract(self) -> None:
        self.assertEqual(run(refused, 2), ["refused"] * 2)

    def test_plans_that_differ_after_the_first_run(self) -> None:
        for how in ("known", "new"):
            with self.subTest(how):
                said = run(plans, 3, how)
                numbers = [one.split()[1] for one in said]
                self.assertEqual(numbers[0], numbers[2])
                self.assertNotEqual(numbers[0], numbers[1])
                for rank, one in enumerate(said):
                    self.assertIn("must make the same calls", one)
                    if how == "new":
                        # Found at once, by what all ranks compare.
                        documents = 3 if rank == 1 else 1
                        self.assertRegex(one, f"rank {rank} runs the forward of 9 tokens in {documents} documents, ")
                        self.assertIn(one.split()[0], ("1", "02", "1")[rank], one)
                        for number in numbers[:2]:
                            self.assertIn(f"({number})", one)
                        continue
                    for other in numbers[:2]:
                        self.assertIn(f"the forward of plan {other}", one)
                    # Of the two that differ, another one; rank 2 meets either.
                    self.assertIn(one.split()[0], ("1", "02", "01")[rank], one)
                    self.assertRegex(
                        one, r"rank 1 (sends|expects|is in) .*rank [02] |rank [02] (sends|expects|is in) .*rank 1 "
                    )

    def test_each_kind(self) -> None:
        for i, kind in enumerate(faults.KINDS):
            with self.subTest(kind):
                faults.trial(kind, 3, 17 + i)

    def test_a_rank_that_waits_itself_is_not_blamed(self) -> None:
        began = time.monotonic()
        outcomes = start(chain, 4, "stopped", seconds=60, until=lambda rank: rank < 3)
        self.assertLess(time.monotonic() - began, 50)
        for outcome in outcomes[:3]:
            self.assertRegex(
                str(outcome.value), "^3: .*rank ., exchange, step 3: receiving 16 bytes, .*; rank 3 gives no answer: "
            )
            for waiting in range(3):
                self.assertIn(
                    f"rank {waiting} waited for rank {waiting + 1} (exchange, step 3: receiving 16 bytes)",
                    outcome.value,
                )

    def test_a_rank_that_computes_for_too_long(self) -> None:
        for said in run(chain, 3, "busy"):
            self.assertRegex(said, "^2: .*rank 2 is in no call of the group, while others wait for it")

    def test_ranks_that_wait_for_each_other(self) -> None:
        for said in run(chain, 3, "circle"):
            self.assertRegex(said, "^None: .*which rank is at fault cannot be told: ranks wait for each other; ")
            # Whichever asked first.
            for waiting in range(3):
                self.assertIn(
                    f"rank {waiting} waited for rank {(waiting + 1) % 3} (exchange, step 3: receiving 16 bytes)", said
                )


def without(rank: int, world: int, port: int, of: int, how: str) -> str:
    """The process that holds the store fails, or the store has no second connection: then a rank sends nothing."""
    store: Any = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    # As open does where the stores of the PyTorch in use have no clone.
    open_ = mock.Mock(side_effect=RuntimeError("no clone")) if how == "clone" else Gloo.open
    with mock.patch.object(c10d, "_get_default_store", lambda: store), mock.patch.object(Gloo, "open", open_):
        transport, room = GlooTransport(timeout=0.5), torch.zeros(4)
    dist.barrier()
    if rank == 0 and how != "clone":
        os.kill(of, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    dist.barrier()
    began = time.monotonic()
    try:
        if rank == 0:
            transport.exchange("ring", 3, [], [Message(1, room.data_ptr(), 16)])
    except cpattn.PeerError as failure:
        took = time.monotonic() - began
        assert took < 6, f"after {took:.1f} s"
        return f"{failure.peer}: {failure}"
    finally:
        dist.barrier()
    return "no error"


class Store(unittest.TestCase):
    """The process that holds the store fails: nothing hangs, and the error says that the rank at fault cannot be told."""

    def test_stopped_killed_and_without_a_second_connection(self) -> None:
        for how, words in (
            ("stopped", "did not answer within 2.0 s"),
            ("killed", "the store of the process group, or the process that holds it, is gone"),
            ("clone", "the store has no second connection"),
        ):
            with self.subTest(how), holder() as (port, of):
                said = run(without, 2, port, of, how)[0]
                self.assertRegex(said, f"^None: .*receiving 16 bytes, rank 1 failed .*cannot be told: .*{words}")

    def test_a_context_after_that(self) -> None:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            with self.subTest(number):
                with holder() as (port, of):
                    said = run(orphan, 1, port, of, number, False)[0]
                self.assertRegex(
                    said,
                    "^None: .*rank 0, making the transport, step 0: no transport was made, after .* that holds the store does not answer",
                )
                with holder() as (port, of):
                    self.assertEqual(run(orphan, 1, port, of, number, True)[0], "None: ")


def on_one_processor() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def hurried(rank: int, world: int, rounds: int) -> bool:
    """Ranks that leave each group as soon as they have it, as a rank does whose next argument is refused. Odd ones get little time."""
    on_one_processor()
    os.nice(10 * (rank % 2))
    for _ in range(rounds):
        Collectives(tuple(range(world)), 60.0).close()
        GlooTransport(timeout=60.0).release()
    return True


def spin() -> None:
    on_one_processor()
    while True:
        pass


class Connecting(unittest.TestCase):
    def test_ranks_that_leave_at_once(self) -> None:
        """On a loaded machine: a rank is still connecting when another one has its group and leaves it."""
        load = [processes.fork(spin) for _ in range(3)]
        try:
            self.assertEqual(run(hurried, 4, 5), [True] * 4)
        finally:
            for process in load:
                process.kill()
                process.join()


if __name__ == "__main__":
    unittest.main()
