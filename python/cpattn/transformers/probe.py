# SPDX-License-Identifier: MIT OR Apache-2.0
"""Test forward passes that find out whether a model is right when each rank has only its own tokens.

Attention is replaced by a function of each single token. A model that mixes tokens in attention only, and takes positions from
`position_ids` only, then gives the logits of some tokens in another order for these tokens alone. Other models do not: convolutions
over tokens, linear attention, state spaces, scales that depend on all tokens, attention that does not go through Transformers' interface.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._header import UNLIMITED
from ..errors import Error, Unsupported
from .attention import Current, Window
from .hybrids.deal import Deal
from .mixers import Mixers
from .pooled import Kept

TOKENS = 7


class Alone:
    """A forward pass in which a token sees itself only, and its o depends on its q, k and v."""

    longest = TOKENS

    def __init__(self) -> None:
        # The kinds of layers, and the number of calls of each.
        self.kinds: Counter[tuple[tuple[str, int], ...]] = Counter()

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: Window, **options: Any) -> Tensor:
        kind = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "value_dim": v.shape[2]}
        kind |= zip(("window_left", "window_right"), window)
        self.kinds[tuple(kind.items())] += 1
        weights = torch.linspace(-1, 1, q.shape[-1], dtype=q.dtype, device=q.device)
        o = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        seen = (q * weights).sum(-1, keepdim=True) + (k * weights.cos()).sum((1, 2), keepdim=True)
        return o + seen.tanh().to(o.dtype)

    @property
    def positions(self) -> Tensor:
        return torch.zeros(len(self.cu_seqlens) - 1)

    # For mixers: each token is a separate document.

    cu_seqlens: tuple[int, ...] = ()

    def to_heads(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return x

    to_tokens = to_heads

    def own_heads(self, side: str = "q", *, heads: int, kv_heads: int) -> slice:
        return slice(0, heads if side == "q" else kv_heads)

    def deal(self, parts: int) -> Deal:
        return Deal(self.cu_seqlens, [torch.arange(self.cu_seqlens[-1])], 0, 1, None)


class Tables(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """The number of rows that tables of embeddings have for positions."""

    positions, rows = torch.zeros(0), UNLIMITED

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default and args[1].numel() == self.positions.numel():
            before = (args[1].flatten() - self.positions).unique().tolist()
            if len(before) == 1:
                self.rows = min(self.rows, len(args[0]) - int(before[0]))
        return func(*args, **kwargs or {})


class Found(NamedTuple):
    """The kinds of a model's layers, each with the number of its layers; the first position of a document; the number of positions
    from there on that the model has; the number of token types, 0 if it takes none; whether the head reads one token of a row."""

    layers: list[tuple[int, dict[str, int]]]
    first: int
    positions: int
    types: int
    pooled: bool


def probe(model: Any, takes: frozenset[str], mixers: Mixers, kept: Kept | None = None) -> Found:
    """Raises Unsupported if the model would be wrong."""
    name = type(model).__name__
    if any(p.is_meta for p in model.parameters()):
        raise Unsupported(f"{name} has parameters on the device meta: load them before ContextParallel, which tries the model")
    if "decoder_input_ids" in takes and getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported(f"{name} has an encoder and a decoder, which is not supported: use cpattn.torch for its layers")
    table = model.get_input_embeddings()
    # Some models embed several streams of tokens, with one table for each.
    if not isinstance(words := getattr(table, "weight", None), Tensor):
        raise Unsupported(f"{name} embeds tokens with a {type(table).__name__}, one table with a weight is needed")
    config = model.config.get_text_config()
    padding, masked = (getattr(config, name, None) for name in ("pad_token_id", "mask_token_id"))
    types = getattr(config, "type_vocab_size", 0) if "token_type_ids" in takes else 0
    ids = torch.randperm(words.shape[0], generator=torch.Generator().manual_seed(1))
    ids = ids[ids != (-1 if padding is None else padding)][:TOKENS].to(words.device)
    if masked is not None and masked < words.shape[0] and masked not in ids:
        ids[1] = masked  # not in `some`
    every = torch.arange(len(ids), device=words.device)
    some = every.flip(0)[::2]
    more = {"use_cache": False} if "use_cache" in takes else {}
    training = [module for module in model.modules() if module.training]
    model.eval()
    forward, calls = Alone(), 0
    tables = Tables()  # type: ignore[no-untyped-call, unused-ignore]

    def logits(order: Tensor, first: int | None) -> Tensor:
        """Of these tokens, with positions from `first`, or without position_ids."""
        nonlocal calls
        Current.forward, calls = forward, calls + 1
        tables.positions, tables.rows = order, UNLIMITED
        forward.cu_seqlens = tuple(range(len(order) + 1))
        where = {} if first is None else {"position_ids": (order + first)[None]}
        where |= {"token_type_ids": (ids[order] % types)[None]} if types else {}
        out = model(input_ids=ids[order][None], **where, **more, **mixers.arguments(forward))
        found = getattr(out, "logits", None)
        if kept is not None:
            pooled, found = found, kept.take()
            if not isinstance(pooled, Tensor) or not torch.equal(pooled[0], found[0, -1]):
                raise Unsupported("the result is not that of the head for the last token of a row, which is needed of a head for classes of sequences")
        if not isinstance(found, Tensor):
            raise Unsupported(
                f"the result, a {type(out).__name__}, has no logits: base models and heads for answers are not supported. Take the class with "
                "a head for words (...ForMaskedLM, ...ForCausalLM), or use cpattn.torch"
            )
        if found.ndim != 3 or found.shape[:2] != (1, len(order)):
            raise Unsupported(
                f"logits of {len(order)} tokens have the shape {tuple(found.shape)}, (1, {len(order)}, ...) is needed, one row for each token: "
                "models that pool tokens, as for classes of sequences, are not supported. Use cpattn.torch for them"
            )
        return found[0].double()

    def apart(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max() / usual.std().clamp(min=1e-30))

    most = 1e-3 if words.dtype in (torch.float32, torch.float64) else 0.2
    try:
        with torch.no_grad(), tables:
            usual = logits(every, None)
            # RoBERTa and its relatives count from the number after that of the padding.
            firsts = [0] if padding is None else [0, padding + 1]
            distances: dict[int, float] = {}
            for one in firsts:
                if 0.0 not in distances.values() and one + len(every) <= tables.rows:
                    distances[one] = apart(logits(every, one), usual)
            # The nearest: in half precision, a table of small positions is near enough from any of them.
            near = [one for one in distances if distances[one] <= most]
            first = min(near, key=distances.__getitem__, default=None)
            distance = apart(logits(some, first or 0), usual[some])
    except Error as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise Unsupported(f"{name} does not run with packed tokens and position_ids: {type(error).__name__}: {error}") from error
    finally:
        Current.forward = None
        for module in training:
            module.training = True
    if not forward.kinds and mixers:
        # No attention: any kind of layer will do for the distribution of tokens.
        kind = {"heads": 1, "kv_heads": 1, "head_dim": 8, "value_dim": 8, "window_left": UNLIMITED, "window_right": 0}
        forward.kinds[tuple(kind.items())] = calls
    if not forward.kinds:
        raise Unsupported(f"{name} has no layer with attention through AttentionInterface of Transformers, which is needed")
    if first is None:
        raise Unsupported(
            f"{name} does not count positions from {' or '.join(map(str, firsts))}, which is not supported: without position_ids its logits differ"
        )
    if not distance <= most:
        raise Unsupported(
            f"{name} mixes tokens outside of attention, or counts positions itself: without attention, and with tokens in another order, "
            f"its logits differ by {distance:.1e} of their standard deviation. Layers over whole documents (convolutions, linear attention, state "
            "spaces) need mixers"
        )
    layers = [(count // calls, dict(kind)) for kind, count in forward.kinds.items()]
    return Found(layers, first, tables.rows, types, kept is not None)
