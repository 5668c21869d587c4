# SPDX-License-Identifier: MIT OR Apache-2.0
"""A class of a model whose loss is not that of its labels: ranks would compute another loss without a word, so labels are refused there."""

from __future__ import annotations

import unittest
from typing import Any

import torch

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

transformers.utils.logging.set_verbosity_error()
PACK = models.batch([23, 1, 17])


def _with(base: Any, change: Any) -> Any:
    """A model whose class has changed its loss where it gets labels."""

    class Own(base):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(*args, labels=labels, **kwargs)
            if labels is not None:
                out.loss = change(out, labels)
            return out

    return Own


def _with_all(base: Any, change: Any) -> Any:
    """The same without a name for the labels."""

    class Own(base):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if kwargs.get("labels") is not None:
                out.loss = change(out, kwargs["labels"])
            return out

    return Own


def _penalty(out: Any, labels: Any) -> Any:
    return out.loss + 0.01 * out.logits.float().logsumexp(-1).square().mean()


def _smoothed(out: Any, labels: Any) -> Any:
    return F.cross_entropy(out.logits[0, :-1].float(), labels[0, 1:], label_smoothing=0.1)


def _of_places(out: Any, labels: Any) -> Any:
    return F.cross_entropy(out.logits[0].float(), labels[0])


def _said(call: Any) -> str:
    try:
        out = call()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "taken" if out is None or out.get("loss") is None else f"loss {out.loss.item():.4f}"


def _losses(rank: int, world: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    without = {name: value for name, value in PACK.items() if name != "labels"}
    for name, kind, change, more in (
        ("penalty", "llama", _penalty, {}),
        ("penalty, labels have no name", "qwen2", _penalty, {}),
        ("smoothing", "qwen3", _smoothed, {}),
        ("smoothing, bf16", "qwen3", _smoothed, {}),
        ("usual, bf16", "llama", lambda out, labels: out.loss, {}),
        ("labels that are not shifted", "gemma", _of_places, {}),
        ("a router's", "mixtral", lambda out, labels: out.loss, {"output_router_logits": True}),
        ("a router's and a penalty", "mixtral", _penalty, {"output_router_logits": True}),
        ("masked words", "modernbert", lambda out, labels: out.loss, {}),
        ("masked words and a penalty", "modernbert", _penalty, {}),
    ):
        model = models.build(kind, **more)
        model = model.bfloat16() if "bf16" in name else model
        model.__class__ = (_with_all if "no name" in name else _with)(type(model), change)
        cp = ContextParallel(model, timeout=60)
        with torch.no_grad():
            found[name] = [_said(lambda: model(**PACK)), _said(lambda: model(**without))]
            if change is _of_places:
                labels = {"shift_labels": PACK["labels"], **without}
                found[name].append(_said(lambda labels=labels: model(**labels)))
                with cp.off():
                    found[name].append(_said(lambda: model(**PACK)))
            if kind == "llama":
                found[name].append(_said(lambda: cp.logprobs(PACK)))
        cp.close()
    return found


def _whole(rank: int, world: int) -> list[str]:
    """Parameters that FSDP2 does not hold after the trial of a model whose pass with labels fails."""

    class Picky(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if labels is not None:
                raise ValueError("labels need weights")
            return out

    model = models.build("llama")
    model.__class__ = Picky
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    cp = ContextParallel(model, timeout=60)
    found = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    cp.close()
    return found


class LossTrial(unittest.TestCase):
    def test_a_pass_that_fails_leaves_parameters_with_their_owner(self) -> None:
        self.assertEqual(processes.run(_whole, 2), [[], []])

    def test_losses_of_ones_own_are_refused(self) -> None:
        for found in processes.run(_losses, 2):
            for name, (labels, without, *other) in found.items():
                self.assertEqual(without, "taken", name)
                if name == "labels that are not shifted":
                    self.assertRegex(
                        labels, "Unsupported.*the label at the same place: give such labels as shift_labels"
                    )
                    self.assertTrue(other[0].startswith("loss "), other)
                    self.assertEqual(other[0], other[1])
                    continue
                self.assertEqual(other, ["taken"] * len(other), name)
                if "penalty" in name or "smoothing" in name:
                    self.assertRegex(
                        labels, r"Unsupported.*labels are given to Own: its own loss of 7 tokens is \S+, and", name
                    )
                else:
                    self.assertTrue(labels.startswith("loss "), (name, labels))


if __name__ == "__main__":
    unittest.main()
