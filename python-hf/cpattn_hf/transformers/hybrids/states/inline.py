# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers whose recurrence is in their own forward: lightning attention, and the RG-LRU.

Each segment runs from a zero state, which ends in the state that the layer would cache. What a token reads of the segment's initial
state, decayed up to the token, is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .segments import Documents, Walk, connected


def lightning(layer: Any, documents: Documents, projected: Tensor, single: Any, arguments: dict[str, Any]) -> Tensor:
    """What the heads of MiniMax's attention give, [1, rows, heads · dim]. `single` is the layer without its projections, which runs on
    projected rows."""
    heads, dim = layer.num_attention_heads, layer.head_dim
    walk = Walk(documents, projected.shape[1])
    rate = layer.slope_rate.float()  # [heads, 1, 1]
    o, state, decay = [], {}, {}
    for at, one in enumerate(walk):
        out, final = type(layer).forward(single, projected[:, one.rows], **arguments)
        o.append(out)
        if not one.ends:
            state[at] = final[0].float()
            decay[at] = (-rate * (one.end - one.first)).exp()
    zeros = torch.zeros_like(rate), torch.zeros(heads, dim, dim, device=rate.device)
    initial, every = walk.states(decay, state, zeros, (projected,))
    for at, one in enumerate(walk):
        if one.starts:
            continue
        rows = projected[0, one.rows]
        q = layer.act_fn(rows).unflatten(-1, (heads, 3 * dim))[..., :dim].transpose(0, 1)
        passed = torch.arange(1, len(rows) + 1, device=rows.device)[:, None]
        with torch.autocast(rows.device.type, enabled=False):
            more = (q.float() * (-rate * passed).exp()) @ initial[at]
            o[at] = (o[at].float() + more.transpose(0, 1).flatten(1)[None]).to(o[at].dtype)
    return connected(torch.cat(o, 1), every)


def recurrence(
    documents: Documents, usual: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The recurrence of the RG-LRU for this rank's rows [1, rows, channels], as `usual` is of one document."""

    def scanned(
        hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Tensor | None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        walk = Walk(documents, hidden_states.shape[1])
        o, state, decay, product = [], {}, {}, {}
        for at, one in enumerate(walk):
            own = {"hidden_states": hidden_states, "recurrent_gate": recurrent_gate, "reset": reset}
            out, final = usual(**{name: x[:, one.rows] for name, x in own.items()}, recurrent_states=None)
            o.append(out)
            if not one.starts:
                product[at] = recurrent_gate[0, one.rows].float().cumprod(0)
            if not one.ends:
                state[at] = final[0].float()
                if not one.starts:
                    decay[at] = product[at][-1]
        zero = torch.zeros(hidden_states.shape[2], device=hidden_states.device)
        initial, every = walk.states(decay, state, (zero, zero), (hidden_states, recurrent_gate))
        for at, one in enumerate(walk):
            if not one.starts:
                o[at] = (o[at].float() + (product[at] * initial[at])[None]).to(o[at].dtype)
        return connected(torch.cat(o, 1), every), every[:1]

    return scanned
