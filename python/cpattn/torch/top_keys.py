# SPDX-License-Identifier: MIT OR Apache-2.0
"""The best keys of each query by an indexer's scores: what `key_indices` of attention is made of.

The scores of a rank's queries with all keys are the part of sparse attention that grows with the square of the length. They are never
whole here: the indexer's keys come rank by rank round the ring, scores are computed tile by tile, and of each tile the best are merged with
the best so far. A rank holds the keys of one other rank, one tile, and `top` numbers for each of its queries.

Which keys are best does not depend on the ranks: a score and a token are one whole number, greater for a greater score and then for an
earlier token, and no two are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import flag, number, whole
from ..errors import InvalidArgument
from ..options import Side
from .gather import Gathering
from .operators import on_device

if TYPE_CHECKING:
    from .reads import Bands

# A key that a query may not read, or none.
_NONE = torch.iinfo(torch.int64).min


class Choosing(Gathering):
    """The method of a batch that chooses keys."""

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    @torch.no_grad()
    def top_keys(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor | None = None,
        *,
        top: int,
        scale: float = 1.0,
        relu: bool = True,
        tile_bytes: int = 1 << 26,
        window_left: int | None = None,
        window_right: int | None = None,
    ) -> Tensor:
        """The `top` keys with the greatest scores that each of this rank's q tokens may read by the mask of the batch and a window, the
        context's unless it is given: int32 [tokens, top], positions in the token's document, the greatest score first and of equal
        ones the earlier key, -1 where there are fewer. As `key_indices` of `attention`. All ranks call it; it has no gradient.

        q [tokens, heads, dim] has a row for each of this rank's q tokens, k [k tokens, dim] one for each of its k tokens. The score of a pair is the
        sum over heads of `weights` [tokens, heads] (1 without) times scale·q·k, or 0 where that is negative; `relu=False` keeps it. Scores are
        computed in f32 (of f64 too). They differ in their last bits with the shapes of tiles, so nearly equal scores may change places from one number of
        ranks to another.

        k comes from rank to rank, and scores are made in tiles of at most about `tile_bytes`: no tensor grows with the product of queries and
        keys.
        """
        top, tile_bytes = whole("top", top, 1, 2**31 - 1), whole("tile_bytes", tile_bytes, 1 << 12, 2**63 - 1)
        scale, rectified = number("scale", scale), flag("relu", relu)
        for name, x, ndim in (("q", q, 3), ("k", k, 2), *((("weights", weights, 2),) if weights is not None else ())):
            on_device(self.context, name, x, ndim=ndim)
            rows = len(self.k_tokens if name == "k" else self.tokens)
            if len(x) != rows or not x.is_floating_point():
                raise InvalidArgument(
                    f"{name} is of {x.dtype} and has the shape {tuple(x.shape)}, a floating-point tensor of {rows} rows is needed: one "
                    "for each of this rank's tokens"
                )
        if q.shape[2] != k.shape[1]:
            raise InvalidArgument(
                f"k has {k.shape[1]} numbers for a token and q {q.shape[2]} for a head: give equal dims"
            )
        if weights is not None and weights.shape[1] != q.shape[1]:
            raise InvalidArgument(
                f"weights has {weights.shape[1]} heads and q {q.shape[1]}: give a weight for each head"
            )
        reads = self.reads(Side.K, window_left=window_left, window_right=window_right)
        self._agreed(("top_keys", top, scale, rectified, window_left, window_right), (k,))
        best = torch.full((len(q), min(top, len(reads))), _NONE, device=q.device)
        own = self.tokens.cpu()
        for tokens, keys in reads.circulate(k):
            _merge(best, (q, weights), (tokens, keys.float()), (reads.bands, own), (scale, rectified), tile_bytes)
        best = best.sort(dim=1, descending=True).values
        return torch.nn.functional.pad(self._positions(best), (0, top - best.shape[1]), value=-1)

    def _positions(self, best: Tensor) -> Tensor:
        """Positions in documents of tokens, which are the low words."""
        tokens = 0xFFFFFFFF - (best & 0xFFFFFFFF)
        ends = torch.tensor(list(self.packing.cu_seqlens_k or self.packing.cu_seqlens), device=best.device)
        none = best == _NONE
        tokens = tokens.masked_fill_(none, 0)
        first = ends[torch.searchsorted(ends, tokens, right=True) - 1]
        return (tokens - first).masked_fill_(none, -1).to(torch.int32)


def _merge(
    best: Tensor,
    queries: tuple[Tensor, Tensor | None],
    keys: tuple[Tensor, Tensor],
    read: tuple[Bands, Tensor],
    how: tuple[float, bool],
    tile_bytes: int,
) -> None:
    """Merges the scores of queries with the keys of one rank into the best."""
    (q, weights), (tokens, k), (bands, own), (scale, rectified) = queries, keys, read, how
    heads, top = q.shape[1], best.shape[1]
    # A score of each head in f32, and one number of 64 bits and two masks.
    pair = 4 * heads + 16
    columns = max(1, min(len(tokens), max(top, int((tile_bytes / pair) ** 0.5))))
    rows = max(1, tile_bytes // (pair * columns))
    for a in range(0, len(q), rows):
        tile_q = q[a : a + rows].float()
        for c in range(0, len(tokens), columns):
            seen = bands.mask(own[a : a + rows], tokens[c : c + columns])
            if not seen.any():
                continue
            scores = torch.matmul(tile_q, k[c : c + columns].T).mul_(scale)  # [rows, heads, columns]
            if rectified:
                scores.relu_()
            if weights is None:
                total = scores.sum(1)
            else:
                total = torch.matmul(weights[a : a + rows, None].float(), scores)[:, 0]
            del scores
            # -0 and 0 are equal scores.
            bits = (total + 0.0).view(torch.int32)
            ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
            ordered += (0xFFFFFFFF - tokens[c : c + columns]).to(q.device)
            ordered.masked_fill_(~seen.to(q.device), _NONE)
            if ordered.shape[1] > top:
                ordered = ordered.topk(top, dim=1, sorted=False).values
            both = torch.cat([best[a : a + rows], ordered], 1)
            best[a : a + rows] = both.topk(top, dim=1, sorted=False).values
