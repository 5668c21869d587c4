# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a Python program as torchrun does: on some processes, each with its rank in the environment and all with one store.

Each process is a fresh one, forked from the server of processes.py, which has loaded what programs here import: torchrun and each of its
processes take 3 to 7 seconds to import that. What differs from a program of its own is its end, without the exit of the interpreter.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import processes
import torch.distributed as dist

# Seconds that the other processes have to end once one has failed.
AFTER = 20


def _main(file: str, arguments: tuple[str, ...], environment: dict[str, str], said: list[str]) -> None:
    for number, name in enumerate(said, 1):
        opened = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ |= environment
    sys.argv = [file, *arguments]
    sys.path.insert(0, os.path.dirname(file))
    runpy.run_path(file, run_name="__main__")


def run(file: str, world: int, *arguments: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """What the program wrote, and the exit code of the first process that failed, or 0. With `world` 0: one process that is no rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_all = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    started: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        said = [os.path.join(folder, name) for name in ("out", "err")]
        for name in said:
            open(name, "x").close()
        try:
            for rank in range(max(world, 1)):
                mine = {**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}
                started.append(processes.fork(_main, file, arguments, mine, said))
            left, code, end = {process.sentinel: process for process in started}, 0, time.monotonic() + seconds
            while left and (until := end - time.monotonic()) > 0:
                for sentinel in wait(list(left), until):
                    process = left.pop(sentinel)  # type: ignore[call-overload]
                    process.join()
                    if process.exitcode and not code:
                        code, end = process.exitcode, min(end, time.monotonic() + AFTER)
        finally:
            for process in started:
                process.kill()
                process.join()
        out, err = (Path(name).read_text("utf-8") for name in said)
    if left and not code:
        raise subprocess.TimeoutExpired([file, *arguments], seconds, out, err)
    return subprocess.CompletedProcess([file, *arguments], code, out, err)
