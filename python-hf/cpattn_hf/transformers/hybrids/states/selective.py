# SPDX-License-Identifier: MIT OR Apache-2.0
"""The scans of Mamba-2 and Mamba-1 on segments.

A state decays elementwise: by exp(A · sum of the steps), so a segment's decay comes from its steps alone. Each segment runs from a zero state;
then a token adds C · (state, decayed up to the token), as the kernel would have. A segment of Mamba-2 that ends its document waits for its
state, and runs with it: its kernel takes an initial state, that of Mamba-1 takes none.

The last state of Mamba-1's kernel is not used: the backward pass of mamba_ssm's leaves its gradient out. The end state is summed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .segments import Documents, Walk, connected, tensors_of

CHUNKS = "mamba2_chunk_scan"
SCAN = "mamba_selective_scan"
# Tokens of Mamba-1 whose decays [channels, tokens, state size] exist at a time.
BLOCK = 128


def chunk_scan(documents: Documents, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of Mamba-2 for this rank's rows [1, rows, heads, ...], as `usual` is of one document."""

    def scanned(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Tensor:
        options = options | {"initial_states": None, "return_final_states": True}
        z = options.pop("z", None)
        walk, heads = Walk(documents, x.shape[1]), x.shape[2]
        steps = _steps(dt, options.get("dt_bias"), options.get("dt_softplus", False), options.get("dt_limit"))
        each, of = heads // C.shape[2], B.shape[-1]
        zero = x.new_zeros(heads, x.shape[-1], of, dtype=torch.float32)
        o: list[Tensor] = [x] * len(walk.segments)
        decay: dict[int, Tensor] = {}
        state: dict[int, Tensor] = {}

        def call(rows: slice, initial: Tensor | None) -> tuple[Tensor, Tensor]:
            own = {"initial_states": initial} | ({} if z is None else {"z": z[:, rows]})
            found: tuple[Tensor, Tensor] = usual(x[:, rows], dt[:, rows], A, B[:, rows], C[:, rows], **(options | own))
            return found

        grown: dict[int, Tensor] = {}
        for at, one in enumerate(walk):
            if one.starts or not one.ends:
                o[at], final = call(one.rows, None)
                if not one.ends:
                    state[at] = final[0].float()
            if not one.starts and not one.ends:
                grown[at] = (A.float() * steps[0, one.rows]).cumsum(0)  # [rows, heads]
                decay[at] = grown[at][-1].exp()[:, None, None]

        # A kernel is one node of autograd: its final state requires a gradient if anything does that it gets, C and D too.
        sources = (x, dt, A, B, C, z, *tensors_of(options))
        initial, every = walk.states(decay, state, (zero[:, :1, :1], zero), sources)

        for at, one in enumerate(walk):
            if one.starts:
                continue
            if one.ends:
                o[at] = call(one.rows, initial[at][None])[0]
                continue
            with torch.autocast(x.device.type, enabled=False):
                read = C[0, one.rows].float().repeat_interleave(each, 1) * grown[at].exp()[..., None]
                more = torch.einsum("thn,hpn->thp", read, initial[at])
                if z is not None:
                    more = more * F.silu(z[0, one.rows].float())
                o[at] = (o[at].float() + more).to(o[at].dtype)
        return connected(torch.cat(o, 1), every)

    return scanned


def selective_scan(documents: Documents, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of Mamba-1 for this rank's rows [1, channels, rows], as `usual` is of one document."""

    def scanned(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Tensor:
        options = options | {"return_last_state": False}
        z = options.pop("z", None)
        walk = Walk(documents, u.shape[2])
        steps = _steps(dt[0].T, options.get("delta_bias"), options.get("delta_softplus", False), None)
        zero = torch.zeros(A.shape, device=u.device)
        o: list[Tensor] = [u] * len(walk.segments)
        decay: dict[int, Tensor] = {}
        state: dict[int, Tensor] = {}
        grown: dict[int, Tensor] = {}
        for at, one in enumerate(walk):
            own = {} if z is None else {"z": z[..., one.rows]}
            parts = (u[..., one.rows], dt[..., one.rows], A, B[..., one.rows], C[..., one.rows])
            o[at] = usual(*parts, **(options | own))
            if one.whole:
                continue
            sums = steps[one.rows].cumsum(0)  # [rows, channels]
            if not one.starts:
                grown[at] = sums
            if not one.ends:
                state[at] = _end(steps[one.rows], sums, A.float(), B[0, :, one.rows].float(), u[0, :, one.rows].float())
            if not one.starts and not one.ends:
                decay[at] = (A.float() * sums[-1][:, None]).exp()

        # No kernel makes these states, so nothing else that a kernel gets is among their sources.
        initial, every = walk.states(decay, state, (zero, zero), (u, dt, A, B, options.get("delta_bias")))

        for at, sums in grown.items():
            rows = walk.segments[at].rows
            more = _read(sums, A.float(), C[0, :, rows].float(), initial[at])
            if z is not None:
                more = more * F.silu(z[0, :, rows].float())
            o[at] = (o[at].float() + more[None]).to(o[at].dtype)
        return connected(torch.cat(o, -1), every)

    return scanned


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None) -> Tensor:
    """The steps in time as the kernels make them, in f32, with channels or heads last."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    steps = F.softplus(steps) if softplus else steps
    return steps if limit is None else steps.clamp(*limit)


def _end(steps: Tensor, sums: Tensor, A: Tensor, B: Tensor, u: Tensor) -> Tensor:
    """The state [channels, state size] in which a segment ends that begins with none, of [rows, channels], those of B and u last. What
    each token adds decays by the steps after it. The decays are made again in the backward pass."""

    def block(later: Tensor, added: Tensor, A: Tensor, B: Tensor) -> Tensor:
        with torch.autocast(later.device.type, enabled=False):
            return torch.einsum("tdn,td,nt->dn", (later[..., None] * A).exp(), added, B)

    blocks = (torch.split(sums[-1] - sums, BLOCK), torch.split(steps * u.T, BLOCK), torch.split(B, BLOCK, -1))
    found = torch.zeros_like(A)
    for later, added, of in zip(*blocks, strict=True):
        found = found + checkpoint(block, later, added, A, of, use_reentrant=False, preserve_rng_state=False)
    return found


def _read(sums: Tensor, A: Tensor, C: Tensor, state: Tensor) -> Tensor:
    """What the tokens of a segment read of its initial state [channels, state size], [channels, rows]. The decays are made again in the
    backward pass."""

    def block(sums: Tensor, A: Tensor, C: Tensor, state: Tensor) -> Tensor:
        with torch.autocast(sums.device.type, enabled=False):
            decayed = (sums.T[..., None] * A[:, None]).exp() * state[:, None]
            return torch.einsum("dtn,nt->dt", decayed, C)

    blocks = zip(torch.split(sums, BLOCK), torch.split(C, BLOCK, -1), strict=True)
    found = [
        checkpoint(block, some, A, of, state, use_reentrant=False, preserve_rng_state=False) for some, of in blocks
    ]
    return torch.cat(found, -1)
