# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models of Transformers whose attention does not use AttentionInterface: loss and gradients of one process, refusals, and the model as
it was afterwards."""

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
from cpattn import Unsupported
from cpattn_hf.transformers import ContextParallel
from transformers import AutoConfig, AutoModelForCausalLM

transformers.utils.logging.set_verbosity_error()
# A document of more than 256 tokens: BLOOM's and MPT's positions are of two numbers from there on.
LENGTHS = [290, 1, 40, 23]
WORDS: dict[str, Any] = {
    "vocab_size": models.WORDS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
GPT = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 4,
    "n_positions": 320,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "gptj": GPT,
    "codegen": GPT,
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 9,
        "max_position_embeddings": 320, "attention_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0,
    },
    "xglm": {
        "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 320, "attention_dropout": 0.0,
        "dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
    },
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True, "new_decoder_architecture": False},
    "falcon-new": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True,
    },
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 6},
    "mpt": {"d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 320},
}  # fmt: skip


def _build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split("-")[0], **{**WORDS, **MODELS[name], **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.15))
    return model.train()


def _alone(name: str) -> tuple[float, torch.Tensor]:
    model, pack = _build(name), models.batch(LENGTHS)
    loss = models.part(model, pack) / models.count(pack)
    loss.backward()
    return loss.item(), models.gradients(model)


def _right(rank: int, world: int, file: str) -> list[str]:
    wrong, ids = [], torch.ones(1, 5, dtype=torch.int64)
    for name, (expected, gradients) in torch.load(file).items():
        model = _build(name)
        usual = model(input_ids=ids).logits
        if name == "xglm":
            model.gradient_checkpointing_enable()
        cp = ContextParallel(model, gradients="sum", timeout=60)
        with cp.off():
            if not torch.equal(model(input_ids=ids).logits, usual):
                wrong.append(f"{name}: another model with cp.off")
        loss = model(**models.batch(LENGTHS)).loss
        loss.backward()
        total = models.gradients(model)
        dist.all_reduce(total)
        cp.close()
        error, distance = abs(loss.item() - expected) / expected, models.apart(total, gradients)
        if not (error <= 1e-6 and distance <= 1e-5):
            wrong.append(f"{name}: loss {error:.1e}, gradients {distance:.1e}")
        if not torch.equal(model(input_ids=ids).logits, usual) or model.config._attn_implementation != "eager":
            wrong.append(f"{name}: another model after close")
    return wrong


def _refused(rank: int, world: int) -> list[str]:
    said = []
    for name, more in (("falcon", {"alibi": True}),):
        model = _build(name, **more)
        try:
            ContextParallel(model, timeout=60).model(**models.batch(LENGTHS))
            said.append(f"{name} was not refused")
        except Unsupported as error:
            said.append(str(error))
    return said


class Adapters(unittest.TestCase):
    def test_loss_and_gradients_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({name: _alone(name) for name in MODELS}, file)
            for wrong in processes.run(_right, 3, file, seconds=200):
                self.assertEqual(wrong, [])

    def test_refusals(self) -> None:
        for (alibi,) in processes.run(_refused, 2):
            self.assertIn("FalconForCausalLM has config.alibi", alibi)


if __name__ == "__main__":
    unittest.main()
