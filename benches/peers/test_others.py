# SPDX-License-Identifier: MIT OR Apache-2.0
"""The first step of a lease on the CPU, where PyTorch and the library are there."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
THERE = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("cpattn") is not None


@unittest.skipUnless(THERE, "PyTorch or cpattn is not installed")
class Others(unittest.TestCase):
    def test_on_the_cpu(self):
        done = subprocess.run(
            [sys.executable, HERE / "others.py", "--device", "cpu", "--tiny"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.assertEqual(done.returncode, 0, done.stdout)
        found = json.loads(done.stdout.splitlines()[-1])
        self.assertEqual(
            [(row["kernel"], row["dtype"]) for row in found["rows"]],
            [("torch", "torch.bfloat16"), ("torch", "torch.float32")],
        )
        for row in found["rows"]:
            self.assertTrue(row["ok"] and row["ours_s"] > 0 and row["sdpa_s"] > 0, row)
            self.assertEqual(set(row["errors"]), {"o", "dq", "dk", "dv"})
        self.assertEqual(found["failed"], [])
        self.assertIn("flex", found["missing"])
        self.assertNotIn("running", found)
        # What is left of a run that is ended during a case.
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")][:-1]
        self.assertEqual(
            [(len(each["rows"]), each["running"]) for each in told],
            [(0, "torch torch.bfloat16 64"), (1, "torch torch.float32 64")],
        )
        self.assertEqual([row["dtype"] for row in told[1]["rows"]], ["torch.bfloat16"])

    def test_wrong_results_are_found(self):
        """In the whole documents and in the drawn rows; a NaN is no small error."""
        import others
        import torch

        device, ends = torch.device("cpu"), others.TINY
        leaves, d_o = others.inputs(device, torch.float32, ends, 64)
        right = others.step(others.by_sdpa(ends), leaves, d_o)
        self.assertLess(max(others.errors(right, leaves, d_o, ends).values()), others.BOUND[torch.float32])
        for at, name in enumerate(("o", "dq", "dk", "dv")):
            for wrong in (0.0, torch.nan):
                found = [x.detach().clone() for x in right]
                # The first document is compared whole, and some rows of the last.
                found[at][: ends[1]] = wrong
                self.assertGreater(others.errors(found, leaves, d_o, ends)[name], 0.1)
        for at, name in enumerate(("o", "dq")):
            found = [x.detach().clone() for x in right]
            found[at][ends[-2] :] *= 1.5
            self.assertGreater(others.errors(found, leaves, d_o, ends)[name], 0.1)


if __name__ == "__main__":
    unittest.main()
