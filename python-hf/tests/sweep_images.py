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
WORDS = 40  # before it are the ids of texts, and after it those of parts of images
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
# What some models need besides, or instead; "_" stands before attributes that are set in the config when it is made.
HALVES = {"rope_type": "default", "rope_theta": 10000.0}
OWN: dict[str, dict[str, Any]] = {
    "llama4_vision_model": {"intermediate_size": 128}, "gemma3": {"mm_tokens_per_image": 4}, "pixtral": {"hidden_act": "gelu"},
    "siglip_vision_model": {"vision_use_head": False}, "gemma4_vision": {"num_key_value_heads": 4}, "llama4_text": {"attention_chunk_size": 8},
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), {"image_grid_pinpoints": [[16, 32], [32, 16]]}),
    "aria": {"projector_patch_to_query_dict": {16: 4}}, "vipllava": {"vision_feature_layers": [-1, -2]},
    "blip-2": {"image_token_index": IMAGE}, "instructblip": {"image_token_index": IMAGE}, "instructblipvideo": {"video_token_index": IMAGE},
    "chameleon": {"vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{chr(65 + i)}Z": 40 + i for i in range(8)}}},
    "emu3": {"vocabulary_map": {"<image>": IMAGE, "<|extra_200|>": 39, **{f"<|visual token {i:06d}|>": 40 + i for i in range(8)}}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**HALVES, "mrope_section": [1, 1, 2]}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    **dict.fromkeys(("janus_vqgan", "emu3_vqgan", "chameleon_vqgan"), {"base_channels": 32, "num_embeddings": 8, "channel_multiplier": [1, 1], "codebook_size": 8}),
    "mistral4": {"head_dim": 16},
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 32, "linear_num_heads": 4, "linear_head_dim": 8},
    "granite4_vision": {"image_grid_pinpoints": [[16, 32], [32, 16]], "deepstack_layer_map": [[-2, 0]], "downsample_rate": "1/2"},
    **dict.fromkeys(("muse_spark", "muse_glimmer"), {"out_hidden_size": 128, "projector_hidden_size": 32}),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), {"image_token_id": IMAGE}),
    "molmo2": {"video_token_id": IMAGE}, "kimi_k25": {"projection_hidden_size": 32}, "timm_wrapper": {"hidden_size": 2048},
    **dict.fromkeys(("deepseek_ocr2_sam_vision_model", "unlimited_ocr_sam_vision_model"), {
        "image_size": 64, "output_channels": 32, "downsample_channels": [32, 32], "window_size": 4, "mlp_dim": 32, "global_attn_indexes": [1],
    }),
    "qwen2_5_omni_audio_encoder": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "output_dim": 32},
    "qwen3_omni_moe_audio_encoder": {
        "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "output_dim": 32, "downsample_hidden_size": 32,
    },
    "sam_vision_model": {"window_size": 4, "global_attn_indexes": [1], "output_channels": 32, "mlp_dim": 32},
    "instructblip_qformer": {"encoder_hidden_size": 32}, "blip_2_qformer": {"encoder_hidden_size": 32},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": {**HALVES, "mrope_section": [1, 1, 1, 1]}},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "muse_spark_audio": {"out_hidden_size": 32, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_hidden_layers": 4},
    "nemotron_h_omni": {"image_token_id": IMAGE, "projector_hidden_size": 32, "vision_hidden_size": 32},
    "step3p5": {"sliding_window": 8}, "radio": {"video_temporal_patch_size": 2}, "gemma3n_text": {"intermediate_size": [48, 48]}, "gemma3n": {"vision_soft_tokens_per_image": 1}, "gemma3n_vision": {"hidden_size": 288},
    "gemma3n_audio": {"hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 1},
}  # fmt: skip
# Numbers of these models, inside of them too.
NUMBERS = {"granite4_vision": {"hidden_size": 64}}
# What some have no config for by default.
TINY: dict[str, Any] = {
    "architecture": "vit_pe_core_tiny_patch16_384",
    "model_args": {"embed_dim": 192, "img_size": [32, 32], "depth": 1, "global_pool": ""},
    "do_pooling": False,
}
WHOLE: dict[str, dict[str, Any]] = {kind: {"vision_config": {}} for kind in ("gemma4", "gemma4_unified")}
WHOLE["perception_lm"] = {"vision_config": TINY}


