# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small hybrids of Transformers, one or more of each family of layers, with states that decay slowly: what one document leaves in a
state or a convolution would be seen in the next."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import models

SMALL: dict[str, Any] = {
    "vocab_size": models.WORDS, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    **LINEAR,
}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 5, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "kimi_linear": {
        **LINEAR, **EXPERTS, "linear_num_heads": 3, "linear_head_dim": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 3,
        "ssm_state_size": 8, "chunk_size": 16,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 40},
    "mamba2": {"num_heads": 9, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, **EXPERTS},
    "mamba": {"state_size": 8, "intermediate_size": 72, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "intermediate_size": 72, "time_step_rank": 4},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 3, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "num_key_value_heads": 4, "head_dim": 18,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 16, **EXPERTS},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 36, "attention_window_size": 20, "head_dim": 9},
}  # fmt: skip


def build(name: str, **more: Any) -> Any:
    """The same model on every process."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SMALL, **MODELS[name], **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            last = parameter_name.split(".")[-1]
            if last == "A_log":
                parameter.copy_(torch.linspace(-5, -3, parameter.numel()).view_as(parameter))
            elif last == "recurrent_param":
                parameter.fill_(-5.0)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.train()
