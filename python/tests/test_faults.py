# SPDX-License-Identifier: MIT OR Apache-2.0
"""One trial of each kind of fault; `faults.py` runs as many as wanted."""

from __future__ import annotations

import unittest

import faults


class Faults(unittest.TestCase):
    def test_each_kind(self) -> None:
        for i, kind in enumerate(faults.KINDS):
            with self.subTest(kind):
                faults.trial(kind, 3, 17 + i)


if __name__ == "__main__":
    unittest.main()
