# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention layers of Transformers that do not use its AttentionInterface: GPT-J, GPT-Neo, CodeGen, XGLM, Falcon, BLOOM, MPT and GIT;
those that run their own attention on gathered keys (`gathered`); and those that count the tokens of their row (`positions`, Llama 4).

An adapter runs instead of the layer's own attention, and calls the function that is registered for the others. ALiBi, a bias that is
linear in the key's position, is a product of two more dims of q and k: the head's slope times the position in the document.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpattn.errors import Unsupported
from .attention import NAME, Mask, attention
from .gathered import adapter_of
from .positions import NAMES as TABLES
from .positions import positions


def _dropout(layer: nn.Module, p: float) -> float:
    return float(p) if layer.training else 0.0


def scores(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
    """`_attn` of GPT-J, CodeGen and GPT-Neo, whose scores are not scaled; half of its layers have a window, in a buffer."""
    if (
        (scale := getattr(layer, "scale_attn", None)) is None
        and layer.attention_type == "local"
        and isinstance(attention_mask, Mask)
    ):
        attention_mask = Mask(attention_mask.forward, (int(layer.bias[0, 0, -1].sum()) - 1, 0))
    q, k, scaling = query.to(value.dtype), key.to(value.dtype), 1.0 if scale is None else 1 / float(scale)
    o, _ = attention(layer, q, k, value, attention_mask, scaling=scaling, dropout=_dropout(layer, layer.attn_dropout.p))
    return o.transpose(1, 2), None


def xglm(
    layer: Any,
    hidden_states: Tensor,
    key_value_states: Any = None,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **_: Any,
) -> Any:
    if key_value_states is not None:
        raise Unsupported("XGLM with cross-attention is not supported: leave out the encoder's states")
    q, k, v = (
        project(hidden_states).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    o, _none = attention(layer, q, k, v, attention_mask, scaling=layer.scaling, dropout=_dropout(layer, layer.dropout))
    return layer.out_proj(o.flatten(2)), None


def falcon(
    layer: Any, hidden_states: Tensor, alibi: None, attention_mask: Any, position_embeddings: Any = None, **_: Any
) -> Any:
    q, k, v = (x.transpose(1, 2) for x in layer._split_heads(layer.query_key_value(hidden_states)))
    if layer.new_decoder_architecture:  # which repeats keys and values
        each = layer.num_heads // layer.num_kv_heads
        k, v = k[:, ::each], v[:, ::each]
    q, k = sys.modules[type(layer).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    o, _none = attention(layer, q, k, v, attention_mask, dropout=_dropout(layer, layer.attention_dropout.p))
    return layer.dense(o.flatten(2)), None


def bloom(layer: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **_: Any) -> Any:
    module = sys.modules[type(layer).__module__]
    q, k, v = layer._reshape(layer.query_key_value(hidden_states))
    # The bias of the second of two tokens is the slope.
    two = torch.ones(1, 2, dtype=torch.int64, device=q.device)
    slopes = module.build_alibi_tensor(two, layer.num_heads, torch.float32)[:, 0, 1] * layer.beta
    o = _alibi(layer, q, k, v, attention_mask, slopes, layer.inv_norm_factor, layer.attention_dropout.p)
    return module.dropout_add(layer.dense(o.flatten(2)), residual, layer.hidden_dropout, layer.training), None


def mpt(
    layer: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **_: Any,
) -> Any:
    mixed = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        mixed = mixed.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    q, k, v = (x.unflatten(-1, (layer.n_heads, layer.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    slopes = -position_bias[:, 0, -2]  # the bias of the last position but one; that of the last is 0
    o = _alibi(layer, q, k, v, attention_mask, slopes, layer.softmax_scale, layer.attn_dropout_p)
    return layer.out_proj(o.flatten(2)), None


def git(
    layer: Any, hidden_states: Tensor, attention_mask: Any = None, past_key_values: Any = None, **_: Any
) -> tuple[Tensor, None]:
    split = (-1, layer.attention_head_size)
    q, k, v = (
        project(hidden_states).unflatten(-1, split).transpose(1, 2) for project in (layer.query, layer.key, layer.value)
    )
    o, _none = attention(layer, q, k, v, attention_mask, dropout=_dropout(layer, layer.dropout.p))
    return o.flatten(2), None


def tempered(layer: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Llama 4, whose layers without rotary embeddings scale q by the place of a token in the row: here by its position, as the row alone would have it."""
    tuning, places = (
        layer.attn_temperature_tuning,
        attention_mask.forward.places if isinstance(attention_mask, Mask) else None,
    )
    if not tuning or layer.use_rope or places is None:
        return type(layer).forward(layer, hidden_states, position_embeddings, attention_mask, **kwargs)
    scale = (
        torch.log1p(torch.floor((places.to(hidden_states.device).float() + 1) / layer.floor_scale)) * layer.attn_scale
        + 1
    )
    layer.attn_temperature_tuning = False
    try:
        return type(layer).forward(
            layer, hidden_states, position_embeddings, attention_mask, **kwargs, query_scale=scale
        )
    finally:
        layer.attn_temperature_tuning = tuning


def _alibi(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, slopes: Tensor, scale: float, dropout: float
) -> Tensor:
    """Attention with a bias of slope · position: softmax does not see what all keys of a query have in common. The position is two
    numbers, each exact in bf16. Eight dims instead of two, so that rows stay aligned."""
    if not isinstance(mask, Mask):
        raise Unsupported(f"{type(layer).__name__} has no mask of transformers.masking_utils, which is needed")
    positions = mask.forward.positions.to(q.device)
    positions = F.pad(positions, (0, k.shape[2] - len(positions)))  # of rows that are no tokens of this rank
    more_k = torch.stack([positions // 256, positions % 256], -1).to(q.dtype)
    more_q = torch.stack([slopes * (256 / scale), slopes / scale], -1).to(q.dtype)
    q = torch.cat([q, more_q[None, :, None].expand(1, -1, q.shape[2], -1), q.new_zeros(()).expand(*q.shape[:3], 6)], -1)
    k = torch.cat([k, more_k[None, None].expand(1, k.shape[1], -1, -1), k.new_zeros(()).expand(*k.shape[:3], 6)], -1)
    return attention(layer, q, k, v, mask, scaling=float(scale), dropout=_dropout(layer, dropout))[0]


# By the names of the classes: the method that the adapter replaces, and the adapter.
ADAPTERS: dict[str, tuple[str, Callable[..., Any]]] = {
    **dict.fromkeys(("GPTJAttention", "GPTNeoSelfAttention", "CodeGenAttention"), ("_attn", scores)),
    "XGLMAttention": ("forward", xglm),
    "FalconAttention": ("forward", falcon),
    "BloomAttention": ("forward", bloom),
    "MptAttention": ("forward", mpt),
    "GitSelfAttention": ("forward", git),
    "Llama4TextAttention": ("forward", tempered),
    **dict.fromkeys(TABLES, ("forward", positions)),
}


class Adapters:
    """The adapters of a model's layers. Transformers does not let such a model choose its attention, which decides the masks it makes,
    so they set it in its config."""

    def __init__(self, model: Any) -> None:
        self._config, self._usual = model.config, model.config._attn_implementation
        self._model = model
        self.gathered = [layer for layer, *_ in self._layers() if type(layer).__name__ not in ADAPTERS]
        if getattr(model.config, "alibi", False) and self._layers():
            raise Unsupported(
                f"{type(model).__name__} has config.alibi, which is not supported: it rounds the bias to bf16, so that it depends on the "
                "position itself and not on the distance alone"
            )

    def _layers(self) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
        """Each layer with the method that is replaced, and what replaces it. Looked up each time: PEFT may copy a layer."""
        kind, found = "sdpa" if self._usual == "sdpa" else "eager", list[tuple[nn.Module, str, Callable[..., Any]]]()
        for layer in self._model.modules():
            if not type(layer).__module__.startswith("transformers.models."):
                continue
            if type(layer).__name__ in ADAPTERS:
                found.append((layer, *ADAPTERS[type(layer).__name__]))
            elif own := adapter_of(layer):
                found.append((layer, "forward", partial(own, kind)))
        return found

    def replaced(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Each layer, its method, and the function of the partial that replaces it."""
        for layer, name, adapter in self._layers():
            yield layer, name, adapter.func if isinstance(adapter, partial) else adapter

    def replace(self) -> None:
        for layer, name, adapter in self._layers():
            vars(layer)[name] = partial(adapter, layer)
            self._config._attn_implementation_internal = NAME

    def restore(self) -> None:
        for layer, name, _ in self._layers():
            vars(layer).pop(name, None)
            self._config._attn_implementation_internal = self._usual
