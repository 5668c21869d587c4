# SPDX-License-Identifier: MIT OR Apache-2.0
"""FlexAttention: any band, softcap and slopes in one call, by a block mask made of the intervals of `rows.Rows`.

The block mask is made from the intervals, block by block, and not from a dense mask. On the CPU FlexAttention has no backward in the
versions of PyTorch that this was written with, and it is not compiled there: the gradients are then those of `Math`.

FlexAttention differentiates its own o and lse, while a part of a row needs p = exp(s - lse) with the lse of the whole row. With
w = exp(lse of the part - lse) the gradients of the part's o and lse are w·d_o and rowsum(o·w·d_o) - w·delta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ...errors import Unsupported
from .heads import HeadMap
from .kernel import HALF, Honours, Kernel
from .math import Math, accumulator
from .rows import Group, Rows

BLOCK = 128


@dataclass(frozen=True)
class Tables:
    """Rows of q that have keys, in the order of the call, the rows of the k view that they read, and FlexAttention's mask and score."""

    q: Tensor
    k: Tensor
    mask: BlockMask
    score: Callable[..., Tensor] | None
    heads: HeadMap


class Flex(Kernel):
    name = "flex"
    form = "rows"

    def __init__(self, device: torch.device | str = "cpu", attention: Callable[..., Any] | None = None):
        self._on_cpu = torch.device(device).type == "cpu"
        self._gradients = Math() if self._on_cpu and attention is None else None
        self._attention: Callable[..., Any] = attention or (
            flex_attention if self._on_cpu else torch.compile(flex_attention)
        )
        self.honours = Honours(
            dtypes=(torch.float64, torch.float32, *HALF) if self._on_cpu else (torch.float32, *HALF),
            value_dim=True,
            softcap=True,
            slopes=True,
        )

    def prepare(self, call: Rows) -> None:
        call.tables[self.name] = tables_of(call) if call.groups else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Rows) -> tuple[Tensor, Tensor]:
        kind = accumulator(q.dtype)
        o = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=kind, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=kind, device=q.device)
        if (tables := call.tables[self.name]) is not None:
            with torch.no_grad():
                part, logs = self._attend(*inputs(q, k, v, tables), tables, call)
            o.index_copy_(0, tables.q, part[0].transpose(0, 1).to(kind))
            lse.index_copy_(1, tables.q, logs[0].to(kind))
        return o, lse

    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        call: Rows,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._gradients is not None:
            return self._gradients.backward(d_o, q, k, v, o, lse, call, delta)
        tables: Tables | None = call.tables[self.name]
        kind, heads = accumulator(q.dtype), q.shape[1] if call.per_q_head else k.shape[1]
        dq = torch.zeros(q.shape, dtype=kind, device=q.device)
        dk, dv = (torch.zeros(x.shape[0], heads, x.shape[2], dtype=kind, device=q.device) for x in (k, v))
        if tables is None:
            return dq, dk, dv
        assert delta is not None
        with torch.enable_grad():
            mine = [x.detach().requires_grad_() for x in inputs(q, k, v, tables)]
            part, logs = self._attend(mine[0], mine[1], mine[2], tables, call)
            weights = (logs.detach() - lse.index_select(1, tables.q)).exp()
            d = d_o.index_select(0, tables.q).transpose(0, 1).to(kind) * weights[0, ..., None]
            d_logs = (part.detach().to(kind) * d).sum(3) - weights * delta.index_select(1, tables.q)
            found = torch.autograd.grad((part, logs), mine, (d[None].to(part.dtype), d_logs.to(logs.dtype)))
        of_q, of_k, of_v = (x[0].transpose(0, 1).to(kind) for x in found)
        dq.index_copy_(0, tables.q, of_q)
        for whole, gradient in ((dk, of_k), (dv, of_v)):
            whole.index_copy_(0, tables.k, tables.heads.summed(gradient))
        return dq, dk, dv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, call: Rows) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] != k.shape[1]
        o, others = self._attention(
            q,
            k,
            v,
            score_mod=tables.score,
            block_mask=tables.mask,
            scale=call.scale,
            enable_gqa=groups,
            return_aux=AuxRequest(lse=True),
        )
        return o, others.lse


