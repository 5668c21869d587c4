# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every causal language model of Transformers, from a small config, on four processes: right, or refused by name.

    python3 sweep_transformers.py --table ../../docs/transformers_models.md
    python3 sweep_transformers.py --only llama,opt

A model is right if loss and gradients are those of one process (1e-5 and 1e-4 relative, in f32). One process runs the documents one
by one, with Transformers' eager attention. By hand: some minutes. Each model has processes of its own with a limit of time, so
one that ends them or hangs is listed as that.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import models
import processes
from cpattn import Error

processes._forks.set_forkserver_preload(["torch.distributed", "transformers.models.auto", "models", "cpattn.transformers"])
transformers.utils.logging.set_verbosity_error()
PACK = [23, 1, 17, 9]

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
    "num_kv_shared_layers": 0, "attention_chunk_size": 64, "lru_width": 32, "embedding_size": 32,
}  # fmt: skip


def build(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind)
    text = config.get_text_config() if type(config.get_text_config()) is not type(config) else config
    known = {name: value for name, value in SMALL.items() if getattr(text, name, None) is not None}
    if getattr(text, "layer_types", None):
        kinds = list(dict.fromkeys(text.layer_types))
        known |= {"layer_types": kinds * 2 if len(kinds) == 1 else kinds, "num_hidden_layers": max(2, len(kinds))}
    for name in ("mlp_layer_types",):
        if getattr(text, name, None):
            known[name] = getattr(text, name)[: known["num_hidden_layers"]]
    small = type(text)(**known)
    model = AutoModelForCausalLM.from_config(small, attn_implementation="eager", dtype=torch.float32)
    size = sum(p.numel() for p in model.parameters())
    if size > 20_000_000:
        raise ValueError(f"{size / 1e6:.0f} million parameters from the small config")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def _try(rank: int, world: int, kind: str) -> tuple[str, str]:
    import torch.distributed as dist

    from cpattn.transformers import ContextParallel

    def short(error: BaseException) -> str:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"

    try:
        model, pack = build(kind), models.batch(PACK)
        loss = models.part(model, pack) / models.count(pack)
        loss.backward()
        expected, alone = models.gradients(model), loss.item()
        model.zero_grad()
    except Exception as error:
        return "not tried", short(error)
    try:
        cp = ContextParallel(model, gradients="sum", timeout=60)
        loss = model(**pack).loss
    except Error as error:
        return "refused", short(error)
    loss.backward()
    total = models.gradients(model)
    dist.all_reduce(total)
    error, distance = abs(loss.item() - alone) / abs(alone), models.apart(total, expected)
    del cp
    right = error <= 1e-5 and distance <= 1e-4
    return "right" if right else "WRONG", f"loss {error:.0e}, gradients {distance:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Tries every causal language model of Transformers.")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--table", type=Path, help="a Markdown file for the table")
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows = []
    for kind in chosen:
        outcomes = processes.start(_try, 4, kind, seconds=60)
        said = {outcome.value or ("BROKEN", (outcome.error or "no answer in 60 s").splitlines()[0][:150]) for outcome in outcomes}
        verdict, detail = sorted(said)[0]
        rows.append((kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], verdict, detail))
        print(f"{kind}: {verdict}: {detail}", flush=True)
        if given.table:
            given.table.write_text(table(rows, len(chosen)))


def table(rows: list[tuple[str, str, str, str]], of: int) -> str:
    count = {v: sum(row[2] == v for row in rows) for v in sorted({row[2] for row in rows})}
    lines = [
        "# Causal language models of Transformers",
        "",
        f"Transformers {transformers.__version__}, PyTorch {torch.__version__}, four processes over gloo, {platform.machine()}, "
        f"{datetime.date.today()}: {len(rows)} of {of} models; " + ", ".join(f"{n} {verdict}" for verdict, n in count.items()) + ".",
        "",
        "Made by `python3 python/tests/sweep_transformers.py --table docs/transformers_models.md`, from small configs in f32. *right*: loss and "
        "gradients are those of one process that runs the documents one by one. *refused*: `ContextParallel` raises the error shown. *not tried*: "
        "the model cannot be made from the script's small config, or cannot run it on one process.",
        "",
        "| model | class | result | |",
        "|---|---|---|---|",
    ]
    for kind, name, verdict, detail in rows:
        text = detail.replace("|", "/").replace("<", "&lt;")
        lines.append(f"| `{kind}` | {name if isinstance(name, str) else name[0]} | {verdict} | {text} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory():
        main()
