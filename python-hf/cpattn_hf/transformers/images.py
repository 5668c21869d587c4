# SPDX-License-Identifier: MIT OR Apache-2.0
"""Batches with images: the model around the text model runs on the whole batch, and the text model on this rank's tokens.

A model of images and texts embeds ids, puts the results of its vision tower in the places of image tokens, computes positions and masks, and
then calls its text model (`get_decoder`). All this happens on every rank for all tokens. A hook before the text model takes this rank's rows of
what it is given: embeddings, positions, also of several rows (M-RoPE), types, and features that layers add at image tokens (DeepStack). What
comes out are rows of this rank's tokens, as in a batch of texts. Whatever else the text model is given is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cpattn.arguments import refused
from cpattn.errors import InvalidArgument, Unsupported
from .attention import Current, _tensors
from .draws import Draws
from .masks import ARGUMENTS
from .pack import TAKEN
from .towers import sharded

if TYPE_CHECKING:
    from .forward import Forward
    from .mixers import Mixers

# Arguments that the model around the text model gets as they are given. The others of TAKEN concern documents and loss.
WHOLE = ("input_ids", "inputs_embeds", "attention_mask", *ARGUMENTS)
# Methods of models that compute positions of several rows, and features of images.
POSITIONS, FEATURES = "get_rope_index", "get_image_features"
# Models whose positions have the number of the image, counted over all rows of a call.
NUMBERED = ("HunYuanVLModel",)


def decoder_of(model: Any) -> Any:
    """The text model inside of a model, or None if there is nothing around it."""
    found = model
    while (inner := found.get_decoder() if hasattr(found, "get_decoder") else found) is not found and inner is not None:
        found = inner
    if not isinstance(found, torch.nn.Module) or found in (model, getattr(model, model.base_model_prefix, None)):
        return None
    takes = inspect.signature(found.forward).parameters
    return found if {"inputs_embeds", "position_ids"} <= set(takes) else None


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)


class Images:
    """What is around the text model of `model`. `vision` says where its tower runs: "all" or "shard"."""

    def __init__(self, model: Any, vision: str, mixers: Mixers, takes: frozenset[str]) -> None:
        if vision not in ("all", "shard"):
            raise refused(
                "vision",
                vision,
                "'all' (each rank computes the features of all images) or 'shard' (each image is computed by one rank) is needed",
            )
        self._decoder, self._mixers, self._name = decoder_of(model), mixers, type(model).__name__
        self.names = tuple(sorted(takes - set(TAKEN) - {"labels"})) if self._decoder is not None else ()
        self._takes = (
            frozenset(inspect.signature(self._decoder.forward).parameters) if self._decoder is not None else frozenset()
        )
        # The names of all arguments that something in the text model reads.
        modules = self._decoder.modules() if self._decoder is not None else ()
        self._read = frozenset(name for module in modules for name in inspect.signature(module.forward).parameters)
        self._hook: Any = None
        self._draws: Callable[[], Draws] | None = None
        # Where each method is replaced: the innermost module that has it.
        self._methods: dict[str, Any] = {}
        for module in model.modules() if self._decoder is not None else ():
            self._methods |= {name: module for name in (POSITIONS, FEATURES) if hasattr(type(module), name)}
        self._shards = vision == "shard"
        if self._shards and FEATURES not in self._methods:
            raise Unsupported(f"vision is 'shard', and {self._name} has no method {FEATURES}: leave vision out")
        # The attention of towers stays what it is.
        self.towers: list[tuple[Any, Any]] = []
        if self._decoder is not None:
            inside = {
                id(one) for module in self._decoder.modules() if (one := getattr(module, "config", None)) is not None
            }
            text, own = model.config.get_text_config(), [*_configs(model.config)]
            own += [
                one
                for module in model.modules()
                if (one := getattr(module, "config", None)) is not None and hasattr(one, "sub_configs")
            ]
            for one in {id(one): one for one in own}.values():
                if id(one) not in inside and all(inner is not text for inner in _configs(one)):
                    self.towers.append((one, one._attn_implementation))

    def __bool__(self) -> bool:
        return self._decoder is not None

    def keep_attention(self) -> None:
        """After the model's attention was set, which sets that of its towers too."""
        for config, usual in self.towers:
            config._attn_implementation_internal = usual

    def given(self, inputs: Mapping[str, Any]) -> frozenset[str]:
        """The arguments of a call that concern images."""
        found = {name for name in self.names if inputs.get(name) is not None and _tensors(inputs[name])}
        positions = inputs.get("position_ids")
        if self and isinstance(positions, Tensor) and positions.ndim == 3:
            found.add("position_ids")
        return frozenset(found)

    def compared(self, inputs: Mapping[str, Any], images: frozenset[str]) -> dict[str, Any]:
        """What of a call with images the ranks compare: tensors, and lists of numbers beside them (the seconds of a video's frames)."""
        lists = {
            name for name, value in inputs.items() if images and name not in TAKEN and isinstance(value, list | tuple)
        }
        return {name: inputs.get(name) for name in sorted(images | lists | {"inputs_embeds"})}

    def arguments(self, forward: Forward, kwargs: dict[str, Any], draws: Callable[[], Draws]) -> dict[str, Any]:
        """The arguments of the model's forward: the whole batch."""
        forward.outer, pack = True, forward.pack
        whole_arguments = {name: value for name, value in kwargs.items() if name not in TAKEN or name in WHOLE}
        if isinstance(mask := whole_arguments.get("attention_mask"), Tensor):  # it may number the documents
            whole_arguments["attention_mask"] = (mask != 0).to(mask.dtype)
        positions = kwargs.get("position_ids")
        if isinstance(positions, Tensor) and positions.ndim == 3:
            whole_arguments["position_ids"] = positions
        elif positions is not None or POSITIONS not in self._methods:
            whole = pack.positions.new_zeros(pack.shape[0] * pack.shape[1])
            whole[pack.kept] = pack.positions
            whole_arguments["position_ids"] = whole.view(pack.shape)
        if self._shards:
            forward.draws = draws()
        else:  # a tower draws the same on all ranks
            self._draws = draws
        return whole_arguments

    # Hooks

    def replace(self) -> None:
        if self._decoder is None or self._hook is not None:
            return
        (enter,) = map(torch.compiler.disable, (self._enter,))
        self._hook = self._decoder.register_forward_pre_hook(enter, with_kwargs=True)
        changes: dict[str, Callable[..., Any]] = {
            POSITIONS: _by_documents,
            **({FEATURES: sharded} if self._shards else {}),
        }
        for name, function in changes.items():
            if (module := self._methods.get(name)) is not None:
                vars(module)[name] = partial(_outside, function, getattr(module, name))

    def restore(self) -> None:
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        for name, module in self._methods.items():
            if getattr(vars(module).get(name), "func", None) is _outside:
                del vars(module)[name]

    def _enter(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward: Any = Current.forward
        if not getattr(forward, "outer", False):
            return None
        forward.outer = False
        kwargs = {**dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)), **kwargs}
        rows = Rows(forward, kwargs, self._name)
        # The documents say what a padding mask says. What nothing in the text model reads goes no further.
        gone = {
            name
            for name, value in kwargs.items()
            if _tensors(value) and (name in ("attention_mask", "cache_position") or name not in self._read)
        }
        mine = {name: rows.of(name, value) for name, value in kwargs.items() if name not in gone}
        if mine.get("position_ids") is None:
            mine["position_ids"] = forward.places[None]
        if "use_cache" in self._takes:
            mine["use_cache"] = False
        if forward.draws is None and self._draws is not None:
            forward.draws, self._draws = self._draws(), None
        return (), mine | self._mixers.arguments(forward)


