# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every case of cpu_cases.txt, small, through `cpu.py` as `run cpu` asks it: that both sides run and agree. Their times mean
nothing. Skipped without PyTorch or the C library; `.ci/python` has both."""

import json
import pathlib
import re
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import cpu

try:
    import cpattn  # noqa: F401 (whether it is there)
    import torch  # noqa: F401
except (ImportError, OSError) as error:
    raise unittest.SkipTest(str(error))


def small(line):
    """Fewer tokens: 40, or 96 behind a window of 8, or the first of many documents."""
    line = re.sub(r"lengths=\d+(?= )", "lengths=96" if "window=" in line else "lengths=40", line)
    line = re.sub(r"lengths=(\d+,\d+,\d+),\S+", r"lengths=\1", line)
    return re.sub(r" quick=\S+", "", line.replace("window=256", "window=8"))


class BothSides(unittest.TestCase):
    def test_agree_on_every_case(self):
        lines = [x for x in (HERE / "cpu_cases.txt").read_text().splitlines() if x and not x.startswith("#")]
        questions = [{"case": small(line), "threads": 1, "rounds": 1, "seconds": 0} for line in lines]
        answers = subprocess.run(
            [sys.executable, HERE / "cpu.py"],
            input="\n".join(map(json.dumps, questions)),
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            timeout=300,
        ).stdout.splitlines()
        self.assertEqual(len(answers), len(lines))
        for question, answer in zip(questions, map(json.loads, answers)):
            case = cpu.Case(question["case"])
            self.assertLess(case.tokens, 300)
            self.assertNotIn("failed", answer, case.name)
            for direction in ("forward", "backward"):
                self.assertEqual(set(answer["times"][direction]), {"ours", *case.peers}, case.name)
            self.assertEqual(set(answer["difference"]), {"o", "dq", "dk", "dv"}, case.name)


if __name__ == "__main__":
    unittest.main()
