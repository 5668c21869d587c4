# SPDX-License-Identifier: MIT OR Apache-2.0
"""A context over the NCCL communicator of a process group, on the stand-ins for the CUDA driver and for NCCL, of which CPATTN_STANDINS names
the folder (see .ci/python; otherwise it is skipped), and PyTorch's tensors in one process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch

HERE = pathlib.Path(__file__).resolve().parent
STANDINS = os.environ.get("CPATTN_STANDINS", "")


class Communicator(unittest.TestCase):
    @unittest.skipUnless(STANDINS, "CPATTN_STANDINS names no folder with the stand-ins for the driver and for NCCL")
    def test_of_the_process_group(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file, report = pathlib.Path(folder, "store"), pathlib.Path(folder, "report")
            examples = str(HERE.parents[1] / "examples/python")
            path = os.pathsep.join(filter(None, (examples, os.environ.get("PYTHONPATH"))))
            env = {**os.environ, "LD_LIBRARY_PATH": STANDINS, "PYTHONPATH": path, "CPATTN_EMU_REPORT": str(report)}
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(HERE / "communicator.py"), str(rank), str(file)],
                    env={**env, "NCCL_HOSTID": f"host{rank}", "CPATTN_NCCL_PATIENCE": "240"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(2)
            ]
            try:
                said = [rank.communicate(timeout=240)[0] for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            for rank, text in zip(ranks, said):
                self.assertEqual((rank.returncode, text.split()[-1:]), (0, ["done"]), "\n".join(said))
            self.assertFalse(report.exists() and report.read_text(), "the stand-ins report nothing")

    def test_pytorch_in_one_process(self) -> None:
        """Beside f64, training as PyTorch alone, graphs: all on a device, what needs none without."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        program = HERE.parents[1] / "benches/peers/pytorch.py"
        done = subprocess.run(
            [sys.executable, str(program), "--device", device],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        self.assertEqual((done.returncode, done.stdout.split()[-1:]), (0, ["ok"]), done.stdout)


if __name__ == "__main__":
    unittest.main()
