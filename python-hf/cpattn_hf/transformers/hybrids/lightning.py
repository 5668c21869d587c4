# SPDX-License-Identifier: MIT OR Apache-2.0
"""The lightning attention of MiniMax. The norm after it is over all heads, so it runs on this rank's tokens, with their gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .shared import Columns, Documents, Layer, Part, mix, same, view


def lightning_attention(
    layer: Any, documents: Documents, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    heads, dim = layer.num_attention_heads, layer.head_dim

    def layer_of(part: Part, outputs: Mapping[str, Callable[[Tensor], Tensor]]) -> Any:
        return view(
            layer,
            num_attention_heads=part.end - part.begin,
            qkv_proj=outputs["qkv_proj"],
            **{name: part.rows(getattr(layer, name)) for name in ("slope_rate", "query_decay", "key_decay")},
            diagonal_decay=part.rows(layer.diagonal_decay, dim=1),
            norm=same,
            output_gate=lambda x: x.new_full((), float("inf")),  # the gate is 1
            out_proj=same,
        )

    projections = {"qkv_proj": (layer.qkv_proj(hidden_states[0]), [Columns(3 * dim)])}
    how = Layer(heads, projections, layer_of, dim, lambda x: {"position_embeddings": None, "attention_mask": None})
    y = layer.norm(mix(layer, documents, how))
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * y), None


MIXERS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": lightning_attention}
