# SPDX-License-Identifier: MIT OR Apache-2.0
"""The check of a ring's links over gloo: its measurements, and the link that it names if a process is stopped or corrupts bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from processes import run, start
from test_core import forward

import cpattn
from cpattn.ring import table
from cpattn.torch import GlooTransport, check_ring, gloo
from cpattn.torch.gloo import Gloo


class Lossy(Gloo):
    """Changes a byte of each large message that it sends."""

    def post(self, receive: bool, peer: int, tag: int, data: memoryview) -> Any:
        if not receive and len(data) > 50_000:
            data[len(data) - 50_000 + 77] ^= 1
        return super().post(receive, peer, tag, data)


def job(rank: int, world: int, how: str) -> object:
    if how == "stopped":
        dist.barrier()
        transport = GlooTransport(timeout=1.5)
        dist.barrier()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with mock.patch.object(gloo, "Gloo", Lossy if how == "lossy" and rank == 1 else Gloo):
            transport = GlooTransport(timeout=30)
    try:
        return [tuple(link) for link in cpattn.check_ring(transport, 1000 if how == "bytes" and rank == 1 else 50_000)]
    except cpattn.Error as error:
        return f"{type(error).__name__} {getattr(error, 'peer', None)}: {error}"


class Ring(unittest.TestCase):
    def test_every_link_both_ways(self) -> None:
        first = run(job, 3, "well")[0]
        self.assertEqual([link[:2] for link in first], [(0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0)])
        for _, _, latency, rate in first:
            self.assertTrue(0 < latency < 10 and rate > 1e4, first)

    def test_a_stopped_rank(self) -> None:
        outcomes = start(job, 4, "stopped", seconds=60, until=lambda rank: rank < 3)
        for outcome in outcomes[:3]:
            self.assertRegex(
                str(outcome.value), "^PeerError 3: cpattn_rank_ring_check: .*rank 3 gives no answer.*; try: "
            )
        self.assertIn("link 2 → 3 failed", str(outcomes[2].value))

    def test_bytes_that_change(self) -> None:
        said = run(job, 3, "lossy")
        self.assertRegex(said[2], "link 1 → 2 delivered other bytes than were sent, from byte 77 on; try: ")
        self.assertTrue(all(str(one).startswith("PeerError") for one in said), said)

    def test_refusals(self) -> None:
        self.assertRegex(run(job, 1, "well")[0], "^InvalidArgument.*the ring was not checked: world is 1")
        self.assertEqual(run(negative, 1), ["bytes is -1, at least 1 is needed"])

    def test_bytes_that_differ(self) -> None:
        said = run(job, 3, "bytes")
        found = "the ring was not checked: bytes is 1000 on rank 1 and 50000 on rank 0, expected the same number on every rank"
        found += r" \(or rank 0 is in another call\)"
        self.assertRegex(said[1], f"^InvalidArgument None: .*{found}; try: ")
        self.assertRegex(said[0], "^InvalidArgument None: .*bytes is 50000 on rank 0 and 1000 on rank 1")
        self.assertRegex(said[2], "^PeerError ")

    def test_as_a_program(self) -> None:
        """Under torchrun, which gives each process its rank."""
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "cpattn.torch.ring",
        ]
        path = os.pathsep.join([str(Path(cpattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*command, "--bytes", "1000"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=200,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("Warning", done.stderr)
        self.assertRegex(done.stdout, r"(?s)latency us.*0 -> 1.*1 -> 0")

    def test_without_torchrun(self) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
        }
        path = os.pathsep.join([str(Path(cpattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "cpattn.torch.ring"]
        done = subprocess.run(
            command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200
        )
        said = "RANK is not set: start this with torchrun --nproc-per-node N -m cpattn.torch.ring\n"
        self.assertEqual((done.returncode, done.stdout, done.stderr), (2, "", said))


class Threads(unittest.TestCase):
    """Ranks whose transports are the library's."""

    def test_every_link_and_a_run_after_that(self) -> None:
        ranks = cpattn.local_group(3)
        for bytes in (1, 50_000):
            all_ = cpattn.on_all(ranks, lambda number, rank, bytes=bytes: rank.check_ring(bytes))
            self.assertEqual([link[:2] for link in all_[0]], [(0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0)])
            self.assertTrue(all(link.latency > 0 and link.bytes_per_second > 0 for link in all_[0]))
            for known in all_:
                self.assertEqual(known, all_[0][: len(known)])
            cpattn.on_all(ranks, lambda number, rank: forward(rank, number))

    def test_a_rank_that_does_not_come(self) -> None:
        ranks, said = cpattn.local_group(3, 500), {}

        def job(number: int, rank: cpattn.Rank) -> None:
            if number < 2:
                with self.assertRaises(cpattn.PeerError) as caught:
                    rank.check_ring(1000)
                said[number] = str(caught.exception)
                # The group has failed with that.
                self.assertRaisesRegex(cpattn.PeerError, "rank 2 did not answer", rank.poll)
                self.assertRaisesRegex(cpattn.PeerError, "rank 2 did not answer", rank.check_ring, 1000)

        cpattn.on_all(ranks, job)
        self.assertRegex(
            said[1], "^cpattn_rank_ring_check: CPATTN_PEER: link 1 → 2 failed: .*rank 2 did not answer.*; try: "
        )
        self.assertIn("rank 2 did not answer", said[0])

    def test_refusals(self) -> None:
        (alone,) = cpattn.local_group(1)
        self.assertRaisesRegex(cpattn.InvalidArgument, "the ring was not checked: world is 1", alone.check_ring)
        self.assertRaisesRegex(cpattn.InvalidArgument, "bytes is 2.5, a whole number is needed", alone.check_ring, 2.5)
        alone.close()
        self.assertRaisesRegex(cpattn.InvalidHandle, "this rank is closed", alone.check_ring)


class Table(unittest.TestCase):
    def test_slow_links_are_marked(self) -> None:
        links = [cpattn.Link(0, 1, 1e-5, 1e9), cpattn.Link(1, 2, 1e-5, 1e9), cpattn.Link(2, 0, 1e-5, 1e8)]
        self.assertEqual([line.endswith("slow") for line in table(links).split("\n")], [False, False, False, True])


def negative(rank: int, world: int) -> str:
    try:
        check_ring(bytes=-1, timeout=5)
    except cpattn.InvalidArgument as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    unittest.main()
