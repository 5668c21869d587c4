# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains a small Qwen3-VL, vision tower included, on documents with two images of different sizes, and shows that several processes have the
losses of one.

    pip install ./python './python-hf[transformers]'
    python3 examples/python/qwen3_vl.py --json one.json
    torchrun --nproc-per-node 3 examples/python/qwen3_vl.py --json three.json --against one.json --plot both.svg

Nothing is downloaded: the model is made from a config, images are drawn here. Each image has one color, and the text after the two names
both, so the loss can only fall if the images are read. A processor makes such batches in a real job: `input_ids` with a run of image tokens
for each image, `mm_token_type_ids` that mark them, `pixel_values` of all patches, and `image_grid_thw` with the size of each image in patches.
The two lines that are for context parallelism are marked. With --shard each image goes through the vision tower on one process.
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
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments

from cpattn_hf.transformers import ContextParallel

COLORS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.9, 0.9, 0.1),
    "white": (1.0, 1.0, 1.0),
}
WORDS = ["<pad>", "<image>", "<begin>", "<end>", "the", "first", "second", "is", "and", ".", *COLORS]
ID = {word: n for n, word in enumerate(WORDS)}
# High and wide, in patches of 4 × 4 pixels. The tower makes a token of 2 × 2 patches.
GRIDS = ((4, 6), (8, 4), (6, 6))
TEXT = {
    "vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
IDS = {"image_token_id": ID["<image>"], "vision_start_token_id": ID["<begin>"], "vision_end_token_id": ID["<end>"]}


def document(draw):
    """Two images and a text about them."""
    colors, ids, pixels, grids = draw.sample(list(COLORS), 2), [], [], draw.sample(GRIDS, 2)
    for color, (high, wide) in zip(colors, grids):
        ids += [ID["<begin>"], *[ID["<image>"]] * (high * wide // 4), ID["<end>"]]
        # A patch: channels × 2 frames × 4 × 4 pixels, as processors put them.
        patch = torch.tensor(COLORS[color]).repeat_interleave(2 * 4 * 4)
        noise = torch.Generator().manual_seed(draw.randrange(1 << 30))
        pixels.append(patch + 0.2 * torch.randn(high * wide, len(patch), generator=noise))
    ids += [ID[word] for word in f"the first is {colors[0]} and the second is {colors[1]} .".split()]
    return {
        "ids": torch.tensor(ids),
        "pixels": torch.cat(pixels),
        "grids": torch.tensor([(1, *grid) for grid in grids]),
    }


def collate(documents):
    """Rows with padding at the right, and the images of all rows in their order."""
    ids = torch.nn.utils.rnn.pad_sequence([one["ids"] for one in documents], batch_first=True)
    return {
        "input_ids": ids, "attention_mask": (ids != 0).long(), "mm_token_type_ids": (ids == ID["<image>"]).long(),
        "labels": ids.masked_fill(ids <= ID["<end>"], -100),
        "pixel_values": torch.cat([one["pixels"] for one in documents]), "image_grid_thw": torch.cat([one["grids"] for one in documents]),
    }  # fmt: skip


def losses(steps, alone, shard):
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_vl", text_config=TEXT, vision_config=VISION, **IDS)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    kind = Trainer
    if not alone:
        cp = ContextParallel(model, vision="shard" if shard else "all")  # context parallelism: this line
        kind = cp.trainer(Trainer)  # and this one
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, seed=1, remove_unused_columns=False,
        )  # fmt: skip
        trainer = kind(
            model=model, args=args, train_dataset=[document(draw) for _ in range(4 * steps)], data_collator=collate
        )
        trainer.train()
    if not alone:
        cp.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--shard", action="store_true", help="each image on one process")
    parser.add_argument("--json", type=Path, help="writes the losses")
    parser.add_argument("--against", type=Path, help="losses of another run, to compare with")
    parser.add_argument("--plot", type=Path, help="writes a picture of both")
    given = parser.parse_args()
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    found = losses(given.steps, alone, given.shard)
    if not alone and dist.get_rank():
        return
    world = 1 if alone else dist.get_world_size()
    name = "1 process" if alone else f"{world} processes"
    if given.json:
        given.json.write_text(json.dumps({"name": name, "losses": found}))
    print(f"{name}: loss {found[0]:.4f} at first, {found[-1]:.4f} after {len(found)} steps")
    if given.against:
        other = json.loads(given.against.read_text())
        apart = max(abs(a - b) for a, b in zip(other["losses"], found, strict=True))
        print(f"at most {apart:.1e} away from {other['name']}")
        if given.plot:
            runs = [(other["name"], other["losses"]), (name, found)]
            given.plot.write_text(pictures.of_runs("Qwen3-VL, two images in each text: loss", runs))


if __name__ == "__main__":
    main()
