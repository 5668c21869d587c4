# SPDX-License-Identifier: MIT OR Apache-2.0
"""Indexers that run on some queries at a time: models of one process, and the largest tensor of a forward pass."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import processes
from largest import Largest
import torch
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.gathered import indexer
from test_gathered import LENGTHS, MODELS, _alone, _build, _wrong

INDEXED = [
    name for name in ("deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text", "minimax_m3_vl_text") if name in MODELS
]


def _tiled(rank: int, world: int, file: str) -> list[str]:
    # Two or three queries at a time.
    indexer.TILE = 24 * 8 * 2 * sum(LENGTHS)
    return [text for name in INDEXED for text in _wrong(name, LENGTHS, file)]


def _memory(rank: int, world: int) -> list[str]:
    """2,048 tokens on 2 ranks: scores of one layer would be 200 MB whole, its mask 2 MB."""
    indexer.TILE = 1 << 20
    tokens = 2048
    model = _build("deepseek_v32").eval()
    cp = ContextParallel(model, gradients="sum", timeout=120)
    batch = {"input_ids": torch.arange(tokens)[None] % 50, "position_ids": torch.arange(tokens)[None]}
    with torch.no_grad(), Largest() as largest:
        model(**batch)
    cp.close()
    return [] if largest.bytes < 1_900_000 else [f"{largest.bytes} bytes"]


class Indexer(unittest.TestCase):
    def test_some_queries_at_a_time(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({(name, tuple(LENGTHS)): _alone(name, LENGTHS) for name in INDEXED}, file)
            for wrong in processes.run(_tiled, 2, file, seconds=200):
                self.assertEqual(wrong, [])

    def test_memory(self) -> None:
        if "deepseek_v32" in MODELS:
            for wrong in processes.run(_memory, 2, seconds=200):
                self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
