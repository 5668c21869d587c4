# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small models of Transformers whose masks are more than a window: blocks of token types, prefixes and chunks; types for the tokens of a pack,
and one process that runs its documents one by one."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch
import transformers
from torch.nn import functional as F

import models

LENGTHS = [23, 1, 17, 9]
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
WINDOWS = {**models.SMALL, "sliding_window": 6, "layer_types": models.KINDS, "query_pre_attn_scalar": 8}
CHUNKED = {
    "num_hidden_layers": 3, "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "num_local_experts": 2, "no_rope_layers": [1, 0, 1],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration", {"text_config": WINDOWS, "vision_config": VISION, "mm_tokens_per_image": 1, "image_token_index": 95},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **WINDOWS, "global_head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": models.WORDS, "use_bidirectional_attention": "vision",
            },
            "vision_config": {**VISION, "head_dim": 8}, "audio_config": None, "image_token_id": 95, "video_token_id": 94, "audio_token_id": 93,
        },
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **models.SMALL}, "projection_dim": 36, "image_token_index": 95,
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
        },
    ),
    "hrm": ("HrmTextForCausalLM", {**models.SMALL, "num_key_value_heads": 9, "H_cycles": 1, "L_cycles": 1, "L_bp_cycles": None}),
    "llama4": ("Llama4ForCausalLM", {**models.SMALL, **CHUNKED, "attention_chunk_size": 8}),
    "git": ("GitForCausalLM", {**models.SMALL, "vision_config": VISION, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "bloom": ("BloomForCausalLM", {"vocab_size": models.WORDS, "hidden_size": 48, "n_layer": 2, "n_head": 6, "pad_token_id": 0}),
}  # fmt: skip


def build(name: str, **more: Any) -> Any:
    if name in models.MODELS and name not in MODELS:
        return models.build(name)
    torch.manual_seed(0)
    kind, options = MODELS[name]
    made = getattr(transformers, kind)
    model = made._from_config(
        made.config_class(**{**options, **more}), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.train()


def types(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Token types for the tokens of LENGTHS."""
    draw = random.Random(seed)
    if name in ("gemma3", "gemma4"):
        # Images of several lengths, one of them over the end of a document and of more tokens than a window.
        every = torch.tensor([draw.choice([0, 0, 0, 1, 1, 1, 1, 1, 2, 3]) for _ in range(sum(LENGTHS))])
        every[20:28], every[5:14] = 1, 1
        return {"token_type_ids" if name == "gemma3" else "mm_token_type_ids": every[None]}
    if name in ("paligemma", "hrm"):
        prefix, rest = (0, 1) if name == "paligemma" else (1, 0)
        parts = [[prefix] * (ends := draw.randint(0, n)) + [rest] * (n - ends) for n in LENGTHS]
        parts[0] = [prefix] * 6 + [rest] * 2 + [prefix] * 3 + [rest] * 12
        return {"token_type_ids": torch.tensor([sum(parts, [])])}
    return {}


def one_by_one(
    model: Any, pack: dict[str, torch.Tensor], more: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and logits of the documents of a pack."""
    total, logits, at = torch.zeros(()), [], 0
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for ids, labels in models.documents(pack):
        mine = {key: value[:, at : at + ids.shape[1]] for key, value in more.items()}
        at += ids.shape[1]
        logits.append(model(input_ids=ids, **mine, **cache).logits[0].float())
        total = total + F.cross_entropy(logits[-1][:-1], labels[0, 1:], ignore_index=-100, reduction="sum")
    return total / models.count(pack), torch.cat(logits).detach()
