# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keys that each token lists, on one rank and on processes, against a dense computation whose mask is made of the lists."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from processes import run
from torch import Tensor

import cpattn
import cpattn.torch

LENGTHS, HEADS, KV_HEADS, DIM, VALUE = [17, 1, 26], 4, 2, 16, 8


def inputs() -> list[Tensor]:
    """q, k, v and the gradient of o, with NaN in every fifth row of k and v of a document."""
    made, n = torch.Generator().manual_seed(3), sum(LENGTHS)
    shapes = ((n, HEADS, DIM), (n, KV_HEADS, DIM), (n, KV_HEADS, VALUE), (n, HEADS, VALUE))
    x = [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]
    for one in x[1:3]:
        one[places() % 5 == 3] = torch.nan
    return x


def places() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])


def lists(heads: int, entries: int) -> Tensor:
    """Some of the keys that a causal mask allows, as int64; a token in seven has none."""
    made, found = torch.Generator().manual_seed(heads), []
    for token, place in enumerate(places().tolist()):
        for _ in range(heads):
            allowed = torch.arange(place + 1)
            allowed = allowed[allowed % 5 != 3]
            some = allowed[torch.randperm(len(allowed), generator=made)][: 0 if token % 7 == 2 else entries]
            found.append(torch.cat([torch.full((entries - len(some),), -1), some]))
    return torch.stack(found).view(-1, heads, entries)


