# SPDX-License-Identifier: MIT OR Apache-2.0
"""The delta rule's kernels (gated delta net, KDA) on segments.

The state S [keys, values] of a head goes through a segment as M S + U: M and U are what the kernel itself makes of the identity and of the values.
One pass gives both, since columns of values are apart: those of the identity have values of 0. Its output for them is what each
token adds for an initial state, so that o += response · S once S is there.

A segment that starts its document needs none of this, and one that ends it waits for its state, and has one pass with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .segments import Documents, Segment, Walk, connected, tensors_of

NAMES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
# Kernels that take one sequence a call.
_single: set[Any] = set()


def delta_rule(documents: Documents, usual: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for this rank's rows [1, rows, heads, ...], as `usual` is of one document."""

    def chunks(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        rest = {
            name: one
            for name, one in options.items()
            if name not in ("initial_state", "output_final_state", "cu_seqlens")
        }
        walk, (heads, wide), keys = Walk(documents, key.shape[1]), value.shape[2:], key.shape[-1]
        tensors = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
        o: list[Tensor] = [value] * len(walk.segments)
        zero = torch.zeros(heads, keys, wide, device=value.device)
        decay: dict[int, Tensor] = {}
        state: dict[int, Tensor] = {}
        response: dict[int, Tensor] = {}

        begin = [at for at, one in enumerate(walk) if one.starts]
        for at, (out, final) in _each(usual, walk, begin, tensors, None, rest):
            o[at] = out
            if not walk.segments[at].ends:
                state[at] = final[0].float()

        between = [at for at, one in enumerate(walk) if not one.starts and not one.ends]
        if between:
            blank = value.new_zeros(*value.shape[:-1], keys)
            identity = torch.eye(keys, device=value.device).expand(heads, keys, keys)
            initial = torch.cat([zero, identity], -1)[None].expand(len(between), -1, -1, -1)
            wider = tensors | {"value": torch.cat([value, blank], -1)}
            for at, (out, final) in _each(usual, walk, between, wider, initial, rest):
                o[at], response[at] = torch.split(out, [wide, keys], -1)
                state[at], decay[at] = torch.split(final[0].float(), [wide, keys], -1)

        # A kernel is one node of autograd: its final state requires a gradient if anything does that it gets, the queries too.
        sources = (*tensors.values(), *tensors_of(rest))
        passed, every = walk.states(decay, state, (zero.new_zeros(heads, keys, keys), zero), sources, matrix=True)

        end = [at for at, one in enumerate(walk) if one.ends and not one.starts]
        last = torch.stack([passed[at] for at in end]) if end else None
        for at, (out, _) in _each(usual, walk, end, tensors, last, rest, final=False):
            o[at] = out
        with torch.autocast(value.device.type, enabled=False):
            for at, of in response.items():
                more = torch.einsum("bthk,hkv->bthv", of.float(), passed[at])
                o[at] = (o[at].float() + more).to(o[at].dtype)
        return connected(torch.cat(o, 1), every), None

    return chunks


def _each(
    kernel: Callable[..., Any],
    walk: Walk,
    of: Sequence[int],
    tensors: dict[str, Tensor],
    initial: Tensor | None,
    options: dict[str, Any],
    final: bool = True,
) -> list[tuple[int, tuple[Tensor, Tensor]]]:
    """The output [1, rows, ...] and the final state [1, ...] of some segments. In one call if the kernel keeps sequences apart
    (`cu_seqlens`, of which those in PyTorch say that they cannot), else in one call each."""
    some: list[Segment] = [walk.segments[at] for at in of]
    options = options | {"output_final_state": final}

    def call(segments: Sequence[Segment], initial: Tensor | None, **more: Any) -> tuple[Tensor, Tensor]:
        own = {name: torch.cat([one[:, of.rows] for of in segments], 1) for name, one in tensors.items()}
        three = [own.pop(name) for name in ("query", "key", "value")]  # by place: fla has other names for them
        found: tuple[Tensor, Tensor] = kernel(*three, **own, initial_state=initial, **more, **options)
        return found

    if len(some) > 1 and kernel not in _single:
        lengths = [one.end - one.first for one in some]
        ends = torch.tensor([0, *lengths], device=tensors["key"].device).cumsum(0)
        try:
            out, states = call(some, initial, cu_seqlens=ends)
        except (ValueError, NotImplementedError):
            _single.add(kernel)
        else:
            outs = torch.split(out, lengths, 1)
            return [(at, (outs[i], states[i : i + 1] if final else out)) for i, at in enumerate(of)]
    return [
        (at, call([one], None if initial is None else initial[i : i + 1])) for i, (at, one) in enumerate(zip(of, some))
    ]
