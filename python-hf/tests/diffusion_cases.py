# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small random transformers of Diffusers, and inputs for them whose lengths 2, 3 and 5 do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

# Of results of f32, whose sums are in another order: each is below 4e-6 (sweep_diffusers.py prints them).
BOUND = 1e-5
GRADIENT_BOUND = 3e-5

Inputs = dict[str, Any]


def _flux(text: int = 7, height: int = 7, width: int = 11, batch: int = 1) -> tuple[Any, Inputs]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=3, joint_attention_dim=24,
        pooled_projection_dim=24, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    grid = torch.cartesian_prod(torch.zeros(1), torch.arange(height).float(), torch.arange(width).float())
    return model, {
        "hidden_states": _random(batch, height * width, 4), "encoder_hidden_states": _random(batch, text, 24), "pooled_projections": _random(batch, 24),
        "timestep": torch.full((batch,), 0.7), "img_ids": grid, "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip


def _flux_controlled() -> tuple[Any, Inputs]:
    model, inputs = _flux()
    return model, inputs | {
        "controlnet_block_samples": [_random(1, 77, 48)],
        "controlnet_single_block_samples": (_random(1, 77, 48),) * 2,
    }


def _flux_adapted() -> tuple[Any, Inputs]:
    """With an IP-Adapter, to whose tokens images attend too."""
    model, inputs = _flux(batch=2)
    for block in model.transformer_blocks:
        block.attn.set_processor(
            FluxIPAdapterAttnProcessor(hidden_size=48, cross_attention_dim=16, num_tokens=(4,), scale=0.7)
        )
    return model, inputs | {"joint_attention_kwargs": {"ip_hidden_states": [_random(2, 4, 16)]}}


def _joint(kind: str, text: int = 7) -> tuple[Any, Inputs]:
    model = getattr(diffusers, kind)(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=24, axes_dims_rope=[4, 4, 8], **({"out_channels": 4} if kind.startswith("Ovis") else {}),
    )  # fmt: skip
    inputs = _flux(text)[1]
    del inputs["pooled_projections"]
    return model, inputs


def _flux2(text: int = 7) -> tuple[Any, Inputs]:
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=3, joint_attention_dim=24,
        timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    grid = torch.cartesian_prod(torch.zeros(1), torch.arange(7.0), torch.arange(11.0), torch.zeros(1))[None]
    words = torch.cartesian_prod(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.arange(float(text)))[None]
    return model, {
        "hidden_states": _random(1, 77, 4), "encoder_hidden_states": _random(1, text, 24), "timestep": torch.tensor([0.7]),
        "img_ids": grid, "txt_ids": words, "guidance": torch.tensor([3.5]),
    }  # fmt: skip


def _qwen(masked: bool = False, batch: int = 1, **more: Any) -> tuple[Any, Inputs]:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3, joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4), **more,
    )  # fmt: skip
    shapes = [[(1, 7, 7), (1, 2, 2)] if more.get("zero_cond_t") else [(1, 7, 7)]] * batch
    inputs = {
        "hidden_states": _random(batch, sum(f * h * w for f, h, w in shapes[0]), 16), "encoder_hidden_states": _random(batch, 7, 16),
        "timestep": torch.full((batch,), 0.7), "img_shapes": shapes,
    }  # fmt: skip
    if masked:
        inputs["encoder_hidden_states_mask"] = torch.tensor([[1, 0, 1, 1, 1, 0, 0], [1] * 7, [1, 0, 1, 1, 1, 0, 0]])[
            :batch
        ]
    return model, inputs


def _qwen_controlled() -> tuple[Any, Inputs]:
    model, inputs = _qwen()
    return model, inputs | {"controlnet_block_samples": [_random(1, 49, 48), _random(1, 49, 48)]}


def _wan(
    batch: int = 1, tokens: bool = False, image: bool = False, kind: str = "WanTransformer3DModel"
) -> tuple[Any, Inputs]:
    more: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 36} if image else {}
    model = getattr(diffusers, kind)(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32,
        num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32, **more,
    )  # fmt: skip
    inputs = {
        "hidden_states": _random(batch, 4, 7, 2, 14),
        "timestep": torch.full((batch, 49), 400.0) if tokens else torch.full((batch,), 400),
        "encoder_hidden_states": _random(batch, 512 if image else 7, 16),
    }
    if tokens:
        inputs["timestep"][:, ::3] = 0.0
    if image:
        inputs["encoder_hidden_states_image"] = _random(batch, 5, 16)
    return model, inputs


