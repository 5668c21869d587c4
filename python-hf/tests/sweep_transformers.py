# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every causal and every masked language model of Transformers, and every model of images and texts with images and without, from a small
config, on four processes: right, or refused by name.

    python3 sweep_transformers.py --table transformers_models.md
    python3 sweep_transformers.py --only llama,opt,masked:bert,texts:qwen3_vl,images:qwen3_vl

A model is right if loss and gradients are those of one process (1e-5 and 1e-4 relative, in f32). One process runs the documents one
by one, with Transformers' eager attention; masked models with their own loss. Models whose masks have blocks of token types get types, and
chunks are shorter than documents. By hand. The processes try one model after another, each with a limit of time: one that
ends them, or hangs, is listed as BROKEN, and other processes go on with the next.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

import models
import processes
import sweep_images
import sweep_table
from cpattn import Error

transformers.utils.logging.set_verbosity_error()
PACK = [23, 1, 17, 9]
RANKS = 4
# Seconds for one model.
LIMIT = 90
# Before the names of models of masked words, which causal models have as well.
MASKED = "masked:"
# Before the names of models of images and texts, on texts alone and with images.
TEXTS, IMAGES = "texts:", "images:"
# Models of images and texts that are in no list of causal models, on text.
MORE = {"paligemma": "PaliGemmaForConditionalGeneration"}
CLASSES = {
    **MORE,
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **{MASKED + kind: made for kind, made in MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()},
}
CLASSES |= {
    f"{of}{kind}": made for of in (TEXTS, IMAGES) for kind, made in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
}

# Names that configs have for small numbers, where they have them.
SMALL = {
    "vocab_size": models.WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "n_positions": 256, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_inner": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "sliding_window": 8,
    "hidden_dropout": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0, "activation_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "layerdrop": 0.0, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "ffn_dim": 48, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "word_embed_proj_dim": 32, "d_model": 32, "n_heads": 4, "n_layers": 2,
    "rotary_dim": 8, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 16, "num_shared_experts": 1, "use_cache": False,
    "is_decoder": True, "vocab_size_per_layer_input": models.WORDS, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
    "num_kv_shared_layers": 0, "attention_chunk_size": 8, "lru_width": 32, "embedding_size": 32,
    "index_topk": 6, "index_n_heads": 16, "index_head_dim": 16,
}  # fmt: skip


# What some models need besides, or instead; None leaves the number out.
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
HYBRID = ["linear_attention", "hybrid"] * 2
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_local_decoder": {"hidden_size_global": 32},
    "blt_local_encoder": {"hidden_size_global": 32},
    "cohere_compass_text": {
        "layer_types": models.KINDS, "head_dim": None,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]} for kind in models.KINDS},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": EXPERTS,
    "dots1": EXPERTS,
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": {
        "shared_experts_intermediate_size": 16, "head_dim": 16,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8, "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "esm": {"vocab_size": models.WORDS, "pad_token_id": 1, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_vision": {"architecture": "mobilenetv3_small_050"},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gemma4_text": {"use_bidirectional_attention": "vision"},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "ministral": {"head_dim": 8},
    "modernbert": {"local_attention": 16, "layer_types": ["full_attention", "sliding_attention"]},
    "mpnet": {"pad_token_id": 1},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4, "hc_lowrank": 8,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "paligemma": {"projection_dim": 32},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_embds": False, "hash_seed": 1, "lsh_attention_probs_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    },
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": None, "layers_block_type": HYBRID, "num_hidden_layers": 4, "head_dim": 16, "num_key_value_heads": 4},
    "zamba2": {"layer_types": None, "layers_block_type": HYBRID, "num_hidden_layers": 4, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# The types of tokens that make blocks in the masks of these models; each is a type for a token, as PACK has them.
BLOCKS = torch.tensor([([0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0] * sum(PACK))[: sum(PACK)]])
TYPES = {
    "gemma3": {"token_type_ids": BLOCKS}, "gemma4": {"mm_token_type_ids": BLOCKS}, "gemma4_unified": {"mm_token_type_ids": BLOCKS},
    "hrm_text": {"token_type_ids": BLOCKS}, "paligemma": {"token_type_ids": BLOCKS},
}  # fmt: skip


# Assistants take no config but one whose text model shares all keys and values.
SHARED = {
    "text_config": {
        "vocab_size": models.WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 2, "layer_types": models.KINDS,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "backbone_hidden_size": 32,
}  # fmt: skip
WHOLE = {"gemma4_assistant": SHARED, "gemma4_unified_assistant": SHARED}

# Why some cannot be trained by themselves; beside the error that one process raises.
ALONE = {kind: "an assistant, which reads keys and values of another model" for kind in WHOLE}


def _small(text: Any, decoder: bool = True) -> Any:
    """A config of the same type with small numbers."""
    known = {}
    for name, value in {**SMALL, "is_decoder": decoder}.items():
        # Some properties cannot be set, and some attributes differ from layer to layer.
        with contextlib.suppress(Exception):
            if getattr(text, name) is not None and getattr(getattr(type(text), name, None), "fset", True):
                known[name] = int(value) if type(getattr(text, name)) is int else value
    if "kv_lora_rank" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or []))
    if kinds and all(
        getattr(getattr(type(text), name, None), "fset", True) for name in ("layer_types", "layers_block_type")
    ):
        known |= {"layer_types": kinds * 2 if len(kinds) == 1 else kinds, "num_hidden_layers": max(2, len(kinds))}
    for name in getattr(type(text), "sub_configs", {}):
        if isinstance(inner := getattr(text, name, None), PreTrainedConfig):
            known[name] = _small(inner, decoder)
    if getattr(text, "mlp_layer_types", None):
        known["mlp_layer_types"] = text.mlp_layer_types[: known["num_hidden_layers"]]
    known |= OWN.get(type(text).model_type, {})
    return type(text)(**{name: value for name, value in known.items() if value is not None})


