# SPDX-License-Identifier: MIT OR Apache-2.0
"""Results of all tokens on all ranks, with gradients: log-probabilities, heads that read one token of a row, the router's loss."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable
from typing import Any

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
import torch
import torch.distributed as dist
from cpattn import InvalidArgument, Unsupported
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.evaluate import gathered
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.mixtral import modeling_mixtral

transformers.utils.logging.set_verbosity_error()
LENGTHS = [7, 3, 19, 11]
TEMPERATURE = 0.7
# Cases: rows with padding at both sides, with a scale of logits (cohere), softcapping (gemma2) and tiles; two tokens for three ranks; FSDP2.
WORDS: dict[str, tuple[str, int, list[int]]] = {
    "rows": ("gemma2", 4, LENGTHS), "scale": ("cohere", 0, LENGTHS), "two tokens": ("llama", 0, [2]),
    "sharded": ("qwen3", 0, LENGTHS),
}  # fmt: skip
HEADS: dict[str, tuple[str, int, list[float] | list[int]]] = {
    "value": ("qwen3", 1, [0.5, -1.0, 2.0, 0.0]),
    "classes": ("gpt2", 3, [0, 2, 1, 1]),
}
ROUTERS = {"mixtral": 0, "gpt-oss": 4}


def rows(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows with padding at both sides, whose first tokens have no labels: one process would predict them from padding."""
    made = models.rows(models.batch(lengths))
    mask = made["attention_mask"]
    made["labels"] = torch.where(F.pad(mask, (1, 0))[:, :-1] > 0, made["labels"], -100)
    return {**made, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def head(name: str) -> Any:
    kind, labels, _ = HEADS[name]
    names = {
        "n_embd": 36,
        "n_head": 3,
        "n_layer": 2,
        "n_positions": 256,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**models.SMALL, "num_labels": labels, **(names if kind == "gpt2" else {})})
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def _dense(model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of one process."""
    logits = model(**{name: value for name, value in given.items() if name != "labels"}).logits.double() / TEMPERATURE
    every, labels = logits.log_softmax(-1), F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    known = (labels != -100) & given["attention_mask"].bool()
    return every.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * known, -(every.exp() * every).sum(-1) * known


def _job(rank: int, world: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}

    def keep(name: str, loss: torch.Tensor, model: Any, summed: bool, *more: torch.Tensor) -> None:
        loss.backward()
        gradients = models.gradients(model)
        if isinstance(gradients, DTensor):
            gradients = gradients.full_tensor()
        if world > 1 and summed:
            dist.all_reduce(gradients)
        found[name] = [x.detach().double().flatten().numpy() for x in (loss[None], gradients, *more)]

    for name, (kind, tile, lengths) in WORDS.items():
        model, given = models.build(kind), rows(lengths)
        if name == "two tokens":
            given["labels"] = given["input_ids"]
        if world > 1:
            cp = ContextParallel(model, tile=tile)
            if name == "sharded":
                for layer in model.model.layers:
                    fully_shard(layer)
            outer = fully_shard(model) if name == "sharded" else DistributedDataParallel(model)
            out = cp.logprobs(given, model=outer, temperature=TEMPERATURE, entropy=True)
            scores, entropies = out.log_probs, out.entropy
        else:
            scores, entropies = _dense(model, given)
        # A loss that is no sum over tokens, as of preferences: of a batch, not of a rank's tokens.
        weights = torch.linspace(-1, 2, scores.numel()).reshape(scores.shape)
        keep(
            name,
            torch.tanh((weights * scores).sum() * 0.01) + (entropies**2).sum() / 100,
            model,
            False,
            scores,
            entropies,
        )
    for name, (_, _, labels) in HEADS.items():
        model, given = head(name), rows(LENGTHS)
        if world > 1:
            ContextParallel(model, gradients="sum")
        out = model(**{**given, "labels": torch.tensor(labels)})
        keep(name, out.loss, model, True, out.logits)
    for name, tile in ROUTERS.items():
        model, given = models.build(name, output_router_logits=True, router_aux_loss_coef=0.5), rows(LENGTHS)
        if world > 1:
            cp = ContextParallel(model, gradients="sum", tile=tile)
        out = model(**given)
        # What a Trainer's evaluation gathers.
        aux, routers = (
            (out.aux_loss, out.router_logits) if world == 1 else gathered(cp, (out.aux_loss, out.router_logits))
        )
        keep(
            name,
            out.loss,
            model,
            True,
            out.aux_loss,
            aux,
            torch.stack(routers)[:, given["attention_mask"].flatten().bool()],
        )
        if world > 1:
            assert torch.equal(cp.logprobs(given).aux_loss, out.aux_loss)
    return found


def _refusals(rank: int, world: int) -> dict[str, str]:
    found: dict[str, str] = {}

    def refuse(name: str, kind: type[Exception], job: Callable[[], Any]) -> None:
        try:
            job()
        except kind as error:
            found[name] = str(error)

    given = rows(LENGTHS)
    model = models.build("llama")
    cp = ContextParallel(model)
    words = {name: value for name, value in given.items() if name != "labels"}
    refuse("no labels", InvalidArgument, lambda: cp.logprobs(words))
    refuse("temperature", InvalidArgument, lambda: cp.logprobs(given, temperature=0))
    refuse("another model", InvalidArgument, lambda: cp.logprobs(given, model=dict))
    cp.close()
    model = head("value")
    cp = ContextParallel(model)
    refuse("rows", Unsupported, lambda: cp.logprobs(given))
    refuse("labels", InvalidArgument, lambda: model(**{**given, "labels": torch.zeros(3)}))
    masked = {**words, "attention_mask": words["attention_mask"].clone()}
    masked["attention_mask"][2, -1] = 0
    refuse("masked", InvalidArgument, lambda: model(**masked))
    refuse("other labels", Exception, lambda: model(**{**words, "labels": torch.full((4,), float(rank))}))
    usual = modeling_mixtral.load_balancing_loss_func
    try:
        modeling_mixtral.load_balancing_loss_func = lambda *given: 2 * usual(*given)
        model = models.build("mixtral", output_router_logits=True)
        ContextParallel(model)
        refuse("router", Unsupported, lambda: model(**rows(LENGTHS)))
    finally:
        modeling_mixtral.load_balancing_loss_func = usual
    # A model that has diverged is not refused for its router's loss.
    model = models.build("mixtral", output_router_logits=True)
    ContextParallel(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[int(given["input_ids"][0, -1])] = torch.nan
    found["diverged"] = str(model(**given).loss.item())
    return found


class Scores(unittest.TestCase):
    def test_as_one_process(self) -> None:
        one = processes.run(_job, 1)[0]
        for found in processes.run(_job, 3):
            for name, expected in one.items():
                for a, b in zip(found[name], expected, strict=True):
                    self.assertEqual(a.shape, b.shape, name)
                    self.assertLessEqual(models.apart(torch.tensor(a), torch.tensor(b)), 3e-6, name)

    def test_refusals(self) -> None:
        said = {
            "no labels": "inputs has no labels", "temperature": "temperature is 0", "another model": "give one that wraps it",
            "rows": "whose head gives no words", "labels": "labels is (3,)", "masked": "attention_mask is 0 at place 18 of row 2", "other labels": "differ from those of rank 0",
            "router": "not that of Transformers' load_balancing_loss_func", "diverged": "nan",
        }  # fmt: skip
        for found in processes.run(_refusals, 2):
            for name, text in said.items():
                self.assertIn(text, found.get(name, ""), name)


if __name__ == "__main__":
    unittest.main()