def _vace() -> tuple[Any, Inputs]:
    model = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32,
        num_layers=3, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32, vace_layers=[0, 2], vace_in_channels=8,
    )  # fmt: skip
    return model, {
        "hidden_states": _random(1, 4, 7, 2, 14), "timestep": torch.tensor([400]), "encoder_hidden_states": _random(1, 7, 16),
        "control_hidden_states": _random(1, 8, 7, 2, 14), "control_hidden_states_scale": torch.tensor([0.7, 1.3]),
    }  # fmt: skip


def _ltx(tokens: bool = False) -> tuple[Any, Inputs]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=8,
        cross_attention_dim=24,
        num_layers=2,
        caption_channels=16,
    )
    mask = torch.ones(2, 7)
    mask[0, 4:] = 0
    times = torch.full((2, 49 if tokens else 1), 400.0)
    if tokens:
        times[:, ::3] = 0.0
    return model, {
        "hidden_states": _random(2, 49, 4), "encoder_hidden_states": _random(2, 7, 16), "encoder_attention_mask": mask,
        "timestep": times, "num_frames": 7, "height": 1, "width": 7,
    }  # fmt: skip


def _ltx2(tokens: bool = False, rope: str = "interleaved", masked: bool = True, **more: Any) -> tuple[Any, Inputs]:
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=8, cross_attention_dim=24, audio_in_channels=4,
        audio_out_channels=4, audio_num_attention_heads=3, audio_attention_head_dim=4, audio_cross_attention_dim=12, num_layers=2,
        caption_channels=16, rope_type=rope, rope_double_precision=False, **more,
    )  # fmt: skip
    mask = torch.ones(2, 7)
    mask[0, 4:] = 0
    inputs = {
        "hidden_states": _random(2, 49, 4), "audio_hidden_states": _random(2, 5, 4), "encoder_hidden_states": _random(2, 7, 16),
        "audio_encoder_hidden_states": _random(2, 7, 16), "timestep": torch.full((2, 49) if tokens else (2,), 400.0),
        "audio_timestep": torch.full((2,), 300.0), "num_frames": 7, "height": 1, "width": 7, "fps": 25.0, "audio_num_frames": 5,
    }  # fmt: skip
    if tokens:
        inputs["timestep"][:, ::3] = 0.0
    return model, inputs | ({"encoder_attention_mask": mask, "audio_encoder_attention_mask": mask} if masked else {})


def _helios(history: bool = True, **more: Any) -> tuple[Any, Inputs]:
    model = diffusers.HeliosTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32,
        num_layers=2, rope_dim=(4, 4, 4), has_multi_term_memory_patch=True, zero_history_timestep=True, **more,
    )  # fmt: skip
    inputs = {
        "hidden_states": _random(1, 4, 7, 2, 14),
        "timestep": torch.tensor([400]),
        "encoder_hidden_states": _random(1, 7, 16),
    }
    if history:
        inputs |= {
            "indices_hidden_states": torch.arange(6, 13)[None], "indices_latents_history_short": torch.arange(5, 6)[None],
            "indices_latents_history_mid": torch.arange(3, 5)[None], "indices_latents_history_long": torch.arange(0, 3)[None],
            "latents_history_short": _random(1, 4, 1, 2, 14), "latents_history_mid": _random(1, 4, 2, 2, 14),
            "latents_history_long": _random(1, 4, 3, 2, 14),
        }  # fmt: skip
    return model, inputs


