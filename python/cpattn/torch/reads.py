# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which tokens a rank's tokens read, by runs of tokens: no mask is made, except by `Bands.mask`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..slices import Slice

# Positions and their distances are smaller.
_FAR = 2**40


def _expanded(begins: Tensor, lengths: Tensor) -> Tensor:
    """The numbers of runs."""
    return torch.arange(int(lengths.sum())) + (begins - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)


def _meetings(first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """For each of some runs, `count` others from `first`: the numbers of both."""
    count = count.clamp(min=0)
    return torch.arange(len(count)).repeat_interleave(count), _expanded(first, count)


class Runs:
    """The tokens of a rank, in its order, as runs of consecutive tokens. `at` are the places of their first tokens."""

    def __init__(self, tokens: Tensor) -> None:
        new = torch.ones(len(tokens) + 1, dtype=torch.bool)
        torch.ne(tokens.diff(), 1, out=new[1:-1]) if len(tokens) else new.zero_()
        ends = new.nonzero().flatten()
        self.at, self.length = ends[:-1], len(tokens)
        self.begins = tokens[self.at]
        self.ends = self.begins + ends.diff()

    def sorted(self) -> tuple[Tensor, Tensor]:
        order = self.begins.argsort()
        return self.begins[order], self.ends[order]


class Rows:
    """Runs of tokens, apart and in order: `begins` and `ends`."""

    def __init__(self, begins: Tensor, ends: Tensor) -> None:
        self.begins, self.ends = begins, ends
        self._before = (ends - begins).cumsum(0) - (ends - begins)

    @classmethod
    def union(cls, begins: Tensor, ends: Tensor) -> Rows:
        """Of runs in any order, which may overlap."""
        order = begins.argsort()
        begins, reach = begins[order], ends[order].cummax(0).values
        new = torch.ones(len(begins), dtype=torch.bool)
        new[1:] = begins[1:] > reach[:-1]
        last = torch.ones_like(new)
        last[:-1] = new[1:]
        return cls(begins[new], reach[last])

    def tokens(self) -> Tensor:
        return _expanded(self.begins, self.ends - self.begins)

    def common(self, held: Runs) -> tuple[Tensor, Tensor, Tensor]:
        """The runs that are also tokens of a rank, in its order: their places there, their places in these runs, and their lengths."""
        first = torch.searchsorted(self.ends, held.begins, right=True)
        one, run = _meetings(first, torch.searchsorted(self.begins, held.ends) - first)
        begins = torch.maximum(held.begins[one], self.begins[run])
        ends = torch.minimum(held.ends[one], self.ends[run])
        return held.at[one] + begins - held.begins[one], self._before[run] + begins - self.begins[run], ends - begins

    def given(self, held: Runs) -> Tensor:
        """The places of the runs among a rank's tokens, in its order."""
        places, _, lengths = self.common(held)
        return _expanded(places, lengths)

    def taken(self, held: Runs) -> Tensor:
        """The places in the runs of a rank's tokens, in its order."""
        _, places, lengths = self.common(held)
        return _expanded(places, lengths)

    def places(self, tokens: Tensor) -> Tensor:
        """The places of tokens of the runs among all tokens of the runs."""
        run = torch.searchsorted(self.begins, tokens, right=True) - 1
        return self._before[run] + tokens - self.begins[run] if len(tokens) else tokens


class Bands:
    """A mask: slices with a number in each field, as tensors, cut by a window. `ends` are those of the documents of the tokens that
    are read, `first` the positions of the first tokens of these."""

    def __init__(self, slices: Tensor, ends: Tensor, first: Tensor) -> None:
        self.slices, self.ends, self.first = slices, ends, first
        self.turn: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        cu_seqlens: Sequence[int],
        cu_seqlens_k: Sequence[int] | None,
        q_start: Sequence[int] | None,
        slices: Iterable[Slice] | None,
        left: int,
        right: int,
    ) -> Bands:
        """The slices of a batch, or its documents, with at most `left` keys before a query and `right` after it."""
        q = torch.tensor(cu_seqlens, dtype=torch.int64)
        k = q if cu_seqlens_k is None else torch.tensor(cu_seqlens_k, dtype=torch.int64)
        start = k.diff() - q.diff() if q_start is None else torch.tensor(q_start, dtype=torch.int64)
        if slices is None:
            no_limit = torch.full_like(start, _FAR)
            rows = torch.stack([q[:-1], q[1:], k[:-1], k[1:], start, -no_limit, no_limit], 1)
        else:
            every = [[max(-_FAR, min(int(number or 0), _FAR)) for number in one] for one in slices]
            rows = torch.tensor(every, dtype=torch.int64).reshape(-1, 7)
        rows[:, 5].clamp_(min=-min(left, _FAR))
        rows[:, 6].clamp_(max=min(right, _FAR))
        made = cls(rows, k, torch.zeros_like(start))
        made.turn = q, start
        return made

    def turned(self) -> Bands:
        """The same pairs with q and k exchanged: which queries read a key."""
        assert self.turn is not None
        q_begin, q_end, k_begin, k_end, start, low, high = self.slices.unbind(1)
        return Bands(torch.stack([k_begin, k_end, q_begin, q_end, -start, -high, -low], 1), *self.turn)

    def documents(self, tokens: Tensor) -> Tensor:
        """The documents of tokens that are read."""
        return torch.searchsorted(self.ends, tokens, right=True) - 1

    def read(self, readers: Runs) -> Rows:
        """The tokens that a rank's tokens read."""
        begins, ends = readers.sorted()
        # Every slice with every run of readers that it meets.
        q_begin, q_end = self.slices[:, :2].t().contiguous()
        first = torch.searchsorted(ends, q_begin, right=True)
        of, run = _meetings(first, torch.searchsorted(begins, q_end) - first)
        q_begin, q_end, k_begin, k_end, start, low, high = self.slices[of].unbind(1)
        a, b = torch.maximum(begins[run], q_begin), torch.minimum(ends[run], q_end)
        # The keys of consecutive queries are consecutive.
        low_k = (a - q_begin + start + low).clamp(min=0)
        high_k = torch.minimum(b - q_begin + start + high, k_end - k_begin)
        some = (a < b) & (low <= high) & (low_k < high_k)
        return Rows.union((k_begin + low_k)[some], (k_begin + high_k)[some])

    def mask(self, readers: Tensor, rows: Tensor) -> Tensor:
        """Which of these rows, which are in order, each of these tokens reads."""
        order = readers.argsort()
        tokens = readers[order].contiguous()
        made = torch.zeros(len(tokens), len(rows), dtype=torch.bool)
        q_ends = torch.searchsorted(tokens, self.slices[:, :2].contiguous()).tolist()
        k_ends = torch.searchsorted(rows, self.slices[:, 2:4].contiguous()).tolist()
        for (a, b), (c, d), (q_begin, _, k_begin, _, start, low, high) in zip(
            q_ends, k_ends, self.slices.tolist(), strict=True
        ):
            if a < b and c < d:
                distance = (rows[None, c:d] - k_begin) - (tokens[a:b, None] - q_begin + start)
                made[a:b, c:d] |= (low <= distance) & (distance <= high)
        return made[order.argsort()]
