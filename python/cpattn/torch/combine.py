# SPDX-License-Identifier: MIT OR Apache-2.0
"""Partial results of several ranks, merged: for servers whose attention is their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import attempt, one_of, refused
from ..errors import InvalidArgument
from ..packing import sinks_of
from ..options import CombineTo
from ..plan import Plan
from .dtypes import DTYPES
from .operators import _rows, _stream, on_device

if TYPE_CHECKING:
    from ..rank import Rank
    from .executor import Executor

# Plans that a context keeps: one for each number of tokens in a step.
CACHE_SIZE = 256


class Combining:
    """The method of a context that merges partial results."""

    rank: Rank | Executor
    number: int
    world: int
    _combines: dict[tuple[Any, ...], Plan]

    def combine(
        self,
        o: Tensor,
        lse: Tensor,
        *,
        to: CombineTo | str = CombineTo.ALL,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Merges partial results of the same queries over all ranks of the context: decode context parallelism. Each rank has attended to
        its own part of the keys, with any kernel that returns lse. All ranks call it with the same shapes. Not differentiable.

        `o` is [tokens, heads, value_dim], without sinks; `lse`, [heads, tokens], float32 (float64 with it), natural log, -inf in a
        row without keys. Returns o and lse of what `to` says: "all" rows, the same bits on every rank; "heads", heads j*H//R to
        (j+1)*H//R on rank j of R; or "tokens", likewise. `dtype` is that of the merged o (None: of o); parts are merged in float32
        (float64). `sinks`, [heads] or [heads, n] float32, are applied once.
        """
        from .context import Context

        assert isinstance(self, Context)
        on_device(self, "o", o, ndim=3)
        on_device(self, "lse", lse, ndim=2)
        to, dtype = one_of("to", to, CombineTo), o.dtype if dtype is None else dtype
        if (known := attempt(DTYPES.get, dtype)) is None:
            raise refused("dtype", dtype, f"one of {', '.join(map(str, DTYPES))} is needed")
        if sinks is not None:
            on_device(self, "sinks", sinks)
        tokens, heads, dim = o.shape
        if not heads or not dim:
            raise InvalidArgument(f"o has {heads} heads of {dim}, at least 1 of 1 is needed")
        key = tokens, heads, dim, known, sinks_of(sinks)
        if (plan := self._combines.get(key)) is None:
            shape = {"head_dim": dim, "value_dim": dim, "dtype": known, "sinks": sinks_of(sinks)}
            plan = Plan([0, tokens], heads, world=self.world, ring=self.world, ulysses=1, **shape)  # type: ignore[arg-type]
            while len(self._combines) >= CACHE_SIZE:
                self._combines.pop(next(iter(self._combines)))
            self._combines[key] = plan
        rows, own = ((self.number + 1) * n // self.world - self.number * n // self.world for n in (tokens, heads))
        rows, own = rows if to == CombineTo.TOKENS else tokens, own if to == CombineTo.HEADS else heads
        merged = o.new_empty(rows, own, dim, dtype=dtype)
        merged_lse = o.new_empty(own, rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        own_sinks = None if sinks is None else sinks.detach().contiguous()
        self.rank.combine(
            plan,
            to,
            _stream(self.rank, o),
            partial_o=_rows(o),
            partial_lse=lse.detach(),
            sinks=own_sinks,
            o=merged,
            lse=merged_lse,
        )
        return merged, merged_lse
