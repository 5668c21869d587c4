# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers that mix the tokens of whole documents, each head separately: linear attention, state space models, convolutions.

Such a layer needs all tokens of its documents, but not all heads. A function for its class runs instead of its forward: it moves the
projected tokens to heads, mixes, and moves the result back. Those of Transformers' hybrids are in `hybrids`; a user can give others
(docs/models.md has one for Qwen3-Next).

The function gets the forward pass as an argument, so a layer that gradient checkpointing runs again in the backward pass has the
documents of its own forward pass. Some models hand keywords to their blocks, which do not hand them on: so blocks keep it as well.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cpattn.arguments import attempt, instance, one_of, refused
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.options import Layout
from cpattn.torch.group import Gathered, Halo
from .attention import Current
from .hybrids import form_of, mixer_of
from .hybrids.deal import Deal

# The keyword with which a model passes the forward pass to its layers.
ARGUMENT = "cpattn_documents"


class Documents(Protocol):
    """An argument of a mixer: the documents of one forward pass, with the methods of `cpattn.torch.Batch` for any dtype."""

    @property
    def cu_seqlens(self) -> tuple[int, ...]: ...
    def to_heads(self, x: Tensor, side: str = "q", *, heads: int, kv_heads: int) -> Tensor: ...
    def to_tokens(self, x: Tensor, side: str = "q", *, heads: int, kv_heads: int) -> Tensor: ...
    def own_heads(self, side: str = "q", *, heads: int, kv_heads: int) -> slice: ...
    def deal(self, parts: int) -> Deal: ...
    def gather(self, x: Tensor | Sequence[Tensor], side: str = "k", **window: int) -> Gathered: ...
    def halo(self, x: Tensor, taps: int) -> Halo: ...


# Takes a layer, the documents and the arguments of the layer's forward; returns the result of the layer's forward.
Mixer = Callable[..., Any]


class _Block(threading.local):
    """The documents of the block that this thread runs."""

    documents: Documents | None = None


_block = _Block()


