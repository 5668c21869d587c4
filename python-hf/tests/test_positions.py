# SPDX-License-Identifier: MIT OR Apache-2.0
"""Numbers of a config that only long documents reach: scales, floors and tables. The trial looks beyond them."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel, adapters
from transformers import AutoConfig, AutoModelForCausalLM

transformers.utils.logging.set_verbosity_error()
LLAMA4 = {
    "num_hidden_layers": 4,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0, 1, 0],
    "attn_scale": 0.5,
}
MINISTRAL = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 16,
    }
}
# By name: the kind, and its config. A floor is far above the trial's positions, and below those of the batch.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("llama4_text", {**LLAMA4, "floor_scale": 16, "attention_chunk_size": 512}),
    "llama4, chunks": ("llama4_text", {**LLAMA4, "floor_scale": 16, "attention_chunk_size": 32}),
    "ministral3": ("ministral3", MINISTRAL),
}
LENGTHS = [150, 1, 40, 23]


def _build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    kind, options = MODELS.get(name, (name, {}))
    config = AutoConfig.for_model(kind, **{**models.SMALL, **options, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def _long(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """Relative errors of loss and gradients."""
    found, pack = {}, models.batch(LENGTHS)
    for name in MODELS:
        for checkpointing in (False, True):
            one, model = _build(name), _build(name)
            expected = models.part(one, pack) / models.count(pack)
            expected.backward()
            if checkpointing:
                models.checkpointing(model, False)
            cp = ContextParallel(model, gradients="sum", timeout=60)
            loss = model(**pack).loss
            loss.backward()
            total = models.gradients(model)
            dist.all_reduce(total)
            cp.close()
            far = abs(loss.item() - expected.item()) / expected.item()
            found[f"{name}, {checkpointing}"] = far, models.apart(total, models.gradients(one))
    return found


def _said(model: Any, pack: Any = None) -> str:
    cp = None
    try:
        cp = ContextParallel(model, timeout=60)
        if pack is not None:
            model(**pack)
    except Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if cp is not None:
            cp.close()
    return "taken"


def _refused(rank: int, world: int) -> dict[str, str]:
    found = {}
    # A layer that counts the tokens of its row, as that of Llama 4 would without its adapter.
    for name, tuning in (("counts", True), ("does not", False)):
        with mock.patch.dict(adapters.ADAPTERS):
            adapters.ADAPTERS.pop("Llama4TextAttention", None)
            found[name] = _said(_build("llama4", attn_temperature_tuning=tuning))
    gptj = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "max_position_embeddings": 160}
    long = models.batch([170])
    # A table that is no embedding.
    found["table"] = _said(_build("gptj", **gptj), long)
    found["long enough"] = _said(_build("gptj", **{**gptj, "max_position_embeddings": 170}), long)
    return found


class Positions(unittest.TestCase):
    def test_long_documents(self) -> None:
        for found in processes.run(_long, 2, seconds=200):
            for name, (far, distance) in found.items():
                with self.subTest(name):
                    self.assertTrue(far <= 1e-6 and distance <= 1e-5, (far, distance))

    def test_refusals(self) -> None:
        for found in processes.run(_refused, 2, seconds=200):
            self.assertIn(
                "Llama4ForCausalLM mixes tokens outside of attention, or counts positions itself", found["counts"]
            )
            self.assertEqual(found["does not"], "taken")
            self.assertIn("the longest document has 170 tokens, GPTJForCausalLM has 160 positions", found["table"])
            self.assertEqual(found["long enough"], "taken")


if __name__ == "__main__":
    unittest.main()
