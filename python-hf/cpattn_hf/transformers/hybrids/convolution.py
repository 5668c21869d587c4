# SPDX-License-Identifier: MIT OR Apache-2.0
"""The short convolutions of LFM2 and LFM3, gated before and after. Each channel is by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .shared import Columns, Documents, Layer, Part, convolution, mix, same, view


def short_convolution(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Tensor:
    one = Columns(1)

    def layer_of(part: Part, outputs: Mapping[str, Callable[[Tensor], Tensor]]) -> Any:
        return view(layer, in_proj=outputs["in_proj"], conv=convolution(layer.conv, part, [one]), out_proj=same)

    projections = {"in_proj": (layer.in_proj(hidden_states[0]), [one] * 3)}
    out: Tensor = layer.out_proj(mix(layer, documents, Layer(layer.conv.in_channels, projections, layer_of, 1)))
    return out


MIXERS: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), short_convolution
)