class Rows:
    """This rank's rows of the arguments of a text model, which were made for the whole batch."""

    def __init__(self, forward: Forward, arguments: Mapping[str, Any], model: str) -> None:
        self.shape, self.model = forward.pack.shape, model
        self.places = forward.pack.kept[forward.tokens]
        # Which tokens are those of images, if layers are given features of them. A padding mask can be of the same type.
        marks = [
            one if one.ndim == 2 else one[..., 0]
            for name, one in arguments.items()
            if name != "attention_mask" and self._marks(one)
        ]
        self.marks = marks[0].flatten() if marks else None

    def _marks(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == torch.bool and value.shape[:2] == self.shape

    def of(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and _tensors(value):
            return {key: self.of(name, one) for key, one in value.items()}
        if isinstance(value, list | tuple) and _tensors(value):
            return type(value)(self.of(name, one) for one in value)
        if not isinstance(value, Tensor):
            return value
        rows, length = self.shape
        if name == "position_ids" and value.shape[-2:] in ((rows, length), (1, length)):
            whole = value.expand(*value.shape[:-2], rows, length).flatten(-2)
            return whole[..., self.places.to(value.device)].unsqueeze(-2)
        if value.shape[:2] == self.shape:
            return value.flatten(0, 1)[self.places.to(value.device)][None]
        if self.marks is not None and value.ndim >= 2 and len(value) == int(self.marks.sum()):
            marks, places = self.marks.to(value.device), self.places.to(value.device)
            return value[(marks.cumsum(0) - 1)[places[marks[places]]]]
        raise Unsupported(
            f"{self.model} gives its text model {name} of the shape {tuple(value.shape)}, which is not supported: rows for tokens "
            f"{self.shape}, or for image tokens, are. Use cpattn.torch for its layers"
        )


def _outside(function: Callable[..., Any], usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A method of the model around the text model, while the whole batch goes through it."""
    forward: Any = Current.forward
    return function(forward, usual, *args, **kwargs) if getattr(forward, "outer", False) else usual(*args, **kwargs)


def _alone(arguments: Mapping[str, Any], mask: Tensor) -> list[dict[str, Any]]:
    """The arguments for each document in a call of its own. A run of image tokens is an image."""
    flat = {name: value for name, value in {**arguments, **arguments.get("kwargs", {})}.items() if name != "kwargs"}
    calls, at = list[dict[str, Any]](), 0
    for row in range(len(mask)):
        types = (flat["mm_token_type_ids"][row] == 1) & mask[row].bool()
        images = int((types[1:] & ~types[:-1]).sum() + types[0])
        one = {
            name: value[row : row + 1] if isinstance(value, Tensor) and value.shape == mask.shape else value
            for name, value in flat.items()
        }
        calls.append(one | {"image_grid_thw": flat["image_grid_thw"][at : at + images]})
        at += images
    return calls


def _by_documents(forward: Forward, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Positions of several rows, as the model computes them for each document: it gets the documents as rows with padding at the right."""
    pack, bound = forward.pack, inspect.signature(usual).bind(*args, **kwargs)
    lengths = [b - a for a, b in pairwise(pack.cu_seqlens)]

    def documents(x: Tensor) -> Tensor:
        return pad_sequence(list(torch.split(x.flatten()[pack.kept.to(x.device)], lengths)), batch_first=True)

    for name, value in bound.arguments.items():
        if isinstance(value, Tensor) and value.shape == pack.shape:
            bound.arguments[name] = documents(value)
    mask = documents(torch.ones(pack.shape, dtype=torch.int64, device=pack.ids.device))
    if "attention_mask" in inspect.signature(usual).parameters:
        bound.arguments["attention_mask"] = mask
    try:
        if type(getattr(usual, "__self__", None)).__name__ in NUMBERED:
            each = [usual(**arguments) for arguments in _alone(bound.arguments, mask)]
            found, deltas = torch.cat([of for of, _ in each], 1), torch.cat([of for _, of in each])
        else:
            found, deltas = usual(*bound.args, **bound.kwargs)
    except (StopIteration, RuntimeError, IndexError, ValueError) as error:
        raise InvalidArgument(
            f"the positions of image tokens cannot be computed ({type(error).__name__}: {error}): each run of image tokens of a document needs its "
            "grid, in the order of the tokens, and no document ends inside of an image. Or give position_ids [3 or 4, rows, tokens]"
        ) from error
    whole = found.new_zeros(len(found), pack.shape[0] * pack.shape[1])
    whole[:, pack.kept.to(found.device)] = found[:, mask.bool().to(found.device)]
    # A delta for each row, as the model has them: that of its first document.
    rows = (pack.kept[list(pack.cu_seqlens[:-1])] // pack.shape[1]).tolist()
    first = [rows.index(row) if row in rows else 0 for row in range(pack.shape[0])]
    return whole.view(len(found), *pack.shape), deltas[first] if isinstance(deltas, Tensor) and len(deltas) == len(
        lengths
    ) else deltas
