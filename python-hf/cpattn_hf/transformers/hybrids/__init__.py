# SPDX-License-Identifier: MIT OR Apache-2.0
"""The mixers of Transformers' hybrids, by the names of the layers' classes.

A recurrent layer has two forms: its rank gets whole documents for a part of the heads (`MIXERS`), or has its own tokens for all heads, and
states pass (`states`). The documents of a forward pass say which one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from . import convolution, delta, lightning, mamba, mamba2, rglru, windows
from .states.layers import FORMS, Form

_FAMILIES = (convolution, delta, lightning, mamba, mamba2, rglru, windows)
MIXERS: dict[str, Callable[..., Any]] = {name: mixer for family in _FAMILIES for name, mixer in family.MIXERS.items()}


def _kind(layer: nn.Module) -> str | None:
    """The class of Transformers that has the layer's forward, of a layer that may derive from it."""
    for kind in type(layer).__mro__:
        if "forward" in vars(kind):
            return kind.__name__ if kind.__module__.startswith("transformers.models.") else None
    return None


def form_of(layer: nn.Module) -> Form | None:
    """How a layer of Transformers passes states, if it is recurrent."""
    return FORMS.get(_kind(layer) or "")


def mixer_of(layer: nn.Module) -> Callable[..., Any] | None:
    """The mixer of a layer of Transformers. A class derived from one of Transformers has its mixer if it has its forward as well."""
    mixer, form = MIXERS.get(_kind(layer) or ""), form_of(layer)
    return mixer if mixer is None or form is None else partial(_either, mixer, form)


def _either(mixer: Callable[..., Any], form: Form, layer: nn.Module, documents: Any, *args: Any, **kwargs: Any) -> Any:
    if documents.passes(type(layer).__name__, form, layer):
        return _passing(form, layer, documents, *args, **kwargs)
    return mixer(layer, documents, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _passing(form: Form, *args: Any, **kwargs: Any) -> Any:
    """Not compiled: it makes the layer's forward anew, with other functions."""
    return form.run(*args, **kwargs)