def small(config: Any, numbers: dict[str, Any], own: dict[str, dict[str, Any]]) -> Any:
    """A config of the same type with small numbers, also inside of it. `own` are numbers of models, besides OWN."""
    known: dict[str, Any] = {}
    for name, value in {**numbers, **VISION}.items():
        with contextlib.suppress(Exception):
            usual = getattr(config, name)
            if usual is not None and getattr(getattr(type(config), name, None), "fset", True):
                known[name] = (
                    [value] * len(usual)
                    if isinstance(usual, list | tuple) and isinstance(value, int)
                    else type(usual)(value)
                )
    if "kv_lora_rank" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if kinds:
        known |= {"layer_types": kinds * 2 if len(kinds) == 1 else kinds, "num_hidden_layers": max(2, len(kinds))}
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope:
        half = int(
            known.get("head_dim", 8)
            * (rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1)
            // 2
        )
        known["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    for name in getattr(type(config), "sub_configs", {}):
        if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
            left = "audio" in name and inner.model_type not in own and inner.model_type not in OWN
            known[name] = (
                None
                if left
                else inner
                if getattr(inner, "architecture", "") == TINY["architecture"]
                else small(inner, numbers, own)
            )
    if getattr(config, "mlp_layer_types", None):
        known["mlp_layer_types"] = config.mlp_layer_types[: known["num_hidden_layers"]]
    known |= own.get(config.model_type, {}) | OWN.get(config.model_type, {})
    return type(config)(**{name: value for name, value in known.items() if value is not None or "audio" in name})


def build(kind: str, numbers: dict[str, Any], own: dict[str, dict[str, Any]]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **WHOLE.get(kind, {}))
    made = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    made = made[0] if isinstance(made, tuple) else made
    config = small(config, numbers | NUMBERS.get(kind, {}), own)
    with torch.device("meta"):
        size = sum(p.numel() for p in made._from_config(config).parameters())
    if size > 30_000_000:
        raise ValueError(f"{size / 1e6:.0f} million parameters from the small config")
    model = made._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()  # some draw random numbers in training


def featuring(model: Any) -> Any:
    """The innermost module with `get_image_features`."""
    found = [module for module in model.modules() if hasattr(type(module), "get_image_features")]
    if not found:
        raise AttributeError(f"{type(model).__name__} has no get_image_features")
    return found[-1]


def ways(model: Any) -> Iterator[Callable[[int], dict[str, torch.Tensor]]]:
    """How a model may want an image, by its number."""
    takes, draw = (
        {
            *inspect.signature(model.forward).parameters,
            *inspect.signature(featuring(model).get_image_features).parameters,
        },
        torch.Generator().manual_seed(5),
    )
    vision = getattr(model.config, "vision_config", None) or model.config
    patch = getattr(vision, "model_patch_size", None) or getattr(vision, "patch_size", 4)
    time = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    size = getattr(vision, "image_size", 16) or 16
    size = size[0] if isinstance(size, list | tuple) else size

    merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in takes else {}

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw)

    def grid(at: int) -> tuple[int, int]:
        return ((4, 8), (4, 4))[at % 2]

    def grids(*shape: int) -> Callable[[int], dict[str, torch.Tensor]]:
        return lambda at: (
            {"pixel_values": some(grid(at)[0] * grid(at)[1], *shape), "image_grid_thw": torch.tensor([[1, *grid(at)]])}
            | merged
        )

    if "target_sizes" in takes:
        yield lambda at: {
            "pixel_values": some(1, 3, patch, grid(at)[0] * grid(at)[1] * patch),
            "target_sizes": torch.tensor([grid(at)]),
        }
    if "high_res_pixel_values" in takes:
        high = model.config.high_res_vision_config.image_size
        yield lambda at: {"pixel_values": some(1, 3, size, size), "high_res_pixel_values": some(1, 3, high, high)}
    if "qformer_input_ids" in takes:
        yield lambda at: {"pixel_values": some(1, 3, size, size), "qformer_input_ids": torch.tensor([[5, 6, 7]]) + at}
    if "image_grid_hw" in takes:
        yield lambda at: {
            "pixel_values": some(grid(at)[0] * grid(at)[1], 3 * patch * patch),
            "image_grid_hw": torch.tensor([grid(at)]),
        }
    if "image_token_pooling" in takes:  # tokens of 4 patches of an image of 4 x 4, besides one of all
        pooling = torch.stack(
            [
                torch.arange(16).view(4, 4)[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten()
                for i in range(2)
                for j in range(2)
            ]
        )
        yield lambda at: {
            "pixel_values": some(1, 16, 3 * patch * patch),
            "image_token_pooling": pooling,
            "image_grids": torch.tensor([[2, 2, 0, 0]]),
        }
    if "tile_fine_mask" in takes:
        yield lambda at: {
            "pixel_values": some(1, 2, 3, size, size),
            "pixel_attention_mask": torch.tensor([[True, at % 2 == 0]]),
        }
    if "image_grid_thw" in takes:
        for shape in (
            (3 * time * patch * patch,),
            (3 * patch * patch,),
            (3, patch, patch),
            (3, time, patch, patch),
            (2 * patch, 2 * patch, 3),
        ):
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
        yield lambda at: {
            "pixel_values": some(1, 3, size, size),
            "image_sizes": torch.tensor([[size, size // (1 + at % 2)]]),
        }
        yield lambda at: {"pixel_values": some(1, 3, 3, size, size), "image_sizes": torch.tensor([[size, 2 * size]])}
        yield lambda at: {"pixel_values": some(1, 5, 3, size, size), "image_sizes": torch.tensor([[size, size]])}
    yield lambda at: {"pixel_values": some(1, 3, size, size)}
    yield lambda at: {"pixel_values": some(1, 1, 3, size, size)}
    yield lambda at: {"pixel_values": some(1, 3, 64, 64)}
    yield lambda at: {"pixel_values": some(1, 1, 3, 32, 32)}
    yield lambda at: {"pixel_values": some(4, time, patch, patch, 3)}
    yield lambda at: {"pixel_values": some(1, 6, 3 * patch * patch)}


def tokens(model: Any, given: dict[str, torch.Tensor]) -> int:
    """The number of tokens of an image, by the features that the model makes of it."""
    feature = featuring(model).get_image_features
    takes = inspect.signature(feature).parameters
    with torch.no_grad():
        out = feature(**{name: value for name, value in given.items() if name in takes})
    found = out.get("pooler_output") if hasattr(out, "get") else out
    found = out["deepstack_features"][0][1] if found is None and "deepstack_features" in out else found
    found = out.last_hidden_state if found is None else found
    return sum(one[..., 0].numel() for one in (found if isinstance(found, list | tuple) else [found]))


# Their towers mix images, so documents in one call have other losses than one by one.
MIXING = ("minicpmv4_6", "minicpmv4_7")
TEXTS = [[3, 5, 2], [9], [1, 6], [4]]
EVERYWHERE = [[3, 5, 2], [0, 9], [1, 6], [4, 1]]  # for models that take no texts alone
ROWS = ("input_ids", "labels", "token_type_ids", "mm_token_type_ids")


def documents(model: Any, way: Callable[[int], dict[str, torch.Tensor]] | None) -> list[dict[str, torch.Tensor]]:
    """Documents of texts, with images between them if there is a way."""
    draw, at, made = torch.Generator().manual_seed(1), 0, []
    takes = inspect.signature(model.forward).parameters
    needed = "pixel_values" in takes and takes["pixel_values"].default is inspect.Parameter.empty
    for texts in EVERYWHERE if needed else TEXTS:
        ids, parts = [], []
        for i, n in enumerate(texts):
            if i and way is not None:
                parts.append(way(at))
                ids += [IMAGE] * tokens(model, parts[-1])
                at += 1
            ids += torch.randint(3, WORDS, (n,), generator=draw).tolist()
        one = {"input_ids": torch.tensor([ids])}
        one["labels"] = torch.where(one["input_ids"] == IMAGE, -100, one["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if way is not None and name in takes:
                one[name] = (one["input_ids"] == IMAGE).long()
        made.append(one | {key: joined(key, parts) for part in parts[:1] for key in part})
    return made


def loss(model: Any, each: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Of one process, document by document."""
    total, count = torch.zeros(()), 0
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for one in each:
        labels = one["labels"][0, 1:]
        logits = model(**{name: value for name, value in one.items() if name != "labels"}, **cache).logits[0].float()
        total = total + F.cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    return total / count


def alone(model: Any, each: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
    """Loss and gradients of one process."""
    model.zero_grad()
    found = loss(model, each)
    found.backward()
    return found.item(), models.gradients(model)


def tried(model: Any, images: bool) -> tuple[list[dict[str, torch.Tensor]], float, torch.Tensor]:
    """The documents with images that the model takes, and the results of one process. Raises the error of the first way."""
    if images and model.config.model_type in MIXING:
        raise ValueError("the features of an image depend on the other images of a call, in Transformers alone")
    first: Exception | None = None
    for way in ways(model) if images else [None]:
        try:
            each = documents(model, way)
            if images:
                others = [
                    one | {"pixel_values": 1 - one["pixel_values"]} if "pixel_values" in one else one for one in each
                ]
                with torch.no_grad():
                    if loss(model, others) == loss(model, each):
                        raise ValueError("the model does not read its images")
            return each, *alone(model, each)
        except Exception as error:  # noqa: BLE001 (the next way may be right)
            first = first or error
    assert first is not None
    raise first


def joined(key: str, each: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The tensors of one name, of images or documents, as one."""
    found, before = [one[key] for one in each if key in one], 0
    if key == "image_token_pooling":  # places in all patches of the call, 4 in a row of 16 for an image
        for at, one in enumerate(found):
            found[at] = one + before
            before += 4 * len(one)
    along_patches = key == "pixel_values" and any("target_sizes" in one for one in each)
    return torch.cat(found, 1 if key in ROWS else -1 if along_patches else 0)


def packed(each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    made = {key: joined(key, each) for key in dict.fromkeys(key for one in each for key in one)}
    return made | {"cu_seqlens": F.pad(torch.tensor([one["input_ids"].shape[1] for one in each]).cumsum(0), (1, 0))}
