# SPDX-License-Identifier: MIT OR Apache-2.0
"""Time and memory of an attention layer on gathered keys beside an all_gather by hand, over gloo; not a test.

    python3 python/tests/measure_gather.py [--rounds N]

Both run PyTorch's scaled_dot_product_attention with a mask, forward and backward, on the same tokens of each of 4 processes. By hand
all keys and values come from all ranks, and their gradients are summed over all. Times are medians of the slowest rank in one
interleaved run; memory is that of keys, values, mask and one matrix of scores for each head, on the rank with most rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cpattn.torch import Batch, Context
from processes import run
from torch.nn import functional as F

HEADS, DIM, TOKENS = 2, 64, 4096
# Documents, and the keys before its own that a query sees.
CASES: dict[str, tuple[list[int], int | None]] = {
    "8 documents": (list(range(0, TOKENS + 1, TOKENS // 8)), None),
    "1 document, window of 256": ([0, TOKENS], 255),
    "1 document": ([0, TOKENS], None),
}


class _All(torch.autograd.Function):
    """All rows, in the order of the batch, by an all_gather; gradients by an all_reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, every: list[torch.Tensor]) -> torch.Tensor:
        ctx.every = every
        longest = max(map(len, every))
        blocks = [x.new_empty(longest, *x.shape[1:]) for _ in every]
        dist.all_gather(blocks, F.pad(x, (0, 0, 0, 0, 0, longest - len(x))).contiguous())
        out = x.new_empty(sum(map(len, every)), *x.shape[1:])
        for tokens, block in zip(every, blocks, strict=True):
            out[tokens] = block[: len(tokens)]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[ctx.every[dist.get_rank()]], None


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> None:
    o = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)
    o.square().sum().backward()


def _ways(batch: Batch, window: int | None) -> dict[str, Callable[[], None]]:
    rows = len(batch.tokens)
    q, k, v = (torch.randn(rows, HEADS, DIM, requires_grad=True) for _ in range(3))
    every = [torch.tensor(batch.plan.tokens("q", rank)) for rank in range(4)]
    position, document = (
        torch.arange(TOKENS),
        torch.searchsorted(torch.tensor(batch.cu_seqlens), torch.arange(TOKENS), right=True),
    )
    distance = position[batch.tokens][:, None] - position
    seen = (
        (document[batch.tokens][:, None] == document)
        & (distance >= 0)
        & (distance <= (TOKENS if window is None else window))
    )
    reads = batch.reads(window_left=window)

    def gathered() -> None:
        _layer(q, *batch.gather((k, v), window_left=window).rows, reads.mask())

    return {"gather": gathered, "all_gather": lambda: _layer(q, _All.apply(k, every), _All.apply(v, every), seen)}  # type: ignore[no-untyped-call]


def _job(rank: int, world: int, case: str, rounds: int) -> tuple[int, int, dict[str, list[float]]]:
    """This rank's tokens, the rows that it reads, and the seconds of each way."""
    cu_seqlens, window = CASES[case]
    batch = Context(heads=HEADS, head_dim=DIM, ring=world).batch(cu_seqlens)
    times: dict[str, list[float]] = {}
    ways = _ways(batch, window)
    for _ in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.monotonic()
            way()
            times.setdefault(name, []).append(time.monotonic() - began)
    dist.barrier()
    return len(batch.tokens), len(batch.reads(window_left=window)), times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"{TOKENS} tokens, {HEADS} heads of {DIM} dims in f32, 4 processes over gloo, forward and backward")
    for case in CASES:
        ranks = run(_job, 4, case, rounds, seconds=600)
        rows = max(rank[1] for rank in ranks)
        text = f"{case:26} rows at most {rows:5} of {TOKENS}"
        for name, of in (("gather", rows), ("all_gather", TOKENS)):
            wall = statistics.median(max(rank[2][name][1 + one] for rank in ranks) for one in range(rounds))
            memory = max(of * HEADS * DIM * 8 + rank[0] * of * (1 + 4 * HEADS) for rank in ranks)
            text += f"  {name} {wall * 1e3:6.0f} ms, {memory / 1e6:4.0f} MB"
        print(text, flush=True)


if __name__ == "__main__":
    main()
