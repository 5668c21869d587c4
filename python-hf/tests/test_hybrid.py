# SPDX-License-Identifier: MIT OR Apache-2.0
"""Qwen3-Next, with the mixer of examples/python/qwen3_next.py: the loss and gradients of one process, and refusals."""

from __future__ import annotations

import ast
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

EXAMPLE = Path(__file__).parents[2] / "examples/python/qwen3_next.py"
sys.path.append(str(EXAMPLE.parent))

import models
import processes
import qwen3_next
from cpattn import InvalidArgument, Unsupported
from cpattn_hf.transformers import ContextParallel
from torch import nn

transformers.utils.logging.set_verbosity_error()
LENGTHS = [70, 1, 67]
FEW = [2]  # fewer tokens than ranks


def _right(rank: int, world: int, file: str) -> list[str]:
    (expected, gradients), few = torch.load(file)
    wrong = []

    def compare(name: str, loss: float, total: torch.Tensor) -> None:
        error, distance = abs(loss - expected) / expected, models.apart(total, gradients)
        if not (error <= 1e-6 and distance <= 1e-5):
            wrong.append(f"{name}: loss {error:.1e}, gradients {distance:.1e}")

    compare("plain", *qwen3_next.together(LENGTHS))
    loss, total = qwen3_next.together(FEW)
    if not (abs(loss / few[0] - 1) <= 1e-6 and models.apart(total, few[1]) <= 1e-5):
        wrong.append(f"fewer tokens than ranks: loss {loss}, {few[0]}, gradients {models.apart(total, few[1])}")
    build = qwen3_next.build
    for reentrant in (False, True):

        def checkpointed() -> Any:
            model = build()
            models.checkpointing(model, reentrant)
            if reentrant:
                model.get_input_embeddings().register_forward_hook(
                    lambda *given: given[-1].requires_grad_() if given[-1].is_leaf else None
                )
            return model

        qwen3_next.build = checkpointed
        compare(f"checkpointing, use_reentrant={reentrant}", *qwen3_next.together(LENGTHS, tile=40 * reentrant))
    qwen3_next.build = build
    return wrong


def _refused(rank: int, world: int) -> dict[str, str]:
    said: dict[str, str] = {}
    model = qwen3_next.build()
    usual = model(input_ids=torch.ones(1, 5, dtype=torch.int64)).logits
    layer = qwen3_next.Qwen3NextGatedDeltaNet

    class Other(layer):  # type: ignore[misc, valid-type]
        """A layer of the user: whether the mixer of the other one is right for it, nobody knows."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    def across(module: nn.Module, documents: Any, hidden_states: torch.Tensor, **_: Any) -> Any:
        return layer.forward(module, hidden_states)  # which runs over the ends of documents

    def change(before: type[nn.Module], after: type[nn.Module]) -> None:
        for module in model.modules():
            if type(module) is before:
                module.__class__ = after

    for name, kind, options in (
        ("without", Unsupported, {}),
        ("across", Unsupported, {"mixers": {layer: across}}),
        ("ring", Unsupported, {"mixers": {layer: qwen3_next.gated_delta_net}, "ulysses": 1, "ring": world}),
        ("class", InvalidArgument, {"mixers": {nn.Conv3d: across}}),
        ("name", InvalidArgument, {"mixers": {"Linear": across}}),
        ("list", InvalidArgument, {"mixers": [layer]}),
    ):
        if name == "without":
            change(layer, Other)
        try:
            ContextParallel(model, **options)
            said[name] = "not refused"
        except kind as error:
            said[name] = str(error)
        if not torch.equal(model(input_ids=torch.ones(1, 5, dtype=torch.int64)).logits, usual):
            said[name] += "; the model is another afterwards"
        change(Other, layer)
    cp = ContextParallel(model, mixers={layer: qwen3_next.gated_delta_net})
    with cp.off():
        said["off"] = str(torch.equal(model(input_ids=torch.ones(1, 5, dtype=torch.int64)).logits, usual))
    cp.close()
    return said


class Hybrid(unittest.TestCase):
    def test_loss_and_gradients_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save((qwen3_next.alone(LENGTHS), qwen3_next.alone(FEW)), file)
            for wrong in processes.run(_right, 3, file):
                self.assertEqual(wrong, [])

    def test_refusals(self) -> None:
        for said in processes.run(_refused, 2):
            self.assertEqual(said["off"], "True")
            self.assertIn("mixes tokens outside of attention", said["without"])
            self.assertIn("mixes tokens outside of attention", said["across"])
            self.assertIn("ulysses is 1, 2 is needed", said["ring"])
            self.assertIn("Conv3d", said["class"])
            for name in ("name", "list"):
                self.assertIn("a mapping of classes of layers to mixers is needed", said[name])
            self.assertFalse([one for one in said.values() if "afterwards" in one], said)

    def test_what_a_user_writes(self) -> None:
        text = EXAMPLE.read_text().split("# >>> context parallelism\n")[1].split("# <<<")[0]
        self.assertLessEqual(sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))), 20)


if __name__ == "__main__":
    unittest.main()
