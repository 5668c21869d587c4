# SPDX-License-Identifier: MIT OR Apache-2.0
"""Heads for tokens further on than the next one (multi-token prediction: DeepSeek V3, GLM-4 MoE, Qwen3-Next), as modules of a user.

A head of depth k sees, at each token, the hidden states of the depth before it and the embedding of the token k places later, and
predicts the one after that. Transformers has layers for that (`MtpLayer`) and no loss over them. Here a function of the user runs once in
each pass that trains, after the base model and inside the model's forward, with this rank's hidden states. What lies k tokens on, on any
rank, is `TokensAhead`'s: in the token's document, of an answer to a shared prompt in that answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cpattn.arguments import refused, whole
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.torch.group import Total
from .attention import Current
from .forward import Forward
from .pack import Pack
from .tiles import number_of, summed

if TYPE_CHECKING:
    from .parallel import ContextParallel

Heads = Callable[[Tensor, "TokensAhead"], Tensor]
OFF = "take the heads out with cp.mtp(None)"


class TokensAhead:
    """What heads read of the tokens after those of this rank. Tensors of tokens are [1, tokens, ...], as the model's own are.

    `position_ids` are those of this rank's tokens. All ranks call `shift` and `loss`, in the same order."""

    def __init__(self, cp: ContextParallel, forward: Forward) -> None:
        self._cp, self._forward = cp, forward
        self.position_ids = forward.places[None]
        ends = torch.tensor(forward.pack.cu_seqlens[1:], device=forward.pack.ids.device)
        # The end of each token's document, by tokens of the batch.
        self._ends = ends.repeat_interleave(
            torch.tensor([b - a for a, b in pairwise(forward.pack.cu_seqlens)], device=ends.device)
        )

    def ids(self, by: int, fill: int = 0) -> Tensor:
        """The ids of the tokens `by` places later in their documents; `fill` if a document has no such token."""
        return self._of(self._forward.pack.ids, whole("by", by, 1, 2**31), fill)

    def labels(self, by: int) -> Tensor:
        """The labels of the tokens `by` places later: what a head of this depth predicts. -100 if there is none."""
        assert self._forward.pack.labels is not None
        refuse_branches(self._forward.pack, by := whole("by", by, 1, 2**31))
        found = self._of(self._forward.pack.labels, by, -100)
        return found if len(self._forward.batch.tokens) else torch.full_like(found, -100)

    def shift(self, rows: Tensor, by: int, fill: float = 0) -> Tensor:
        """The rows [1, tokens, ...] of the tokens `by` places later in their documents, which other ranks may have; earlier, if it is
        negative. Differentiable."""
        forward = self._forward
        if not isinstance(rows, Tensor) or rows.ndim < 2 or rows.shape[:2] != (1, len(forward.tokens)):
            raise refused(
                "rows",
                tuple(rows.shape) if isinstance(rows, Tensor) else rows,
                f"a tensor (1, {len(forward.tokens)}, ...) is needed",
            )
        return forward.model_rows(forward.batch.shift(forward.own_rows(rows[0]), by, fill))[None]

    def loss(self, head: Callable[[Tensor], Tensor], hidden: Tensor, by: int) -> Tensor:
        """The loss of the whole batch for the labels `by` places later than those of the model, on every rank. `head` makes logits of
        hidden states, for `tile` tokens at a time if ContextParallel has it. Divided by `num_items_in_batch` if the batch has it, else by the
        number of labels at this depth; `loss_weights` are those of the labels."""
        forward, pack, cp = self._forward, self._forward.pack, self._cp
        assert pack.labels is not None
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[:2] != (1, len(forward.tokens)):
            raise refused(
                "hidden",
                tuple(hidden.shape) if isinstance(hidden, Tensor) else hidden,
                f"a tensor (1, {len(forward.tokens)}, hidden size) is needed",
            )
        labels = self.labels(by)[0]
        weights = None if pack.weights is None else self._of(pack.weights, by, 0)[0]

        def part(rows: Tensor, labels: Tensor, *weights: Tensor) -> Tensor:
            return summed(head(rows)[0], labels, *weights)

        tensors = (hidden, labels) if weights is None else (hidden, labels, weights)
        if not cp.tile:
            own = part(*tensors)
        else:
            number = number_of(cp, forward, cp.tile, head)
            split = zip(
                hidden.tensor_split(number, dim=1), *(one.tensor_split(number) for one in tensors[1:]), strict=True
            )
            own = sum(
                (checkpoint(part, *one, use_reentrant=False) for one in split),
                hidden.new_zeros((), dtype=torch.float32),
            )
        return Total.apply(own, forward.batch.context.transport, cp.factor) / self._divisor(by)  # type: ignore[no-untyped-call, no-any-return]

    def _divisor(self, by: int) -> float:
        """The number of labels at this depth; with weights, their sum."""
        pack = self._forward.pack
        if self._forward.items is not None:
            return float(self._forward.items)
        every = torch.arange(len(pack.ids), device=pack.ids.device)
        assert pack.labels is not None
        some = self._at(pack.labels, every, by, -100) != -100
        if pack.weights is None or not bool(some.any()):
            return max(int(some.sum()), 1)
        if not (found := float(self._at(pack.weights, every, by, 0)[some].double().sum())):
            raise InvalidArgument(
                f"loss_weights of the labels {by} tokens on sum up to 0, by which the loss is divided: give num_items_in_batch, or other weights"
            )
        return found

    def _of(self, numbers: Tensor, by: int, fill: float) -> Tensor:
        """Of this rank's tokens, from numbers of all tokens."""
        return self._at(numbers, self._forward.tokens, by, fill)[None]

    def _at(self, numbers: Tensor, tokens: Tensor, by: int, fill: float) -> Tensor:
        tokens = tokens.to(numbers.device)
        there = tokens + by < self._ends[tokens]
        return torch.where(there, numbers[torch.where(there, tokens + by, tokens)], fill)


