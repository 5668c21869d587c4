# SPDX-License-Identifier: MIT OR Apache-2.0
"""What servers use: partial results merged over ranks, against a dense computation, and k and v in pages, against the same rows
one after another."""

from __future__ import annotations

import math
import unittest

import torch
from processes import run

import cpattn
import cpattn.torch
from cpattn import CombineTo
from cpattn.schedule import OpKind, Tensor

TOKENS, HEADS, DIM, KEYS, WORLD = 4, 5, 8, 21, 3


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(n, HEADS, DIM, generator=made, dtype=torch.float64) for n in (TOKENS, KEYS, KEYS))
    return q, k, v


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse [heads, tokens] over the keys that each query may see, in float64."""
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double().view(HEADS, -1).logsumexp(1)[:, None])
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def parts(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's part: every third key; the last query sees no key at all, and the first none of rank 1."""
    allowed = (torch.arange(KEYS) % WORLD == rank).expand(TOKENS, KEYS).clone()
    allowed[-1] = False
    if rank == 1:
        allowed[0] = False
    q, k, v = inputs()
    return *dense(q, k, v, allowed), allowed


def job(rank: int, world: int) -> list[float]:
    q, k, v = inputs()
    o, lse, _ = parts(rank)
    o[lse.T == -torch.inf] = torch.nan
    allowed = torch.stack([parts(r)[2] for r in range(world)]).any(0)
    context = cpattn.torch.Context(heads=HEADS, head_dim=DIM, timeout=60.0)
    worst, sinks = [], torch.tensor([0.5, -1.0, 3.0, 0.0, -torch.inf])
    several = torch.stack([sinks, torch.full_like(sinks, -torch.inf), sinks.flip(0)], 1)
    for to in CombineTo:
        for dtype, given, bound in (
            (torch.float32, None, 2e-6),
            (torch.bfloat16, sinks, 2e-2),
            (torch.float64, None, 1e-12),
            (torch.float32, several, 2e-6),
        ):
            acc = torch.float64 if dtype == torch.float64 else torch.float32
            got, got_lse = context.combine(o.to(dtype), lse.to(acc), to=to.name.lower(), sinks=given, dtype=acc)
            want, want_lse = dense(q, k, v, allowed, given)
            tokens, heads = (slice(rank * n // world, (rank + 1) * n // world) for n in (TOKENS, HEADS))
            tokens, heads = (
                tokens if to == CombineTo.TOKENS else slice(None),
                heads if to == CombineTo.HEADS else slice(None),
            )
            want, want_lse = want[tokens, heads], want_lse[heads, tokens]
            assert got.shape == want.shape and got_lse.shape == want_lse.shape and got.dtype == acc
            ended = torch.isfinite(want_lse)
            assert torch.equal(ended, torch.isfinite(got_lse))
            apart = [
                (got - want).abs().max().item() if want.numel() else 0.0,
                *(got_lse - want_lse)[ended].abs().tolist(),
            ]
            worst.append(max(apart) / bound)
    context.close()
    return worst


class Combines(unittest.TestCase):
    def test_parts_of_processes(self) -> None:
        for rank, worst in enumerate(run(job, WORLD)):
            self.assertLess(max(worst), 1.0, f"rank {rank}: {worst}")

    def test_schedules(self) -> None:
        plan = cpattn.Plan([0, TOKENS], HEADS, DIM, world=WORLD, ring=WORLD, ulysses=1)
        for to in ("all", "heads", CombineTo.TOKENS):
            made = plan.combine_schedule(1, to, "bfloat16")
            self.assertEqual([op.kind for op in made.ops][:3], [OpKind.SUM, OpKind.EXCHANGE, OpKind.COMBINE])
            self.assertIsNone(made.direction)
            self.assertEqual(
                {b.tensor for b in made.buffers} - {None}, {Tensor.PARTIAL_O, Tensor.PARTIAL_LSE, Tensor.O, Tensor.LSE}
            )
        with self.assertRaisesRegex(cpattn.InvalidArgument, "partial_o.dtype is f64"):
            plan.combine_schedule(1, "all", "float64")
        made = cpattn.Plan([0, TOKENS], HEADS, DIM, world=WORLD, ring=WORLD, ulysses=1, sinks=2).combine_schedule(
            1, "heads", "float32"
        )
        (shape,) = [b.shape for b in made.buffers if b.tensor == Tensor.SINKS]
        self.assertEqual(shape, (1, HEADS, 2))


class Pages(unittest.TestCase):
    """Two sequences, of 13 and 6 cached tokens, one new token each."""

    def test_bits(self) -> None:
        made, lengths = torch.Generator().manual_seed(2), (13, 6)
        for world, options in (
            (1, {}),
            (2, {"ring": 2, "ulysses": 1, "layout": "striped", "layout_parameter": 2, "circulate_forward": "queries"}),
        ):
            plan = cpattn.Plan([0, 1, 2], 4, DIM, cu_seqlens_k=[0, 13, 19], kv_heads=2, world=world, **options)  # type: ignore[arg-type]
            q, k, v = (torch.randn(n, h, DIM, generator=made) for n, h in ((2, 4), (19, 2), (19, 2)))

            def both(
                number: int, rank: cpattn.Rank, plan: cpattn.Plan = plan, whole: tuple[torch.Tensor, ...] = (q, k, v)
            ) -> bool:
                q, k, v = whole
                own, held = plan.tokens(cpattn.Side.Q, number), list(plan.tokens(cpattn.Side.K, number))
                q, documents = (
                    q[torch.tensor(own, dtype=torch.int64)],
                    [[t for t in held if (t < lengths[0]) == first] for first in (True, False)],
                )
                pool = torch.full((2, 8, 3, 2, DIM), torch.nan)  # k and v, 8 pages of 3 rows
                table, free = torch.full((2, 6), -1, dtype=torch.int32), [5, 2, 7, 0, 3, 6, 1, 4]
                for document, tokens in enumerate(documents):
                    for i, token in enumerate(tokens):
                        if i % 3 == 0:
                            table[document, i // 3] = free.pop()
                        pool[:, table[document, i // 3], i % 3] = torch.stack([k[token], v[token]])
                rows = torch.tensor(held, dtype=torch.int64)
                results = []
                # One after another; in pages; in pages of k that are each followed by one of v.
                beside = pool.transpose(0, 1).contiguous().view(-1, 2, DIM)
                for given in (
                    {"k": k[rows], "v": v[rows]},
                    {
                        "k": pool[0].view(-1, 2, DIM),
                        "v": pool[1].view(-1, 2, DIM),
                        "block_table": table,
                        "page_size": 3,
                    },
                    {"k": beside, "v": beside[3:], "block_table": table, "page_size": 3, "page_stride": 6},
                ):
                    o, lse = torch.empty(len(own), 4, DIM), torch.empty(4, len(own))
                    rank.forward(plan, q=q, o=o, lse=lse, **given)  # type: ignore[arg-type]
                    results.append((o, lse))
                assert torch.isfinite(results[0][0]).all()
                return all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))

            self.assertEqual(cpattn.on_all(cpattn.local_group(world), both), [True] * world)

    def test_refusals(self) -> None:
        plan, rank = cpattn.Plan([0, 1], 1, DIM, cu_seqlens_k=[0, 4]), cpattn.local_group(1)[0]
        q, k, lse, good = (
            torch.zeros(1, 1, DIM),
            torch.zeros(4, 1, DIM),
            torch.zeros(1, 1),
            torch.zeros(1, 2, dtype=torch.int32),
        )
        for words, given in (
            ("block_table is None, and page_size is 2", {"page_size": 2}),
            ("block_table is of DLPack type 0, 64 bits", {"block_table": good.long(), "page_size": 2}),
            (r"block_table is of shape \(2,\)", {"block_table": good[0], "page_size": 2}),
            ("block_table has strides", {"block_table": torch.zeros(2, 2, dtype=torch.int32).T, "page_size": 2}),
            ("documents is 2, expected 1", {"block_table": torch.zeros(2, 2, dtype=torch.int32), "page_size": 2}),
            (r"block_table\[0\]\[1\] is 9", {"block_table": torch.tensor([[0, 9]], dtype=torch.int32), "page_size": 2}),
            ("page_size", {"block_table": good}),
        ):
            with self.assertRaisesRegex(cpattn.InvalidArgument, words):
                rank.forward(plan, q=q, k=k, v=k, o=q.clone(), lse=lse, **given)  # type: ignore[arg-type]


class LseBase(unittest.TestCase):
    def test_base_2(self) -> None:
        """lse to base 2 is a natural one times log2(e), and its backward has the gradients of the same loss."""
        plan = cpattn.Plan([0, 7], heads=2, head_dim=4, dtype="float64")
        draw = torch.Generator().manual_seed(3)
        q, k, v, d_o = (torch.randn(7, 2, 4, generator=draw, dtype=torch.float64) for _ in range(4))
        d_lse, scale, found = torch.randn(2, 7, generator=draw, dtype=torch.float64), math.log2(math.e), []
        (rank,) = cpattn.local_group(1)
        for base, factor in (("natural", 1.0), (cpattn.LseBase.BASE_2, scale)):
            o, lse, dq, dk, dv = torch.empty_like(q), torch.empty_like(d_lse), *(torch.empty_like(q) for _ in range(3))
            rank.forward(plan, q=q, k=k, v=v, o=o, lse=lse, lse_base=base)
            rank.backward(
                plan, q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv, d_lse=d_lse / factor, lse_base=base
            )
            found.append([o, lse / factor, dq, dk, dv])
        for natural, other in zip(*found, strict=True):
            torch.testing.assert_close(other, natural, rtol=1e-12, atol=1e-13)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "lse_base is 'ten'"):
            rank.forward(plan, q=q, k=k, v=v, o=o, lse=lse, lse_base="ten")
        rank.close()


if __name__ == "__main__":
    unittest.main()
