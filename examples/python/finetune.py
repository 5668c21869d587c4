# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fine-tunes a small gpt-oss and a small Gemma 3 with TRL's SFTTrainer and packing, and shows that several processes have the
losses of one.

    pip install ./python './python-hf[transformers]' trl datasets
    python3 examples/python/finetune.py --json one.json
    torchrun --nproc-per-node 4 examples/python/finetune.py --json four.json --against one.json --plot both.svg

Both models have windows, one has sinks. Nothing is downloaded: models are made from configs, tokenizer and data here. The
two lines that are for context parallelism are marked. One process uses Transformers' eager attention; that of gpt-oss does not
keep the documents of a pack apart, so the baseline gives it the mask that does (`keep_apart`).
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from cpattn_hf.transformers import ContextParallel

WORDS = "the a small old red fox dog cat house river sees finds likes leaves and but then near under".split()
SIZES = {
    "vocab_size": len(WORDS) + 2, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 16, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1, "attention_dropout": 0.0, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MODELS = {
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma 3": ("gemma3_text", {"query_pre_attn_scalar": 16}),
}


def tokenizer():
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def texts(count):
    draw = random.Random(1)
    follow = {word: draw.sample(WORDS, 3) for word in WORDS}
    for _ in range(count):
        text = [draw.choice(WORDS)]
        while len(text) < draw.randrange(20, 120):
            text.append(draw.choice(follow[text[-1]]))
        yield {"text": " ".join(text)}


def losses(name, steps, alone, device="cpu"):
    kind, more = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SIZES, **more}), attn_implementation="eager", dtype=torch.float32
    )
    trainer = SFTTrainer
    if device == "cuda":  # the CUDA kernels take bfloat16 and float16
        model = model.to("cuda", torch.bfloat16)
    if not alone:
        cp = ContextParallel(model)  # context parallelism: this line
        trainer = cp.trainer(SFTTrainer)  # and this one
    elif name == "gpt-oss":
        keep_apart(model)
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=steps, packing=True, max_length=256, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            learning_rate=3e-3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=device == "cpu", bf16=False, seed=1,
        )  # fmt: skip
        trainer = trainer(
            model=model, args=args, train_dataset=Dataset.from_list(list(texts(400))), processing_class=tokenizer()
        )
        trainer.train()
    if not alone:
        cp.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def keep_apart(model):
    """The baseline for gpt-oss: its eager attention with the mask of documents that Transformers has for other models."""
    import transformers.models.gpt_oss.modeling_gpt_oss as gpt_oss

    usual, forward = gpt_oss.create_causal_mask, model.model.forward
    windowed = gpt_oss.create_sliding_window_causal_mask

    def told(*args, position_ids=None, **kwargs):
        gpt_oss.create_causal_mask = lambda **given: usual(**given, position_ids=position_ids)
        gpt_oss.create_sliding_window_causal_mask = lambda **given: windowed(**given, position_ids=position_ids)
        try:
            return forward(*args, position_ids=position_ids, **kwargs)
        finally:
            gpt_oss.create_causal_mask, gpt_oss.create_sliding_window_causal_mask = usual, windowed

    model.model.forward = told


def draw(runs):
    """One panel for each model: the first run as a wide line, the others on top of it."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 300" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="680" height="300" fill="white"/>')
    for panel, model in enumerate(MODELS):
        left, every = 50 + 340 * panel, [loss for _, found in runs for loss in found[model]]
        low, high = min(every), max(every)
        parts.append(f'<text x="{left}" y="22" font-size="14">{model}: loss</text>')
        for loss, y in ((high, 40), ((low + high) / 2, 145), (low, 250)):
            parts.append(
                f'<path d="M{left} {y}h270" stroke="#ddd"/><text x="{left - 6}" y="{y + 4}" text-anchor="end">{loss:.2f}</text>'
            )
        parts.append(
            f'<text x="{left}" y="268">1</text><text x="{left + 270}" y="268" text-anchor="end">step {len(runs[0][1][model])}</text>'
        )
        for number, (name, found) in enumerate(runs):
            color, width = ("#f5a742", 6) if number == 0 else ("#1d4ed8", 1.5)
            step = 270 / max(len(found[model]) - 1, 1)
            points = " ".join(
                f"{left + step * n:.1f},{40 + 210 * (high - loss) / (high - low):.1f}"
                for n, loss in enumerate(found[model])
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
            parts.append(f'<path d="M{left + 120} {56 + 18 * number}h24" stroke="{color}" stroke-width="{width}"/>')
            parts.append(f'<text x="{left + 150}" y="{60 + 18 * number}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description="Fine-tunes two small models; see the top of the file.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the losses go")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="the JSON of another run: compared, and in the plot"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG of them")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: weights in bfloat16; no GPU has run it yet"
    )
    given = parser.parse_args()
    other = json.loads(given.against.read_text()) if given.against else None
    world, alone = int(os.environ.get("WORLD_SIZE", "1")), "WORLD_SIZE" not in os.environ
    if not alone:
        if given.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo" if given.device == "cpu" else "cpu:gloo,cuda:nccl")
    found = {name: losses(name, given.steps, alone, given.device) for name in MODELS}
    if int(os.environ.get("RANK", "0")) == 0:
        title = "one process" if alone else f"cpattn, {world} processes"
        runs = [(title, found)]
        if given.json:
            given.json.write_text(json.dumps({"name": title, "losses": found}) + "\n")
        if other:
            runs.insert(0, (other["name"], other["losses"]))
            for name in MODELS:
                worst = max(abs(a - b) / b for a, b in zip(found[name], other["losses"][name], strict=True))
                print(f"{name}: largest relative difference to {other['name']}: {worst:.1e}")
        if given.plot:
            given.plot.write_text(draw(runs))
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
