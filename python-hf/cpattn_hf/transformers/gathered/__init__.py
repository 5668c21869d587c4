# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers of Transformers whose scores no kernel has, by the names of their classes: they run their own attention on gathered keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .blocks import blocks
from .compressed import compressed
from .keys import gathered
from .listed import listed

# An indexer chooses the keys of each query.
INDEXED = ("DeepseekV32Attention", "GlmMoeDsaAttention", "HYV4Attention", "AXK2Attention", "Dots3NoteTextAttention")
# Numbers from the values are added to the scores, and choose keys.
DYNAMIC = ("DogeAttention",)
# A learned bias that depends on the distance.
BIASED = ("InklingAttention", "Inkling2SlidingAttention", "Inkling2FullAttention")
# Attention that has no AttentionInterface.
PLAIN = (
    "GPTNeoXJapaneseAttention", "MegatronBertSelfAttention", "MvpAttention", "RemBertSelfAttention", "RoFormerSelfAttention", "TrOCRAttention",
)  # fmt: skip


def plain(kind: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Layers that add their mask to scores, whatever the model's attention is called."""
    return gathered("eager", layer, *args, **kwargs)


GATHERED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(INDEXED, listed),
    **dict.fromkeys((*DYNAMIC, *BIASED), gathered),
    **dict.fromkeys(PLAIN, plain),
    "Qwen4ExpTextAttention": compressed,
    "MiniMaxM3VLAttention": blocks,
}


def adapter_of(layer: nn.Module) -> Callable[..., Any] | None:
    """What runs instead of the forward of a layer of Transformers; None for a layer that kernels can run."""
    name = type(layer).__name__
    if name in ("Dots3NoteTextAttention", "MiniMaxM3VLAttention") and layer.indexer is None:
        return None
    return GATHERED.get(name)
