# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recurrent layers on this rank's own tokens: segments, and the layer's own forward with two of its functions replaced.

A *segment* is a maximal run of consecutive tokens of one document on a rank. A recurrent layer runs once over all of this rank's tokens,
by its own forward. Only its convolution and its kernel look at other tokens: these two are replaced for the call. The convolution gets
the taps before each segment from the ranks that have them. The kernel runs on each segment, and states pass from segment to segment of a
document (`Documents.scan`), which other ranks may have.

A rank without tokens has one row all the same, which is in no segment. It runs as a document of its own, and takes part in every
exchange with nothing, forward and backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cpattn.torch.group import Halo


class Segment(NamedTuple):
    """Tokens `first` to `end` of a document, which this rank has in its rows from `row` on. `starts` and `ends`: whether the document does
    with it."""

    document: int
    first: int
    end: int
    row: int
    starts: bool
    ends: bool

    @property
    def whole(self) -> bool:
        return self.starts and self.ends

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.first)


class Documents(Protocol):
    """What a recurrent layer asks of a forward pass."""

    @property
    def segments(self) -> Sequence[Segment]: ...

    # From the decays and the end states of the segments that are no whole documents, the initial state of each.
    def scan(self, decay: Tensor, state: Tensor, *, matrix: bool = False) -> Tensor: ...
    def halo(self, x: Tensor, taps: int) -> Halo: ...


def segments_of(tokens: Tensor, cu_seqlens: Sequence[int]) -> list[Segment]:
    """The segments of a rank, by the indices of its tokens in the batch, in the order of its rows."""
    if not len(tokens):
        return []
    ends = torch.tensor(cu_seqlens, dtype=torch.int64)
    document = torch.searchsorted(ends, tokens, right=True) - 1
    breaks = ((tokens.diff() != 1) | (document.diff() != 0)).nonzero().flatten() + 1
    found = []
    for begin, end in pairwise([0, *breaks.tolist(), len(tokens)]):
        of = int(document[begin])
        base, length = cu_seqlens[of], cu_seqlens[of + 1] - cu_seqlens[of]
        first = int(tokens[begin]) - base
        last = first + end - begin
        found.append(Segment(of, first, last, begin, first == 0, last == length))
    return found


class Walk:
    """The segments of this rank, for a layer that has so many rows."""

    def __init__(self, documents: Documents, rows: int) -> None:
        self._documents = documents
        self.count = len(documents.segments)
        self.segments = documents.segments or [Segment(0, 0, rows, 0, True, True)]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def states(
        self,
        decay: Mapping[int, Tensor],
        state: Mapping[int, Tensor],
        zeros: tuple[Tensor, Tensor],
        sources: Sequence[Tensor | None],
        *,
        matrix: bool = False,
    ) -> tuple[dict[int, Tensor], Tensor]:
        """The initial states of the segments that do not start their documents, by their numbers; and all that depends on the exchange, for
        `connected`. `decay` is that of the segments that neither start nor end their document, `state` the end state of those that do not end
        it; `zeros` are of the shapes of both, without the batch's dim. `sources` are all that states come from: a rank whose segments have no
        state to send takes part in the exchange of the backward pass as well, whichever of them have a gradient."""
        come = [one for one in sources if one is not None]
        parts = [at for at, one in enumerate(self.segments) if not one.whole]
        own = (
            connected(torch.stack([of.get(at, zero) for at in parts] or [zero])[: len(parts)].float(), *come)
            for of, zero in zip((decay, state), zeros, strict=True)
        )
        initial = self._documents.scan(*own, matrix=matrix)
        return {at: initial[i] for i, at in enumerate(parts) if not self.segments[at].starts}, initial


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None for _ in ctx.needs_input_grad[1:])


def connected(x: Tensor, *others: Tensor) -> Tensor:
    """x, whose backward pass goes on to the others too, with no gradient: what they come from may be an exchange of all ranks."""
    out: Tensor = _Connected.apply(x, *others)  # type: ignore[no-untyped-call]
    return out


def tensors_of(options: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a kernel's further arguments."""
    return [one for one in options.values() if isinstance(one, Tensor)]


def names_of(layer: torch.nn.Module) -> dict[str, Any]:
    """The functions that the layer's forward finds in its module."""
    found: dict[str, Any] = inspect.unwrap(type(layer).forward).__globals__
    return found


def run(layer: torch.nn.Module, functions: dict[str, Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    """The layer's own forward, with these functions in place of those that its module has by their names. The module stays as it is."""
    usual = inspect.unwrap(type(layer).forward)
    made = FunctionType(
        usual.__code__, usual.__globals__ | functions, usual.__name__, usual.__defaults__, usual.__closure__
    )
    made.__kwdefaults__ = usual.__kwdefaults__
    return made(layer, *args, **kwargs)


def convolution(documents: Documents, usual: Callable[..., Tensor], taps: int) -> Callable[..., Tensor]:
    """A causal convolution of [1, channels, rows], as `usual` is of one document: the `taps` tokens before each segment come from
    the ranks that have them."""

    def convolved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = x[0].T
        halo = documents.halo(rows, taps)
        walk = Walk(documents, len(rows))
        if not walk.count:
            return connected(usual(x, *args, **kwargs), halo.rows)
        places = halo.places
        lead = [torch.cat([places[one.row, :taps], places[one.rows, taps]]) for one in walk]
        lengths = [len(one) for one in lead]
        long = halo.rows[torch.cat(lead)].T[None]
        out = usual(long, *args, **kwargs)[..., : long.shape[-1]]
        return torch.cat([one[..., taps:] for one in torch.split(out, lengths, -1)], -1)

    return convolved
