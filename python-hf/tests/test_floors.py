# SPDX-License-Identifier: MIT OR Apache-2.0
"""A library that is older than the oldest one is refused when cpattn_hf is imported, by its name and both versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from cpattn_hf.floors import OLDEST

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def importing(package: str, name: str, version: str) -> str:
    """The last line that an interpreter writes which imports cpattn_hf's package and finds another library in this version."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}.py").write_text(f"__version__ = {version!r}\n")
        path = os.pathsep.join([folder, *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", f"import cpattn_hf.{package}"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    return done.stderr.strip().splitlines()[-1]


class Floors(unittest.TestCase):
    def test_older_ones_are_refused_by_name(self) -> None:
        for package, name, version in (
            ("transformers", "transformers", "5.16.2"), ("transformers", "transformers", "5.9.0.dev0"), ("diffusers", "diffusers", "0.42.0"), ("diffusers", "torch", "2.10.0+cpu"),
        ):  # fmt: skip
            oldest = OLDEST[package][name]
            self.assertEqual(
                importing(package, name, version),
                f"ImportError: {name} is {version}, and cpattn_hf.{package} needs {oldest} or later: pip install --upgrade '{name}>={oldest}'",
            )

    def test_the_oldest_one_is_taken(self) -> None:
        for version in ("5.20", "5.20.0.dev0", "6.0"):
            self.assertNotIn("or later", importing("transformers", "transformers", version))

    def test_the_project_says_the_same(self) -> None:
        text = PROJECT.read_text()
        everywhere = re.search(r"^dependencies = (.*)$", text, re.MULTILINE)
        assert everywhere
        for package, oldest in OLDEST.items():
            own = re.search(rf"^{package} = (\[.*\])$", text, re.MULTILINE)
            assert own
            for name, version in oldest.items():
                self.assertIn(f'"{name}>={version}"', own[1] if name in own[1] else everywhere[1])


if __name__ == "__main__":
    unittest.main()
