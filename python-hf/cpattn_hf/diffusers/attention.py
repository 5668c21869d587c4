# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention of a sequence that is spread over the ranks, as an attention backend of Diffusers.

Each rank has some rows of q, k and v, [batch, tokens, heads, dim], as many as it likes. The batch of `cpattn.torch` has them one rank after
another, each with as many rows as the longest needs: those that are added are in no slice, so no query reads them. Every query reads
all keys that the mask keeps, wherever they are, so the order of tokens means nothing. Elements of the batch with the same mask are heads
of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from cpattn.errors import Unsupported
from cpattn.torch import Context, GlooTransport
from cpattn.torch.group import refusing
from cpattn.torch.group import Collectives, Members
from .counts import counts
from .masks import keys_of, slices_of
from .sequence import exchanged

if TYPE_CHECKING:
    from .parallel import ContextParallel


class Attention:
    """Attention over the ranks of a group. All ranks make one, and make the same calls."""

    def __init__(
        self, group: Members, transport: GlooTransport, collectives: Collectives, options: dict[str, Any]
    ) -> None:
        self._group, self._transport, self._collectives, self._options = group, transport, collectives, options
        self._contexts: dict[tuple[Any, ...], Context] = {}
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """o of this rank's queries, of q's type."""
        usual = q.dtype
        self.calls += 1
        with refusing(self._transport):
            key_mask = None if mask is None else keys_of(mask, q, k)
            if torch.is_autocast_enabled(q.device.type):
                q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        kind = (q.shape[0], *q.shape[2:], *k.shape[2:], v.shape[3], str(q.dtype), scale, key_mask is not None)
        every_q, every_k = counts(self._transport, "attention", kind, q.shape[1], k.shape[1])
        read = self._read(key_mask, q.shape[0], every_k)
        if not max(every_q):
            return q.new_empty(*q.shape[:3], v.shape[3])
        if empty := [at for at, row in enumerate(read) if True not in row]:
            raise Unsupported(
                f"attn_mask hides all keys from element {empty[0]} of the batch, at least one is needed: leave that element, or its mask, out"
            )
        context = self._context(q, k, v)
        order: list[int] = []
        parts: list[Tensor] = []
        for row in sorted(set(map(tuple, read))):
            some = [at for at, other in enumerate(read) if tuple(other) == row]
            of_q, of_k, of_v = (x if len(some) == len(x) else x[some] for x in (q, k, v))
            parts.append(self._alike(context, of_q, of_k, of_v, max(every_q), max(every_k), row, scale))
            order += some
        o = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.tensor(order, device=q.device).argsort()]
        return o.to(usual)

    def _read(self, key_mask: Tensor | None, batch: int, every: Sequence[int]) -> list[list[bool]]:
        """For each element of the batch which rows of k of all ranks are read, each rank's with what is added to it."""
        rank, longest = self._transport.rank, max(every)
        rows = torch.zeros(len(every), batch, longest, dtype=torch.bool)
        if key_mask is None:
            for one, length in enumerate(every):
                rows[one, :, :length] = True
        else:
            rows[rank, :, : every[rank]] = key_mask.cpu()
            sent = rows[rank].view(torch.uint8).reshape(1, -1).repeat(len(every), 1)
            if sent.numel():
                got = exchanged(sent, [1] * len(every), [1] * len(every), self._collectives)
                rows = got.view(torch.bool).view(rows.shape)
        found: list[list[bool]] = rows.transpose(0, 1).reshape(batch, -1).tolist()
        return found

    def _alike(
        self,
        context: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        most_q: int,
        most_k: int,
        read: Sequence[bool],
        scale: float | None,
    ) -> Tensor:
        """Elements of the batch that read the same keys, as heads of one call."""
        world, (batch, tokens, heads, _) = self._transport.world, q.shape
        q, k, v = (_rows(x, most) for x, most in ((q, most_q), (k, most_k), (v, most_k)))
        batch_ = context.batch(
            [0, world * most_q], cu_seqlens_k=[0, world * most_k], slices=slices_of(world * most_q, read)
        )
        first_q, first_k = self._transport.rank * most_q, self._transport.rank * most_k
        assert batch_.tokens.tolist() == list(range(first_q, first_q + most_q)) and batch_.k_tokens.tolist() == list(
            range(first_k, first_k + most_k)
        )
        o: Tensor = batch_.attention(q, k, v, scale=scale)
        return o[:tokens].view(tokens, batch, heads, o.shape[2]).transpose(0, 1)

    def _context(self, q: Tensor, k: Tensor, v: Tensor) -> Context:
        key = (q.dtype, q.device, *q.shape[2:], *k.shape[2:], v.shape[3])
        if key not in self._contexts:
            shape: dict[str, Any] = {
                "heads": q.shape[2],
                "kv_heads": k.shape[2],
                "head_dim": q.shape[3],
                "value_dim": v.shape[3],
            }
            self._contexts[key] = Context(
                self._group,
                dtype=q.dtype,
                device=q.device,
                own_tokens=True,
                layout="contiguous",
                **shape,
                **self._options,
            )
        return self._contexts[key]

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()


def _rows(x: Tensor, most: int) -> Tensor:
    """[batch, tokens, heads, dim] as [most tokens, batch heads, dim]."""
    batch, tokens, heads, dim = x.shape
    rows = x.transpose(0, 1).reshape(tokens, batch * heads, dim)
    return rows if tokens == most else torch.cat([rows, rows.new_zeros(most - tokens, *rows.shape[1:])])


class Settings:
    """What processors get as their parallel configuration: attention with it is over the ranks."""

    def __init__(self, parallel: ContextParallel) -> None:
        self.parallel = parallel

    @property
    def context_parallel_config(self) -> Any:
        raise Unsupported(
            "set_attention_backend was called after ContextParallel was made, so attention would not go over the ranks: close the "
            "ContextParallel, set the backend, and make it again"
        )

    def __deepcopy__(self, _: Any) -> Settings:
        return self


def backend(former: Any) -> Any:
    """The name of a backend that computes attention with `Settings` over the ranks, and other attention as the backend `former` does (None:
    the active one)."""
    usual = None if former is None else AttentionBackendName(former)
    name = "cpattn" if usual is None else f"cpattn_{usual.value}"
    if (known := next((one for one in _AttentionBackendRegistry._backends if one.value == name), None)) is not None:
        return known
    # A name that the enum does not list, since enums cannot be extended.
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Settings | None = None,
    ) -> Tensor:
        if isinstance(_parallel_config, Settings) and (attend := _parallel_config.parallel.attention) is not None:
            if dropout_p:
                raise Unsupported(f"dropout_p is {dropout_p} in attention, 0 is needed: each rank would draw its own")
            if is_causal:
                raise Unsupported(
                    "is_causal is True in attention, False is needed: the ranks' tokens have no common order"
                )
            return attend(query, key, value, attn_mask, scale)
        chosen, function = (
            _AttentionBackendRegistry.get_active_backend()
            if usual is None
            else (usual, _AttentionBackendRegistry._backends[usual])
        )
        arguments = {
            "query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
            "enable_gqa": enable_gqa, "_parallel_config": None,
        }  # fmt: skip
        o: Tensor = function(
            **{
                one: what
                for one, what in arguments.items()
                if one in _AttentionBackendRegistry._supported_arg_names[chosen]
            }
        )
        return o

    _AttentionBackendRegistry.register(member)(attention)
    return member
