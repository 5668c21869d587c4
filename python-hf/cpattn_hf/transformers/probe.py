# SPDX-License-Identifier: MIT OR Apache-2.0
"""Test forward passes that find out whether a model is right when each rank has only its own tokens.

Attention is replaced by a function of each single token. A model that mixes tokens in attention only, and takes positions from
`position_ids` only, then gives the logits of some tokens in another order for these tokens alone. Other models do not: convolutions
over tokens, linear attention, state spaces, scales that depend on all tokens, attention that does not go through Transformers' interface.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpattn import UNLIMITED
from cpattn.errors import Error, Unsupported
from cpattn.packing import Packing
from cpattn.torch.group import Gathered, Halo, Reads, bands_of
from cpattn.torch.group import Runs
from .attention import Current
from .hybrids.deal import Deal
from .hybrids.states.layers import Form
from .hybrids.states.segments import Segment
from .loss_trial import difference
from .masks import ARGUMENTS, SAMPLE, TYPES, Blocks, Parts, Window, rule
from .mixers import Mixers
from .owners import may_fail, trial
from .places import Places, far_position
from .pooled import Kept
from .zero import shape_of

TOKENS = 7


class Alone:
    """A forward pass in which a token sees itself only, and its o depends on its q, k and v."""

    longest = UNLIMITED

    def __init__(self, recurrent: str = "heads") -> None:
        self._recurrent = recurrent
        # The kinds of layers, and the number of calls of each.
        self.kinds: Counter[tuple[tuple[str, int], ...]] = Counter()
        self.numbers: list[Tensor] = []  # of blocks
        self.conflicts: list[str] = []
        # The window of a layer with gathered keys.
        self.gathered: Window | None = None
        self.places: Tensor | None = None

    def refuse_is_causal(self, message: str) -> None:
        self.conflicts.append(message)

    def blocked(self, numbers: Tensor) -> bool:
        self.numbers.append(numbers)
        return bool((numbers >= 0).any())

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: Window | Parts, **options: Any) -> Tensor:
        window = window.hull if isinstance(window, Parts) else window
        kind = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "value_dim": v.shape[2]}
        kind |= zip(("window_left", "window_right"), window)
        self.kinds[tuple(kind.items())] += 1
        weights = torch.linspace(-1, 1, q.shape[-1], dtype=q.dtype, device=q.device)
        o = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        seen = (q * weights).sum(-1, keepdim=True) + (k * weights.cos()).sum((1, 2), keepdim=True)
        return o + seen.tanh().to(o.dtype)

    def reads(self, window: Window | Parts) -> Reads:
        if isinstance(window, Parts):
            raise Unsupported(
                "layers that run their own attention on gathered keys take documents with or without a window, and their mask is another one"
            )
        self.gathered = window
        return self._reads(window)

    def gather(self, x: Tensor | Sequence[Tensor], side: str = "k", **window: int) -> Gathered:
        reads = self._reads((UNLIMITED, UNLIMITED))
        return reads.said(x if isinstance(x, Tensor) else tuple(x), reads.tokens.device)

    def halo(self, x: Tensor, taps: int) -> Halo:
        return self._reads((taps, 0)).halo(x, taps)

    def _reads(self, window: Window) -> Reads:
        tokens = torch.arange(self.cu_seqlens[-1])
        return Reads(bands_of(Packing(self.cu_seqlens), *window), [Runs(tokens)], [Runs(tokens)], 0, tokens, None)

    @property
    def positions(self) -> Tensor:
        return torch.zeros(len(self.cu_seqlens) - 1, dtype=torch.int64)

    # For mixers: each token is a separate document.

    cu_seqlens: tuple[int, ...] = ()

    def to_heads(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return x

    to_tokens = to_heads

    def own_heads(self, side: str = "q", *, heads: int, kv_heads: int) -> slice:
        return slice(0, heads if side == "q" else kv_heads)

    def deal(self, parts: int) -> Deal:
        return Deal(self.cu_seqlens, [torch.arange(self.cu_seqlens[-1])], 0, 1, None)

    @property
    def segments(self) -> list[Segment]:
        return [Segment(one, 0, 1, one, True, True) for one in range(self.cu_seqlens[-1])]

    def scan(self, decay: Tensor, state: Tensor, *, matrix: bool = False) -> Tensor:
        return torch.zeros_like(state)

    def passes(self, kind: str, form: Form, layer: Any) -> bool:
        return self._recurrent == "states"


class Found(NamedTuple):
    """The kinds of a model's layers, each with the number of its layers; the first position of a document; the number of positions
    from there on that the model has; whether it counts no tokens with the padding's id; the number of token types, 0 if it takes none,
    the name of their argument, and the blocks that they make in its masks; whether the head reads one token of a row; how
    often a pass runs attention with kernels; and what its loss is, if not that of its labels."""

    layers: list[tuple[int, dict[str, int]]]
    first: int
    positions: int
    skips: bool
    types: int
    named: str
    blocks: Blocks | None
    pooled: bool
    runs: int
    loss: str = ""

    @property
    def told(self) -> list[tuple[int, dict[str, int]]]:
        """The layers as options of plans: causal documents are the default, and slices say themselves what a query sees after its own key."""
        return [
            (count, {name: value for name, value in kind.items() if name != "window_right" or value})
            for count, kind in self.layers
        ]


def probe(
    model: Any,
    takes: frozenset[str],
    mixers: Mixers,
    kept: Kept | None = None,
    heads: int = 1,
    shifted: bool | None = None,
) -> Found:
    """Raises Unsupported if the model would be wrong. A model without attention that uses kernels has tokens as for so many `heads`. Its loss is
    that of labels which it shifts or not, or of something else."""
    name = type(model).__name__
    if any(p.is_meta for p in model.parameters()):
        raise Unsupported(
            f"{name} has parameters on the device meta: load them before ContextParallel, which tries the model"
        )
    if "decoder_input_ids" in takes and getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported(
            f"{name} has an encoder and a decoder, which is not supported: use cpattn.torch for its layers"
        )
    table = model.get_input_embeddings()
    # Some models embed several streams of tokens, with one table for each.
    if not isinstance(words := getattr(table, "weight", None), Tensor):
        raise Unsupported(f"{name} embeds tokens with a {type(table).__name__}, one table with a weight is needed")
    config = model.config.get_text_config()
    padding, masked = (getattr(config, name, None) for name in ("pad_token_id", "mask_token_id"))
    types, named, blocks = (
        getattr(config, "type_vocab_size", 0),
        next((one for one in ARGUMENTS if one in takes), ""),
        None,
    )
    types = types if named == "token_type_ids" else 0
    number = shape_of(words)[0]
    ids = torch.randperm(number, generator=torch.Generator().manual_seed(1))
    ids = ids[ids != (-1 if padding is None else padding)][:TOKENS].to(words.device)
    if masked is not None and masked < number and masked not in ids:
        ids[1] = masked  # not in `some`
    every = torch.arange(len(ids), device=words.device)
    some = every.flip(0)[::2]
    more = {"use_cache": False} if "use_cache" in takes else {}
    training = [module for module in model.modules() if module.training]
    model.eval()
    forward, calls = Alone(mixers.recurrent), 0
    tables = Places()  # type: ignore[no-untyped-call, unused-ignore]

    def outputs(
        order: Tensor, first: int | Tensor | None, of: Tensor | None = None, ids: Tensor = ids, **labels: Tensor
    ) -> Any:
        nonlocal calls
        Current.forward, calls = forward, calls + 1
        tables.begin(order)
        forward.cu_seqlens = tuple(range(len(order) + 1))
        forward.places = None if first is None else order + first
        where = {} if first is None else {"position_ids": (order + first)[None]}
        where |= {named: (ids[order] % types if of is None else of)[None]} if types or of is not None else {}
        return model(input_ids=ids[order][None], **where, **more, **labels, **mixers.arguments(forward))

    def logits(order: Tensor, first: int | Tensor | None, of: Tensor | None = None, ids: Tensor = ids) -> Tensor:
        """Of these tokens, with positions from `first`, or without position_ids; with types of their own."""
        out = outputs(order, first, of, ids)
        found = getattr(out, "logits", None)
        if kept is not None:
            pooled, found = found, kept.take()
            if not isinstance(pooled, Tensor) or not torch.equal(pooled[0], found[0, -1]):
                raise Unsupported(
                    "the result is not that of the head for the last token of a row, which is needed of a head for classes of sequences"
                )
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

    def gap(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max() / usual.std().clamp(min=1e-30))

    most = 1e-3 if words.dtype in (torch.float32, torch.float64) else 0.2
    try:
        with torch.no_grad(), trial(model), tables:
            usual = logits(every, None)
            # RoBERTa and its relatives count from the number after that of the padding.
            firsts = [0] if padding is None else [0, padding + 1]
            distances: dict[int, float] = {}
            for one in firsts:
                if 0.0 not in distances.values() and one + len(every) <= tables.rows:
                    distances[one] = gap(logits(every, one), usual)
            # The nearest: in half precision, a table of small positions is near enough from any of them.
            near = [one for one in distances if distances[one] <= most]
            first = min(near, key=distances.__getitem__, default=None)
            distance = gap(logits(some, first or 0), usual[some])
            if any(bool((one >= 0).any()) for one in forward.numbers):
                raise Unsupported(
                    "its mask has blocks of tokens that do not come from token types, which is not supported: use cpattn.torch"
                )
            rows, counted, kinds = tables.rows, calls, forward.kinds.copy()
            if first is not None and (far := far_position(config, rows) - len(every)) > first:
                distance = max(distance, _far(logits, every, some, far, tables, gap))
            skips = bool(first) and _skips(logits, ids, every, first or 0)
            loss = ""
            if kept is None and shifted is not None:
                with may_fail(model):  # it may take no labels, or want other inputs beside them
                    loss = difference(model, outputs(every, first, labels=ids[None]), ids, shifted)
            if named and not types:
                types, blocks = _typed(
                    model, forward, logits, torch.arange(len(SAMPLE), device=words.device) % len(ids), first or 0, most
                )
            if forward.conflicts:
                raise Unsupported(forward.conflicts[0])
    except Error as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise Unsupported(
            f"{name} does not run with packed tokens and position_ids: {type(error).__name__}: {error}"
        ) from error
    finally:
        Current.forward = None
        for module in training:
            module.training = True
    runs = sum(count // counted for count in kinds.values())
    if not kinds and (mixers or forward.gathered):
        # No attention with kernels: any kind of layer will do for the distribution of tokens.
        left, right = forward.gathered or (UNLIMITED, 0)
        kind = {
            "heads": heads,
            "kv_heads": heads,
            "head_dim": 8,
            "value_dim": 8,
            "window_left": left,
            "window_right": right,
        }
        kinds[tuple(kind.items())] = counted
    if not kinds:
        raise Unsupported(
            f"{name} has no layer with attention through AttentionInterface of Transformers, which is needed"
        )
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
    layers = [(count // counted, dict(kind)) for kind, count in kinds.items()]
    return Found(layers, first, rows, skips, types, named, blocks, kept is not None, runs, loss)


def _far(
    logits: Callable[..., Tensor],
    every: Tensor,
    some: Tensor,
    far: int,
    places: Places,
    gap: Callable[[Tensor, Tensor], float],
) -> float:
    """What tokens in another order, and the model's own numbers of their places, change at positions that only long documents have."""
    usual = logits(every, far)
    counted = places.counted
    distance = gap(logits(some, far), usual[some])
    if counted:
        places.moved, places.by = counted, far
        distance = max(distance, gap(logits(every, far), usual))
        places.moved = frozenset()
    return distance


