# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows of other ranks: `gather` brings a rank the rows that its tokens read by the mask, `halo` those just before its tokens.

For attention whose scores no kernel has: a layer's own code runs on this rank's queries and the gathered keys. A window gathers a
window. `reads.py` computes which rows these are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..arguments import instances, one_of, whole
from .._header import UNLIMITED
from ..errors import Disagreement, InvalidArgument, PeerError
from ..packing import Packing
from ..options import Side, window
from ..plan import Plan
from .operators import on_device
from .reads import Bands, Runs

if TYPE_CHECKING:
    from .context import Context

Exchange = Callable[[Tensor, Tensor, list[int], list[int]], None]


class Talk(Protocol):
    """What brings rows of bytes on a device: `gloo.Collectives`, or the executor of a kernel of others."""

    device: torch.device

    def exchange(self, to: Tensor, sent: Tensor, arriving: list[int], leaving: list[int]) -> None: ...


class Gathered(NamedTuple):
    """Rows of the batch that this rank's tokens read, in the order of the batch: a tensor, or as many as were given. `tokens` are
    their indices in the batch, `documents` the numbers of their documents, `positions` their positions in these."""

    rows: Any
    tokens: Tensor
    positions: Tensor
    documents: Tensor


class Halo(NamedTuple):
    """`rows` has this rank's rows and those before them, in the order of the batch, and then a row of zeros. `places` [tokens, taps + 1]
    are the places in `rows` of the last taps + 1 tokens up to each of this rank's tokens, the earliest first; that of the row of
    zeros where the document has no such token."""

    rows: Tensor
    places: Tensor