def dense(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """o and lse [heads, tokens] in float64."""
    n, group = len(q), HEADS // KV_HEADS
    ends = torch.tensor(LENGTHS).cumsum(0)
    first = torch.repeat_interleave(ends - torch.tensor(LENGTHS), torch.tensor(LENGTHS))
    allowed = torch.zeros(keys.shape[1], n, n + 1, dtype=torch.bool)
    at = torch.where(keys < 0, n, keys + first[:, None, None])
    allowed = allowed.scatter(2, at.transpose(0, 1), True)[..., :n].repeat_interleave(HEADS // keys.shape[1], 0)
    k, v = (x.nan_to_num(0.0).repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).div(DIM**0.5).masked_fill(~allowed, -torch.inf)
    every = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], 2)
    lse = every.logsumexp(-1)
    weights = torch.where(allowed, (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp(), 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def job(rank: int, world: int) -> list[str]:
    wrong = []
    for dtype, bound, options in (
        (torch.float32, 2e-6, {"ring": world, "ulysses": 1, "key_rows": "listed"}),
        (torch.float32, 2e-6, {"ring": world, "ulysses": 1, "key_rows": "allowed"}),
        (torch.float64, 1e-12, {"ring": 1, "ulysses": world}),
        (torch.bfloat16, 2e-2, {}),
    ):
        context = cpattn.torch.Context(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            value_dim=VALUE,
            dtype=dtype,
            timeout=60.0,
            own_tokens=True,
            **options,
        )  # type: ignore[arg-type]
        batch = context.batch(torch.tensor([0, *LENGTHS]).cumsum(0).tolist())
        for heads, sinks in ((1, None), (KV_HEADS, torch.tensor([0.5, -1.0, 3.0, 0.0]))):
            keys, whole = lists(heads, 6), [x.to(dtype).double() for x in inputs()]
            q, k, v = (x.clone().requires_grad_() for x in whole[:3])
            expected, expected_lse = dense(q, k, v, keys, sinks)
            expected.backward(whole[3])
            own = [batch.shard(x).to(dtype).requires_grad_() for x in whole[:3]]
            given: Any = keys if heads > 1 else keys[:, 0].to(torch.int32)
            o, lse = batch.attention(*own, sinks, key_indices=given[batch.tokens], return_lse=True)
            o.backward(batch.shard(whole[3]).to(dtype))
            pairs = [
                (o, expected.detach()),
                *((x.grad, y.grad.nan_to_num(0.0)) for x, y in zip(own, (q, k, v), strict=True)),
            ]
            for name, (got, want) in zip(("o", "dq", "dk", "dv"), pairs, strict=True):
                error = (got.double() - batch.shard(want)).abs().max() / want.abs().max()
                if not error <= bound:
                    wrong.append(f"{dtype} {options} {heads} heads: {name} {error:.1e}")
            want_lse = expected_lse.detach()[:, batch.tokens]
            if not torch.equal(torch.isinf(lse), torch.isinf(want_lse)) or not torch.allclose(
                lse.double(), want_lse, rtol=1e-5 + bound
            ):
                wrong.append(f"{dtype} {options} {heads} heads: lse")
        context.close()
    return wrong


def blocks(rank: int, world: int) -> list[str]:
    """Blocks have the bits of lists of their keys, forward and backward, and fetch as many bytes of k and v."""
    wrong, size = [], 4
    for options in ({"ring": world, "ulysses": 1}, {"ring": world, "ulysses": 1, "window_left": 9}, {}):
        context = cpattn.torch.Context(
            heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, value_dim=VALUE, dtype=torch.float32, timeout=60.0, own_tokens=True,
            **options,
        )  # type: ignore[arg-type]  # fmt: skip
        batch = context.batch(torch.tensor([0, *LENGTHS]).cumsum(0).tolist())
        made, lengths = torch.Generator().manual_seed(8), torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))
        listed = torch.full((sum(LENGTHS), KV_HEADS, 3), -1)
        keys = torch.full((sum(LENGTHS), KV_HEADS, 3 * size), -1)
        for token, place in enumerate(places().tolist()):
            for head in range(KV_HEADS):
                every = torch.randperm(-(-int(lengths[token]) // size), generator=made)[: 3 - token % 3]
                listed[token, head, : len(every)] = every
                found = (every[:, None] * size + torch.arange(size)).flatten()
                left = options.get("window_left", 10**6)
                found = found[(found <= place) & (found >= place - left)]
                keys[token, head, : len(found)] = found.sort(descending=True).values
        results, fetched = [], []
        for given in ({"key_blocks": listed[batch.tokens], "block_size": size}, {"key_indices": keys[batch.tokens]}):
            x = [batch.shard(x.nan_to_num(0.0)).float().requires_grad_() for x in inputs()[:3]]
            context.record()
            o = batch.attention(*x, **given)
            o.backward(batch.shard(inputs()[3]).float())
            results.append([o, *(one.grad for one in x)])
            fetched.append(sum(event.bytes for event in context.rank.trace() if event.name == "fetch"))
        if fetched[0] != fetched[1] or fetched[0] == 0:
            wrong.append(f"{options}: blocks fetch {fetched[0]} bytes, lists of their keys {fetched[1]}")
        for name, got, want in zip(("o", "dq", "dk", "dv"), *results, strict=True):
            if not torch.allclose(got, want, atol=1e-6):
                wrong.append(f"{options}: {name} {(got - want).abs().max():.1e}")
        context.close()
    return wrong


def refused(rank: int, world: int) -> list[str]:
    """What a batch takes that it should refuse."""
    q, good = torch.zeros(4, 1, DIM), torch.zeros(4, 1, 1, dtype=torch.int32)
    context = cpattn.torch.Context(heads=1, head_dim=DIM, timeout=5.0)
    batch, taken = context.batch([0, 4]), []
    sliced = batch.with_slices(cpattn.slices.documents([0, 4]))
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (batch, "torch.float32 on cpu", {"key_indices": good.float()}),
        (batch, "key_indices has the shape (4,)", {"key_indices": good[:, 0, 0]}),
        (sliced, "key_indices in a batch with slices", {"key_indices": good}),
        (sliced, "key_blocks in a batch with slices", {"key_blocks": good, "block_size": 2}),
        (batch, "key_blocks has the shape (4,)", {"key_blocks": good[:, 0, 0], "block_size": 2}),
        (batch, "key_blocks is given without block_size", {"key_blocks": good}),
        (batch, "block_size is 2 without key_blocks", {"block_size": 2}),
        (batch, "block_size is 0", {"key_blocks": good, "block_size": 0}),
        (
            batch,
            "key_indices and key_blocks are both given",
            {"key_blocks": good, "block_size": 2, "key_indices": good},
        ),
        (batch, "key_blocks[0, 0, 0] is 2, -1 or below 2 is needed", {"key_blocks": good + 2, "block_size": 3}),
        (batch, "key_blocks[0, 0] has 0 twice", {"key_blocks": good.repeat(1, 1, 2), "block_size": 3}),
        (batch, "key_blocks has 3 rows, 4 are needed", {"key_blocks": good[:3], "block_size": 3}),
    ]
    for of, words, given in cases:
        try:
            of.attention(q, q, q, **given)
            taken.append(words)
        except (cpattn.InvalidArgument, cpattn.Unsupported) as error:
            taken += [] if words in str(error) else [str(error)]
    context.close()
    return taken


class Processes(unittest.TestCase):
    def test_dense_result(self) -> None:
        for world in (2, 3):
            for wrong in run(job, world):
                self.assertEqual(wrong, [])

    def test_blocks(self) -> None:
        for wrong in run(blocks, 2):
            self.assertEqual(wrong, [])


class OneRank(unittest.TestCase):
    def test_refusals(self) -> None:
        plan, rank = cpattn.Plan([0, 4], 1, DIM), cpattn.local_group(1)[0]
        q, lse = torch.zeros(4, 1, DIM), torch.zeros(1, 4)
        good = torch.tensor([[[0]], [[0]], [[-1]], [[2]]], dtype=torch.int32)
        given: dict[str, Any] = {"q": q, "k": q.clone(), "v": q.clone(), "o": q.clone(), "lse": lse}
        rank.forward(plan, **given, key_indices=good)
        for words, keys in (
            ("key_indices is of DLPack type 0, 64 bits", good.long()),
            (r"key_indices is of shape \(4, 1\)", good[:, 0]),
            ("key_indices has strides", good.repeat(1, 2, 2).transpose(0, 2)),
            (r"key_indices\[0\]\[0\]\[0\] is 1", good + 1),
            ("key_indices is of 3 entries", good[:3]),
        ):
            with self.assertRaisesRegex(cpattn.InvalidArgument, words):
                rank.forward(plan, **given, key_indices=keys)
        with self.assertRaisesRegex(cpattn.Unsupported, "key_indices and block_table are both given"):
            rank.forward(plan, **given, key_indices=good, block_table=good[0], page_size=4)
        self.assertEqual(run(refused, 1), [[]])


if __name__ == "__main__":
    unittest.main()
