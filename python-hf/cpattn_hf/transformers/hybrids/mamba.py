# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mamba-1: Mamba, Falcon Mamba, Jamba and Zamba.

The channels are apart, except that dt, B and C are projections of all of them. So each rank has some channels of all documents, and
these projections are summed over the ranks, for each document. Zamba has heads, each with projections of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .shared import Columns, Documents, Layer, Part, convolution, mix, same, view

Outputs = Mapping[str, Callable[[Tensor], Tensor]]


def mamba(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Tensor:
    one, width = Columns(1), layer.intermediate_size
    deal = documents.deal(width)

    def layer_of(part: Part, outputs: Outputs) -> Any:
        def x_proj(x: Tensor) -> Tensor:
            if type(layer.x_proj) is nn.Linear:
                return deal.sum(F.linear(x, layer.x_proj.weight[:, part.begin : part.end]))
            return deal.sum(layer.x_proj(F.pad(x, (part.begin, width - part.end))))

        return view(
            layer,
            intermediate_size=part.end - part.begin,
            in_proj=outputs["in_proj"],
            conv1d=convolution(layer.conv1d, part, [one]),
            x_proj=x_proj,
            dt_proj=_rows(layer.dt_proj, part),
            A_log=part.rows(layer.A_log),
            D=part.rows(layer.D),
            out_proj=same,
            training=False,  # the kernel for training computes the last projection as well
        )

    projections = {"in_proj": (layer.in_proj(hidden_states[0]), [one, one])}
    out: Tensor = layer.out_proj(mix(layer, documents, Layer(width, projections, layer_of, 1)))
    return out


def _rows(projection: Any, part: Part) -> Any:
    """A projection to the channels of a part. Layers multiply with its weight, so with an adapter of PEFT too, whose weight is that of the layer
    inside; those of quantized models call it."""
    inside = projection.get_base_layer() if hasattr(projection, "get_base_layer") else projection
    more = {} if inside is projection else {"forward": lambda x: projection(x)[..., part.begin : part.end]}
    return view(inside, weight=part.rows(projection.weight), bias=part.rows(projection.bias), **more)


def zamba(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Tensor:
    head = layer.mamba_head_dim

    def layer_of(part: Part, outputs: Outputs) -> Any:
        return view(
            layer,
            n_mamba_heads=part.end - part.begin,
            intermediate_size=part.share(layer.intermediate_size),
            in_proj=outputs["in_proj"],
            conv1d=convolution(layer.conv1d, part, [Columns(head)]),
            **{
                name: part.rows(getattr(layer, name))
                for name in ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
            },
            out_proj=same,
        )

    projections = {"in_proj": (layer.in_proj(hidden_states[0]), [Columns(2 * head)])}
    out: Tensor = layer.out_proj(mix(layer, documents, Layer(layer.n_mamba_heads, projections, layer_of, head)))
    return out


MIXERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), mamba),
    "ZambaMambaMixer": zamba,
}
