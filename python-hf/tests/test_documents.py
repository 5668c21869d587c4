# SPDX-License-Identifier: MIT OR Apache-2.0
"""What says which tokens are a document: attention_mask, cu_seqlens and seq_idx before positions. The reference is Transformers'."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import InvalidArgument
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.pack import pack

transformers.utils.logging.set_verbosity_error()
LENGTH = 200
CUT = torch.cat([torch.arange(100), torch.arange(500, 600)])[None]
ENDS = [0, 70, LENGTH]


def inputs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: the arguments here, and those with which Transformers has the same documents."""
    plain = {name: models.batch([LENGTH])[name] for name in ("input_ids", "labels")}
    mask = torch.ones_like(plain["input_ids"])
    numbers = torch.arange(LENGTH)[None].ge(ENDS[1]).int()
    # Of two documents, in Transformers: positions that restart, and no label for the first token of the second one.
    apart = {**plain, "labels": plain["labels"].index_fill(1, torch.tensor(ENDS[1:2]), -100)}
    packed = {**apart, "position_ids": torch.cat([torch.arange(b - a) for a, b in zip(ENDS, ENDS[1:])])[None]}
    far = {**plain, "labels": plain["labels"].index_fill(1, torch.tensor([100]), -100), "position_ids": CUT}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "positions alone": (far, far),
        "seq_idx": ({**apart, "seq_idx": numbers}, packed),
        "seq_idx, positions that go on": (
            {**apart, "seq_idx": numbers, "position_ids": torch.arange(LENGTH)[None]},
            packed,
        ),
        "cu_seq_lens_k": ({**apart, "cu_seq_lens_k": ENDS}, packed),
    }
    for name, positions in (
        ("two runs", CUT),
        ("stride 2", torch.arange(0, 2 * LENGTH, 2)[None]),
        ("all equal", torch.zeros(1, LENGTH, dtype=torch.int64)),
    ):
        one = {**plain, "attention_mask": mask, "position_ids": positions}
        cases[f"mask, {name}"] = (one, one)
        cases[f"cu_seqlens, {name}"] = (
            {**plain, "cu_seqlens": torch.tensor([0, LENGTH]), "position_ids": positions},
            one,
        )
    return cases


def _both(rank: int, world: int, file: str) -> dict[str, tuple[float, float]]:
    """Relative errors of the loss and of the gradients, by case."""
    references, found = torch.load(file), {}
    for name in ("llama", "mistral"):
        for case, (given, _) in inputs().items():
            model = models.build(name, max_position_embeddings=1024)
            cp = ContextParallel(model, gradients="sum")
            loss = model(**given).loss
            loss.backward()
            total = models.gradients(model)
            dist.all_reduce(total)
            expected, gradients = references[name, case]
            found[f"{name}: {case}"] = (abs(loss.item() / expected - 1), models.apart(total, gradients))
            cp.close()
    return found


class Documents(unittest.TestCase):
    def test_the_documents_of_transformers(self) -> None:
        references = {}
        for name in ("llama", "mistral"):
            for case, (_, usual) in inputs().items():
                model = models.build(name, max_position_embeddings=1024)
                loss = model(**usual).loss
                loss.backward()
                references[name, case] = (loss.item(), models.gradients(model))
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(references, file)
            for found in processes.run(_both, 3, file, seconds=200):
                for case, (loss, gradients) in found.items():
                    self.assertTrue(loss <= 1e-6 and gradients <= 1e-5, (case, loss, gradients))

    def test_what_is_said_twice(self) -> None:
        ids = torch.ones(1, 6, dtype=torch.int64)
        self.assertEqual(
            pack({"input_ids": ids, "cu_seqlens": [0, 2, 6], "cu_seq_lens_q": torch.tensor([0, 2, 6])}).cu_seqlens,
            (0, 2, 6),
        )
        with self.assertRaisesRegex(
            InvalidArgument, r"cu_seq_lens_k is \[0, 3, 6\] and cu_seqlens is \[0, 2, 6\]: give one"
        ):
            pack({"input_ids": ids, "cu_seqlens": [0, 2, 6], "cu_seq_lens_k": [0, 3, 6]})
        with self.assertRaisesRegex(InvalidArgument, r"seq_idx has the shape \(1, 5\), \(1, 6\) is needed"):
            pack({"input_ids": ids, "seq_idx": ids[:, 1:]})
        # A mask may number documents, and seq_idx may divide them further.
        numbered = {
            "input_ids": ids,
            "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 0]]),
            "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]]),
        }
        self.assertEqual(pack(numbered).cu_seqlens, (0, 2, 3, 5))


if __name__ == "__main__":
    unittest.main()
