# SPDX-License-Identifier: MIT OR Apache-2.0
"""Qwen4-exp: an indexer compares each query with blocks of keys, whose rotary embeddings it computes from those of their first tokens. So
it needs the embeddings of the keys, and then those of the queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .keys import Keys, gathered


def compressed(
    kind: str, layer: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    keys, own = Keys.of(layer, attention_mask), [one.detach() for one in position_embeddings]
    every = tuple(torch.cat(pair, 1) for pair in zip(keys.gather(own, (1, 1)), own, strict=True))
    return gathered(kind, layer, hidden_states, every, attention_mask, **kwargs)
