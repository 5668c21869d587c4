# SPDX-License-Identifier: MIT OR Apache-2.0
"""All tokens of the batch with some of the heads, for layers that mix whole documents: the two all-to-alls of Ulysses as calls of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..arguments import one_of
from ..options import Kind, Side, at_least_1
from ..plan import Plan
from . import operators
from .operators import on_device

if TYPE_CHECKING:
    from .context import Context


class Heads:
    """The methods of a batch for layers that mix whole documents."""

    context: Context
    _plan_of: Callable[[Mapping[str, Any]], Plan]

    def to_heads(
        self, x: Tensor, side: Side | str = Side.Q, *, heads: int | None = None, kv_heads: int | None = None
    ) -> Tensor:
        """For a layer that mixes the tokens of whole documents, each head by itself: linear attention, state space models,
        convolutions. From this rank's tokens with all heads, [tokens, heads, dim], to all tokens of the batch, in its order, with
        this rank's heads, [all tokens, own heads, dim]; `cu_seqlens` says where documents end. Differentiable. All ranks call it.

        `heads` and `kv_heads` are those of the layer. Without both, they are the context's; without `kv_heads`, it is `heads`. With
        `side="k"`, x has `kv_heads` heads, and a rank gets the heads that its q heads use; the gradient of a head on several ranks is
        summed. Refused unless `ulysses` is the number of ranks: make the context with `ulysses=` of at most `heads`.
        """
        return self._exchange(x, side, heads, kv_heads, True)

    def to_tokens(
        self, x: Tensor, side: Side | str = Side.Q, *, heads: int | None = None, kv_heads: int | None = None
    ) -> Tensor:
        """The inverse of `to_heads`: from [all tokens, own heads, dim] to [tokens, heads, dim]. With `side="k"`, a head on several
        ranks is summed."""
        return self._exchange(x, side, heads, kv_heads, False)

    def own_heads(self, side: Side | str = Side.Q, *, heads: int | None = None, kv_heads: int | None = None) -> slice:
        """The heads that `to_heads` gives this rank, for weights of single heads."""
        share = self._mixing(heads, kv_heads).share(self.context.number)
        if one_of("side", side, Side) == Side.Q:
            return slice(share.q_head_begin, share.q_head_end)
        return slice(share.kv_head_begin, share.kv_head_end)

    def _mixing(self, heads: int | None, kv_heads: int | None) -> Plan:
        """The plan of a layer that mixes whole documents."""
        kind = self.context._kind
        if heads is None and kv_heads is None:
            kv_heads = kind.get("kv_heads")
        heads = kind["heads"] if heads is None else at_least_1("heads", heads)
        kv_heads = heads if kv_heads is None else at_least_1("kv_heads", kv_heads)
        return self._plan_of({"kind": Kind.OTHER, "heads": heads, "kv_heads": kv_heads, "passes": 1})

    def _exchange(self, x: Tensor, side: Side | str, heads: int | None, kv_heads: int | None, to_heads: bool) -> Tensor:
        context, side = self.context, one_of("side", side, Side)
        on_device(context, "x", x, ndim=3)
        plan = self._mixing(heads, kv_heads)
        out: Tensor = operators.AllToAll.apply(x, context.rank, context.number, plan, side, to_heads)  # type: ignore[no-untyped-call]
        return out
