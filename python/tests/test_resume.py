# SPDX-License-Identifier: MIT OR Apache-2.0
"""Training that is stopped by a signal or by the death of a rank, and goes on, also with another mesh and another number of ranks: the losses of a
job that nobody stopped, in f64."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import processes
import torch

EXAMPLE = Path(__file__).parents[2] / "examples/python/resume.py"
sys.path.append(str(EXAMPLE.parent))
import resume  # noqa: E402

STEPS = 5


def _train(
    rank: int,
    world: int,
    folder: str,
    context: int,
    steps: int = STEPS,
    stop: tuple[int, int] | None = None,
    dies: bool = False,
) -> tuple[int, list[float], int]:
    """The first step, the losses of the steps that were run, and the next step. The rank `stop[0]` gets SIGTERM inside of a call of attention in
    the step `stop[1]`, or is killed there."""
    job = resume.Job(folder, context, timeout=20.0, dtype=torch.float64)
    first = job.step
    if stop and rank == stop[0]:

        def signalled(*_: Any) -> None:
            if job.step == stop[1] and not job.asked:
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                # While the layer waits in its attention: the other rank of its pack is late.
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()

        job.model.layers["1"].register_forward_pre_hook(signalled)
    if stop and rank == (stop[0] ^ 1) and not dies:

        def late(*_: Any) -> None:
            if job.step == stop[1]:
                threading.Event().wait(0.5)

        job.model.layers["1"].register_forward_pre_hook(late)
    losses = job.train(steps)
    job.close()
    return first, losses, job.step


class Resume(unittest.TestCase):
    losses: list[float]

    @classmethod
    def setUpClass(cls) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ((first, cls.losses, after),) = processes.run(_train, 1, folder, 1, seconds=300)
        assert (first, after, len(cls.losses)) == (0, STEPS, STEPS)
        assert cls.losses[-1] != cls.losses[0]

    def same(self, found: list[tuple[int, list[float], int]], first: int, after: int) -> None:
        for rank, (began, losses, ended) in enumerate(found):
            self.assertEqual((began, ended, len(losses)), (first, after, after - first), f"rank {rank}")
            for loss, expected in zip(losses, self.losses[first:after], strict=True):
                self.assertAlmostEqual(loss, expected, delta=1e-9 * expected)

    def test_a_signal_at_one_rank(self) -> None:
        """All ranks stop after the step, which is saved once; others go on, with other meshes and numbers of ranks."""
        with tempfile.TemporaryDirectory() as folder:
            self.same(processes.run(_train, 4, folder, 2, STEPS, (1, 0), seconds=300), 0, 1)
            self.assertEqual(sorted(os.listdir(folder)), ["latest", "step-1"])
            self.same(processes.run(_train, 3, folder, 3, 2, seconds=300), 1, 2)
            self.same(processes.run(_train, 2, folder, 1, 3, seconds=300), 2, 3)
            self.same(processes.run(_train, 4, folder, 4, 4, seconds=300), 3, 4)
            self.same(processes.run(_train, 1, folder, 1, 5, seconds=300), 4, 5)

    def test_a_rank_that_dies(self) -> None:
        """The others end with an error, none waits for ever, and what was saved is whole."""
        with tempfile.TemporaryDirectory() as folder:
            outcomes = processes.start(_train, 2, folder, 2, STEPS, (1, 3), True, seconds=200)
            self.assertEqual(outcomes[1].exit, -signal.SIGKILL)
            self.assertRegex(outcomes[0].error or "", "^(PeerError|RuntimeError|DistBackendError|Disagreement)")
            self.same(processes.run(_train, 2, folder, 2, seconds=300), 2, STEPS)

    def test_a_supervisor(self) -> None:
        """torchrun starts all ranks again, and they go on."""
        with tempfile.TemporaryDirectory() as folder:
            options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2"]
            job = [
                str(EXAMPLE),
                "--folder",
                folder,
                "--context",
                "2",
                "--steps",
                str(STEPS),
                "--timeout",
                "20",
                "--die",
                "3",
            ]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", *options, *job],
                env=environment,
                capture_output=True,
                text=True,
                timeout=400,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            found = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([0-9.]+)", done.stdout)}
            self.assertEqual(list(found), [2, 3, 4])
            for step, loss in found.items():
                self.assertAlmostEqual(loss, self.losses[step], delta=1e-4)


if __name__ == "__main__":
    unittest.main()
