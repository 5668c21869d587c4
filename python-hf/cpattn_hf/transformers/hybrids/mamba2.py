# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mamba-2: Nemotron-H, Falcon-H1, Granite hybrid, Bamba, Zamba2 and Mamba-2 itself.

A part is some groups of heads with their B and C; with one group, some heads with the B and C of all. The norm after the scan is over all
heads of a group or of the layer, so it runs on this rank's tokens, with their gate, which other ranks do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .shared import Columns, Documents, Layer, Part, convolution, mix, same, view


def mamba2(layer: Any, documents: Documents, hidden_states: Tensor, **_: Any) -> Tensor:
    grouped = layer.n_groups > 1
    heads = layer.n_groups if grouped else layer.num_heads
    each = layer.num_heads // heads
    wide, state, step = Columns(each * layer.head_dim), Columns(layer.ssm_state_size, shared=not grouped), Columns(each)
    mixed = [wide, state, state]
    # Falcon-H1 multiplies before and after the projection.
    projected = (
        layer.in_proj(hidden_states * getattr(layer, "ssm_in_multiplier", 1.0)) * getattr(layer, "mup_vector", 1.0)
    )[0]
    gate, rest = projected.split([layer.intermediate_size, projected.shape[-1] - layer.intermediate_size], -1)
    normed = getattr(layer, "mamba_rms_norm", True)  # otherwise the scan takes the gate

    def layer_of(part: Part, outputs: Mapping[str, Callable[[Tensor], Tensor]]) -> Any:
        width = part.share(layer.intermediate_size)

        def in_proj(x: Tensor) -> Tensor:
            no_gate = x.new_zeros(()).expand(*x.shape[:-1], width)
            return torch.cat([no_gate if normed else outputs["gate"](x), outputs["rest"](x)], -1)

        return view(
            layer,
            num_heads=part.share(layer.num_heads),
            n_groups=part.share(layer.n_groups) if grouped else 1,
            intermediate_size=width,
            conv_dim=len(part.columns(mixed)),
            in_proj=in_proj,
            conv1d=convolution(layer.conv1d, part, mixed),
            **{name: part.rows(getattr(layer, name), each) for name in ("dt_bias", "A_log", "D")},
            norm=(lambda y, gate: y) if normed else layer.norm,
            out_proj=same,
            ssm_in_multiplier=1.0,
            mup_vector=1.0,
            training=False,  # the kernel for training computes the norm and the last projection as well
        )

    projections = {"rest": (rest, [*mixed, step])} | ({} if normed else {"gate": (gate, [wide])})
    y = mix(layer, documents, Layer(heads, projections, layer_of, wide.width))
    if normed:
        y = layer.norm(y, gate[None])
    out: Tensor = layer.out_proj(y.to(hidden_states.dtype))
    return out


MIXERS: dict[str, Callable[..., Any]] = dict.fromkeys(
    (
        "Mamba2Mixer",
        "NemotronHMamba2Mixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "BambaMixer",
        "Zamba2MambaMixer",
    ),
    mamba2,
)
