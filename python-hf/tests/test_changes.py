# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model that is changed after ContextParallel: what hooks need is found again, and what makes a pass wrong is refused in it, by name and on all
ranks."""

from __future__ import annotations

import copy
import io
import pickle
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch

try:
    import peft
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers or peft is not installed") from None

import hybrids
import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

transformers.utils.logging.set_verbosity_error()
PACK = models.batch([23, 1, 17])
IDS = torch.randint(3, models.WORDS, (3, 11), generator=torch.Generator().manual_seed(3))
IDS[1, 7:] = 0
ROWS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def _neo(kind: str) -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 320}
    config = AutoConfig.for_model(
        kind, vocab_size=models.WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False, **more
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def _changes(rank: int, world: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {}

    def case(name: str, model: Any, change: Callable[[Any], None], undo: Callable[[Any], None]) -> None:
        """The passes after the change, and after it was undone."""
        cp = ContextParallel(model, timeout=60)
        with torch.no_grad():
            loss = model(**PACK).loss.item()
            change(model)
            said = [_said(lambda: model(**PACK))]
            undo(model)
            said.append(str(model(**PACK).loss.item() == loss))
            with cp.off():
                change(model)  # which does not concern the ranks' passes
                undo(model)
            said.append(str(model(**PACK).loss.item() == loss))
        cp.close()
        found[name] = said

    def field(model: Any, value: str) -> None:
        model.config._attn_implementation = value

    def of_a_layer(model: Any) -> Any:
        return model.model.layers[1].self_attn

    def its_config(model: Any, value: str) -> None:
        layer = of_a_layer(model)
        layer.config = copy.deepcopy(layer.config)
        layer.config._attn_implementation = value

    def its_forward(model: Any) -> None:
        of_a_layer(model).forward = lambda hidden_states, **_: (hidden_states, None)

    case(
        "set_attn_implementation",
        models.build("llama"),
        lambda m: m.set_attn_implementation("sdpa"),
        lambda m: m.set_attn_implementation("cpattn"),
    )
    case("config", models.build("llama"), lambda m: field(m, "eager"), lambda m: field(m, "cpattn"))
    case("a layer's config", models.build("llama"), lambda m: its_config(m, "sdpa"), lambda m: its_config(m, "cpattn"))
    case("a layer's forward", models.build("llama"), its_forward, lambda m: vars(of_a_layer(m)).pop("forward"))
    # On one rank only: the others are told.
    case(
        "rank 0's config",
        models.build("llama"),
        lambda m: field(m, "eager") if rank == 0 else None,
        lambda m: field(m, "cpattn"),
    )
    gptj = _neo("gptj")
    ours: list[Any] = []
    case(
        "an adapter", gptj, lambda m: ours.append(vars(m.transformer.h[1].attn).pop("_attn", None)),
        lambda m: vars(m.transformer.h[1].attn).update({"_attn": ours.pop()} if ours[-1] else {}),
    )  # fmt: skip
    return found


HOW: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "SEQ_CLS": {"task_type": "SEQ_CLS", "target_modules": ["q_proj"]},
    "SEQ_CLS, all-linear": {"task_type": "SEQ_CLS", "target_modules": "all-linear"},
    "score": {"target_modules": ["q_proj"], "modules_to_save": ["score"]},
    "self_attn": {"target_modules": ["up_proj"], "modules_to_save": ["self_attn"]},
}


def _classes() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**models.SMALL, "num_labels": 2})
    return AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager", dtype=torch.float64
    ).eval()


def _adapted(model: Any, how: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **how)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:  # other weights than those that are saved
                parameter.mul_(1.5)
    return adapted


def _gradients(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])


def _peft(rank: int, world: int) -> dict[str, list[float]]:
    """Distances of logits and gradients to those of one process."""
    warnings.simplefilter("ignore")
    found = {}
    labels = torch.tensor([0, 1, 1])
    for name, how in HOW.items():
        usual = _adapted(_classes(), how)
        expected = usual(**ROWS, labels=labels)
        expected.loss.backward()
        gradients = _gradients(usual)
        for order in ("first", "then", "around"):
            model = _classes()
            cp = ContextParallel(model, timeout=60, gradients="sum") if order == "first" else None
            adapted = _adapted(model, how)
            cp = cp or ContextParallel(model if order == "then" else adapted, timeout=60, gradients="sum")
            out = adapted(**ROWS, labels=labels)
            out.loss.backward()
            mine = _gradients(adapted)
            torch.distributed.all_reduce(mine)
            with cp.off(), torch.no_grad():
                off = adapted(**ROWS).logits
            cp.close()
            with torch.no_grad():
                closed = adapted(**ROWS).logits
            apart = [models.apart(one, expected.logits) for one in (out.logits, off, closed)]
            found[f"{name}, {order}"] = [*apart, models.apart(mine, gradients)]
    return found


def _mixers(rank: int, world: int) -> list[str]:
    model = hybrids.build("mamba2")
    cp = ContextParallel(model, timeout=60)
    layer = next(iter(cp._mixers.layers))
    ours = layer.forward
    said = []
    with torch.no_grad():
        model(**PACK)
        layer.forward = lambda hidden_states, *_, **__: hidden_states
        said.append(_said(lambda: model(**PACK)))
        layer.forward = ours
        said.append(_said(lambda: model(**PACK)))
    cp.close()
    return said


def _small(rank: int, world: int) -> dict[str, str]:
    found, model = {}, models.build("llama")
    for name in ("ulyses", "replica", "compare_weight"):
        found[name] = _said(lambda name=name: ContextParallel(model, timeout=60, **{name: 1}))
    cp = ContextParallel(model, timeout=60)
    found["pickle"] = _said(lambda: pickle.dumps(model))
    found["torch.save"] = _said(lambda: torch.save({"model": torch.nn.ModuleList([model])}, io.BytesIO()))
    found["deepcopy"] = _said(lambda: copy.deepcopy(model))
    for name, shape in (("no token", (1, 0)), ("no row", (0, 5))):
        found[name] = _said(lambda shape=shape: model(input_ids=torch.zeros(shape, dtype=torch.int64)))
        found[f"{name}, embedded"] = _said(lambda shape=shape: model(inputs_embeds=torch.zeros(*shape, 36)))
    padded = {"input_ids": torch.zeros(1, 5, dtype=torch.int64), "attention_mask": torch.zeros(1, 5, dtype=torch.int64)}
    found["padding alone"] = _said(lambda: model(**padded))
    cp.close()
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        found["closed"] = str(torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits))
    return found


def _projections(rank: int, world: int) -> dict[str, float]:
    """LoRA on projections that layers multiply with themselves."""
    warnings.simplefilter("ignore")
    found = {}
    pack = models.batch([20, 1, 9])
    for kind in ("jamba", "mamba"):
        for target in ("dt_proj", "x_proj"):
            losses = []
            for alone in (True, False):
                model = hybrids.build(kind)
                cp = None if alone else ContextParallel(model, timeout=60)
                adapted = _adapted(model, {"target_modules": [target]})
                with torch.no_grad():
                    losses.append(
                        models.part(adapted, pack).item() / models.count(pack)
                        if cp is None
                        else adapted(**pack).loss.item()
                    )
                if cp is not None:
                    cp.close()
            found[f"{kind}, {target}"] = abs(losses[0] - losses[1]) / losses[0]
    return found


class Changes(unittest.TestCase):
    def test_refused_by_name(self) -> None:
        every = processes.run(_changes, 2, seconds=200)
        for rank, found in enumerate(every):
            for name, words in (
                (
                    "set_attn_implementation",
                    "Unsupported: the attention of LlamaForCausalLM is 'sdpa' (set_attn_implementation, config._attn_implementation)",
                ),
                ("config", "Unsupported: the attention of LlamaForCausalLM is 'eager'"),
                ("a layer's config", "Unsupported: the attention of LlamaAttention is 'sdpa'"),
                (
                    "a layer's forward",
                    "Unsupported: the layers of LlamaForCausalLM ran attention 1 times in this pass and 2 times when",
                ),
                ("an adapter", "Unsupported: something has replaced _attn of GPTJAttention"),
                ("rank 0's config", ("is 'eager'", "ranks [0] of this group refused their inputs")[rank]),
            ):
                with self.subTest(name, rank=rank):
                    self.assertIn(words, found[name][0])
                    self.assertEqual(found[name][1:], ["True", "True"])

    def test_adapters_of_peft(self) -> None:
        for found in processes.run(_peft, 2, seconds=200):
            for name, distances in found.items():
                with self.subTest(name):
                    self.assertLessEqual(max(distances), 2e-6, distances)

    def test_projections(self) -> None:
        for found in processes.run(_projections, 2, seconds=200):
            for name, far in found.items():
                self.assertLessEqual(far, 1e-6, name)

    def test_small(self) -> None:
        for found in processes.run(_small, 2, seconds=200):
            for name in ("ulyses", "replica", "compare_weight"):
                self.assertIn(f"{name} is no argument of ContextParallel", found[name])
                self.assertIn("compare_weights, dropout, gather, gradients, group, ", found[name])
            for name in ("pickle", "torch.save", "deepcopy"):
                self.assertIn("Unsupported: a model with a ContextParallel cannot be copied or pickled", found[name])
            for name, words in (
                ("no token", "input_ids has 1 rows of 0 tokens"),
                ("no row", "input_ids has 0 rows of 5 tokens"),
                ("padding alone", "attention_mask leaves"),
            ):
                self.assertIn(words, found[name])
            self.assertIn("inputs_embeds has 1 rows of 0 tokens", found["no token, embedded"])
            self.assertEqual(found["closed"], "True")

    def test_mixers(self) -> None:
        for said in processes.run(_mixers, 2, seconds=200):
            self.assertIn("something has replaced forward of Mamba2Mixer", said[0])
            self.assertEqual(said[1], "taken")


if __name__ == "__main__":
    unittest.main()
