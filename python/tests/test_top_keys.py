# SPDX-License-Identifier: MIT OR Apache-2.0
"""The best keys by an indexer's scores, on one rank and on processes, against scores that are whole. Inputs are small whole numbers: scores are
exact in any order, and many are equal."""

from __future__ import annotations

import unittest

import torch
from largest import Largest
from processes import run
from torch import Tensor

import cpattn
import cpattn.torch

LENGTHS, HEADS, DIM = [97, 1, 0, 64, 30], 3, 8


def inputs() -> list[Tensor]:
    """q, k and weights of a batch."""
    made, n = torch.Generator().manual_seed(5), sum(LENGTHS)
    return [torch.randint(-2, 3, shape, generator=made).float() for shape in ((n, HEADS, DIM), (n, DIM), (n, HEADS))]


def whole(q: Tensor, k: Tensor, weights: Tensor | None, top: int, left: int, scale: float, relu: bool) -> Tensor:
    """The same from all scores at once."""
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    scores = torch.einsum("qhd,kd->qhk", q, k) * scale
    scores = scores.relu() if relu else scores
    total = (scores if weights is None else scores * weights[..., None]).sum(1)
    distance = place[:, None] - place
    allowed = (document[:, None] == document) & (distance >= 0) & (distance <= left)
    rows = []
    for row, seen in zip(total.tolist(), allowed, strict=True):
        found = sorted(seen.nonzero().flatten().tolist(), key=lambda at: (-row[at], at))[:top]
        rows.append([int(place[at]) for at in found] + [-1] * (top - len(found)))
    return torch.tensor(rows, dtype=torch.int32)


def job(rank: int, world: int) -> list[str]:
    wrong = []
    for options in (
        {"ring": world},
        {"ulysses": world, "ring": 1},
        {"layout": "striped", "layout_parameter": 5, "ring": world},
    ):
        context = cpattn.torch.Context(
            heads=4, head_dim=16, dtype=torch.float32, timeout=60.0, own_tokens=True, **options
        )  # type: ignore[arg-type]
        batch = context.batch(torch.tensor([0, *LENGTHS]).cumsum(0).tolist())
        q, k, weights = inputs()
        cases: list[tuple[int, int | None, float, bool, bool, int]] = [
            (7, None, 0.5, True, True, 1 << 26),
            (7, None, 0.5, True, True, 1 << 12),
            (200, None, 1.0, False, True, 1 << 14),
            (3, 20, 1.0, True, False, 1 << 13),
        ]
        for top, left, scale, relu, weighted, tile in cases:
            own = [batch.shard(q), batch.shard(k, "k"), batch.shard(weights) if weighted else None]
            got = batch.top_keys(*own, top=top, scale=scale, relu=relu, tile_bytes=tile, window_left=left)
            limit = cpattn.UNLIMITED if left is None else left
            want = whole(q, k, weights if weighted else None, top, limit, scale, relu)[batch.tokens]
            if not torch.equal(got, want):
                wrong.append(
                    f"{options} top {top}, window {left}, tile {tile}: {(got != want).sum()} of {want.numel()}"
                )
        # They are lists of attention.
        lists = batch.top_keys(batch.shard(q), batch.shard(k, "k"), top=5)
        x = torch.ones(len(batch.tokens), 4, 16)
        o = batch.attention(x, x, x, key_indices=lists)
        if not torch.allclose(o, x):
            wrong.append("attention over the chosen keys")
        context.close()
    return wrong


def memory(rank: int, world: int) -> list[str]:
    """No tensor has the size of queries times keys."""
    tokens, top = 6144, 64
    context = cpattn.torch.Context(heads=1, head_dim=8, dtype=torch.bfloat16, timeout=120.0)
    batch = context.batch([0, tokens])
    made = torch.Generator().manual_seed(rank)
    q, k = (
        torch.randn(shape, generator=made).bfloat16() for shape in ((tokens // world, 4, 32), (tokens // world, 32))
    )
    with Largest() as largest:
        batch.top_keys(q, k, top=top, tile_bytes=1 << 19)
    # Tiles are at most half a MB, the best keys 8 bytes each; all scores of a head would be 38 MB.
    limit = max(1 << 19, 3 * 8 * len(q) * top)
    context.close()
    return [] if largest.bytes <= limit else [f"{largest.bytes} bytes, at most {limit}"]


def refused(rank: int, world: int) -> list[str]:
    context = cpattn.torch.Context(heads=1, head_dim=8, timeout=5.0)
    batch, taken = context.batch([0, 4]), []
    q, k = torch.zeros(4, 2, 8), torch.zeros(4, 8)
    for words, given in (
        ("k has the shape|k is of torch.float32 and has the shape", {"q": q, "k": k[:3]}),
        ("k has 7 numbers for a token and q 8 for a head", {"q": q, "k": k[:, :7]}),
        ("weights has 3 heads and q 2", {"q": q, "k": k, "weights": torch.zeros(4, 3)}),
        ("q is of torch.int64", {"q": q.long(), "k": k}),
        ("top is 0", {"q": q, "k": k, "top": 0}),
        ("tile_bytes is 10", {"q": q, "k": k, "tile_bytes": 10}),
    ):
        try:
            batch.top_keys(**{"top": 2} | given)  # type: ignore[arg-type]
            taken.append(words)
        except cpattn.InvalidArgument as error:
            if not any(one in str(error) for one in words.split("|")):
                taken.append(f"{words}: {error}")
    context.close()
    return taken


class TopKeys(unittest.TestCase):
    def test_on_one_rank(self) -> None:
        self.assertEqual(run(job, 1), [[]])

    def test_on_ranks(self) -> None:
        self.assertEqual(run(job, 3), [[]] * 3)

    def test_memory(self) -> None:
        self.assertEqual(run(memory, 2), [[]] * 2)

    def test_what_is_refused(self) -> None:
        self.assertEqual(run(refused, 1), [[]])


if __name__ == "__main__":
    unittest.main()