def _minimax() -> tuple[Any, Inputs]:
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=3, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1, ffn_dim=32, in_channels=3,
        audio_in_channels=6, patch_size=(1, 2, 2), text_dim=16, freq_dim=32, time_embed_hidden_dim=24, time_embed_dim=24, rope_freq_dim=2,
    )  # fmt: skip
    text, video, audio = 7, 17, 5
    tags = torch.tensor([1] * text + [0] * video + [2] * audio)
    places = torch.stack([torch.arange(len(tags)), torch.arange(len(tags)) % 3, torch.arange(len(tags)) % 5], 1)
    return model, {
        "hidden_states": _random(1, video, 12), "audio_hidden_states": _random(1, audio, 6), "encoder_hidden_states": _random(1, text, 16),
        "timestep": torch.tensor([0.4, 0.0]), "timestep_indices": (torch.arange(len(tags)) % 4 == 3).long(), "token_tags": tags, "position_ids": places,
        "video_indices": torch.where(tags == 0)[0], "audio_indices": torch.where(tags == 2)[0], "text_indices": torch.where(tags == 1)[0],
    }  # fmt: skip


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_draw)


_draw = torch.Generator()

# By what is special about them.
CASES: dict[str, Callable[[], tuple[Any, Inputs]]] = {
    "Flux": _flux,
    "Flux, 2 in a batch": lambda: _flux(batch=2),
    "Flux, 2 words": lambda: _flux(text=2),
    "Flux, ControlNet": _flux_controlled,
    "Flux, IP-Adapter": _flux_adapted,
    "Flux2": _flux2,
    "Flux2, 2 words": lambda: _flux2(text=2),
    "OvisImage": lambda: _joint("OvisImageTransformer2DModel"),
    "OvisImage, 2 words": lambda: _joint("OvisImageTransformer2DModel", text=2),
    "LongCatImage": lambda: _joint("LongCatImageTransformer2DModel"),
    "LongCatImage, 2 words": lambda: _joint("LongCatImageTransformer2DModel", text=2),
    "QwenImage": _qwen,
    "QwenImage, masks": lambda: _qwen(masked=True, batch=3),
    "QwenImage, ControlNet": _qwen_controlled,
    "QwenImage, edit": lambda: _qwen(zero_cond_t=True),
    "Wan": _wan,
    "Wan, 2 in a batch": lambda: _wan(batch=2),
    "Wan, timesteps of tokens": lambda: _wan(tokens=True),
    "Wan, image": lambda: _wan(image=True),
    "ChronoEdit": lambda: _wan(kind="ChronoEditTransformer3DModel", image=True),
    "ChronoEdit, timesteps of tokens": lambda: _wan(kind="ChronoEditTransformer3DModel", tokens=True),
    "WanVACE": _vace,
    "LTX": _ltx,
    "LTX, timesteps of tokens": lambda: _ltx(tokens=True),
    "LTX2": _ltx2,
    "LTX2, timesteps of tokens": lambda: _ltx2(tokens=True),
    "LTX2, split rotary embeddings": lambda: _ltx2(rope="split"),
    "Helios": lambda: _helios(history=False),
    "Helios, history": _helios,
    "MiniMaxH3": _minimax,
}


def build(case: str) -> tuple[Any, Inputs]:
    """The model in evaluation, and its inputs, the same in each process."""
    torch.manual_seed(5)
    _draw.manual_seed(7)
    model, inputs = CASES[case]()
    with torch.no_grad():
        for parameter in model.parameters():
            # Wide enough that attention weighs keys differently; tables of zeros would hide rows.
            parameter.copy_(
                torch.randn(parameter.shape, generator=_draw) * (0.3 if parameter.ndim > 1 else 0.2)
                + (parameter.ndim == 1) * 0.8
            )
    return model.eval(), inputs


def results(output: Any) -> list[torch.Tensor]:
    """The tensors of what a model returns."""
    return [
        one for one in (output if isinstance(output, tuple) else output.to_tuple()) if isinstance(one, torch.Tensor)
    ]


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest distance of two results, in units of the root mean square of what is expected."""
    assert [one.shape for one in found] == [one.shape for one in expected]
    return max(((a - b).abs().max() / b.square().mean().sqrt()).item() for a, b in zip(found, expected, strict=True))


def rows_of(dim: int) -> Any:
    """For a plan: an output that is gathered."""
    from diffusers.models._modeling_parallel import ContextParallelOutput

    return ContextParallelOutput(gather_dim=dim)
