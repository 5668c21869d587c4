# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains a small model of one of the newest kinds, and shows that several processes have the losses of one:

- `qwen3_5`: three of four layers are gated delta nets, which mix the tokens of whole documents;
- `nemotron_h`: Mamba-2 layers beside attention;
- `deepseek_v32`: latent attention, of which an indexer lists the keys of each query.

    pip install ./python './python-hf[transformers]'
    python3 examples/python/newest_kinds.py deepseek_v32 --json one.json
    torchrun --nproc-per-node 3 examples/python/newest_kinds.py deepseek_v32 --json three.json --against one.json --plot both.svg

Nothing is downloaded: the model is made from a config. Each word of a document follows from the one two places before it, which the model
learns. The two lines that are for context parallelism are marked; no kind needs another one. Where two keys are as good as equal, rounding decides
which of them the indexer of deepseek_v32 takes, so its losses part after some dozen steps, by thousandths or hundredths; with all keys they do not.
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

import pictures
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

from cpattn_hf.transformers import ContextParallel

WORDS = 24
SMALL = {
    "vocab_size": WORDS, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "attention_dropout": 0.0,
    "use_cache": False,
}  # fmt: skip
KINDS = {
    "qwen3_5": ("qwen3_5_text", {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
    }),
    "nemotron_h": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "full_attention"] * 2, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 3,
        "ssm_state_size": 8, "chunk_size": 16,
    }),
    "deepseek_v32": ("deepseek_v32", {
        "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_group": 1, "topk_group": 1, "index_topk": 12, "index_n_heads": 24, "index_head_dim": 16,
    }),
}  # fmt: skip


def document(draw):
    words = [draw.randrange(1, WORDS), draw.randrange(1, WORDS)]
    for _ in range(draw.randint(6, 40)):
        words.append((words[-2] * 5 + 3) % (WORDS - 1) + 1)
    return {"input_ids": words, "labels": [-100, -100] + words[2:]}


def losses(kind, steps, alone):
    torch.manual_seed(0)
    name, more = KINDS[kind]
    config = AutoConfig.for_model(name, **{**SMALL, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    trainer_of = Trainer
    if not alone:
        cp = ContextParallel(model)  # context parallelism: this line
        trainer_of = cp.trainer(Trainer)  # and this one
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, seed=1,
        )  # fmt: skip
        documents = [document(draw) for _ in range(4 * steps)]
        # One process has rows with padding: not every kind has documents in a pack of its own.
        trainer = trainer_of(
            model=model,
            args=args,
            train_dataset=documents,
            data_collator=padded if alone else DataCollatorWithFlattening(),
        )
        trainer.train()
    if not alone:
        cp.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def padded(documents):
    """Rows with padding at the right."""
    row = lambda name, fill: torch.nn.utils.rnn.pad_sequence([torch.tensor(one[name]) for one in documents], True, fill)
    ids = row("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": row("labels", -100)}


def main():
    parser = argparse.ArgumentParser(
        description="Trains a small model of one of the newest kinds; see the top of the file."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the losses go")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="the JSON of another run: compared, and in the plot"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG of both")
    given = parser.parse_args()
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    found = losses(given.kind, given.steps, alone)
    if not alone and dist.get_rank():
        return
    name = "1 process" if alone else f"cpattn, {dist.get_world_size()} processes"
    if given.json:
        given.json.write_text(json.dumps({"name": name, "losses": found}))
    print(f"{given.kind}, {name}: loss {found[0]:.4f} at first, {found[-1]:.4f} after {len(found)} steps")
    if given.against:
        other = json.loads(given.against.read_text())
        apart = max(abs(a - b) for a, b in zip(other["losses"], found, strict=True))
        print(f"at most {apart:.1e} away from {other['name']}")
        if given.plot:
            given.plot.write_text(
                pictures.of_runs(f"{given.kind}: loss", [(other["name"], other["losses"]), (name, found)])
            )


if __name__ == "__main__":
    main()
