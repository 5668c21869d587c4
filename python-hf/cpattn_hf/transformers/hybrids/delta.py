# SPDX-License-Identifier: MIT OR Apache-2.0
"""The gated delta net of Qwen3-Next, Qwen3.5 and OLMo hybrid, and the delta attention (KDA) of Kimi Linear and Bailing hybrid.

A head of keys has its own heads of values, so a part is some heads of keys with all that belongs to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .shared import Columns, Documents, Layer, Part, convolution, mix, same, view

Outputs = Mapping[str, Callable[..., Any]]


def gated_delta_net(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Tensor:
    each = layer.num_v_heads // layer.num_k_heads
    key, value, one = Columns(layer.head_k_dim), Columns(each * layer.head_v_dim), Columns(each)
    mixed = [key, key, value]
    if hasattr(layer, "in_proj_qkvz"):
        sections = {"in_proj_qkvz": [Columns(2 * key.width + 2 * value.width)], "in_proj_ba": [Columns(2 * each)]}
    elif hasattr(layer, "in_proj_qkv"):
        sections = {"in_proj_qkv": mixed, "in_proj_z": [value], "in_proj_b": [one], "in_proj_a": [one]}
    else:
        sections = {
            "q_proj": [key],
            "k_proj": [key],
            "v_proj": [value],
            "a_proj": [one],
            "b_proj": [one],
            "g_proj": [value],
        }
    out = "out_proj" if hasattr(layer, "out_proj") else "o_proj"

    def layer_of(part: Part, outputs: Outputs) -> Any:
        return view(
            layer,
            **outputs,
            **{
                name: part.share(getattr(layer, name))
                for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
            },
            A_log=part.rows(layer.A_log, each),
            dt_bias=part.rows(layer.dt_bias, each),
            conv1d=convolution(layer.conv1d, part, mixed),
            **{out: same},
        )

    x = hidden_states[0]
    projections = {name: (getattr(layer, name)(x), of) for name, of in sections.items()}
    y = mix(layer, documents, Layer(layer.num_k_heads, projections, layer_of, value.width))
    projected: Tensor = getattr(layer, out)(y)
    return projected


def delta_attention(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Tensor:
    head, one = Columns(layer.head_dim), Columns(1)
    forget, x = layer.forget_gate, hidden_states[0]
    low = hasattr(forget, "f_b_proj")  # of a low rank, in two steps
    projections = {
        **{name: (getattr(layer, name)(x), [head]) for name in ("q_proj", "k_proj", "v_proj")},
        "b_proj": (layer.b_proj(x), [one]),
        "forget": (forget.f_b_proj(forget.f_a_proj(x)) if low else forget.f_proj(x), [head]),
        "gate": (layer.g_b_proj(layer.g_a_proj(x)) if hasattr(layer, "g_b_proj") else layer.g_proj(x), [head]),
    }

    def layer_of(part: Part, outputs: Outputs) -> Any:
        sizes = {name: part.share(getattr(layer, name)) for name in ("num_heads", "qkv_dim")}
        decay = {
            "dt_bias": part.rows(forget.dt_bias, layer.head_dim),
            "A_log": part.rows(forget.A_log, dim=2 if forget.A_log.ndim == 4 else 0),
        }
        forgets = {"f_a_proj": same, "f_b_proj": outputs["forget"], "f_proj": outputs["forget"]}
        gates = {"g_a_proj": same, "g_b_proj": outputs["gate"], "g_proj": outputs["gate"]}
        return view(
            layer,
            **{name: outputs[name] for name in ("q_proj", "k_proj", "v_proj", "b_proj")},
            **gates,
            **sizes,
            forget_gate=view(forget, **sizes, **decay, **forgets),
            conv1d=convolution(layer.conv1d, part, [head] * 3),
            o_proj=same,
        )

    y = mix(layer, documents, Layer(layer.num_heads, projections, layer_of, layer.head_dim))
    projected: Tensor = layer.o_proj(y)
    return projected


MIXERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "Qwen4ExpTextGatedDeltaNet",
            "OlmoHybridGatedDeltaNet",
        ),
        gated_delta_net,
    ),
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), delta_attention),
}
