# SPDX-License-Identifier: MIT OR Apache-2.0
"""examples/python/train.py, finetune.py, grpo.py and newest_kinds.py: one process and several have the same losses, and the user's code
stays short. The programs of the README and of docs/pytorch.md run under torchrun, the others as programs.py says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import programs

EXAMPLES = Path(__file__).parents[2] / "examples/python"
STEPS = 4


def start(processes: int, *more: str, program: str = "train.py") -> subprocess.CompletedProcess[str]:
    return programs.run(str(EXAMPLES / program), processes, f"--steps={STEPS}", *more)


def train(folder: str, name: str, processes: int, *more: str) -> tuple[list[float], str]:
    file = Path(folder) / f"{name}.json"
    done = start(processes, f"--json={file}", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())["losses"], done.stdout


class Train(unittest.TestCase):
    def test_the_same_losses(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one, _ = train(folder, "one", 0)
            plot = Path(folder) / "both.svg"
            timeline = Path(folder) / "timeline.svg"
            trace = Path(folder) / "trace.json"
            more = (f"--against={folder}/one.json", f"--plot={plot}", f"--timeline={timeline}", f"--trace={trace}")
            how = ("--ulysses=2", "--ring=2", "--layout=balanced", "--layout-parameter=2")
            four, said = train(folder, "four", 4, *more, *how)
            self.assertEqual(len(one), STEPS)
            self.assertLess(one[-1], one[0], "it learns")
            for a, b in zip(one, four, strict=True):
                self.assertLessEqual(abs(a - b) / a, 2e-6)
            self.assertIn("largest relative difference", said)
            lines = ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}polyline")
            self.assertEqual([len(line.attrib["points"].split()) for line in lines], [STEPS, STEPS])
            rows = [text.text for text in ElementTree.parse(timeline).findall("{http://www.w3.org/2000/svg}text")]
            self.assertTrue({f"rank {rank}" for rank in range(4)} <= set(rows), rows)
            events = json.loads(trace.read_text())["traceEvents"]
            self.assertEqual({event["pid"] for event in events if event["ph"] == "X"}, set(range(4)))

    @unittest.skipUnless(find_spec("trl") and find_spec("datasets"), "TRL and datasets are not installed")
    def test_fine_tuning(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one = start(0, f"--json={folder}/one.json", program="finetune.py")
            self.assertEqual(one.returncode, 0, one.stderr)
            plot = Path(folder) / "both.svg"
            two = start(
                2, f"--json={folder}/two.json", f"--against={folder}/one.json", f"--plot={plot}", program="finetune.py"
            )
            self.assertEqual(two.returncode, 0, two.stderr)
            losses = [json.loads(Path(folder, name).read_text())["losses"] for name in ("one.json", "two.json")]
            for model in losses[0]:
                for a, b in zip(losses[0][model], losses[1][model], strict=True):
                    self.assertLessEqual(abs(a - b) / a, 2e-6, model)
            lines = ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}polyline")
            self.assertEqual([len(line.attrib["points"].split()) for line in lines], 4 * [STEPS])

    @unittest.skipUnless(find_spec("trl") and find_spec("datasets"), "TRL and datasets are not installed")
    def test_reinforcement(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one = start(0, f"--json={folder}/one.json", program="grpo.py")
            self.assertEqual(one.returncode, 0, one.stderr)
            plot = Path(folder) / "both.svg"
            two = start(
                2, f"--json={folder}/two.json", f"--against={folder}/one.json", f"--plot={plot}", program="grpo.py"
            )
            self.assertEqual(two.returncode, 0, two.stderr)
            rewards = [json.loads(Path(folder, name).read_text())["rewards"] for name in ("one.json", "two.json")]
            for a, b in zip(*rewards, strict=True):
                self.assertLessEqual(abs(a - b), 1e-6, rewards)
            lines = ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}polyline")
            self.assertEqual([len(line.attrib["points"].split()) for line in lines], 2 * [STEPS])

    @unittest.skipUnless(find_spec("transformers") and find_spec("accelerate"), "Transformers is not installed")
    def test_newest_kinds(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one = start(0, "deepseek_v32", f"--json={folder}/one.json", program="newest_kinds.py")
            self.assertEqual(one.returncode, 0, one.stderr)
            plot = Path(folder) / "both.svg"
            two = start(
                2,
                "deepseek_v32",
                f"--json={folder}/two.json",
                f"--against={folder}/one.json",
                f"--plot={plot}",
                program="newest_kinds.py",
            )
            self.assertEqual(two.returncode, 0, two.stderr)
            losses = [json.loads(Path(folder, name).read_text())["losses"] for name in ("one.json", "two.json")]
            for a, b in zip(*losses, strict=True):
                self.assertLessEqual(abs(a - b) / a, 1e-5, losses)
            lines = ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}polyline")
            self.assertEqual([len(line.attrib["points"].split()) for line in lines], 2 * [STEPS])

    def test_what_all_are_refused_for_is_said_once(self) -> None:
        # No file is asked for.
        done = start(2, "--ulysses=5")
        self.assertNotEqual(done.returncode, 0)
        said = [line for line in done.stderr.splitlines() if "ulysses" in line]
        self.assertEqual(len(said), 1, done.stderr)
        self.assertTrue(said[0].startswith("error: "), said)

    def test_the_pages(self) -> None:
        """The program of docs/pytorch.md, and the three lines of the README in the place of its own, unchanged."""
        page = (EXAMPLES.parents[1] / "docs/pytorch.md").read_text().split("## A first program")[1]
        program = page.split("```python\n")[1].split("```")[0]
        readme = (EXAMPLES.parents[1] / "README.md").read_text().split("## From PyTorch")[1]
        lines = readme.split("```python\n")[1].split("```")[0].split("# A model of")[0].splitlines()
        self.assertEqual([line.split(" = ")[0] for line in lines], ["context", "batch", "o"])
        own = {line.split(" = ")[0]: line for line in program.splitlines()}
        of_readme = program
        for line in lines:
            of_readme = of_readme.replace(own[line.split(" = ")[0]], line)
        self.assertNotEqual(of_readme, program)
        for text in program, of_readme:
            self.runs_on_two(text)

    def runs_on_two(self, program: str) -> None:
        """Two ranks share the 80 tokens, and the ends of both documents."""
        program += (
            # One write: lines of two processes do not mix.
            "import os\nos.write(1, f'tokens {len(ids)} last {(labels == -100).sum().item()}\\n'.encode())\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            (file := Path(folder) / "first.py").write_text(program)
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
        self.assertEqual(done.returncode, 0, done.stderr)
        ranks = [line.split()[1::2] for line in done.stdout.splitlines() if line.startswith("tokens")]
        self.assertEqual([sum(int(rank[i]) for rank in ranks) for i in range(2)], [80, 2], done.stdout)

    def test_what_a_user_writes(self) -> None:
        text = (EXAMPLES / "train.py").read_text()
        between = text.split("# >>> context parallelism")[1].split("# <<<")[0].splitlines()[1:]
        lines = [line for line in between if line.strip()]
        self.assertIn("cpattn.torch.Context", "\n".join(lines))
        self.assertLessEqual(len(lines), 15)
        rest = text.replace("\n".join(between), "")
        self.assertNotIn("cpattn.torch.", rest.replace("import cpattn.torch", ""), "cpattn is used in between only")


if __name__ == "__main__":
    unittest.main()
