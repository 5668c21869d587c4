# SPDX-License-Identifier: MIT OR Apache-2.0
"""Transformers' recurrent layers on a rank's own tokens, and what they cost: one form for each family.

Each runs the layer's own forward once over all rows of this rank. What a family needs of its module is named, so that another version of
Transformers without it is noticed when `ContextParallel` is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..shared import same, view
from . import delta, inline, selective
from .choice import Cost
from .segments import Documents, convolution, names_of, run

CONVOLUTION = "causal_conv1d_fn"


@dataclass(frozen=True)
class Form:
    """How layers of a class pass states: `run` takes a layer, the documents and the arguments of the layer's forward. `names` are the
    functions of its module that are replaced, one of each row; `counts` says what the layer costs."""

    run: Callable[..., Any]
    names: tuple[tuple[str, ...], ...]
    counts: Callable[[Any], Cost]

    def missing(self, layer: nn.Module) -> str | None:
        """What the layer lacks for it."""
        there = names_of(layer)
        for names in self.names:
            if not any(name in there for name in names):
                return f"the module of {type(layer).__name__} has no function {' or '.join(names)}"
        hooked = [name for name, child in layer.named_children() if hasattr(child, "_hf_hook")]
        if hooked:
            return f"{type(layer).__name__}.{hooked[0]} has a hook of accelerate, which moves its weights"
        return None


def _convolved(layer: Any, documents: Documents, taps: int) -> dict[str, Callable[..., Any]]:
    return {CONVOLUTION: convolution(documents, names_of(layer)[CONVOLUTION], taps)}


def delta_rule(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Any:
    there = names_of(layer)
    kernel = next(name for name in delta.NAMES if name in there)
    functions = _convolved(layer, documents, layer.conv_kernel_size - 1)
    return run(layer, functions | {kernel: delta.delta_rule(documents, there[kernel])}, hidden_states)


def mamba2(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Any:
    kernel = selective.chunk_scan(documents, names_of(layer)[selective.CHUNKS])
    functions = _convolved(layer, documents, layer.conv_kernel_size - 1) | {selective.CHUNKS: kernel}
    return run(view(layer, training=False), functions, hidden_states)


def mamba(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Any:
    kernel = selective.selective_scan(documents, names_of(layer)[selective.SCAN])
    functions = _convolved(layer, documents, layer.conv_kernel_size - 1) | {selective.SCAN: kernel}
    return run(view(layer, training=False), functions, hidden_states)


def short_convolution(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Any:
    return run(layer, _convolved(layer, documents, layer.conv.kernel_size[0] - 1), hidden_states)


def lightning(layer: Any, documents: Documents, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    single = view(
        layer,
        qkv_proj=same,
        norm=same,
        output_gate=lambda x: x.new_full((), float("inf")),  # the gate is 1
        out_proj=same,
    )
    arguments = {"position_embeddings": None, "attention_mask": None}
    y = layer.norm(inline.lightning(layer, documents, layer.qkv_proj(hidden_states), single, arguments))
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * y), None


def recurrent_block(layer: Any, documents: Documents, input_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    unit = layer.rg_lru
    usual = partial(type(unit)._rnn_scan, unit)
    places = [torch.arange(one.first, one.end) for one in documents.segments] or [torch.zeros(1, dtype=torch.int64)]
    whole = view(
        layer,
        conv_1d=convolution(documents, layer.conv_1d, layer.conv_1d.kernel_size[0] - 1),
        rg_lru=view(unit, _rnn_scan=inline.recurrence(documents, usual)),
    )
    position_ids = torch.cat(places)[None].to(input_states.device)
    out: Any = type(layer).forward(whole, input_states, position_ids=position_ids, attention_mask=None, use_cache=False)
    return out[0], None


def _delta_cost(layer: Any) -> Cost:
    if hasattr(layer, "num_v_heads"):
        parts, heads, keys, values = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        columns = 2 * parts * keys + 3 * heads * values + 2 * heads
    else:
        parts = heads = layer.num_heads
        keys = values = layer.head_dim
        columns = 6 * heads * keys + heads
    chunk = 64
    token = heads * (3 * chunk * keys + 2 * chunk * values + 3 * keys * values)
    return Cost(parts, columns, heads * keys * (keys + values), token, heads * (2 * chunk * keys + 4 * keys * keys))


def _mamba2_cost(layer: Any) -> Cost:
    heads, wide, state, groups = layer.num_heads, layer.head_dim, layer.ssm_state_size, layer.n_groups
    columns = 2 * heads * wide + 2 * groups * state + heads
    token = heads * (layer.chunk_size * (state + wide) + 2 * state * wide)
    return Cost(groups if groups > 1 else heads, columns, heads * (wide * state + 1), token, heads * state * wide)


def _mamba_cost(layer: Any) -> Cost:
    wide, state = layer.intermediate_size, layer.ssm_state_size
    # A token within a document: what it adds to the end state, and what it reads of the initial one.
    return Cost(getattr(layer, "n_mamba_heads", wide), 3 * wide, 2 * wide * state, 3 * wide * state, 4 * wide * state)


def _convolution_cost(layer: Any) -> Cost:
    wide, taps = layer.conv.in_channels, layer.conv.kernel_size[0]
    return Cost(wide, 4 * wide, 0, taps * wide, 0, (taps - 1) * wide)


def _lightning_cost(layer: Any) -> Cost:
    heads, dim = layer.num_attention_heads, layer.head_dim
    token = heads * dim * (2 * layer.block_size + 2 * dim)
    return Cost(heads, 4 * heads * dim, heads * (dim * dim + 1), token, heads * dim * dim)


def _recurrent_cost(layer: Any) -> Cost:
    return Cost(
        layer.rg_lru.num_attention_heads,
        2 * layer.lru_width,
        2 * layer.lru_width,
        2 * layer.lru_width,
        2 * layer.lru_width,
    )


_CONVOLUTION = ((CONVOLUTION,),)
_DELTA = Form(delta_rule, (*_CONVOLUTION, delta.NAMES), _delta_cost)
_MAMBA2 = Form(mamba2, (*_CONVOLUTION, (selective.CHUNKS,)), _mamba2_cost)
_MAMBA = Form(mamba, (*_CONVOLUTION, (selective.SCAN,)), _mamba_cost)
_SHORT = Form(short_convolution, _CONVOLUTION, _convolution_cost)
FORMS: dict[str, Form] = {
    **dict.fromkeys(
        (
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "Qwen4ExpTextGatedDeltaNet",
            "OlmoHybridGatedDeltaNet",
            "KimiLinearDeltaAttention",
            "BailingHybridDeltaAttention",
        ),
        _DELTA,
    ),
    **dict.fromkeys(
        (
            "Mamba2Mixer",
            "NemotronHMamba2Mixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "BambaMixer",
            "Zamba2MambaMixer",
        ),
        _MAMBA2,
    ),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"), _MAMBA),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _SHORT),
    "MiniMaxLightningAttention": Form(lightning, (), _lightning_cost),
    "RecurrentGemmaRecurrentBlock": Form(recurrent_block, (), _recurrent_cost),
}
