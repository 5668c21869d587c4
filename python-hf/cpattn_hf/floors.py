# SPDX-License-Identifier: MIT OR Apache-2.0
"""The oldest versions of other libraries, as in pyproject.toml: an older one is refused when it is imported, by its name and both versions.

An adapter that runs with an older version may compute something else, and its errors would name what that version lacks, not the version.
"""

from __future__ import annotations

import importlib
import re

OLDEST = {
    "transformers": {"torch": "2.10", "transformers": "5.20"},
    "diffusers": {"torch": "2.11", "diffusers": "0.42.1"},
}


def _numbers(version: str) -> tuple[int, ...]:
    """Those of a release: of 5.24.0.dev0 they are 5, 24 and 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def refuse_older(package: str) -> None:
    """Raises ImportError if a library that `cpattn_hf.<package>` needs is too old. One that is not installed raises Python's own."""
    for name, oldest in OLDEST[package].items():
        version = str(importlib.import_module(name).__version__)
        if _numbers(version) < _numbers(oldest):
            raise ImportError(
                f"{name} is {version}, and cpattn_hf.{package} needs {oldest} or later: pip install --upgrade '{name}>={oldest}'",
                name=name,
            )
