# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers in which a token sees the few tokens before it: the short convolutions of Inkling, and the n-grams of Qwen4-exp.

Each token of this rank is a row of its own, with the tokens before it in its document, some of which other ranks have. The layer's own
forward runs on these rows, and the last token of each is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .shared import Documents, view


def _rows(documents: Documents, x: Tensor, taps: int, step: int = 1) -> Tensor:
    """Of x [1, tokens, ...]: each token with the `taps` before it, `step` apart, [tokens, taps + 1, ...]."""
    halo = documents.halo(x[0], taps * step)
    return halo.rows[halo.places[:, ::step]]


def short_convolution(layer: Any, documents: Documents, hidden_states: Tensor, dynamic_input: Tensor | None = None, **_: Any) -> Tensor:
    rows = _rows(documents, hidden_states, layer.conv_kernel_size - 1)
    # Weights that depend on a token are those of the last one only.
    more = () if dynamic_input is None else (dynamic_input[0, :, None].expand(-1, rows.shape[1], -1),)
    out: Tensor = type(layer).forward(layer, rows, *more)[:, -1]
    return out[None]


def ngrams(layer: Any, documents: Documents, input_ids: Tensor, past_key_values: None = None, **_: Any) -> Tensor:
    halo = documents.halo(input_ids[0], layer.context_len)
    none = halo.places == len(halo.rows) - 1
    rows = torch.where(none, layer.eos_token_id, halo.rows[halo.places])  # the layer's own padding
    out: Tensor = type(layer).forward(layer, rows, None)[:, -1]
    return out[None]


def per_layer_embedding(layer: Any, documents: Documents, hidden_states: Tensor, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
    taps, step = layer.conv1d.kernel_size[0] - 1, layer.conv1d.dilation[0]
    near = view(layer, conv1d=view(layer.conv1d, dilation=(1,)), short_conv_state_len=taps)

    def convolved(x: Tensor, past_key_values: None) -> Tensor:
        out: Tensor = type(layer)._short_conv(near, _rows(documents, x, taps, step), None)[:, -1]
        return out[None]

    given = view(layer, _short_conv=convolved)
    out: Tensor = type(layer).forward(given, hidden_states, input_ids, None)
    return out


MIXERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("InklingShortConvolution", "Inkling2ShortConvolution", "Inkling2DynamicShortConvolution"), short_convolution),
    "Qwen4ExpTextNGramEmbedding": ngrams,
    "Qwen4ExpTextPLELayer": per_layer_embedding,
}
