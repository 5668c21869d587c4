# SPDX-License-Identifier: MIT OR Apache-2.0
"""Test forward passes that find out whether a model is right when each rank has only its own tokens.

Attention is replaced by a function of each single token. A model that mixes tokens in attention only, and takes positions from
`position_ids` only, then gives permuted logits for permuted tokens. Other models do not: convolutions over tokens, linear attention,
state spaces, positions counted from 0, attention that does not go through Transformers' interface.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..errors import Error, Unsupported
from .attention import Current
from .mixers import Mixers

TOKENS = 7


class Alone:
    """A forward pass in which a token sees itself only, and its o depends on its q, k and v."""

    longest = TOKENS

    def __init__(self) -> None:
        # The kinds of layers, and the number of calls of each.
        self.kinds: Counter[tuple[tuple[str, int], ...]] = Counter()

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: int, **options: Any) -> Tensor:
        kind = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "value_dim": v.shape[2], "window_left": window}
        self.kinds[tuple(kind.items())] += 1
        weights = torch.linspace(-1, 1, q.shape[-1], dtype=q.dtype, device=q.device)
        o = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        seen = (q * weights).sum(-1, keepdim=True) + (k * weights.cos()).sum((1, 2), keepdim=True)
        return o + seen.tanh().to(o.dtype)

    # For mixers: each token is a separate document.

    cu_seqlens = tuple(range(TOKENS + 1))

    def to_heads(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return x

    to_tokens = to_heads

    def own_heads(self, side: str = "q", *, heads: int, kv_heads: int) -> slice:
        return slice(0, heads if side == "q" else kv_heads)


def probe(model: Any, takes: frozenset[str], mixers: Mixers) -> list[tuple[int, dict[str, int]]]:
    """The kinds of the model's layers, each with the number of its layers. Raises Unsupported if the model would be wrong."""
    name = type(model).__name__
    if any(p.is_meta for p in model.parameters()):
        raise Unsupported(f"{name} has parameters on the device meta: load them before ContextParallel, which tries the model")
    table = model.get_input_embeddings()
    # Some models embed several streams of tokens, with one table for each.
    if not isinstance(words := getattr(table, "weight", None), Tensor):
        raise Unsupported(f"{name} embeds tokens with a {type(table).__name__}, one table with a weight is needed")
    ids = torch.randperm(words.shape[0], generator=torch.Generator().manual_seed(1))[:TOKENS].to(words.device)[None]
    positions = torch.arange(ids.shape[1], device=words.device)[None]
    more = {"use_cache": False} if "use_cache" in takes else {}
    training = [module for module in model.modules() if module.training]
    model.eval()
    logits, forward = [], Alone()
    try:
        with torch.no_grad():
            backwards = torch.arange(ids.shape[1] - 1, -1, -1, device=words.device)
            for order, given in ((slice(None), True), (backwards, True), (slice(None), False)):
                Current.forward = forward
                where = {"position_ids": positions[:, order]} if given else {}
                out = model(input_ids=ids[:, order], **where, **more, **mixers.arguments(forward))
                logits.append(out.logits[0, order].double())
    except Error as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise Unsupported(f"{name} does not run with packed tokens and position_ids: {type(error).__name__}: {error}") from error
    finally:
        Current.forward = None
        for module in training:
            module.training = True
    if not forward.kinds:
        raise Unsupported(f"{name} has no layer with attention through AttentionInterface of Transformers, which is needed")
    apart, usual = (float((logits[0] - other).abs().max() / logits[0].std().clamp(min=1e-30)) for other in logits[1:])
    most = 1e-3 if words.dtype in (torch.float32, torch.float64) else 0.2
    if not usual <= most:
        raise Unsupported(f"{name} does not count positions from 0, which is not supported: without position_ids its logits differ")
    if not apart <= most:
        raise Unsupported(
            f"{name} mixes tokens outside of attention, or counts positions itself: without attention, and with tokens in another order, "
            f"its logits differ by {apart:.1e} of their standard deviation. Layers over whole documents (convolutions, linear attention, state "
            "spaces) need mixers"
        )
    return [(calls // len(logits), dict(kind)) for kind, calls in forward.kinds.items()]
