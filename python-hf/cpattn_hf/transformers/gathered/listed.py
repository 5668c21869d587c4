# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers whose indexer lists keys for each query: the kernels compute the listed pairs alone, on this rank's queries and gathered keys.

Such a layer gives its attention function the columns that it chose, unless that is Transformers' own, which makes a mask of them. What is
gathered is the compressed keys and values, before the layer expands them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cpattn import UNLIMITED
from cpattn.errors import Unsupported
from cpattn.plan import Plan
from cpattn.rank import Rank, local_group
from cpattn.torch.group import DTYPES
from ..attention import Current
from .indexer import Tiled, Unmade
from .keys import gathered

NAME = "cpattn_listed"


@cache
def _rank(workers: int) -> Rank:
    """A group of this process alone."""
    return local_group(1, workers=workers)[0]


@lru_cache(maxsize=64)
def _plan(
    tokens: int,
    rows: int,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    scale: float,
    sinks: bool,
) -> Plan:
    """One document of these queries and keys, all of which a query may list."""
    return Plan(
        [0, tokens], heads, dims[0], cu_seqlens_k=[0, rows], kv_heads=kv_heads, value_dim=dims[1], dtype=DTYPES[dtype], scale=scale,
        sinks=sinks, window_right=UNLIMITED, world=1,
    )  # fmt: skip


class _Listed(torch.autograd.Function):
    """Attention of q [tokens, heads, dim] to the rows of k and v that `keys` [tokens, 1 or kv heads, entries] lists, with a sink for each head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, keys: Tensor, scale: float, workers: int
    ) -> Tensor:
        ctx.rank = _rank(workers)
        ctx.plan = _plan(
            len(q), len(k), q.shape[1], k.shape[1], (q.shape[2], v.shape[2]), q.dtype, scale, sinks is not None
        )
        given = {} if sinks is None else {"sinks": sinks.detach().float().contiguous()}
        o = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[1], len(q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        q, k, v = (x.detach() for x in (q, k, v))
        ctx.rank.forward(ctx.plan, q=q, k=k, v=v, o=o, lse=lse, key_indices=keys, **given)
        ctx.save_for_backward(q, k, v, sinks, keys, o, lse)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, keys, o, lse = ctx.saved_tensors
        q, k, v, o = (x.detach() for x in (q, k, v, o))
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        given = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o.contiguous(), "dq": dq, "dk": dk, "dv": dv}
        if sinks is not None:
            given |= {"sinks": sinks.detach().float().contiguous(), "dsinks": lse.new_empty(sinks.shape)}
        ctx.rank.backward(ctx.plan, key_indices=keys, **given)
        return dq, dk, dv, None if sinks is None else given["dsinks"].to(sinks.dtype), None, None, None


def attend(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Unmade,
    scaling: float,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_indices: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function of Transformers for these layers, with sinks `s_aux`. Columns that the mask forbids are chosen where it
    allows fewer."""
    if indices is None and block_indices is None:
        raise Unsupported(
            f"{type(layer).__name__} gives its attention no indices: use a version of transformers whose layer does"
        )
    # Windows are in the mask; other options of Transformers' functions would change the scores.
    if more.get("softcap") is not None:
        raise Unsupported(
            f"{type(layer).__name__} has softcap={more['softcap']} and lists keys: this adapter has no softcap over listed keys"
        )
    if indices is None:  # the columns of the keys of blocks, [1, heads, tokens, entries]
        assert block_indices is not None
        keys = block_indices[0].transpose(0, 1).repeat_interleave(k.shape[1] // block_indices.shape[1], 1).contiguous()
    else:
        if not isinstance(mask, Unmade):
            allowed = mask[:, 0].expand(-1, indices.shape[1], -1).gather(-1, indices.long())
            indices = torch.where(allowed, indices, -1)
        keys = indices.to(torch.int32)[0, :, None].contiguous()
    # Under autocast q, k and v can be of different types: rotary embeddings make some of them f32.
    dtype = torch.get_autocast_dtype(v.device.type) if torch.is_autocast_enabled(v.device.type) else v.dtype
    q, k, v = (x[0].to(dtype).transpose(0, 1).contiguous() for x in (q, k, v))
    # A trial of a model has no batch.
    batch = getattr(Current.forward, "batch", None)
    workers = batch.context.workers if batch else 1
    o: Tensor = _Listed.apply(q, k, v, s_aux, keys, scaling, workers)  # type: ignore[no-untyped-call]
    return o[None], None


AttentionInterface.register(NAME, attend)  # type: ignore[no-untyped-call, unused-ignore]


def listed(kind: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The layer's forward over listed keys; over the layer's own mask where the kernels cannot: on a device, and with dropout."""
    hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    dropped: Any = layer.training and getattr(layer, "attention_dropout", 0.0)
    if hidden.is_cuda or dropped:
        return gathered(kind, layer, *args, **kwargs)
    own = getattr(layer, "indexer", None)
    change = None if own is None else lambda layer, keys: {"indexer": Tiled(own, keys)}
    return gathered(NAME, layer, *args, change=change, mask_of=lambda keys, device: Unmade(), **kwargs)
