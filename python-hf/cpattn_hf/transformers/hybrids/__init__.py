# SPDX-License-Identifier: MIT OR Apache-2.0
"""The mixers of Transformers' hybrids, by the names of the layers' classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from . import convolution, delta, lightning, mamba, mamba2, rglru, windows

_FAMILIES = (convolution, delta, lightning, mamba, mamba2, rglru, windows)
MIXERS: dict[str, Callable[..., Any]] = {name: mixer for family in _FAMILIES for name, mixer in family.MIXERS.items()}


def mixer_of(layer: nn.Module) -> Callable[..., Any] | None:
    """The mixer of a layer of Transformers. A class derived from one of Transformers has its mixer if it has its forward as well."""
    for kind in type(layer).__mro__:
        if "forward" in vars(kind):
            return MIXERS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None
    return None