def _skips(logits: Callable[..., Tensor], ids: Tensor, order: Tensor, first: int) -> bool:
    """Whether a model that counts positions from the number after that of the padding leaves out tokens with the padding's id."""
    some = ids.clone()
    some[2] = first - 1
    usual = logits(order, None, ids=some)
    left_out = torch.where(some == first - 1, first - 1, (some != first - 1).cumsum(0) + first - 1) - order
    every, others = (float((logits(order, where, ids=some) - usual).abs().max()) for where in (first, left_out))
    return others < every


def _typed(
    model: Any, forward: Alone, logits: Callable[..., Tensor], order: Tensor, first: int, most: float
) -> tuple[int, Blocks | None]:
    """The number of types that a model without a table of types takes, 0 if it does something else with them than blocks in its masks, and
    the rule of the blocks."""
    conflicts, usual = forward.conflicts, logits(order, first)
    found: tuple[int, Blocks | None] = (0, None)
    forward.numbers, forward.conflicts = [], []
    # It may take other types, or none without its other inputs: a batch with types is then refused.
    with may_fail(model):
        typed = logits(order, first, torch.tensor(SAMPLE, device=order.device))
        if float((typed - usual).abs().max()) <= most * float(usual.std()):
            found = TYPES, rule(forward.numbers)
    if found[1] is None:  # types decide nothing that a layer sees
        forward.conflicts = conflicts
    return found
