# SPDX-License-Identifier: MIT OR Apache-2.0
"""For `sweep_transformers.py`: every model of images and texts of Transformers from a small config, and documents with images for it.

A model has images of one size or, where it takes any, of two. How it wants them is not said anywhere but in its processor, so several ways
are tried on one process; the number of an image's tokens is that of the features that the model makes of it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import models

IMAGE = 90  # the id of a token of an image
# Names that configs of vision towers and of what joins them to a text model have for small numbers.
VISION: dict[str, Any] = {
    "depth": 2, "num_heads": 4, "image_size": 16, "patch_size": 4, "out_hidden_size": 32, "embed_dim": 32, "spatial_merge_size": 2,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1], "window_size": 16, "projection_dim": 32,
    "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5, "mm_tokens_per_image": 4,
    "pooling_kernel_size": 2, "position_embedding_size": 8, "image_seq_length": 16, "num_image_tokens": 16, "scale_factor": 2, "downsample_factor": 2,
    "in_channels": 3, "num_channels": 3, "num_position_embeddings_per_side": 4, "mlp_ratio": 2, "text_hidden_size": 32, "temporal_patch_size": 2,
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": 91, "video_token_index": 91, "audio_token_id": 92, "audio_token_index": 92,
    "boi_token_id": 93, "eoi_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 94, "image_start_token_id": 93, "image_end_token_id": 94,
}  # fmt: skip
# What some models need besides, or instead.
OWN: dict[str, dict[str, Any]] = {
    "llama4_vision_model": {"intermediate_size": 128}, "gemma3": {"mm_tokens_per_image": 4}, "pixtral": {"hidden_act": "gelu"},
    "siglip_vision_model": {"vision_use_head": False}, "gemma4_vision": {"num_key_value_heads": 4}, "llama4_text": {"attention_chunk_size": 8},
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), {"image_grid_pinpoints": [[16, 32], [32, 16]]}),
    "aria": {"projector_patch_to_query_dict": {16: 4}}, "vipllava": {"vision_feature_layers": [-1, -2]},
}  # fmt: skip
# What some have no config for by default.
WHOLE: dict[str, dict[str, Any]] = {kind: {"vision_config": {}} for kind in ("gemma4", "gemma4_unified")}


def small(config: Any, numbers: dict[str, Any]) -> Any:
    """A config of the same type with small numbers, also inside of it."""
    known: dict[str, Any] = {}
    for name, value in {**numbers, **VISION}.items():
        with contextlib.suppress(Exception):
            usual = getattr(config, name)
            if usual is not None and getattr(getattr(type(config), name, None), "fset", True):
                known[name] = [value] * len(usual) if isinstance(usual, list | tuple) and isinstance(value, int) else type(usual)(value)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if kinds:
        known |= {"layer_types": kinds * 2 if len(kinds) == 1 else kinds, "num_hidden_layers": max(2, len(kinds))}
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope:
        half = int(known.get("head_dim", 8) * (rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1) // 2)
        known["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    for name in getattr(type(config), "sub_configs", {}):
        if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
            known[name] = None if "audio" in name else small(inner, numbers)
    if getattr(config, "mlp_layer_types", None):
        known["mlp_layer_types"] = config.mlp_layer_types[: known["num_hidden_layers"]]
    return type(config)(**known | OWN.get(config.model_type, {}))


def build(kind: str, numbers: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **WHOLE.get(kind, {}))
    made = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    made = made[0] if isinstance(made, tuple) else made
    config = small(config, numbers)
    with torch.device("meta"):
        size = sum(p.numel() for p in made._from_config(config).parameters())
    if size > 20_000_000:
        raise ValueError(f"{size / 1e6:.0f} million parameters from the small config")
    model = made._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()  # some draw random numbers in training


def ways(model: Any) -> Iterator[Callable[[int], dict[str, torch.Tensor]]]:
    """How a model may want an image, by its number."""
    takes, draw = inspect.signature(model.forward).parameters, torch.Generator().manual_seed(5)
    vision = getattr(model.config, "vision_config", None) or model.config
    patch, time = getattr(vision, "patch_size", 4), getattr(vision, "temporal_patch_size", 1)
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    size = getattr(vision, "image_size", 16) or 16
    size = size[0] if isinstance(size, list | tuple) else size

    merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in takes else {}

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw)

    def grid(at: int) -> tuple[int, int]:
        return ((4, 8), (4, 4))[at % 2]

    def grids(*shape: int) -> Callable[[int], dict[str, torch.Tensor]]:
        return lambda at: {"pixel_values": some(grid(at)[0] * grid(at)[1], *shape), "image_grid_thw": torch.tensor([[1, *grid(at)]])} | merged

    if "image_grid_thw" in takes:
        for shape in ((3 * time * patch * patch,), (3 * patch * patch,), (3, patch, patch), (3, time, patch, patch)):
            yield grids(*shape)
    if "image_position_ids" in takes:
        def placed(at: int) -> dict[str, torch.Tensor]:
            high, wide = grid(at)
            places = torch.full((1, 32, 2), -1)
            places[0, : high * wide] = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)
            return {"pixel_values": some(1, 32, 3 * patch * patch), "image_position_ids": places}

        yield placed
    if "spatial_shapes" in takes:
        yield lambda at: {
            "pixel_values": some(1, 16, 3 * patch * patch), "spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64)
        }  # fmt: skip
    if "image_sizes" in takes:
        yield lambda at: {"pixel_values": some(1, 3, size, size), "image_sizes": torch.tensor([[size, size // (1 + at % 2)]])}
        yield lambda at: {"pixel_values": some(1, 3, 3, size, size), "image_sizes": torch.tensor([[size, 2 * size]])}
        yield lambda at: {"pixel_values": some(1, 5, 3, size, size), "image_sizes": torch.tensor([[size, size]])}
    yield lambda at: {"pixel_values": some(1, 3, size, size)}
    yield lambda at: {"pixel_values": some(1, 1, 3, size, size)}


def tokens(model: Any, given: dict[str, torch.Tensor]) -> int:
    """The number of tokens of an image, by the features that the model makes of it."""
    feature = model.get_image_features
    takes = inspect.signature(feature).parameters
    with torch.no_grad():
        out = feature(**{name: value for name, value in given.items() if name in takes})
    found = out.get("pooler_output") if hasattr(out, "get") else out
    found = out.last_hidden_state if found is None else found
    return sum(one[..., 0].numel() for one in (found if isinstance(found, list | tuple) else [found]))


TEXTS = [[3, 5, 2], [9], [1, 6], [4]]
ROWS = ("input_ids", "labels", "token_type_ids", "mm_token_type_ids")


def documents(model: Any, way: Callable[[int], dict[str, torch.Tensor]] | None) -> list[dict[str, torch.Tensor]]:
    """Documents of texts, with images between them if there is a way."""
    draw, at, made = torch.Generator().manual_seed(1), 0, []
    takes = inspect.signature(model.forward).parameters
    for texts in TEXTS:
        ids, parts = [], []
        for i, n in enumerate(texts):
            if i and way is not None:
                parts.append(way(at))
                ids += [IMAGE] * tokens(model, parts[-1])
                at += 1
            ids += torch.randint(3, IMAGE, (n,), generator=draw).tolist()
        one = {"input_ids": torch.tensor([ids])}
        one["labels"] = torch.where(one["input_ids"] == IMAGE, -100, one["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if way is not None and name in takes:
                one[name] = (one["input_ids"] == IMAGE).long()
        made.append(one | {key: torch.cat([part[key] for part in parts]) for key in (parts[0] if parts else ())})
    return made


def alone(model: Any, each: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
    """Loss and gradients of one process, document by document."""
    total, count = torch.zeros(()), 0
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for one in each:
        labels = one["labels"][0, 1:]
        logits = model(**{name: value for name, value in one.items() if name != "labels"}, **cache).logits[0].float()
        total = total + F.cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    loss = total / count
    model.zero_grad()
    loss.backward()
    return loss.item(), models.gradients(model)


def tried(model: Any, images: bool) -> tuple[list[dict[str, torch.Tensor]], float, torch.Tensor]:
    """The documents with images that the model takes, and the results of one process. Raises the error of the first way."""
    first: Exception | None = None
    for way in ways(model) if images else [None]:
        try:
            each = documents(model, way)
            return each, *alone(model, each)
        except Exception as error:  # noqa: BLE001 (the next way may be right)
            first = first or error
    assert first is not None
    raise first


def packed(each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    keys = dict.fromkeys(key for one in each for key in one)
    made = {key: torch.cat([one[key] for one in each if key in one], 1 if key in ROWS else 0) for key in keys}
    return made | {"cu_seqlens": F.pad(torch.tensor([one["input_ids"].shape[1] for one in each]).cumsum(0), (1, 0))}


def table(rows: dict[str, list[Any]]) -> list[str]:
    """Lines of a table of the results on texts alone and with images: class, verdict and details by name."""
    lines = ["| model | class | texts alone | with images |", "|---|---|---|---|"]
    for kind in dict.fromkeys(name.partition(":")[2] for name in rows):
        cells = []
        for of in ("texts", "images"):
            _, verdict, detail = rows.get(f"{of}:{kind}", ["", "", ""])
            cells.append(f"{verdict}: {detail}".replace("|", "/").replace("<", "&lt;"))
        made = rows[next(name for name in rows if name.endswith(f":{kind}"))][0]
        lines.append(f"| `{kind}` | {made if isinstance(made, str) else made[0]} | {' | '.join(cells)} |")
    return lines
