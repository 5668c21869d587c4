# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a model may be called with, and what it must not be asked for: every argument is honoured or refused by name.

The rules here concern the model: its loss, its numbers of words and positions. What the arguments say about documents is in `pack.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache

from cpattn import UNLIMITED
from cpattn.arguments import attempt, refused
from cpattn.errors import InvalidArgument, Unsupported
from .attention import _tensors
from .loss_trial import PLACES as AT_PLACES
from .masks import ARGUMENTS
from .pack import TAKEN, Pack, pack, shared, within
from .probe import Found

_OWN = "each rank computes its own tokens only. For generate, use `with cp.off():`"
REFUSED_OPTIONS = {
    "sparse_prediction": "logits are those of all tokens. Set model.config.sparse_prediction = False; `tile` saves the same memory",
    **dict.fromkeys(("output_attentions", "output_hidden_states", "logits_to_keep"), _OWN),
}

# The names of arguments for caches, some of which are not a Cache.
CACHES = ("past_key_values", "cache", "cache_params")

# The names in configs of ids that stand for images, videos and audio.
PLACES = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")

# The losses of models, and whether the label of a token is the next one.
LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


def loss_of(model: Any) -> str:
    """The name of the model's loss."""
    return str(getattr(getattr(model, "loss_function", None), "__name__", "ForCausalLMLoss"))


def shifts(model: Any) -> bool:
    """Whether the label of a token of the model is the next one."""
    return LOSSES.get(loss_of(model), True)


def documents(model: Any, known: Found, inputs: Mapping[str, Any]) -> Pack:
    if known.pooled:  # labels of rows
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    return pack(inputs, known.first, shifts(model), known.skips)


def items_of(found: Pack, inputs: Mapping[str, Any]) -> float | None:
    """By what the loss of a call is divided, as the call says: None for the number of its labels, or the sum of their weights."""
    if (number := inputs.get("num_items_in_batch")) is None:
        if found.weights is not None and found.count == 0:
            raise InvalidArgument(
                "loss_weights of the tokens with a label sum up to 0, by which the loss is divided: give num_items_in_batch, or other weights"
            )
        return None
    if (items := attempt(float, number)) is None:
        raise refused("num_items_in_batch", number, "a number is needed")
    return items


def refuse_loss(model: Any, known: Found, found: Pack, inputs: Mapping[str, Any]) -> None:
    """Refuses labels of a model whose loss is not that of its labels."""
    if found.labels is not None and known.loss and (known.loss != AT_PLACES or inputs.get("shift_labels") is None):
        raise Unsupported(f"labels are given to {type(model).__name__}: {known.loss}")


def checked(
    model: Any, config: Any, known: Found, inputs: Mapping[str, Any], images: frozenset[str] = frozenset()
) -> Pack:
    """The documents of a call of `model` with the text config `config`, and the arguments `images` for what is around its text model. Raises
    InvalidArgument and Unsupported."""
    for name, value in inputs.items():
        known_name = name in images or (
            name in TAKEN and (name not in ARGUMENTS or (known.types and name == known.named))
        )
        if name == "position_ids" and name not in images and getattr(value, "ndim", 2) == 3:
            raise Unsupported(
                f"position_ids has the shape {tuple(value.shape)}, and {type(model).__name__} takes positions of one row: [rows, tokens] is needed"
            )
        if not known_name and value is not None and _tensors(value):
            raise Unsupported(f"the model was given {name}, which is not supported: leave it out")
    for name, value in inputs.items():
        if isinstance(value, Cache) or (name in CACHES and value is not None):
            raise Unsupported(
                f"{name} is given, a cache, which is not supported, not even an empty one: leave it out, or use `with cp.off():`"
            )

    def asked(name: str) -> Any:
        return getattr(config, name, None) if inputs.get(name) is None else inputs[name]

    for name, reason in REFUSED_OPTIONS.items():
        if asked(name):
            raise Unsupported(f"{name} is set, which is not supported: {reason}")
    if asked("return_dict") is False:
        raise Unsupported("return_dict is False, True is needed")
    found, loss = documents(model, known, inputs), loss_of(model)
    if found.labels is not None and loss not in LOSSES:
        raise Unsupported(
            f"model.loss_function is {loss}, {' or '.join(LOSSES)} is needed: give no labels, and compute the loss of this rank's tokens "
            "from the logits"
        )
    if found.slices is not None and asked("output_router_logits") and found.router_weights is None and shared(found):
        raise Unsupported(
            "slices are given whose tokens are shared by several answers, and output_router_logits is set: a token counts in the router's loss as often as it "
            "has answers, so give router_weights, as SharedPrefixCollator does, or set model.config.output_router_logits = False"
        )
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    some = found.ids
    if images:  # places of images, whose ids may be outside of the vocabulary
        marks = [getattr(model.config, name, None) for name in PLACES]
        some = some[~torch.isin(some, some.new_tensor([mark for mark in marks if isinstance(mark, int)]))]
    within("input_ids", some, getattr(words, "num_embeddings", None))
    if found.labels is not None:
        within("labels", found.labels[found.labels != -100], getattr(head, "out_features", None))
    if found.types is not None and known.types:
        within(known.named, found.types, known.types)
    padded = found.reach > found.longest
    if found.reach > known.positions and not (padded and inputs.get("position_ids") is not None):
        raise InvalidArgument(
            f"the longest document has {found.reach} tokens, {'counted from position 0, ' * padded}{type(model).__name__} has "
            f"{known.positions} positions: cut longer documents{', or put padding at the right' * padded}"
        )
    if known.positions < UNLIMITED:
        within("position_ids", found.positions, found.first + known.positions)
    rope = getattr(config, "rope_parameters", None) or {}
    usual: Any = getattr(config, "original_max_position_embeddings", None) or getattr(
        config, "max_position_embeddings", 0
    )
    for one in filter(lambda one: isinstance(one, dict), (rope, *rope.values())):
        kind, most = one.get("rope_type"), one.get("original_max_position_embeddings") or usual
        if kind in ("dynamic", "longrope") and found.reach > most:
            raise Unsupported(
                f"rotary embeddings of the type {kind}: positions reach {found.reach - 1}, at most {most - 1} are supported: cut longer "
                "documents"
            )
    return found
