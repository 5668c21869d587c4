# SPDX-License-Identifier: MIT OR Apache-2.0
"""The recurrent block of RecurrentGemma: a convolution and the RG-LRU, whose gates are of one head each. The other branch, which the
result is multiplied with, runs on this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .shared import Columns, Documents, Layer, Part, convolution, mix, same, view


def recurrent_block(layer: Any, documents: Documents, input_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    unit = layer.rg_lru
    block = Columns(unit.block_width)

    def layer_of(part: Part, outputs: Mapping[str, Callable[[Tensor], Tensor]]) -> Any:
        gates = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias")
        recurrent = view(
            unit,
            num_attention_heads=part.end - part.begin,
            recurrent_param=part.rows(unit.recurrent_param, block.width),
            **{name: part.rows(getattr(unit, name)) for name in gates},
        )
        return view(
            layer,
            linear_x=outputs["linear_x"],
            linear_y=same,
            act_fn=lambda x: 1.0,
            conv_1d=convolution(layer.conv_1d, part, [block]),
            rg_lru=recurrent,
            linear_out=same,
        )

    def arguments(x: Tensor) -> dict[str, Any]:
        return {
            "position_ids": torch.arange(x.shape[1], device=x.device)[None],
            "attention_mask": None,
            "use_cache": False,
        }

    projections = {"linear_x": (layer.linear_x(input_states[0]), [block])}
    y = mix(layer, documents, Layer(unit.num_attention_heads, projections, layer_of, block.width, arguments))
    return layer.linear_out(y * layer.act_fn(layer.linear_y(input_states))), None


MIXERS: dict[str, Callable[..., Any]] = {"RecurrentGemmaRecurrentBlock": recurrent_block}
