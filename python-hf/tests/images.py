# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small models of images and texts of Transformers, documents with images for them, and one process that runs the documents one by one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch.nn import functional as F

import models

IMAGE, VIDEO = 95, 94  # the ids of tokens of images and videos
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 4}
SIGLIP = {**SIZES, "num_hidden_layers": 1, "image_size": 8, "vision_use_head": False}
TEXT = {**models.SMALL, "intermediate_size": 32}
MROPE = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
QWEN = {
    "in_channels": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "patch_size": 4,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 36,
}
# "dynamic": the model's images are of any size, in a list of patches with a grid for each image.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration", "grids",
        {
            "text_config": {
                **TEXT, "num_attention_heads": 3, "head_dim": 12,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
            },
            "vision_config": {**QWEN, "hidden_size": 16, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration", "grids",
        {
            "text_config": {**MROPE, "num_hidden_layers": 3},
            "vision_config": {**QWEN, "hidden_size": 16, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration", "grids",
        {
            "text_config": {
                **MROPE, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            },
            "vision_config": {**QWEN, "hidden_size": 16, "depth": 1, "num_position_embeddings": 16},
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration", "token_type_ids",
        {
            "text_config": {**TEXT, "sliding_window": 6, "layer_types": models.KINDS, "query_pre_attn_scalar": 8}, "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration", "places",
        {
            "text_config": {
                **TEXT, "sliding_window": 6, "layer_types": models.KINDS, "global_head_dim": 8, "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": models.WORDS, "use_bidirectional_attention": "vision",
            },
            "vision_config": {**SIZES, "num_hidden_layers": 1, "head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 8},
            "audio_config": None, "audio_token_id": 93,
        },
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration", "prefix",
        {
            "text_config": {"model_type": "gemma", **TEXT}, "projection_dim": 36,
            "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration", "pixels",
        {
            "text_config": {
                **TEXT, "num_hidden_layers": 2, "intermediate_size_mlp": 32, "layer_types": ["chunked_attention", "full_attention"],
                "num_local_experts": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 8,
            },
            "vision_config": {
                **SIZES, "num_hidden_layers": 1, "image_size": 16, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16,
                "intermediate_size": 64, "pixel_shuffle_ratio": 0.5, "vision_feature_layer": -1,
            },
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration", "sizes",
        {
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **SIZES, "num_hidden_layers": 2, "image_size": 16, "head_dim": 8}, "spatial_merge_size": 2,
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration", "pixels",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**SIZES, "num_hidden_layers": 1, "image_size": [16, 16], "patch_size": [4, 4], "use_mean_pooling": True},
            "downsample_ratio": 0.5,
        },
    ),
}  # fmt: skip


def build(name: str) -> Any:
    torch.manual_seed(0)
    kind, _, options = MODELS[name]
    made = getattr(transformers, kind)
    places = [
        one
        for one in ("image_token_id", "image_token_index")
        if one in inspect.signature(made.config_class.__init__).parameters
    ]
    videos = (
        {"video_token_id": VIDEO}
        if "video_token_id" in inspect.signature(made.config_class.__init__).parameters
        else {}
    )
    config = made.config_class(**options, **dict.fromkeys(places, IMAGE), **videos)
    model = made._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.train()


# The sizes of images in patches, where the model takes any size. A token is 2 × 2 of them.
GRIDS = [(4, 6), (8, 4), (4, 4)]


def image(kind: str, grid: tuple[int, int], draw: torch.Generator) -> tuple[int, dict[str, torch.Tensor]]:
    """The number of tokens of an image, and the arguments for it."""
    high, wide = grid

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    if kind == "grids":
        return high * wide // 4, {
            "pixel_values": some(high * wide, 96),
            "image_grid_thw": torch.tensor([[1, high, wide]]),
        }
    if kind == "places":
        places = torch.full((1, 32, 2), -1)
        places[0, : high * wide] = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)
        return high * wide // 4, {"pixel_values": some(1, 32, 48).sigmoid(), "image_position_ids": places}
    if kind == "sizes":
        high, wide = min(high, 4), 2 if wide > 4 else 4
        return high * wide // 4, {
            "pixel_values": some(1, 3, 16, 16),
            "image_sizes": torch.tensor([[high * 4, wide * 4]]),
        }
    return 4, {"pixel_values": some(1, 3, *((16, 16) if kind == "pixels" else (8, 8)))}


# Documents as lists of numbers of text tokens, with an image between two of them.
DOCUMENTS = [[3, 5, 2], [9], [1, 6], [4]]


def documents(
    name: str, seed: int = 1, every: list[list[int]] = DOCUMENTS, grids: list[tuple[int, int]] = GRIDS
) -> list[dict[str, torch.Tensor]]:
    """The arguments of documents, each for a call of its own."""
    kind, draw, at = MODELS[name][1], torch.Generator().manual_seed(seed), 0
    made = []
    for texts in every:
        ids, parts = [], []
        for i, n in enumerate(texts):
            if i:
                tokens, part = image(kind, grids[at % len(grids)], draw)
                at += 1
                ids += [IMAGE] * tokens
                parts.append(part)
            ids += torch.randint(3, 90, (n,), generator=draw).tolist()
        one: dict[str, torch.Tensor] = {"input_ids": torch.tensor([ids])}
        one["labels"] = torch.where(one["input_ids"] == IMAGE, -100, one["input_ids"])
        types = (one["input_ids"] == IMAGE).long()
        if kind in ("grids", "places"):
            one["mm_token_type_ids"] = types
        if kind == "token_type_ids":
            one["token_type_ids"] = types
        if kind == "prefix":  # an image and the words of its question
            one["token_type_ids"] = (torch.arange(len(ids)) > (len(ids) * 2) // 3).long()[None]
        for key in parts[0] if parts else ():
            one[key] = torch.cat([part[key] for part in parts])
        made.append(one)
    return made


def with_videos(name: str, each: list[dict[str, torch.Tensor]], seed: int = 2) -> list[dict[str, torch.Tensor]]:
    """Documents with a video in the first and the third: 2 and 3 frames of 4 x 4 patches, which Qwen3-VL has as runs with a word before each."""
    draw, made = torch.Generator().manual_seed(seed), [dict(one) for one in each]
    for at, frames in ((0, 2), (2, 3)):
        one, apart = made[at], name != "qwen2_5_vl"
        ids = sum(([5 + frame] * apart + [VIDEO] * 4 for frame in range(frames)), [7] * (not apart))
        one["input_ids"] = torch.cat([one["input_ids"], torch.tensor([ids + [8, 9]])], 1)
        one["labels"] = torch.where(one["input_ids"] >= VIDEO, -100, one["input_ids"])
        one["mm_token_type_ids"] = (one["input_ids"] == IMAGE).long() + 2 * (one["input_ids"] == VIDEO)
        one["pixel_values_videos"] = torch.randn(frames * 16, 96, generator=draw)
        one["video_grid_thw"] = torch.tensor([[frames, 4, 4]])
        if not apart:
            one["second_per_grid_ts"] = torch.tensor([0.5 + at])
    return made


TOKENS = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")


def packed(each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The documents in one row, without what says where they end."""
    keys = dict.fromkeys(key for one in each for key in one)
    return {key: torch.cat([one[key] for one in each if key in one], 1 if key in TOKENS else 0) for key in keys}


def lengths(each: list[dict[str, torch.Tensor]]) -> list[int]:
    return [one["input_ids"].shape[1] for one in each]


def ends(each: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return F.pad(torch.tensor(lengths(each)).cumsum(0), (1, 0))


def positions(each: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths(each)])[None]


def padded(each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The documents as rows, padded at the right and at the left by turns."""
    made, width = packed(each), max(lengths(each))
    fills = {"labels": -100}
    for key in [key for key in TOKENS if key in made]:
        rows = torch.full((len(each), width), fills.get(key, 0))
        for row, one in enumerate(each):
            n = one[key].shape[1]
            rows[row, slice(n) if row % 2 else slice(width - n, None)] = one[key][0]
        made[key] = rows
    made["attention_mask"] = (made["input_ids"] != 0).long()
    return made


def one_by_one(model: Any, each: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of the documents, and the logits of each."""
    total, count, logits = torch.zeros(()), 0, []
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for one in each:
        labels = one["labels"][0, 1:]
        logits.append(model(**{key: value for key, value in one.items() if key != "labels"}, **cache).logits[0].float())
        total = total + F.cross_entropy(logits[-1][:-1], labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    return total / count, [one.detach() for one in logits]
