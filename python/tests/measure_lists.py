# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention over listed keys beside attention over all keys of the mask, and how many rows the lists of a rank name; not a test.

    capi/build && PYTHONPATH=python python3 python/tests/measure_lists.py [--rounds N] [--unions]

Time is that of the CPU, of both processes together, in one interleaved run over gloo; memory is what the larger process grows by in its first
call, in its peak of resident pages. Both are of a forward and a backward of latent attention (576/512), as DeepSeek V3.2 has it.

Unions: a query's list has the keys with the highest scores before it. A score is a part that all queries of the key share, and a part of
the pair's own; `share` is the first one's part of the variance. At 0 the lists of queries are independent, at 1 they are the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from cpattn.torch import Context
from peak import peak
from processes import run

HEADS, DIM, V_DIM = 8, 576, 512
# Tokens of one document, and entries of a list.
CASES = ((2048, 64), (2048, 256), (4096, 256))
KEYS, QUERIES, ENTRIES, SHARES = (32768, 131072), (512, 4096), 2048, (0.0, 0.5, 0.9, 0.99)


def lists(positions: torch.Tensor, entries: int, seed: int) -> torch.Tensor:
    """Keys drawn for each token among those up to it; -1 where there are fewer."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(positions), int(positions.max()) + 1, generator=draw)
    scores[torch.arange(scores.shape[1]) > positions[:, None]] = -1
    found = scores.topk(min(entries, scores.shape[1]), 1)
    return torch.where(found.values < 0, -1, found.indices).int()


def _ways(rank: int, world: int, tokens: int, entries: int) -> dict[str, Callable[[], None]]:
    batch = Context(heads=HEADS, kv_heads=1, head_dim=DIM, value_dim=V_DIM, ring=world).batch([0, tokens])
    rows, draw = len(batch.tokens), torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(rows, heads, dim, generator=draw).requires_grad_()
        for heads, dim in ((HEADS, DIM), (1, DIM), (1, V_DIM))
    )
    keys = lists(batch.positions, entries, rank)

    def call(**more: torch.Tensor) -> None:
        batch.attention(q, k, v, **more).sum().backward()

    return {"all": call, "listed": lambda: call(key_indices=keys)}


def _times(rank: int, world: int, tokens: int, entries: int, rounds: int) -> dict[str, list[float]]:
    ways = _ways(rank, world, tokens, entries)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.process_time()
            way()
            if at:
                times[name].append(time.process_time() - began)
    dist.barrier()
    return times


def _grows(rank: int, world: int, tokens: int, entries: int, name: str) -> float:
    """In a process of its own: what one call has freed would be there for the next."""
    grown = peak(_ways(rank, world, tokens, entries)[name])
    dist.barrier()
    return grown


def union(keys: int, queries: int, share: float, draw: torch.Generator, at_a_time: int = 64) -> float:
    """The part of the keys that some list of the last `queries` tokens names."""
    common, named = torch.randn(keys, generator=draw), torch.zeros(keys, dtype=torch.bool)
    for first in range(keys - queries, keys, at_a_time):
        scores = share**0.5 * common + (1 - share) ** 0.5 * torch.randn(at_a_time, keys, generator=draw)
        scores[torch.arange(keys) > torch.arange(first, first + at_a_time)[:, None]] = -torch.inf
        named[scores.topk(ENTRIES, 1, sorted=False).indices.flatten()] = True
    return float(named.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--unions", action="store_true", help="the parts of the keys that lists name, alone")
    given = parser.parse_args()
    if given.unions:
        draw = torch.Generator().manual_seed(1)
        for keys in KEYS:
            for queries in QUERIES:
                parts = "  ".join(f"share {share}: {union(keys, queries, share, draw):.3f}" for share in SHARES)
                print(f"{keys} keys, lists of {ENTRIES}, {queries} queries: {parts}", flush=True)
        return
    print(
        f"{HEADS} heads of {DIM} and {V_DIM} dims, one kv head, f32, 2 processes over gloo, forward and backward; medians of {given.rounds}"
    )
    for tokens, entries in CASES:
        ranks = run(_times, 2, tokens, entries, given.rounds, seconds=600)
        text = f"{tokens} tokens, {entries} keys of {tokens / 2:.0f} on average"
        for name in ("all", "listed"):
            cpu = statistics.median(sum(rank[name][at] for rank in ranks) for at in range(given.rounds))
            text += f"  {name} {cpu * 1e3:6.0f} ms, {max(run(_grows, 2, tokens, entries, name, seconds=600)):5.1f} MB"
        print(text, flush=True)


if __name__ == "__main__":
    main()