def inputs(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """[1, heads, rows, dim] of the rows that are read."""
    of_k, of_v = (tables.heads.expanded(x.index_select(0, tables.k)) for x in (k, v))
    first, second, third = (x.transpose(0, 1).contiguous()[None] for x in (q.index_select(0, tables.q), of_k, of_v))
    return first, second, third


def tables_of(call: Rows) -> Tables:
    device = call.kv.device
    q = torch.cat([group.rows for group in call.groups])
    k = torch.unique(torch.cat([keys.rows for group in call.groups for keys in group.keys]))
    begin, end = intervals(call.groups, k.cpu())
    heads = HeadMap(call.kv.tolist(), call.kv_heads, call.per_q_head, device)
    score = score_of(call, q, k)
    return Tables(q, k, mask_of(begin, end, len(k), device), score, heads)


def intervals(groups: tuple[Group, ...], k: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n]: the intervals of the keys `k`, in order, that each row reads; empty ones fill up."""
    found: list[list[tuple[int, int]]] = []
    for group in groups:
        of_group: list[list[tuple[int, int]]] = [[] for _ in range(len(group.rows))]
        for keys in group.keys:
            # Rows of a range without gaps are runs among the keys.
            places = torch.searchsorted(k, keys.rows.cpu())
            breaks = [0, *((places.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(places)]
            begins, ends, first = keys.begin.tolist(), keys.end.tolist(), places.tolist()
            for row, (b, e) in enumerate(zip(begins, ends)):
                for left, right in zip(breaks, breaks[1:]):
                    x, y = max(b, left), min(e, right)
                    if x < y:
                        of_group[row].append((first[left] + x - left, first[left] + y - left))
        found += [joined(sorted(row)) for row in of_group]
    most = max(map(len, found))
    padded = torch.tensor([[*row, *[(0, 0)] * (most - len(row))] for row in found], device="cpu")
    return padded[..., 0].contiguous(), padded[..., 1].contiguous()


def joined(row: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals of which those that touch are one."""
    runs: list[tuple[int, int]] = []
    for begin, end in row:
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return runs


def mask_of(begin: Tensor, end: Tensor, keys: int, device: torch.device) -> BlockMask:
    """The block mask of intervals [rows, n], which are on the host."""
    rows, count = begin.shape
    q_blocks, k_blocks = -(-rows // BLOCK), -(-keys // BLOCK)
    # For each row and block of keys, how many of the keys it reads.
    edges = torch.arange(k_blocks + 1, device="cpu") * BLOCK
    read = torch.zeros(rows, k_blocks, dtype=torch.long, device="cpu")
    for at in range(count):
        ends = end[:, at, None].clamp(max=edges[None, 1:])
        read += (ends - begin[:, at, None].clamp(min=edges[None, :-1])).clamp(min=0)
    sizes = torch.minimum(edges[1:], torch.tensor(keys, device="cpu")) - edges[:-1]
    padded = torch.nn.functional.pad(read, (0, 0, 0, q_blocks * BLOCK - rows)).view(q_blocks, BLOCK, k_blocks)
    some = (padded > 0).any(1)
    # Rows that do not exist, and keys past the end, are in no full block.
    full = (padded == BLOCK).all(1) & (sizes == BLOCK)
    partial = some & ~full
    lists = []
    for which in (partial, full):
        lists += [
            which.sum(1).int()[None, None],
            which.int().argsort(dim=1, descending=True, stable=True).int()[None, None],
        ]
    begin, end = begin.to(device), end.to(device)

    def allowed(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = (j >= begin[i, 0]) & (j < end[i, 0])
        for at in range(1, count):
            inside = inside | ((j >= begin[i, at]) & (j < end[i, at]))
        return inside

    some_count, some_list, full_count, full_list = (x.to(device) for x in lists)
    block_mask: BlockMask = BlockMask.from_kv_blocks(
        some_count, some_list, full_count, full_list, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(rows, keys)
    )
    return block_mask


def score_of(call: Rows, q: Tensor, k: Tensor) -> Callable[..., Tensor] | None:
    """Softcap and slopes."""
    cap = call.softcap
    if call.groups[0].slopes is None:
        if not cap:
            return None

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        return capped
    slopes = torch.cat(
        [group.slopes[None].expand(len(group.rows), -1) for group in call.groups if group.slopes is not None]
    )
    x, y = (places.to(q.device) for places in places_of(call.groups, k.cpu()))

    def sloped(score: Tensor, _: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        return score - slopes[i, h] * (y[j] - x[i]).abs()

    return sloped


def places_of(groups: tuple[Group, ...], k: Tensor) -> tuple[Tensor, Tensor]:
    """One position for each row and each key, whose differences are the distances of all pairs."""
    y, known, rows = (
        torch.zeros(len(k), dtype=torch.long, device="cpu"),
        torch.zeros(len(k), dtype=torch.bool, device="cpu"),
        [],
    )
    for group in groups:
        moves: set[int] = set()
        for keys in group.keys:
            places, positions = torch.searchsorted(k, keys.rows.cpu()), keys.k_pos.cpu()
            before = known[places]
            move = int((y[places] - positions)[before][0]) if bool(before.any()) else next(iter(moves), 0)
            if bool((y[places] != positions + move)[before].any()):
                raise refused()
            y[places], known[places] = positions + move, True
            moves.add(move)
        if len(moves) > 1:
            raise refused()
        rows.append(group.keys[0].q_pos.cpu() + next(iter(moves)))
    return torch.cat(rows), y


def refused() -> Unsupported:
    return Unsupported(
        'kernels=\'flex\' has one position for each key, and alibi_slopes with these slices need several: use kernels="math" or "cpattn"'
    )
