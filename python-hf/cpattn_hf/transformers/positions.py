# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tables of positions in models that count positions themselves: BART and its relatives, RoFormer, TrOCR. They get those of this rank's
tokens in their documents."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .attention import Current

NAMES = (
    "BartLearnedPositionalEmbedding", "BlenderbotLearnedPositionalEmbedding", "BlenderbotSmallLearnedPositionalEmbedding",
    "MBartLearnedPositionalEmbedding", "MarianSinusoidalPositionalEmbedding", "MvpLearnedPositionalEmbedding",
    "PLBartLearnedPositionalEmbedding", "PegasusSinusoidalPositionalEmbedding", "RoFormerSinusoidalPositionalEmbedding",
    "TrOCRLearnedPositionalEmbedding",
)  # fmt: skip


def positions(table: Any, tokens: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The table's own forward, which takes the positions that the model has counted, or counts them: of the tokens or their shape."""
    places = None if Current.forward is None else Current.forward.places
    if places is not None:
        args, kwargs = (), {"position_ids": places}
    rows: Tensor = type(table).forward(table, tokens, *args, **kwargs)
    return rows
