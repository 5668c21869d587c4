# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers that mix the tokens of whole documents, each head separately: linear attention, state space models, convolutions.

Such a layer needs all tokens of its documents, but not all heads. The user gives a function for its class, which runs instead of its
forward: it moves the projected tokens to heads, mixes, and moves the result back (docs/training.md has one for Qwen3-Next).

The function gets the forward pass as an argument, so a layer that gradient checkpointing runs again in the backward pass has the
documents of its own forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import InvalidArgument, Unsupported

# The keyword with which a model passes the forward pass to its layers.
ARGUMENT = "cpattn_documents"


class Documents(Protocol):
    """An argument of a mixer: the documents of one forward pass, with the methods of `cpattn.torch.Batch` for any dtype."""

    @property
    def cu_seqlens(self) -> tuple[int, ...]: ...
    def to_heads(self, x: Tensor, side: str = "q", *, heads: int, kv_heads: int) -> Tensor: ...
    def to_tokens(self, x: Tensor, side: str = "q", *, heads: int, kv_heads: int) -> Tensor: ...
    def own_heads(self, side: str = "q", *, heads: int, kv_heads: int) -> slice: ...


# Takes a layer, the documents and the arguments of the layer's forward; returns the result of the layer's forward.
Mixer = Callable[..., Any]


class Mixers:
    """The mixers of a model's layers, by class."""

    def __init__(self, model: torch.nn.Module, mixers: Mapping[type[torch.nn.Module], Mixer], options: dict[str, Any], ranks: int) -> None:
        self._layers = []
        for kind, mixer in mixers.items():
            layers = [module for module in model.modules() if isinstance(module, kind)]
            if not layers:
                raise InvalidArgument(f"mixers has {kind.__name__}, and {type(model).__name__} has no layer of this class")
            self._layers += [(layer, mixer) for layer in layers]
        if not mixers:
            return
        if not any(one.kind == one.VAR_KEYWORD for one in inspect.signature(model.forward).parameters.values()):
            raise Unsupported(f"mixers are given, and {type(model).__name__}.forward takes no **kwargs: it must pass keywords on to its layers")
        if options.setdefault("ulysses", ranks) != ranks:
            raise Unsupported(
                f"ulysses is {options['ulysses']}, {ranks} is needed, the number of ranks: layers with mixers need whole documents. Leave "
                "ulysses out"
            )

    def arguments(self, documents: Documents) -> dict[str, Any]:
        """Further arguments for the call of the model."""
        return {ARGUMENT: documents} if self._layers else {}

    def replace(self) -> None:
        for layer, mixer in self._layers:
            layer.forward = partial(self._forward, layer, mixer)

    def restore(self) -> None:
        for layer, _ in self._layers:
            vars(layer).pop("forward", None)

    @staticmethod
    def _forward(layer: torch.nn.Module, mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
        if (documents := kwargs.pop(ARGUMENT, None)) is None:
            raise Unsupported(
                f"{type(layer).__name__} has a mixer and was given no documents: call the whole model, or use `with cp.off():`"
            )
        return mixer(layer, documents, *args, **kwargs)