def build(kind: str) -> Any:
    torch.manual_seed(0)
    mapping = MODEL_FOR_MASKED_LM_MAPPING if kind.startswith(MASKED) else MODEL_FOR_CAUSAL_LM_MAPPING
    masked, kind = kind.startswith(MASKED), kind.removeprefix(MASKED)
    config = AutoConfig.for_model(kind, **WHOLE.get(kind, {}))
    if kind in MORE:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in mapping:
        config = config.get_text_config()
    made = mapping[type(config)]
    if made.config_class is not type(config):
        config = config.get_text_config(decoder=True)
    small = config if kind in WHOLE else _small(config, not masked)
    with torch.device("meta"):
        size = sum(p.numel() for p in made._from_config(small).parameters())
    if size > 20_000_000:
        raise ValueError(f"{size / 1e6:.0f} million parameters from the small config")
    model = made._from_config(small, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _alone(kind: str) -> tuple[Any, dict[str, torch.Tensor], float, torch.Tensor, dict[str, torch.Tensor]]:
    """A model, its batch, loss and gradients of one process, and the types of tokens that the batch has besides."""
    masked = kind.startswith(MASKED)
    model, pack, types = build(kind), models.batch(PACK), TYPES.get(kind, {})
    with torch.no_grad():
        if models.part(model, pack, masked) != models.part(model, pack, masked):
            model.eval()  # it draws random numbers in training
    loss = models.part(model, pack, masked, types) / models.count(pack, masked)
    loss.backward()
    expected = models.gradients(model)
    model.zero_grad()
    return model, pack, loss.item(), expected, types


def _labels(cp: Any, pack: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The pack, with labels of the next tokens for a model that would not shift them."""
    from cpattn_hf.transformers.loss_trial import PLACES

    if cp._found.loss != PLACES:
        return pack
    end = torch.full((1, 1), -100)
    labels = torch.cat([torch.cat([of[:, 1:], end], dim=1) for _, of in models.documents(pack)], dim=1)
    return {**{name: value for name, value in pack.items() if name != "labels"}, "shift_labels": labels}


def _try(kind: str) -> tuple[str, str]:
    import torch.distributed as dist

    from cpattn_hf.transformers import ContextParallel

    of = next((one for one in (TEXTS, IMAGES) if kind.startswith(one)), None)
    types: dict[str, torch.Tensor] = {}
    try:
        if of is not None:
            model = sweep_images.build(kind.removeprefix(of), SMALL, OWN)
            each, alone, expected = sweep_images.tried(model, of == IMAGES)
            pack = sweep_images.packed(each)
            model.zero_grad()
        else:
            model, pack, alone, expected, types = _alone(kind)
    except Exception as error:
        why = "; ".join([*filter(None, [ALONE.get(kind)]), _short(error)])
        return _refused(kind.removeprefix(of), why) if of is not None else ("not tried", why)
    found = []
    for more in ({}, {"vision": "shard"})[: 1 + (of == IMAGES)]:
        model.zero_grad()
        try:
            cp = ContextParallel(model, gradients="sum", timeout=60, **more)
            loss = model(**_labels(cp, pack), **types).loss
        except Error as error:
            found.append(("refused", _short(error)))
            if more:
                break
            return found[0]
        loss.backward()
        total = models.gradients(model)
        dist.all_reduce(total)
        error, distance = abs(loss.item() - alone) / abs(alone), models.apart(total, expected)
        cp.close()
        right = error <= 1e-5 and distance <= 1e-4
        found.append(
            (
                "right" if right else "WRONG",
                f"loss {error:.0e}, gradients {distance:.0e}" + ", with blocks of token types" * bool(types),
            )
        )
    if len(found) == 1 or found[0][0] == "WRONG":
        return found[0]
    (verdict, detail), (other, why) = found
    return (
        ("WRONG", f"vision='shard': {why}")
        if other == "WRONG"
        else (verdict, f"{detail}; shards: {other if other == 'right' else why}")
    )


def _refused(kind: str, why: str) -> tuple[str, str]:
    """Of a model of images and texts that the script cannot run on one process: whether it is refused."""
    from cpattn_hf.transformers import ContextParallel

    try:
        model = sweep_images.build(kind, SMALL, OWN)
    except Exception:
        return "not tried", why
    try:
        ContextParallel(model, timeout=60).close()
    except Error as error:
        return "refused", _short(error)
    return "not tried", why


def _tries(rank: int, world: int, kinds: list[str], folder: str) -> None:
    """Tries one model after another, and writes each result to a file. Ends at the first that fails: the group is then unusable."""
    import torch.distributed as dist

    for kind in kinds:
        # Ends the process if nothing else does.
        signal.alarm(LIMIT)
        try:
            result = _try(kind)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            result = ("BROKEN", f"{_short(error)} ({Path(at.filename).name}, line {at.lineno})")
        with open(f"{folder}/{rank}", "a") as file:
            file.write(json.dumps([kind, *result]) + "\n")
        if result[0] == "BROKEN":
            return
        gc.collect()
        dist.barrier()


def sweep(kinds: list[str], each: Callable[[str, str, str], None]) -> None:
    """Calls `each` with a model, its verdict and details, in order. Four processes try many models; after one that breaks them
    others take over."""
    while kinds:
        with tempfile.TemporaryDirectory() as folder:
            group = threading.Thread(
                target=processes.start, args=(_tries, RANKS, kinds, folder), kwargs={"seconds": LIMIT * len(kinds)}
            )
            group.start()
            done = 0
            while done < len(kinds):
                running = group.is_alive()
                time.sleep(0.2)
                said = [Path(folder, str(rank)) for rank in range(RANKS)]
                lines = [path.read_text().splitlines() if path.exists() else [] for path in said]
                if any(len(of_rank) <= done for of_rank in lines) and running:
                    continue
                results = {tuple(json.loads(of_rank[done])[1:]) for of_rank in lines if len(of_rank) > done}
                if any(len(of_rank) <= done for of_rank in lines):
                    results |= {("BROKEN", f"a process ended, or gave no answer in {LIMIT} s")}
                broken = sorted(result for result in results if result[0] in ("BROKEN", "WRONG"))
                verdict, detail = (broken or sorted(results))[0]
                each(kinds[done], verdict, detail)
                done += 1
                if verdict == "BROKEN":
                    break
            group.join()
            kinds = kinds[done:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tries every causal and every masked language model of Transformers.")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--table", type=Path, help="the page whose rows are replaced: transformers_models.md")
    given = parser.parse_args()
    chosen = (
        given.only.split(",")
        if given.only
        else [
            *sorted({**MORE, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}),
            *(MASKED + kind for kind in sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)),
        ]
    )
    if not given.only:
        chosen += [of + kind for kind in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) for of in (TEXTS, IMAGES)]
    rows: list[tuple[str, Any, str, str]] = []

    def each(kind: str, verdict: str, detail: str) -> None:
        rows.append((kind, CLASSES[kind], verdict, detail))
        print(f"{len(rows)}/{len(chosen)} {kind}: {verdict}: {detail}", flush=True)
        if given.table:
            named = [
                (kind, made if isinstance(made, str) else made[0], verdict, detail)
                for kind, made, verdict, detail in rows
            ]
            given.table.write_text(sweep_table.updated(given.table.read_text(), named, str(datetime.date.today())))

    sweep(chosen, each)


if __name__ == "__main__":
    main()
