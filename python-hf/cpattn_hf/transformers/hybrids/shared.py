# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the mixers of all classes share: a layer as one rank sees it, with its part of the heads.

A layer runs its own forward, document by document, on such a view: its projections are columns that came from other ranks, its weights
of single heads are slices, its numbers of heads are those of the part. What follows the heads runs on this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpattn.errors import Unsupported
from cpattn.torch.group import Halo
from .deal import Deal

M = TypeVar("M", bound=nn.Module)


class Documents(Protocol):
    """The documents of one forward pass."""

    def deal(self, parts: int) -> Deal: ...
    def halo(self, x: Tensor, taps: int) -> Halo: ...


@dataclass(frozen=True)
class Columns:
    """Consecutive columns of a projection: `width` for each head, or `width` that all heads share."""

    width: int
    shared: bool = False


@dataclass
class Part:
    """A part of a layer's heads: those from `begin` to `end` of `heads`."""

    heads: int
    begin: int
    end: int

    def columns(self, sections: Sequence[Columns]) -> Tensor:
        """The columns of this part among those of all heads."""
        at, found = 0, []
        for one in sections:
            begin, end = (0, one.width) if one.shared else (self.begin * one.width, self.end * one.width)
            found.append(torch.arange(at + begin, at + end))
            at += one.width if one.shared else self.heads * one.width
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def share(self, number: int) -> int:
        """The share of a number that is proportional to the heads."""
        return number * (self.end - self.begin) // self.heads

    def rows(self, weight: Tensor | None, width: int = 1, dim: int = 0) -> Tensor | None:
        """The rows of a weight that has `width` of them for each head."""
        return None if weight is None else weight.narrow(dim, self.begin * width, (self.end - self.begin) * width)


def view(module: M, **changed: Any) -> M:
    """The module with other attributes. It shares all others with the module, which stays as it is."""
    copy = object.__new__(type(module))
    vars(copy).update({name: value for name, value in vars(module).items() if name != "forward"} | changed)
    return copy


def convolution(conv: nn.Conv1d, part: Part, sections: Sequence[Columns]) -> nn.Conv1d:
    """A convolution of each channel by itself, with the channels of a part."""
    mine = part.columns(sections).to(conv.weight.device)
    if type(conv) is not nn.Conv1d:
        raise Unsupported(
            f"a convolution is a {type(conv).__name__}, a Conv1d is needed: leave the convolutions of hybrids as they are"
        )
    bias = None if conv.bias is None else conv.bias[mine]
    return view(
        conv, weight=conv.weight[mine], bias=bias, in_channels=len(mine), out_channels=len(mine), groups=len(mine)
    )


def same(x: Tensor) -> Tensor:
    return x


@dataclass
class Layer:
    """How a layer's heads are apart.

    `projections` are the results of the layer's projections for this rank's tokens, [tokens, columns], by the names of its modules,
    or by any name, each with its sections. `view` makes the layer for a part: it gets a function for each projection, which takes a
    document's columns of all projections. `out` is the width of a head's result; `arguments` are further ones of the layer's forward.
    """

    heads: int
    projections: Mapping[str, tuple[Tensor, Sequence[Columns]]]
    view: Callable[[Part, Mapping[str, Callable[..., Any]]], nn.Module]
    out: int
    arguments: Callable[[Tensor], dict[str, Any]] = field(default=lambda x: {})


def mix(layer: nn.Module, documents: Documents, how: Layer) -> Tensor:
    """What the layer's heads give for this rank's tokens, [1, tokens, heads · out]."""
    deal = documents.deal(how.heads)
    ends = [how.heads * one // deal.parts for one in range(deal.parts + 1)]
    parts = [Part(how.heads, begin, end) for begin, end in zip(ends, ends[1:])]
    own = parts[deal.part[deal.rank]]
    rows = torch.cat([projected for projected, _ in how.projections.values()], -1)
    device = rows.device
    columns: list[list[Tensor]] = [[] for _ in parts]
    places: dict[str, slice] = {}
    at = begin = 0
    for name, (projected, sections) in how.projections.items():
        for one, found in zip(parts, columns, strict=True):
            found.append(at + one.columns(sections))
        at += projected.shape[-1]
        width = len(own.columns(sections))
        places[name], begin = slice(begin, begin + width), begin + width
    x = deal.to_documents(rows, [torch.cat(found).to(device) for found in columns])
    part = how.view(own, {name: _taker(where) for name, where in places.items()})
    spans = deal.documents()
    if not spans:  # the parameters take part all the same, as other ranks expect
        x, spans = F.pad(x, (0, 0, 0, 1)), [(0, 1)]
    results = []
    for begin, end in spans:
        document = x[begin:end][None]
        result = type(layer).forward(part, document, **how.arguments(document))
        results.append((result[0] if isinstance(result, tuple) else result)[0])
    y = torch.cat(results)[: deal.ends[-1]]
    out = [Columns(how.out)]
    return deal.to_tokens(y, [one.columns(out).to(device) for one in parts], len(rows))[None]


def _taker(where: slice) -> Callable[[Tensor], Tensor]:
    return lambda x: x[..., where]
