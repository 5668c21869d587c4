# SPDX-License-Identifier: MIT OR Apache-2.0
"""One trial of each kind of fault, and who is blamed; `faults.py` runs as many as wanted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import unittest
from datetime import timedelta
from unittest import mock

import faults
import torch
import torch.distributed as dist
from processes import run, start
from torch.distributed import distributed_c10d as c10d

import cpattn
from cpattn.torch import GlooTransport
from cpattn.torch.blame import Blame
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
        time.sleep(0.4 * TIMEOUT * rank)
        transport.exchange("ring", 3, [], [Message((rank + 1) % world, room.data_ptr(), 16)])
    except cpattn.PeerError as failure:
        return f"{failure.peer}: {failure}"
    return "no error"


class Faults(unittest.TestCase):
    def test_each_kind(self) -> None:
        for i, kind in enumerate(faults.KINDS):
            with self.subTest(kind):
                faults.trial(kind, 3, 17 + i)

    def test_a_rank_that_waits_itself_is_not_blamed(self) -> None:
        began = time.monotonic()
        outcomes = start(chain, 4, "stopped", seconds=60, until=lambda rank: rank < 3)
        self.assertLess(time.monotonic() - began, 50)
        for outcome in outcomes[:3]:
            self.assertRegex(str(outcome.value), "^3: rank . of 4: ring, step 3: receiving 16 bytes, .*; rank 3 gives no answer: ")
            for waiting in range(3):
                self.assertIn(f"rank {waiting} waited for rank {waiting + 1} (ring, step 3: receiving 16 bytes)", outcome.value)

    def test_a_rank_that_computes_for_too_long(self) -> None:
        for said in run(chain, 3, "busy"):
            self.assertRegex(said, "^2: .*rank 2 is in no call of the group, while others wait for it")

    def test_ranks_that_wait_for_each_other(self) -> None:
        for said in run(chain, 3, "circle"):
            self.assertRegex(said, "^None: .*which rank is at fault cannot be told: ranks wait for each other; ")
            # Whichever asked first.
            for waiting in range(3):
                self.assertIn(f"rank {waiting} waited for rank {(waiting + 1) % 3} (ring, step 3: receiving 16 bytes)", said)


class Store(unittest.TestCase):
    """The process that holds the store fails: nothing hangs, and the error says that the rank at fault cannot be told."""

    def test_stopped_and_killed(self) -> None:
        holder = (
            "import torch.distributed as d, time\n"
            "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
            "print(s.port, flush=True); time.sleep(100)"
        )
        for number, text in ((signal.SIGSTOP, "did not answer within 2.0 s"), (signal.SIGKILL, "is gone")):
            with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout
                store = dist.TCPStore("127.0.0.1", int(process.stdout.readline()), timeout=timedelta(seconds=30))
                with mock.patch.object(c10d, "_get_default_store", lambda store=store: store):
                    blame = Blame("test", 0, 2, timeout=0.5)
                blame.listen(lambda: None)
                process.send_signal(number)
                began = time.monotonic()
                verdict = blame.ask()
                self.assertIsNone(verdict.peer)
                self.assertIn("cannot be told", verdict.text)
                self.assertIn(text, verdict.text)
                self.assertLess(time.monotonic() - began, 6)
                process.kill()
                blame.close()

    def test_without_a_second_connection(self) -> None:
        with mock.patch.object(c10d, "_get_default_store", object):
            verdict = Blame("test", 0, 2, timeout=0.5).ask()
        self.assertIsNone(verdict.peer)
        self.assertIn("cannot be told: the store has no second connection", verdict.text)


if __name__ == "__main__":
    unittest.main()