def _given(documents: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    outer, _block.documents = _block.documents, documents
    try:
        return function(*args, **kwargs)
    finally:
        _block.documents = outer


def striped() -> Unsupported:
    return Unsupported(
        "recurrent is 'states', and layout is 'striped', with which a rank has no consecutive tokens: use another layout, or recurrent='heads'"
    )


def _check(name: str, recurrent: str, layers: Iterable[torch.nn.Module], options: dict[str, Any]) -> None:
    """Refuses a form of recurrent layers that the model's layers do not have."""
    if not isinstance(recurrent, str) or recurrent not in ("auto", "states", "heads"):
        raise refused(
            "recurrent",
            recurrent,
            "'auto', 'states' (each rank has its own tokens) or 'heads' (whole documents) is needed",
        )
    if recurrent == "auto":
        return
    forms = [(layer, form) for layer in layers if (form := form_of(layer))]
    if not forms:
        raise InvalidArgument(
            f"recurrent is {recurrent!r}, and {name} has no recurrent layer of Transformers without a mixer of yours: leave recurrent out"
        )
    if (
        recurrent == "states"
        and attempt(lambda: one_of("layout", options.get("layout", Layout.AUTO), Layout)) == Layout.STRIPED
    ):
        raise striped()
    for layer, form in forms:
        if recurrent == "states" and (missing := form.missing(layer)):
            raise Unsupported(f"recurrent is 'states', and {missing}: use recurrent='heads', or leave it out")


class Mixers:
    """The mixers of a model's layers: those that a user gives, by class, and those of Transformers' hybrids."""

    def __init__(
        self,
        model: torch.nn.Module,
        mixers: Mapping[type[torch.nn.Module], Mixer],
        options: dict[str, Any],
        ranks: int,
        recurrent: str = "auto",
    ) -> None:
        self.layers: dict[torch.nn.Module, Mixer] = {}
        for kind, mixer in instance(
            "mixers", mixers, Mapping, "a mapping of classes of layers to mixers is needed"
        ).items():
            if not isinstance(kind, type) or not callable(mixer):
                raise refused("mixers", mixers, "a mapping of classes of layers to mixers is needed")
            layers = [module for module in model.modules() if isinstance(module, kind)]
            if not layers:
                raise InvalidArgument(
                    f"mixers has {kind.__name__}, and {type(model).__name__} has no layer of this class"
                )
            self.layers |= dict.fromkeys(layers, mixer)
        if mixers and options.setdefault("ulysses", ranks) != ranks:
            raise Unsupported(
                f"ulysses is {options['ulysses']}, {ranks} is needed, the number of ranks: layers with mixers of `mixers` need whole "
                "documents. Leave ulysses out"
            )
        known = {
            module: found for module in model.modules() if module not in self.layers and (found := mixer_of(module))
        }
        self.layers |= known
        self.recurrent = recurrent
        _check(type(model).__name__, recurrent, known, options)
        # Decided once, and compared between ranks, for some of which weights may have hooks.
        asked = [(type(layer).__name__, form.missing(layer)) for layer in known if (form := form_of(layer))]
        able = {kind for kind, _ in asked} - {kind for kind, missing in asked if missing}
        self.able = [] if recurrent == "heads" else sorted(able)
        self._blocks = [
            module for module in model.modules() if any(child in self.layers for child in module.children())
        ]
        if self.layers and not any(
            one.kind == one.VAR_KEYWORD for one in inspect.signature(model.forward).parameters.values()
        ):
            what = "mixers are given" if mixers else f"{type(next(iter(known))).__name__} has a mixer"
            raise Unsupported(
                f"{what}, and {type(model).__name__}.forward takes no **kwargs: it must pass keywords on to its layers"
            )

    def __bool__(self) -> bool:
        return bool(self.layers)

    def arguments(self, documents: Documents) -> dict[str, Any]:
        """Further arguments for the call of the model."""
        for block in self._blocks:
            usual = vars(block).get("_gradient_checkpointing_func")
            if usual is not None and getattr(usual, "func", None) is not Mixers._checkpointed:
                vars(block)["_gradient_checkpointing_func"] = partial(Mixers._checkpointed, usual)
        return {ARGUMENT: documents} if self.layers else {}

    def replace(self) -> None:
        for layer, mixer in self.layers.items():
            layer.forward = partial(self._forward, layer, mixer)
        for block in self._blocks:
            if "forward" not in vars(block):
                block.forward = partial(self._within, block.forward)

    def replaced(self) -> Iterator[tuple[torch.nn.Module, str, Any]]:
        """Each layer, its method, and the function of the partial that replaces it."""
        yield from ((layer, "forward", Mixers._forward) for layer in self.layers)

    def restore(self) -> None:
        for module in (*self.layers, *self._blocks):
            if getattr(vars(module).get("forward"), "func", None) in (Mixers._forward, Mixers._within):
                del module.forward
        for block in self._blocks:
            kept: Any = vars(block).get("_gradient_checkpointing_func")
            if getattr(kept, "func", None) is Mixers._checkpointed:
                vars(block)["_gradient_checkpointing_func"] = kept.args[0]

    @staticmethod
    def _within(usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _given(kwargs.get(ARGUMENT) or _block.documents, usual, *args, **kwargs)

    @staticmethod
    def _checkpointed(usual: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gradient checkpointing of a block. What it runs again has the documents of now."""
        return usual(partial(_given, Current.forward, function), *args, **kwargs)

    @staticmethod
    def _forward(layer: torch.nn.Module, mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
        documents: Any = kwargs.pop(ARGUMENT, None) or _block.documents or Current.forward
        if documents is None:
            raise Unsupported(
                f"{type(layer).__name__} has a mixer and was given no documents: call the whole model, or use `with cp.off():`. In a model "
                "that hands no keywords to its blocks, checkpoint them with model.gradient_checkpointing_enable"
            )
        return mixer(layer, documents, *args, **kwargs)
