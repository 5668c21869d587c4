# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers in which a token sees the few tokens before it: short convolutions of Inkling and ZAYA, and n-grams of Qwen4-exp.

Each token of this rank is a row of its own, with the tokens before it in its document, some of which other ranks have. The layer's own
forward runs on these rows, and the last token of each is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cpattn.errors import Unsupported
from .shared import Documents, _taker, view


def _rows(documents: Documents, x: Tensor, taps: int, step: int = 1) -> Tensor:
    """Of x [1, tokens, ...]: each token with the `taps` before it, `step` apart, [tokens, taps + 1, ...]."""
    halo = documents.halo(x[0], taps * step)
    return halo.rows[halo.places[:, ::step]]


def short_convolution(
    layer: Any, documents: Documents, hidden_states: Tensor, dynamic_input: Tensor | None = None, **_: Any
) -> Tensor:
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


def per_layer_embedding(
    layer: Any, documents: Documents, hidden_states: Tensor, input_ids: Tensor, *_: Any, **__: Any
) -> Tensor:
    taps, step = layer.conv1d.kernel_size[0] - 1, layer.conv1d.dilation[0]
    near = view(layer, conv1d=view(layer.conv1d, dilation=(1,)), short_conv_state_len=taps)

    def convolved(x: Tensor, past_key_values: None) -> Tensor:
        out: Tensor = type(layer)._short_conv(near, _rows(documents, x, taps, step), None)[:, -1]
        return out[None]

    changed = view(layer, _short_conv=convolved)
    out: Tensor = type(layer).forward(changed, hidden_states, input_ids, None)
    return out


def projections(layer: Any, documents: Documents, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Of queries, keys and values, which convolutions mix: each token's own are computed once."""
    if layer.v_proj_delayed.bias is not None:
        raise Unsupported(
            f"{type(layer).__name__} has config.attention_bias, which is not supported: the first token of a document sees it"
        )
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    outputs = [getattr(layer, name)(hidden_states) for name in names]
    ends = torch.tensor([0, *(one.shape[-1] for one in outputs)]).cumsum(0).tolist()
    takers = {name: _taker(slice(*one)) for name, one in zip(names, pairwise(ends), strict=True)}
    rows = _rows(documents, torch.cat(outputs, -1), layer.conv_kernel_size)
    out = type(layer).forward(view(layer, hidden_size=ends[-1], **takers), rows, None)
    return tuple(one[:, -1][None] for one in out)


MIXERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("InklingShortConvolution", "Inkling2ShortConvolution", "Inkling2DynamicShortConvolution"), short_convolution
    ),
    "Qwen4ExpTextNGramEmbedding": ngrams,
    "ZayaCCAProjection": projections,
    "Qwen4ExpTextPLELayer": per_layer_embedding,
}
