# SPDX-License-Identifier: MIT OR Apache-2.0
"""One forward pass of a model over the ranks of a group: what its layers, its head and its mixers ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cpattn.options import Side
from cpattn.torch import Batch
from cpattn.torch.group import Collectives
from .draws import Draws, seed_of_call
from .gathered.forward import Gathers
from .hybrids.deal import Deal
from .hybrids.states.choice import Cost, Load, by_heads, by_states, described
from .hybrids.states.layers import Form
from .hybrids.states.passing import Passing
from .hybrids.states.segments import Segment, connected, segments_of
from .masks import Parts, Window
from .pack import Pack
from .scores import Reader
from .views import Views

# A number of 64 bits (of the golden ratio).
PARTS = 0x9E3779B97F4A7C15


@dataclass(eq=False)
class Forward(Gathers):
    """One forward pass: its documents, and a batch for each dtype of q, k and v.

    `tokens` are the tokens of the batch that this rank's model gets. Models do not run without a token, so a rank without any gets the
    first one, without a label: it is left out of all that is exchanged, and of the results. Logits exist for `size` tokens at a time (0: for
    all). A `reader` makes the results, of all tokens, instead of loss and logits."""

    pack: Pack
    views: Views
    batch: Batch
    items: Any
    labels: Tensor | None
    weights: Tensor | None = None
    reader: Reader | None = None
    size: int = 0
    tile: Tensor | None = None
    hidden: Tensor | None = None
    outputs: Any = None
    router: Any = None
    ahead: Tensor | None = None  # the loss of heads for further tokens
    draws: Draws | None = None
    # Whether the model around the text model runs, on the whole batch.
    outer: bool = False
    group: Collectives | None = None
    # Where groups have several sizes: the documents of all of them, this rank's tokens in these (none for a rank that only takes part), and its group.
    whole: Pack = None  # type: ignore[assignment]
    own: Tensor = None  # type: ignore[assignment]
    local: Collectives | None = None
    first_rank: int = 0
    part: int = 0  # which part of the heads this rank has (tensor parallelism)
    recurrent: str = "heads"  # the form of recurrent layers
    able: Sequence[str] = ()  # the classes of recurrent layers that can pass states
    deals: dict[int, Deal] = field(default_factory=dict)
    # By the class of recurrent layers: whether they pass states, and what both forms cost.
    passed: dict[str, tuple[bool, Load, Load]] = field(default_factory=dict)
    longest: int = field(init=False)
    tokens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.batch.tokens if len(self.batch.tokens) else self.batch.tokens.new_zeros(1)
        if self.whole is None:
            self.whole, self.own, self.local = self.pack, self.batch.tokens, self.group
        if self.labels is not None:
            self.labels = self.labels[self.tokens] if len(self.batch.tokens) else torch.full_like(self.labels[:1], -100)
            self.weights = None if self.weights is None else self.weights[self.tokens]
        self.longest = max(self.whole.longest, self.whole.reach)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window | Parts, dropout: float = 0.0, **options: Any
    ) -> Tensor:
        if dropout:
            # Each part of the heads has masks of its own, and so has each group.
            options |= {
                "dropout_p": dropout,
                "dropout_seed": (seed_of_call(self.draws).number + (self.part + self.first_rank) * PARTS) % 2**64,
            }
        dtype = torch.get_autocast_dtype(v.device.type) if torch.is_autocast_enabled(v.device.type) else v.dtype
        q, k, v = (self.own_rows(x.to(dtype)) for x in (q, k, v))
        batch, (left, right) = self.views.of(dtype, window)
        return self.model_rows(batch.attention(q, k, v, window_left=left, window_right=right, **options))

    def blocked(self, numbers: Tensor) -> bool:
        if self.outer and numbers.shape == self.pack.shape:
            indices = self.pack.kept
            return self.views.blocked(
                numbers.flatten()[indices.to(numbers.device)][None], torch.arange(len(indices), device=indices.device)
            )
        return self.views.blocked(numbers, self.tokens)

    def refuse_is_causal(self, message: str) -> None:
        self.views.refuse_is_causal(message)

    def own_rows(self, x: Tensor) -> Tensor:
        """The rows of x that are tokens of this rank."""
        return x[: len(self.batch.tokens)]

    def counted(self, x: Tensor) -> Tensor:
        """The rows of x that are tokens of the batch of all ranks: none, where this rank's group has no documents."""
        return x[: len(self.own)]

    def model_rows(self, x: Tensor) -> Tensor:
        """From rows for the tokens of this rank to rows for those that its model got."""
        return x if len(self.batch.tokens) else torch.cat([x, x.new_zeros(1, *x.shape[1:])])

    @property
    def places(self) -> Tensor:
        return self.pack.positions[self.tokens]

    @property
    def positions(self) -> Tensor:
        pack = self.pack
        return self.batch.positions if pack.slices is None else pack.positions[self.batch.tokens] - pack.first

    # For mixers.

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return self.batch.cu_seqlens

    def to_heads(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return self.views.batch(x.dtype).to_heads(self.own_rows(x), side, **heads)

    def to_tokens(self, x: Tensor, side: str = "q", **heads: int) -> Tensor:
        return self.model_rows(self.views.batch(x.dtype).to_tokens(x, side, **heads))

    def own_heads(self, side: str = "q", **heads: int) -> slice:
        return self.batch.own_heads(side, **heads)

    @cached_property
    def every_token(self) -> list[Tensor]:
        """The indices in the batch of each rank's tokens."""
        world = self.batch.context.world
        return [torch.tensor(self.batch.plan.tokens(Side.Q, one), dtype=torch.int64) for one in range(world)]

    def deal(self, parts: int) -> Deal:
        """Who gets which heads of which documents, if a layer's heads can be cut into so many parts."""
        rank, world = self.batch.context.number, self.batch.context.world
        if (parts := min(parts, world)) not in self.deals:
            self.deals[parts] = Deal(self.cu_seqlens, self.every_token, rank, parts, self.local)
        return self.deals[parts]

    # For recurrent layers.

    @cached_property
    def every_segment(self) -> list[list[Segment]]:
        """The segments of each rank."""
        return [segments_of(tokens, self.cu_seqlens) for tokens in self.every_token]

    @property
    def segments(self) -> list[Segment]:
        return self.every_segment[self.batch.context.number]

    @cached_property
    def passing(self) -> Passing:
        """The exchange of states that are not on the CPU, and of packs of which few documents are in several segments."""
        every = [[one for one in some if not one.whole] for some in self.every_segment]
        return Passing(every, self.batch.context.number, self.local)

    @cached_property
    def _scans(self) -> bool:
        """Whether `Batch.scan` passes states on: it runs on the CPU, or wherever the kernel of others does, and has a row for each segment, also for
        whole documents, of which a pack may have thousands."""
        context, most = self.batch.context, 2 * max(map(len, self.passing.every))
        return (context.device.type == "cpu" or context.kernel is not None) and max(
            map(len, self.every_segment)
        ) <= most

    def scan(self, decay: Tensor, state: Tensor, *, matrix: bool = False) -> Tensor:
        """From the decays and the end states of the segments that are no whole documents, [segments, ...], the initial state of each. Nothing is
        exchanged if each document is in one segment."""
        if not self.passing:
            return connected(torch.zeros_like(state), decay, state)
        if not self._scans:
            return self.passing.scan(decay, state, matrix)
        # `Walk.states` connects both alike on all ranks. Without a gradient on any, `Batch.scan` must not require one: a frozen
        # layer would keep its activations.
        with torch.set_grad_enabled(torch.is_grad_enabled() and (decay.requires_grad or state.requires_grad)):
            return self._scanned(decay, state, matrix)

    def _scanned(self, decay: Tensor, state: Tensor, matrix: bool) -> Tensor:
        rows = [at for at, one in enumerate(self.segments) if not one.whole]
        if len(rows) == len(self.segments):
            return self.batch.scan(decay, state, matrix=matrix)
        at = torch.tensor(rows, dtype=torch.int64, device=state.device)
        every = (one.new_zeros(len(self.segments), *one.shape[1:]).index_copy(0, at, one) for one in (decay, state))
        return self.batch.scan(*every, matrix=matrix)[at]

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def passes(self, kind: str, form: Form, layer: Any) -> bool:
        """Whether layers of this class pass states in this forward pass, or get whole documents."""
        if kind not in self.passed:
            heads, states = self._loads(form.counts(layer))
            world = self.batch.context.world
            cheaper = world > 1 and kind in self.able and states.total < heads.total
            self.passed[kind] = self.recurrent == "states" or (self.recurrent == "auto" and cheaper), heads, states
        return self.passed[kind][0]

    def _loads(self, cost: Cost) -> tuple[Load, Load]:
        lengths = [b - a for a, b in pairwise(self.cu_seqlens)]
        size = self.batch.context.dtype.itemsize
        sent = None if self._scans else self.passing.sent()
        return by_heads(cost, lengths, self.batch.context.world, size), by_states(cost, self.every_segment, sent)

    def explain(self) -> str:
        """The plan of attention, and what recurrent layers do."""
        return "\n".join((self.batch.explain(), *(described(kind, *of) for kind, of in self.passed.items())))
