# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reinforcement learning with TRL's GRPOTrainer on a toy reward: a small model learns to write names of animals only.
Several processes share each forward and backward pass, and have the rewards of one.

    pip install ./python './python-hf[transformers]' trl datasets
    python3 examples/python/grpo.py --json one.json
    torchrun --nproc-per-node 4 examples/python/grpo.py --json four.json --against one.json --plot both.svg

Nothing is downloaded: model, tokenizer and prompts are made here. The two lines that are for context parallelism are marked. Each process
generates with the whole model, and the first one's completions count; the passes that compute log-probabilities and gradients are shared.
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
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from cpattn_hf.transformers import ContextParallel

ANIMALS = {"fox", "dog", "cat"}
WORDS = "fox dog cat house river tree".split()
SIZES = {
    "vocab_size": len(WORDS) + 2, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def tokenizer():
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def prompts(count):
    draw = random.Random(1)
    return Dataset.from_list([{"prompt": " ".join(draw.choices(WORDS, k=draw.randrange(8, 40)))} for _ in range(count)])


def reward(completions, **_):
    """The share of a completion's words that are animals."""
    return [sum(word in ANIMALS for word in text.split()) / max(len(text.split()), 1) for text in completions]


def rewards(steps, alone):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES), dtype=torch.float32)
    trainer = GRPOTrainer
    if not alone:
        cp = ContextParallel(model)  # context parallelism: this line
        trainer = cp.trainer(GRPOTrainer)  # and this one
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder, max_steps=steps, per_device_train_batch_size=16, num_generations=8, max_completion_length=8, beta=0.0, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, seed=1,
        )  # fmt: skip
        trainer = trainer(
            model=model, args=args, train_dataset=prompts(400), reward_funcs=reward, processing_class=tokenizer()
        )
        trainer.train()
    if not alone:
        cp.close()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main():
    parser = argparse.ArgumentParser(description="Trains a small model with GRPO; see the top of the file.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the mean rewards go")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="the JSON of another run: compared, and in the plot"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG of them")
    given = parser.parse_args()
    other = json.loads(given.against.read_text()) if given.against else None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    found = rewards(given.steps, world == 1)
    if int(os.environ.get("RANK", "0")) == 0:
        title = "one process" if world == 1 else f"cpattn, {world} processes"
        if given.json:
            given.json.write_text(json.dumps({"name": title, "rewards": found}) + "\n")
        runs = [(title, found)]
        if other:
            runs.insert(0, (other["name"], other["rewards"]))
            worst = max(abs(a - b) for a, b in zip(found, other["rewards"], strict=True))
            print(f"largest difference to {other['name']}: {worst:.1e}")
        if given.plot:
            given.plot.write_text(pictures.of_runs("GRPO: mean reward", runs))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