class Reads:
    """The rows that this rank reads, and the exchange that brings them. All ranks make it, and call `gather` in the same order.

    `tokens`, `positions` and `documents` are as in `Gathered`. `given` is the number of rows that `gather` takes."""

    def __init__(
        self, bands: Bands, readers: Sequence[Runs], held: Sequence[Runs], rank: int, own: Tensor, talk: Talk | None
    ) -> None:
        self.rank, self._talk, self._bands, self._own = rank, talk, bands, own
        found = list(map(bands.read, readers))
        self._rows = mine = found[rank]
        self.given = held[rank].length
        self.tokens = mine.tokens()
        # The rows given here that each rank needs, and the places of those that come from each rank.
        self._send = [one.given(held[rank]) for one in found]
        self._place = [mine.taken(one) for one in held]
        self._home = torch.device("cpu") if talk is None else talk.device
        self._leaving, self._arriving = torch.cat(self._send).to(self._home), torch.cat(self._place).to(self._home)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def documents(self) -> Tensor:
        return self._bands.documents(self.tokens)

    @property
    def own_documents(self) -> Tensor:
        """The documents of this rank's tokens that read, if q and k are the same tokens."""
        return self._bands.documents(self._own)

    @cached_property
    def positions(self) -> Tensor:
        return self.tokens - self._bands.ends[self.documents] + self._bands.first[self.documents]

    def bytes(self, *x: Tensor) -> int:
        """The memory of the rows that `gather` makes of these tensors on this rank."""
        return len(self) * sum(map(_width, x))

    def mask(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Which of the rows each of this rank's tokens reads, [tokens, rows]: so many bytes. Of tokens from `begin` to `end` alone, in
        this rank's order."""
        return self._bands.mask(self._own[begin:end], self.tokens)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def gather(self, *x: Tensor) -> tuple[Tensor, ...]:
        """The rows of tensors that have a row for each token of this rank, all in one exchange. Differentiable: gradients are
        summed in f32 (of f64 in f64) by the rank that has the row, in the order of the ranks."""
        for one in x:
            if one.ndim == 0 or len(one) != self.given:
                raise InvalidArgument(
                    f"x has the shape {tuple(one.shape)}, ({self.given}, ...) is needed: a row for each of this rank's tokens"
                )
        out: tuple[Tensor, ...] = _Move.apply(self, True, *x)  # type: ignore[no-untyped-call]
        return out

    @property
    def bands(self) -> Bands:
        """The mask."""
        return self._bands

    def circulate(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that this rank reads of x, which has one for each token that it has: first its own, then those of the ranks before
        it, one rank after another, so that one other rank's are here at a time. Tokens in order, and their rows. All ranks go
        through all of it."""
        world, none = len(self._send), self._leaving[:0]
        data = _bytes(x).to(self._home)
        for step in range(world):
            to, source = (self.rank + step) % world, (self.rank - step) % world
            sent, place = self._send[to], self._place[source]
            got = data[sent.to(self._home)]
            if step > 0:
                leaving, arriving = [none] * world, [none] * world
                leaving[to], arriving[source] = sent, place
                got = self._exchange(got, leaving, arriving)
            tokens = self.tokens[place]
            order = tokens.argsort()
            yield tokens[order], _values(got[order.to(self._home)].to(x.device), (x,))[0]

    def said(self, rows: Any, device: torch.device) -> Gathered:
        """Gathered rows with what they are."""
        return Gathered(rows, *(one.to(device) for one in (self.tokens, self.positions, self.documents)))

    def halo(self, rows: Tensor, taps: int) -> Halo:
        """Of gathered rows, if these are so many before each token in its document."""
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        at, back = self._rows.places(self._own), torch.arange(taps, -1, -1)
        there = self.positions[at][:, None] >= back
        return Halo(rows, torch.where(there, at[:, None] - back, len(self)).to(rows.device))

    def shifted(self, by: int) -> tuple[Tensor, Tensor]:
        """Which of this rank's tokens, by their places, have a token `by` later in their document, and the places of those in the rows
        read, on the device of the rows."""
        mine, ends = self._own, self._bands.ends
        document = self._bands.documents(mine)
        at = mine + by
        there = ((at >= ends[document]) & (at < ends[document + 1])).nonzero().flatten() if len(mine) else mine
        return there.to(self._home), self._rows.places(at[there]).to(self._home)

    def _there(self, x: Sequence[Tensor]) -> list[Tensor]:
        device = x[0].device
        data = torch.cat([_bytes(one) for one in x], 1).to(self._home)
        got = self._exchange(data[self._leaving], self._send, self._place)
        rows = torch.empty(len(self), data.shape[1], dtype=torch.uint8, device=self._home)
        rows[self._arriving] = got
        return _values(rows.to(device), x)

    def _back(self, x: Sequence[Tensor]) -> list[Tensor]:
        device = x[0].device
        data = torch.cat([_bytes(one) for one in x], 1).to(self._home)
        got = self._exchange(data[self._arriving], self._place, self._send).to(device)
        sums = [one.new_zeros(self.given, *one.shape[1:], dtype=_wide(one.dtype)) for one in x]
        lengths = list(map(len, self._send))
        for rows, block in zip(torch.split(self._leaving.to(device), lengths), torch.split(got, lengths), strict=True):
            for total, part in zip(sums, _values(block, x), strict=True):
                total.index_add_(0, rows, part.to(total.dtype))
        return [total.to(one.dtype) for total, one in zip(sums, x, strict=True)]

    def _exchange(self, data: Tensor, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> Tensor:
        """Rows of bytes for each rank, in the order of the ranks; returns those from each."""
        width = data.shape[1]
        if self._talk is None:
            return data
        if not width:
            return data.new_empty(sum(map(len, arriving)), 0)
        got = torch.empty(sum(map(len, arriving)), width, dtype=torch.uint8, device=self._home)
        try:
            self._talk.exchange(
                got.view(-1), data.reshape(-1), *([len(rows) * width for rows in way] for way in (arriving, leaving))
            )
        except RuntimeError as error:
            raise PeerError(f"gathering rows failed on rank {self.rank}: {error}") from error
        return got


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of a sum."""
    return dtype if dtype.is_complex or dtype == torch.float64 else torch.float32


def _width(x: Tensor) -> int:
    """The bytes of a row."""
    return math.prod(x.shape[1:]) * x.element_size()


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    if flat.stride(0) != 1:  # of one number
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8).view(len(x), _width(x))


def _values(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `_bytes` of several tensors, for another number of rows."""
    made = [one.new_empty(len(data), *one.shape[1:]) for one in like]
    for one, part in zip(made, torch.split(data, list(map(_width, like)), 1), strict=True):
        _bytes(one).copy_(part)  # new tensors are contiguous, and so share their memory with their bytes
    return made


class _Move(torch.autograd.Function):
    """Either way between the rows of the ranks that have them and those of the ranks that read them. The gradient takes the other
    way."""

    @staticmethod
    def forward(ctx: Any, reads: Reads, there: bool, *x: Tensor) -> tuple[Tensor, ...]:
        ctx.how, ctx.real = (
            (reads, there),
            [at for at, one in enumerate(x) if one.is_floating_point() or one.is_complex()],
        )
        out = reads._there(x) if there else reads._back(x)
        ctx.mark_non_differentiable(*(one for at, one in enumerate(out) if at not in ctx.real))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        reads, there = ctx.how
        found: list[Tensor | None] = [None] * len(gradients)
        back = _Move.apply(reads, not there, *(gradients[at] for at in ctx.real)) if ctx.real else ()  # type: ignore[no-untyped-call]
        for at, one in zip(ctx.real, back, strict=True):
            found[at] = one
        return None, None, *found


def bands_of(packing: Packing, left: int, right: int) -> Bands:
    """The mask of a packing within a window."""
    return Bands.of(packing.cu_seqlens, packing.cu_seqlens_k, packing.q_start, packing.slices, left, right)


def held(plan: Plan, side: Side) -> list[Runs]:
    """The tokens of each rank."""
    every = (plan.tokens(side, rank) for rank in range(plan.world))
    return [
        Runs(torch.frombuffer(tokens, dtype=torch.int64) if tokens else torch.empty(0, dtype=torch.int64))
        for tokens in every
    ]


class Gathering:
    """The methods of a batch that bring rows of other ranks."""

    context: Context
    packing: Packing
    plan: Plan
    tokens: Tensor
    k_tokens: Tensor

    def reads(
        self, side: Side | str = Side.K, *, window_left: int | None = None, window_right: int | None = None
    ) -> Reads:
        """Which rows this rank's tokens read by the mask of the batch, and a window, the context's unless it is given: with
        `side="k"` rows of k tokens, which its q tokens read; with `side="q"` rows of q tokens that read its k tokens. Cached."""
        context, side = self.context, one_of("side", side, Side)
        kind = context._kind
        left = kind.get("window_left", UNLIMITED) if window_left is None else window("window_left", window_left)
        usual = kind.get("window_right", 0 if self.packing.slices is None else UNLIMITED)
        right = usual if window_right is None else window("window_right", window_right)

        def make() -> Bands:
            bands = bands_of(self.packing, left, right)
            return bands if side == Side.K else bands.turned()

        return self._reads((side, left, right), Side.Q if side == Side.K else Side.K, side, make)

    def _reads(self, key: Any, readers: Side, side: Side, make: Callable[[], Bands]) -> Reads:
        known: dict[Any, Reads] = self.__dict__.setdefault("_known_reads", {})
        if key not in known:
            own = (self.tokens if readers == Side.Q else self.k_tokens).cpu()
            talk = self.context.talk()
            known[key] = Reads(make(), held(self.plan, readers), held(self.plan, side), self.context.number, own, talk)
        return known[key]

    def gather(
        self,
        x: Tensor | Sequence[Tensor],
        side: Side | str = Side.K,
        *,
        window_left: int | None = None,
        window_right: int | None = None,
    ) -> Gathered:
        """The rows of x, which has one for each of this rank's k tokens, that this rank's q tokens read (`reads` says which), in the
        order of the batch. x is a tensor of any dtype and any further dims, or several of them, which one exchange brings.

        Differentiable: gradients are summed in f32 by the rank that has the row, in the order of the ranks, so that they have
        the same bits each time. All ranks call it. `reads(...).bytes(x)` is the memory of the result.
        """
        given = [x] if isinstance(x, Tensor) else list(instances("x", x, Tensor))
        reads = self.reads(side, window_left=window_left, window_right=window_right)
        got = self._gathered(reads, (one_of("side", side, Side), window_left, window_right), given)
        return reads.said(got[0] if isinstance(x, Tensor) else got, self.context.device)

    def halo(self, x: Tensor, taps: int) -> Halo:
        """This rank's rows of x, one for each of its q tokens, and the `taps` rows before each of them in its document, which other
        ranks may have: for convolutions. With `h = batch.halo(x, taps)`, `h.rows[h.places]` is [tokens, taps + 1, ...]. Differentiable.
        All ranks call it."""
        reads = self.halo_reads(taps)
        (rows,) = self._gathered(reads, ("halo", taps), (x,))
        return reads.halo(rows, taps)

    def halo_reads(self, taps: int) -> Reads:
        """The rows of `halo`. Cached."""
        taps, alone = whole("taps", taps, 0, 2**31), Packing(self.packing.cu_seqlens)
        return self._reads(("halo", taps), Side.Q, Side.Q, lambda: bands_of(alone, taps, 0))

    def _from_others(self, rows: Tensor, by: int, fill: float) -> Tensor:
        """`Batch.shift` over the backend of the group, on the device of the rows."""
        alone = Packing(self.packing.cu_seqlens)
        reads = self._reads(("shift", by), Side.Q, Side.Q, lambda: bands_of(alone, -by, by))
        (found,) = self._gathered(reads, ("shift", by), (rows.detach(),))
        there, places = reads.shifted(by)
        out = torch.full_like(rows, fill, memory_format=torch.contiguous_format)
        out[there] = found[places]
        made: Tensor = out
        return made

    def _gathered(self, reads: Reads, what: tuple[Any, ...], x: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for one in x:
            on_device(self.context, "x", one)
            if one.ndim == 0 or len(one) != reads.given:
                raise InvalidArgument(
                    f"x has the shape {tuple(one.shape)}, ({reads.given}, ...) is needed: a row for each of this rank's tokens"
                )
        self._agreed(what, x)
        return reads.gather(*x) if x else ()

    def _agreed(self, what: tuple[Any, ...], x: Sequence[Tensor]) -> None:
        """Compares what the ranks gather."""
        context = self.context
        if context.world > 1:
            call = repr(
                (what, self.packing.numbers(), self.plan.distribution, [(tuple(one.shape[1:]), one.dtype) for one in x])
            )
            mine = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little")
            said = context.transport.agree(0, context.world, mine)
            if others := [rank for rank, one in enumerate(said) if one != said[0]]:
                raise Disagreement(
                    f"ranks {others} of this group gather other rows than rank 0, or rows of another shape or type (this is rank "
                    f"{context.number}: {what}, {[(tuple(one.shape[1:]), one.dtype) for one in x]}): make the same calls on all ranks",
                    others[0],
                )
