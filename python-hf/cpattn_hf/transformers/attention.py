# SPDX-License-Identifier: MIT OR Apache-2.0
"""The attention function and the mask function that are registered with Transformers under the name "cpattn".

A model makes masks once in a forward pass and gives them to its layers. Here a mask is a `Mask`: the kind of layer, and the
documents of this forward pass. Every layer gets it as an argument, so a layer that gradient checkpointing runs again in the backward
pass has the documents of its own forward pass, also if several are in flight.

Every option of a model is either honoured or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from cpattn.errors import Unsupported
from cpattn.torch.group import Reads
from .masks import Parts, Window, read, simplified, window_of

NAME = "cpattn"
# Modules in which a token attends to what layers before made of itself, and to no other token.
OVER_LAYERS = ("Inkling2BlockAttentionResidual",)


class Forward(Protocol):
    """One forward pass of a model."""

    longest: int

    @property
    def places(self) -> Tensor | None:
        """The position_ids of the tokens that the model gets, or None: those that it counts itself."""
        ...

    @property
    def positions(self) -> Tensor:
        """Of this rank's tokens in their documents."""
        ...

    def blocked(self, numbers: Tensor) -> bool:
        """Whether the batch has blocks of tokens. Refuses numbers of this rank's tokens that do not follow from their types."""
        ...

    def refuse_is_causal(self, message: str) -> None:
        """Refuses a layer whose `is_causal` contradicts its mask."""
        ...

    def reads(self, window: Window | Parts) -> Reads:
        """The rows that this rank's tokens read."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: Window | Parts, **options: Any) -> Tensor: ...


class Mask:
    """A mask over documents. It is `explicit` if it decides alone what layers see, whatever their `is_causal` is."""

    # As a mask that is ready for layers has: a text model that gets one from the model around it makes no other.
    ndim, shape = 4, (1, 1, 0, 0)

    def __init__(self, forward: Forward, window: Window | Parts, explicit: bool = False) -> None:
        self.forward, self.window, self.explicit = forward, window, explicit

    def to(self, *_: Any, **__: Any) -> Mask:
        """Some models convert their masks."""
        return self

    def __getitem__(self, part: Any) -> Mask:
        """Some take the rows of the tokens whose logits are kept: all of them."""
        whole = (slice(None), slice(0, None), ...)
        if all(one in whole for one in (part if isinstance(part, tuple) else (part,))):
            return self
        raise Unsupported(
            f"the model computes with its mask (it takes {part}), which is not supported: the layer needs an adapter. Use cpattn.torch"
        )


class Current:
    """The current forward pass of a model of this process."""

    forward: Forward | None = None


def mask(mask_function: Callable[..., Any], **arguments: Any) -> Mask:
    """The mask function, which Transformers calls for each kind of layer."""
    forward, numbers = Current.forward, list[Tensor]()
    if forward is None:
        raise Unsupported(
            "the forward pass did not begin with the model that has the ContextParallel: call that model, not a part of it"
        )
    if isinstance(ready := arguments.get("attention_mask"), Mask):
        return ready
    expression = read(mask_function, numbers)
    if arguments.get("q_length") != arguments.get("kv_length"):
        raise Unsupported(
            f"the mask has {arguments.get('kv_length')} keys and {arguments.get('q_length')} queries: caches are not supported"
        )
    window = window_of(simplified(expression, any([forward.blocked(one) for one in numbers]), forward.longest))
    return Mask(forward, window, bool(numbers))


# Tensors in an attention call that repeat the mask, or that only the layer itself uses.
HARMLESS = ("position_ids", "position_embeddings", "cache_position", "num_items_in_batch", "input_ids")


def _tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_tensors, value)))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    query_scale: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function, which Transformers calls in each layer: takes [1, heads, tokens, dim], returns [1, tokens, heads, dim].
    `query_scale` is a factor of each query, from an adapter."""
    name = type(module).__name__
    if name in OVER_LAYERS and attention_mask is None:
        return F.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None
    if not isinstance(attention_mask, Mask):
        kind = "no mask" if attention_mask is None else f"a mask of the type {type(attention_mask).__name__}"
        raise Unsupported(f"{name} has {kind}, a mask of transformers.masking_utils is needed")
    window = attention_mask.window.hull if isinstance(attention_mask.window, Parts) else attention_mask.window
    causal = window[1] == 0
    alone = window == (0, 0)  # a query sees its own key only: both at once
    if conflicts := [
        flag
        for flag in (is_causal, getattr(module, "is_causal", None))
        if flag is not None and bool(flag) != causal and not alone
    ]:
        if not attention_mask.explicit:
            kind = "causal" if causal else "bidirectional"
            attention_mask.forward.refuse_is_causal(
                f"{name} has is_causal={conflicts[0]} and a {kind} mask: set is_causal of the layers to {causal}"
            )
    for option, argument in more.items():
        if argument is not None and option not in HARMLESS and _tensors(argument):
            raise Unsupported(f"{name} uses {option}, which is not supported")
    if query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise Unsupported(
            f"{name} has queries {tuple(query.shape)} and keys {tuple(key.shape)}, [1, heads, tokens, dim] with equal tokens is needed"
        )
    if query_scale is not None:
        query = (query * query_scale[:, None]).to(query.dtype)
    o = attention_mask.forward.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        attention_mask.window,
        scale=1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        softcap=float(softcap or 0.0),
        dropout=float(dropout),
        sinks=None if s_aux is None else s_aux.float(),
    )
    return o.unsqueeze(0), None


def register() -> None:
    AttentionInterface.register(NAME, attention)  # type: ignore[no-untyped-call, unused-ignore]
    AttentionMaskInterface.register(NAME, mask)  # type: ignore[no-untyped-call, unused-ignore]
