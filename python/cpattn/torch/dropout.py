# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dropout of attention: the seed of a call, and the mask that it stands for.

A layer that gradient checkpointing computes again in the backward pass must drop what it dropped before. If its generator is not restored
it would draw another seed, and gradients would be those of neither. So seeds of forward passes are kept, and a forward inside of a
backward needs one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dropout
from ..arguments import number, refused, whole
from ..errors import InvalidArgument, Unsupported

# Seeds are kept of so many calls: those between a forward pass and its backward are fewer.
CALLS = 1 << 16
# The seeds, the latest last.
_seeds: dict[int, None] = {}


def dropout_mask(p: float, seed: int | Tensor, heads: int, q_tokens: int, k_tokens: int | None = None) -> Tensor:
    """The pairs that `Batch.attention(dropout_p=p, dropout_seed=seed)` keeps, [heads, q_tokens, k_tokens], of all tokens of the batch:
    True for a pair that is kept. The probabilities of these are multiplied by 1/(1 - p). It does not depend on documents, slices, ranks
    or layouts. `k_tokens` is `q_tokens` if it is not given."""
    p, seed, heads = probability("p", p), seed_of("seed", seed), whole("heads", heads, 1, 2**16)
    q_tokens = whole("q_tokens", q_tokens, 0, 2**31)
    k_tokens = q_tokens if k_tokens is None else whole("k_tokens", k_tokens, 0, 2**31)
    mask = torch.ones(heads, q_tokens, k_tokens, dtype=torch.bool)
    if mask.numel():
        for head, rows in enumerate(mask):
            bits = dropout.dropout_mask(p, seed, head, q_tokens, k_tokens)
            rows.copy_(torch.frombuffer(bytearray(bits), dtype=torch.bool).view(q_tokens, k_tokens))
    return mask


def probability(name: str, p: Any) -> float:
    """A probability of dropout."""
    if not 0 <= (value := number(name, p)) < 1:
        raise refused(name, p, "a probability from 0 up to, but not including, 1 is needed")
    return value


def seed_of(name: str, seed: Any) -> int:
    """A seed as a number from 0 to 2^64 - 1. A negative number of an int64 tensor stands for itself plus 2^64."""
    return int(_one(name, seed).item()) % 2**64 if isinstance(seed, Tensor) else whole(name, seed, 0, 2**64 - 1)


def _one(name: str, seed: Tensor) -> Tensor:
    if seed.numel() != 1 or seed.dtype != torch.int64:
        raise InvalidArgument(
            f"{name} is a tensor of {seed.dtype} of the shape {tuple(seed.shape)}, one number of torch.int64 is needed"
        )
    return seed


def of_call(p: float | None, seed: int | Tensor | None, of_context: float) -> Tensor | None:
    """The seed of a call as a tensor, which graphs do not treat as a constant; None without dropout. A seed that is not given is drawn
    from PyTorch's generator for the CPU."""
    p = of_context if p is None else probability("dropout_p", p)
    if isinstance(seed, Tensor):
        seed = _one("dropout_seed", seed)
    elif seed is not None:
        value = whole("dropout_seed", seed, 0, 2**64 - 1)
        seed = torch.tensor(value - 2**64 if value >= 2**63 else value, dtype=torch.int64)
    if not p:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64) if seed is None else seed


def known(seed: int) -> int:
    """The seed of a forward, which inside of a backward pass is that of an earlier forward."""
    if seed not in _seeds and torch._C._current_graph_task_id() != -1:
        raise Unsupported(
            "attention with dropout is computed again in the backward pass with another seed than before, as gradient checkpointing with "
            "preserve_rng_state=False makes it draw one: give dropout_seed, the same number both times, or leave preserve_rng_state=False out"
        )
    _seeds.pop(seed, None)
    _seeds[seed] = None
    if len(_seeds) > CALLS:
        del _seeds[next(iter(_seeds))]
    return seed