def refuse_branches(pack: Pack, by: int) -> None:
    """Refuses a pack in which a token has several tokens up to `by` places later, of several answers, other than copies in which nothing counts:
    heads would see those of the first answer alone."""
    if pack.slices is None:
        return
    assert pack.labels is not None
    positions, ids, ends = pack.positions.tolist(), pack.ids.tolist(), pack.cu_seqlens
    counts = F.pad(pack.labels[:-1] != -100, (1, 0)).tolist()  # whether a token is the label of the one before it
    # The ends of runs of tokens whose positions grow by one, of one document each.
    runs = [
        *(at for at, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1 or ends[bisect_left(ends, at)] == at),
        len(positions),
    ]

    def cut(begin: int, end: int) -> list[tuple[int, int]]:
        return list(pairwise([begin, *runs[bisect_right(runs, begin) : bisect_left(runs, end)], end]))

    for one in pack.slices:
        for (begin, end), queries in product(cut(one.k_begin, one.k_end), cut(one.q_begin, one.q_end)):
            for later in range(*queries):
                # The keys that are 1 to by + 1 places before it, of which only the last ones of a run are.
                if (far := positions[later] - positions[end - 1]) > by + 1:
                    break
                for m in range(max(far, 1), by + 2):
                    key = end - 1 - (m - far)
                    if key < begin or key + m == later:
                        continue
                    other = key + m < ends[bisect_right(ends, key)] and ids[key + m] == ids[later]
                    if (m <= by and not other) or (m == by + 1 and counts[later]):
                        raise Unsupported(
                            f"the token {key} of the pack is shared by several answers, which differ {m} tokens after it, and a head reads {by} tokens on: "
                            f"SharedPrefixCollator(ahead={by}) makes a pack for it"
                        )


class MultiToken:
    """The hook after a base model that runs the user's heads."""

    def __init__(self, cp: ContextParallel, heads: Heads) -> None:
        if not callable(heads):
            raise refused(
                "heads", heads, "a function of hidden states and TokensAhead, which returns a loss, or None is needed"
            )
        name, base = type(cp.model).__name__, getattr(cp.model, cp.model.base_model_prefix, None)
        if base is None or base is cp.model:
            raise Unsupported(
                f"{name} has no base model separate from its head, after which heads for further tokens could run"
            )
        self._cp, self._heads, self.base = cp, heads, base

    def check(self, labels: bool, reads: bool, images: bool, ids: bool, shifted: bool) -> None:
        """Refuses passes in which the heads would be left out, or see something else than in one process. Before a pass."""
        if not self._cp.model.training or not labels:
            return
        if reads:
            raise Unsupported(
                f"the loss of this pass is not the model's own (a trainer of TRL, cp.logprobs), and heads of cp.mtp would be left out: {OFF}"
            )
        if images:
            raise Unsupported(f"images are given to a model with heads of cp.mtp, which read ids of tokens: {OFF}")
        if not ids:
            raise Unsupported(
                f"inputs_embeds is given to a model with heads of cp.mtp, which read ids of tokens: give input_ids, or {OFF}"
            )
        if not shifted:
            raise Unsupported(
                f"the labels of {type(self._cp.model).__name__} are those of the tokens themselves, not of the next ones: {OFF}"
            )

    def __call__(self, module: Any, args: Any, out: Any) -> None:
        forward: Any = Current.forward
        if (
            not isinstance(forward, Forward)
            or forward.tile is not None
            or forward.labels is None
            or not self._cp.model.training
        ):
            return
        hidden = out["last_hidden_state"] if forward.hidden is None else forward.hidden
        found = self._heads(hidden, TokensAhead(self._cp, forward))
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise refused(
                "the result of the heads",
                tuple(found.shape) if isinstance(found, Tensor) else found,
                "a loss, a tensor of one number, is needed",
            )
        forward.ahead = found.reshape(())
