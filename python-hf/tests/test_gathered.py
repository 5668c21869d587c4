# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models of Transformers whose layers run their own attention on gathered keys, and those that count positions themselves: loss and
gradients of one process that runs each document alone."""

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
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.gathered.listed import attend
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

transformers.utils.logging.set_verbosity_error()
LENGTHS = [33, 1, 50, 2, 3, 1, 20]
SMALL: dict[str, Any] = {
    "vocab_size": models.WORDS, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
BERT = {
    "num_key_value_heads": 4, "is_decoder": True, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "type_vocab_size": 2,
}  # fmt: skip
DECODER = {
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "is_decoder": True, "is_encoder_decoder": False,
    "dropout": 0.0, "activation_dropout": 0.0, "encoder_layers": 1,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
# Many heads of the indexer: with few, many of its scores are 0, and which of these keys are taken is chance.
LATENT = {
    **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "index_topk": 5, "index_n_heads": 24, "index_head_dim": 16,
}  # fmt: skip
SWA = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8, "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "sliding_window": 6, "shared_experts_intermediate_size": 16,
}  # fmt: skip
INKLING = {
    **EXPERTS, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 6, "rel_extent": 9,
    "d_rel": 4, "log_scaling_n_floor": 8, "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": LATENT,
    "glm_moe_dsa": {**LATENT, "indexer_types": ["full", "shared"]},
    "hy_v4": {**LATENT, "indexer_types": ["full", "shared"]},
    "dots3_note_text": {**LATENT, **SWA, "head_dim": 16, "layer_types": ["sliding_attention", "indexed_attention"]},
    "minimax_m3_vl_text": {
        **EXPERTS, "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"], "index_n_heads": 2,
        "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1, "dense_intermediate_size": 40,
        "shared_intermediate_size": 16,
    },
    "doge": {"keep_window_size": 5},
    "inkling_text": INKLING,
    "inkling2_text": INKLING,
    "qwen4_exp_text": {
        **EXPERTS, "indexer_n_heads": 24, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
        "hc_lowrank": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_vocab_size_base": 50,
    },
    "zaya": {**EXPERTS, "num_experts_per_tok": 1},
    "gemma4_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": models.KINDS * 2, "sliding_window": 6, "global_head_dim": 8,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": models.WORDS,
    },
    "rembert": {**BERT, "input_embedding_size": 16, "output_embedding_size": 16},
    "bart": DECODER,
    "mvp": DECODER,
}  # fmt: skip

# Older versions of Transformers do not have all of them.
MODELS = {name: options for name, options in MODELS.items() if name in CONFIG_MAPPING_NAMES}


def _build(name: str, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SMALL, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif "A_log" not in part:
                parameter.add_(
                    torch.randn_like(parameter) * 0.1 + part.endswith(".A")
                )  # Doge's: scores that differ by more than rounding
    return model.train()


def _batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    """A pack in which no document has a word twice: Doge's scores of both would be equal, and which of them is taken is chance."""
    made = models.batch(lengths)
    draw = torch.Generator().manual_seed(3)
    made["input_ids"] = torch.cat(
        [3 + torch.randperm(models.WORDS - 3, generator=draw)[:length] for length in lengths]
    )[None]
    return {**made, "labels": torch.where(made["labels"] == -100, -100, made["input_ids"])}


def _alone(name: str, lengths: list[int]) -> tuple[float, torch.Tensor]:
    model, pack = _build(name), _batch(lengths)
    loss = models.part(model, pack) / models.count(pack)
    loss.backward()
    return loss.item(), models.gradients(model)


def _wrong(
    name: str, lengths: list[int], file: str, attention: str = "eager", checkpointed: bool = False, **options: int
) -> list[str]:
    expected, gradients = torch.load(file)[name, tuple(lengths)]
    model, ids = _build(name, attention), torch.ones(1, 5, dtype=torch.int64)
    with torch.no_grad():
        usual = model(input_ids=ids).logits
    if checkpointed:
        models.checkpointing(model, False)
    cp = ContextParallel(model, gradients="sum", timeout=60, **options)
    pack = _batch(lengths)
    loss = model(**(models.of_next(pack) if MODELS[name] is DECODER else pack)).loss
    loss.backward()
    total = models.gradients(model)
    dist.all_reduce(total)
    cp.close()
    error, distance = abs(loss.item() - expected) / expected, models.apart(total, gradients)
    said = f"{name}, {lengths}, {attention}, checkpointed={checkpointed}, {options}:"
    wrong = [] if error <= 1e-6 and distance <= 3e-5 else [f"{said} loss {error:.1e}, gradients {distance:.1e}"]
    if not torch.equal(model(input_ids=ids).logits, usual):
        wrong.append(f"{said} another model after close")
    return wrong


def _right(rank: int, world: int, file: str) -> list[str]:
    wrong = []
    for name in MODELS:
        wrong += _wrong(name, LENGTHS, file)
    for name in ("deepseek_v32", "inkling_text", "qwen4_exp_text", "minimax_m3_vl_text", "zaya", "mvp"):
        if name not in MODELS:
            continue
        wrong += _wrong(name, [4], file)  # which leaves ranks without tokens
        wrong += _wrong(name, LENGTHS, file, checkpointed=name != "mvp")
        if name in ("deepseek_v32", "inkling_text", "minimax_m3_vl_text"):
            wrong += _wrong(name, LENGTHS, file, "sdpa")
        if name == "deepseek_v32":  # without kernels, no number of heads limits Ulysses
            wrong += _wrong(name, LENGTHS, file, ulysses=3)
    return wrong


class Gathered(unittest.TestCase):
    def test_loss_and_gradients_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save({(name, tuple(of)): _alone(name, of) for name in MODELS for of in (LENGTHS, [4])}, file)
            for wrong in processes.run(_right, 3, file, seconds=200):
                self.assertEqual(wrong, [])

    def test_listed_keys_under_autocast(self) -> None:
        # Rotary embeddings make some of q, k and v f32 there.
        draw = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, 2, 5, 8, generator=draw) for _ in range(3))
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, _ = attend(None, q, k.bfloat16(), v.bfloat16(), seen[None, None], 0.5, torch.arange(5).expand(1, 5, 5))
        expected = (q @ k.mT * 0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
        self.assertEqual(o.dtype, torch.bfloat16)
        torch.testing.assert_close(o.float(), expected.transpose(1, 2), rtol=0, atol=0.05)


if __name__ == "__main__":
    unittest.main()
