# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a function on several processes that form a gloo group on the loopback, and never waits for ever.

Each process is a fresh one, but imports nothing: it is forked from a server, which has loaded the test modules of the process that calls,
with all that they import, and then `server`. Importing PyTorch takes 2 seconds, Transformers and TRL 4 more; a fork takes 20 milliseconds.
Nothing runs in the server: no group, and no thread but one of Arrow's allocator, which provides for forks. Modules that import JAX, which does
not, stay out of it. A test of how a program is loaded, or how an interpreter ends, starts one with `subprocess`.

The store is held by the process that calls, which is no rank: killing a rank does not take the store away. Or rank 0 holds it,
as in most programs.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

# Each process gets its share of a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For each connection to a store PyTorch asks for the name of 127.0.0.1, on both sides, of a name server: one that does not answer
# would delay it by 5 seconds or more.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Inductor would start processes that import PyTorch, for one kernel.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.distributed as dist

_forks = multiprocessing.get_context("forkserver")

# Whether sizes and variants are tested that say little more than the others: with `CPATTN_LONG` set (`.ci/long`).
LONG = "CPATTN_LONG" in os.environ

# Seconds until all processes run and have formed a group, on a machine that has much else to do.
JOINING = 240


def fork(job: Callable[..., None], *args: Any) -> Any:
    """A process of the server, which the first call starts. Whoever calls ends it."""
    here = os.path.dirname(os.path.abspath(__file__))
    mine = [
        name for name, module in sys.modules.items() if os.path.dirname(getattr(module, "__file__", None) or "") == here
    ]
    names = [name for name in mine if "jax" not in vars(sys.modules[name])]
    _forks.set_forkserver_preload([*names, "server"])
    process = _forks.Process(target=job, args=args)
    process.start()
    return process


class Outcome:
    """How a process ended: the result or the exception of its job (class and text), and its exit code."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: str | None = None
        self.exit: int | None = None
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"Outcome(value={self.value!r}, error={self.error!r}, exit={self.exit}, seconds={self.seconds:.1f})"


def _main(
    job: Callable[..., Any], rank: int, world: int, port: int, results: Any, seconds: float, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    holds, joining = port == 0, timedelta(seconds=JOINING)
    store = dist.TCPStore("127.0.0.1", port, is_master=holds, wait_for_workers=False, timeout=joining)
    if holds:
        results.send(("port", store.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=JOINING))
    # A job must not stop or end itself while another rank is still joining the group.
    dist.barrier()
    results.send(("ready", None))
    # Where it was, should it still be there shortly before it is killed.
    faulthandler.dump_traceback_later(0.9 * seconds)
    try:
        answer = ("value", job(rank, world, *args))
    except BaseException as error:  # noqa: BLE001 (reported to the parent process)
        answer = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    results.send(answer)
    results.close()
    # Not through the exit handlers of a group that may have failed.
    os._exit(0)


def start(
    job: Callable[..., Any],
    world: int,
    *args: Any,
    seconds: float = 100.0,
    until: Callable[[int], bool] = lambda rank: True,
    inside: bool = False,
) -> list[Outcome]:
    """Outcomes by rank. Waits for the ranks of which `until` is true, and at most so many seconds once all of them have
    joined; kills what is then left, and returns when no process is. `inside`: rank 0 holds the store.
    """
    store = None if inside else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if store else 0
    pipes = [_forks.Pipe(duplex=False) for _ in range(world)]
    processes: list[Any] = []
    outcomes = [Outcome() for _ in range(world)]
    try:
        for rank, (mine, theirs) in enumerate(pipes):
            processes.append(fork(_main, job, rank, world, port, theirs, seconds, args))
            if port == 0:
                assert mine.poll(JOINING), "rank 0 has made no store"
                port = mine.recv()[1]
        for _, theirs in pipes:
            theirs.close()
        ready = [mine.poll(JOINING) and mine.recv()[0] for mine, _ in pipes]
        assert ready == ["ready"] * world, f"not all processes have joined: {ready}"
        began = time.monotonic()
        waiting = {pipes[rank][0]: rank for rank in range(world) if until(rank)}
        while waiting and (left := began + seconds - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                # A process that died without an answer has closed its end of the pipe.
                with suppress(EOFError):
                    kind, what = pipe.recv()  # type: ignore[union-attr]
                    setattr(outcomes[rank], kind, what)
                outcomes[rank].seconds = time.monotonic() - began
    finally:
        for rank, process in enumerate(processes):
            if outcomes[rank].seconds:
                process.join(10)
            outcomes[rank].exit = process.exitcode
            process.kill()
            process.join()
    return outcomes


def run(job: Callable[..., Any], world: int, *args: Any, seconds: float = 100.0) -> list[Any]:
    """The results of the job on each rank. Raises AssertionError with the error of the first rank that failed."""
    outcomes = start(job, world, *args, seconds=seconds)
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise AssertionError(f"rank {rank}: {outcome.error}")
        assert outcome.exit == 0, f"rank {rank} did not end well: {outcomes}"
    return [outcome.value for outcome in outcomes]
