# SPDX-License-Identifier: MIT OR Apache-2.0
"""The loss of a router of experts over prompts that answers share: that of the answers one by one, or of each token once."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error
from cpattn.slices import documents, prefix_lm
from cpattn_hf.transformers import ContextParallel, SharedPrefixCollator, encode_slices

transformers.utils.logging.set_verbosity_error()
PROMPT, ANSWERS = [5, 8, 13, 4, 9, 2], [[21, 34, 2], [55, 2, 7, 7], [3, 2]]
GROUP = {"prompt": PROMPT, "answers": ANSWERS}
# Turns that branch twice: 1 and 2 go on from 0, 3 and 4 from 1.
TREE = {
    "parents": [None, 0, 0, 1, 1],
    "tokens": [PROMPT, [21, 34, 2], [55, 2], [7, 7, 9], [30, 11, 12, 13]],
    "weights": [1, 1, 1, 1, 1],
}
PATHS = [
    [*PROMPT, *TREE["tokens"][1], *TREE["tokens"][3]],
    [*PROMPT, *TREE["tokens"][1], *TREE["tokens"][4]],
    [*PROMPT, *TREE["tokens"][2]],
]
CASES = {
    "group": ([GROUP], [PROMPT + answer for answer in ANSWERS]),
    "two groups": ([GROUP, GROUP], [PROMPT + answer for answer in ANSWERS * 2]),
    "tree": ([TREE], PATHS),
    "one answer": ([{"prompt": PROMPT, "answers": [ANSWERS[0]]}], [PROMPT + ANSWERS[0]]),
}


def _build() -> Any:
    return models.build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)


def _rows(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def _results(rank: int, world: int) -> dict[str, tuple[float, float, float]]:
    """Relative errors of the router's loss, the loss, and gradients."""
    found = {}
    for name, (features, rows) in CASES.items():
        one = _build()
        expected = one(**_rows(rows))
        expected.loss.backward()
        for tile in (0, 4):
            model = _build()
            cp = ContextParallel(model, gradients="sum", tile=tile, timeout=60)
            out = model(**SharedPrefixCollator(prompt=1.0, shared="each")(features))
            out.loss.backward()
            total = models.gradients(model)
            dist.all_reduce(total)
            cp.close()
            far = [
                abs(a.item() - b.item()) / b.item()
                for a, b in ((out.aux_loss, expected.aux_loss), (out.loss, expected.loss))
            ]
            found[f"{name}, {tile}"] = far[0], far[1], models.apart(total, models.gradients(one))
    return found


def _said(call: Any) -> str:
    try:
        call()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def _refused(rank: int, world: int) -> dict[str, str]:
    model, found = _build(), {}
    cp = ContextParallel(model, timeout=60)
    pack = SharedPrefixCollator(prompt=1.0)([GROUP])
    alone = {name: value for name, value in pack.items() if name != "router_weights"}
    found["no weights"] = _said(lambda: model(**alone))
    with_router = {"output_router_logits": False}
    found["no router"] = _said(lambda: model(**alone, **with_router))
    found["negative"] = _said(lambda: model(**{**pack, "router_weights": -pack["router_weights"]}))
    found["another shape"] = _said(lambda: model(**{**pack, "router_weights": pack["router_weights"][:, 1:]}))
    found["other weights"] = _said(lambda: model(**{**pack, "router_weights": pack["router_weights"] + rank}))
    # Slices in which each token counts once.
    batch = models.batch([9, 1, 14])
    for name, slices in (("documents", documents([0, 9, 10, 24])), ("prefixes", prefix_lm([0, 9, 10, 24], [3, 0, 6]))):
        found[name] = _said(lambda slices=slices: model(**batch, slices=encode_slices(slices)))
    cp.close()
    return found


class Router(unittest.TestCase):
    def test_answers_one_by_one(self) -> None:
        for found in processes.run(_results, 2, seconds=200):
            for name, (aux, loss, gradients) in found.items():
                with self.subTest(name):
                    self.assertTrue(aux <= 1e-6 and loss <= 1e-6 and gradients <= 1e-5, (aux, loss, gradients))

    def test_refusals(self) -> None:
        for found in processes.run(_refused, 2, seconds=200):
            self.assertIn(
                "slices are given whose tokens are shared by several answers, and output_router_logits is set",
                found["no weights"],
            )
            self.assertIn("router_weights has negative numbers", found["negative"])
            self.assertIn("router_weights has the shape (1, 16)", found["another shape"])
            self.assertIn("the inputs of ranks [1] of this group differ", found["other weights"])
            for name in ("no router", "documents", "prefixes"):
                self.assertEqual(found[name], "taken", name)

    def test_numbers_of_tokens(self) -> None:
        made = SharedPrefixCollator(shared="each")([GROUP])["router_weights"]
        # The shared part without its last token, and for each answer a copy of that token and the answer.
        self.assertEqual(made.tolist(), [[3.0] * 5 + [1.0] * 12])
        made = SharedPrefixCollator(shared="once")([GROUP])["router_weights"]
        self.assertEqual(made.tolist(), [[1.0] * 5 + [1.0] * 4 + [0.0] + [1.0] * 4 + [0.0] + [1.0] * 2])
        self.assertNotIn("router_weights", SharedPrefixCollator()([{"prompt": PROMPT, "answers": [[3]]}]))


if __name__ == "__main__":
    unittest.main()
