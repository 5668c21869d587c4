# SPDX-License-Identifier: MIT OR Apache-2.0
"""The exchange of states where `Batch.scan` does not serve: on a device with the crate's kernels, and among many whole documents.

Along the segments of a document, s[next] = decay · s + state, and s is 0 for the first one. Each rank gets the decays and the states of the
segments before its own from the ranks that have them, and multiplies them out in the order of the document. So bits do not depend
on time, and bytes not on the number of tokens. The backward pass is the same exchange in the other direction: what reaches the end of a
segment comes from those after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpattn.errors import PeerError
from cpattn.torch.group import Collectives
from .segments import Segment


class Passing:
    """Who needs whose states in one batch. `every` are the segments of each rank that are no whole documents."""

    def __init__(self, every: Sequence[Sequence[Segment]], rank: int, talk: Collectives | None) -> None:
        self.every, self.rank, self._talk = every, rank, talk

    def __bool__(self) -> bool:
        return any(self.every)

    def _sent(self, source: int, to: int, backward: bool) -> list[int]:
        """The segments of one rank that another needs, by their numbers: those before, or after, one of its own in their document."""
        reach: dict[int, int] = {}
        for one in self.every[to]:
            reach[one.document] = (min if backward else max)(one.first, reach.get(one.document, one.first))
        return [
            at
            for at, one in enumerate(self.every[source])
            if one.document in reach
            and (one.first > reach[one.document] if backward else one.first < reach[one.document])
        ]

    def sent(self) -> list[int]:
        """How many states each rank sends and gets in a forward pass: a segment's goes to each other rank that has a later one of its
        document."""
        latest: dict[int, dict[int, int]] = {}
        for rank, some in enumerate(self.every):
            for one in some:
                of = latest.setdefault(one.document, {})
                of[rank] = max(one.first, of.get(rank, one.first))
        found = [0] * len(self.every)
        for rank, some in enumerate(self.every):
            for one in some:
                for to, last in latest[one.document].items():
                    if to != rank and last > one.first:
                        found[rank] += 1
                        found[to] += 1
        return found

    def scan(self, decay: Tensor, state: Tensor, matrix: bool) -> Tensor:
        """The initial state of each of this rank's segments, [segments, ...]. Differentiable. All ranks call it."""
        out: Tensor = _Scan.apply(decay, state, self, matrix)  # type: ignore[no-untyped-call]
        return out

    def sums(self, decay: Tensor, state: Tensor, matrix: bool, backward: bool) -> Tensor:
        """What comes in at each of this rank's segments, from its start or, in the backward pass, from its end."""
        known = {
            (one.document, one.first): (d, s) for one, d, s in zip(self.every[self.rank], decay, state, strict=True)
        }
        known |= self._others(decay, state, backward)
        came: dict[tuple[int, int], Tensor] = {}
        total: Tensor | None = None
        document = -1
        for place in sorted(known, reverse=backward):
            d, s = known[place]
            total = None if place[0] != document else total
            document = place[0]
            came[place] = torch.zeros_like(s) if total is None else total
            total = s if total is None else (d @ total if matrix else d * total) + s
        own = [came[one.document, one.first] for one in self.every[self.rank]]
        return torch.stack(own) if own else torch.zeros_like(state)

    def _others(self, decay: Tensor, state: Tensor, backward: bool) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        world = len(self.every)
        if self._talk is None or world == 1:
            return {}
        rows = (
            torch.cat([decay.reshape(len(state), -1), state.reshape(len(state), -1)], 1)
            if len(state)
            else state.reshape(0, 1)
        )
        sizes = [decay.shape[1:].numel(), state.shape[1:].numel()]
        empty: list[int] = []
        leaving = [self._sent(self.rank, to, backward) if to != self.rank else empty for to in range(world)]
        arriving = [self._sent(of, self.rank, backward) if of != self.rank else empty for of in range(world)]
        sent = torch.cat([rows[one].reshape(-1) for one in leaving]).to("cpu", torch.float32).contiguous()
        counts = [[len(one) * sum(sizes) * 4 for one in way] for way in (arriving, leaving)]
        got = torch.empty(sum(counts[0]) // 4, dtype=torch.float32)
        try:
            self._talk.exchange(got.view(torch.uint8), sent.view(torch.uint8), *counts)
        except RuntimeError as error:
            raise PeerError(f"the exchange of states failed on rank {self.rank}: {error}") from error
        found = {}
        parts = iter(torch.split(got.to(state.device), sum(sizes)) if len(got) else ())
        for of, some in enumerate(arriving):
            for at in some:
                d, s = torch.split(next(parts), sizes)
                one = self.every[of][at]
                found[one.document, one.first] = d.view(decay.shape[1:]), s.view(state.shape[1:])
        return found


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, state: Tensor, passing: Passing, matrix: bool) -> Tensor:
        with torch.autocast(state.device.type, enabled=False):  # states stay in f32 from hop to hop
            initial = passing.sums(decay.detach(), state.detach(), matrix, False)
        ctx.save_for_backward(decay, initial)
        ctx.how = passing, matrix
        return initial

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        passing, matrix = ctx.how
        decay, initial = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            of = passing.sums(decay.transpose(-1, -2) if matrix else decay, gradient.detach(), matrix, True)
            own = of @ initial.transpose(-1, -2) if matrix else (of * initial).sum_to_size(decay.shape)
        return own, of, None, None
