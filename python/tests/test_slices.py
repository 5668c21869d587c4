# SPDX-License-Identifier: MIT OR Apache-2.0
"""Slices: their makers, plans of them, and attention over several processes against the formula in f64 with a dense mask."""

from __future__ import annotations

import doctest
import random
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dense import allowed_by, dense, error, gradients
from processes import run
from test_torch import draw, leave, refused

import cpattn
from cpattn import UNLIMITED, Plan, Slice, slices
from cpattn.packing import Packing
from cpattn.torch import Context

sys.path.append(str(Path(__file__).parents[2] / "examples/python"))
import joint_attention

# Documents, and slices over them: one for each maker, some that cross documents.
CASES: dict[str, tuple[list[int], list[Slice]]] = {
    "documents": ([0, 5, 5, 34], slices.documents([0, 5, 5, 34])),
    "shared_prefix": ([0, 40], slices.shared_prefix(13, [9, 1, 17])),
    "answers_as_documents": ([0, 13, 22, 40], slices.shared_prefix(13, [9, 18])),
    "tree": ([0, 9, 40], slices.tree([None, 0, 0, 1, 1, None, 5], [9, 4, 5, 3, 8, 6, 5])),
    "prefix_lm": ([0, 7, 30], slices.prefix_lm([0, 7, 30], [7, 11])),
    "chunks": ([0, 7, 30], slices.chunks([0, 7, 30], 4)),
    "block_causal": ([0, 7, 30], slices.block_causal([0, 7, 30], 4)),
    "spans": ([0, 7, 30], slices.spans([0, 7, 30], [(1, 4), (8, 19), (25, 30)])),
    "block_diffusion": ([0, 28], slices.block_diffusion(14, 4)),
    "joint": ([0, 21, 34], [Slice(0, 34, 0, 34)]),
    "pack": (
        [0, 6, 17, 37],
        slices.documents([0, 6]) + slices.moved(slices.shared_prefix(4, [3, 4]), 6) + [Slice(17, 37, 17, 37, 0, -3, 2)],
    ),
    "some_queries_see_nothing": ([0, 16, 32], [Slice(0, 10, 20, 32, 900, None, -890), Slice(12, 20, 0, 5)]),
    "nothing": ([0, 9, 20], []),
}


class Makers(unittest.TestCase):
    def test_pictures(self) -> None:
        failed, attempted = doctest.testmod(slices)
        self.assertEqual(failed, 0)
        self.assertGreaterEqual(attempted, 12)

    def test_by_their_definitions(self) -> None:
        """Each maker against a sentence about one pair of tokens."""
        rng = random.Random(4)
        for _ in range(30):
            lengths = [rng.randrange(9) for _ in range(4)]
            ends = [sum(lengths[:i]) for i in range(5)]
            n, size = ends[-1], rng.randrange(1, 5)
            of = [d for d, length in enumerate(lengths) for _ in range(length)]
            place = [t - ends[of[t]] for t in range(n)]
            prefix = [rng.randrange(length + 1) for length in lengths]
            span = [(a + p, b) for a, b, p in zip(ends, ends[1:], prefix)]
            # A node below a node before it, or a root.
            above = [None if i == 0 or rng.random() < 0.3 else rng.randrange(i) for i in range(4)]

            def ancestors(d: int, above: list[int | None] = above) -> list[int]:
                up = above[d]
                return [] if up is None else [up, *ancestors(up)]

            rules: dict[str, tuple[list[Slice], Any]] = {
                "documents": (slices.documents(ends), lambda q, k: of[q] == of[k] and k <= q),
                "tree": (
                    slices.tree(above, lengths),
                    lambda q, k: k <= q and (of[k] == of[q] or of[k] in ancestors(of[q])),
                ),
                "prefix_lm": (
                    slices.prefix_lm(ends, prefix),
                    lambda q, k: of[q] == of[k] and (k <= q or place[k] < prefix[of[k]] > place[q]),
                ),
                "chunks": (
                    slices.chunks(ends, size),
                    lambda q, k: of[q] == of[k] and place[q] // size == place[k] // size and k <= q,
                ),
                "block_causal": (
                    slices.block_causal(ends, size),
                    lambda q, k: of[q] == of[k] and place[k] // size <= place[q] // size,
                ),
                "spans": (
                    slices.spans(ends, span),
                    lambda q, k: of[q] == of[k] and (k <= q or min(place[q], place[k]) >= prefix[of[q]]),
                ),
            }
            for name, (made, rule) in rules.items():
                want = "\n".join("".join(".#"[rule(q, k)] for k in range(n)) for q in range(n))
                self.assertEqual(slices.picture(made, n), want, name)
                self.assertTrue(torch.equal(allowed_by(made, n, n), mask_of(want, n)), name)

    def test_distances_in_a_tree(self) -> None:
        """A node is at the distance of the path from its ancestors, whatever lies between them in the pack."""
        made = slices.tree([None, 0, 0, 1], [2, 1, 1, 2])
        # The path to node 3 is tokens 0, 1, 2, 4, 5.
        self.assertEqual(
            [s for s in made if s.q_begin == 4], [Slice(4, 6, 0, 3, 3, high=0), Slice(4, 6, 4, 6, 0, high=0)]
        )
        self.assertEqual(allowed_by(made, 6, 6, left=1)[4].tolist(), [False, False, True, False, True, False])

    def test_from_dense(self) -> None:
        rng = random.Random(7)
        for _ in range(200):
            q, k = rng.randrange(9), rng.randrange(1, 9)
            mask = torch.tensor([[rng.random() < 0.6 for _ in range(k)] for _ in range(q)]).reshape(q, k)
            for found in (slices.from_dense(mask), slices.from_dense(mask.tolist()) if q else []):
                self.assertTrue(torch.equal(allowed_by(found, q, k), mask), (mask, found))
        # Sweeps along keys find prompts, those along queries masks of rows.
        fewest = {"documents": 2, "shared_prefix": 4, "chunks": 8, "joint": 1, "prefix_lm": 3}
        for name, count in fewest.items():
            ends, made = CASES[name]
            found = slices.from_dense(allowed_by(made, ends[-1], ends[-1]))
            self.assertEqual(len(found), count, (name, found))
        band = allowed_by([Slice(0, 60, 0, 60, 0, -5, 3)], 60, 60)
        self.assertEqual(slices.from_dense(band), [Slice(0, 60, 0, 60, 0, -5, 3)])

    def test_refusals(self) -> None:
        wrong = cpattn.InvalidArgument
        for words, call in (
            ("branches[1] is -1, at least 0", lambda: slices.shared_prefix(1, [1, -1])),
            ("parents has length 1, 2 is needed: one for each entry of lengths", lambda: slices.tree([None], [1, 1])),
            ("parents[1] is 1, a node before 1, or None, is needed", lambda: slices.tree([None, 1], [1, 1])),
            ("prefixes[0] is 6, at most 5", lambda: slices.prefix_lm([0, 5], [6])),
            ("prefixes has length 0, 1 is needed: one for each document", lambda: slices.prefix_lm([0, 5], [])),
            ("chunk is 0, at least 1", lambda: slices.chunks([0, 5], 0)),
            ("cu_seqlens is [0, 5, 3], 0 and then the end of each document", lambda: slices.block_causal([0, 5, 3], 2)),
            (
                "spans[1] is (3, 6), (begin, end) inside of one document",
                lambda: slices.spans([0, 5, 9], [(0, 2), (3, 6)]),
            ),
            ("pairs[0] is (1, 2), ((q_begin, q_end), (k_begin, k_end))", lambda: slices.pairs([(1, 2)])),  # type: ignore[list-item]
            ("mask has 4097 k tokens, at most 4096", lambda: slices.from_dense(torch.ones(1, 4097))),
            ("mask has 4097 q tokens, at most 4096", lambda: slices.from_dense(torch.ones(4097, 1))),
            (
                "mask[1] is [-inf, 0.0], True (allowed) or False",
                lambda: slices.from_dense(torch.ones(2, 2).triu().log()),
            ),
            ("mask has the shape (2, 2, 2)", lambda: slices.from_dense(torch.ones(2, 2, 2))),
            ("mask has rows of 1 and of 2 k tokens", lambda: slices.from_dense([[1], [1, 0]])),
            ("slices[0] is (0, 1, 0, 1), a Slice is needed", lambda: Plan([0, 5], 1, 8, slices=[(0, 1, 0, 1)])),  # type: ignore[list-item]
            ("slices is 3, a sequence of Slices is needed", lambda: Plan([0, 5], 1, 8, slices=3)),  # type: ignore[arg-type]
            ("slices[0].low is 0.5, a whole number", lambda: Plan([0, 5], 1, 8, slices=[Slice(0, 1, 0, 1, low=0.5)])),  # type: ignore[arg-type]
            (
                "slices[1].q_end is 2147483648, at most",
                lambda: Plan([0, 5], 1, 8, slices=[Slice(0, 1, 0, 1), Slice(1, 2**31, 0, 1)]),
            ),
            (
                "slices[0].k_end is 6, expected at most 5, the tokens of k",
                lambda: Plan([0, 5], 1, 8, slices=[Slice(0, 1, 0, 6)]),
            ),
            (
                "slices[1] is one that allows q token 1 with k token 1",
                lambda: Plan([0, 5], 1, 8, slices=[Slice(0, 3, 0, 3), Slice(1, 2, 1, 2)]),
            ),
            (
                "window_right is 0 (causal), expected CPATTN_UNLIMITED: slices[0]",
                lambda: Plan([0, 3], 1, 8, slices=[Slice(0, 3, 0, 3)], window_right=0),
            ),
        ):
            refused(wrong, words, call)


def mask_of(text: str, k_tokens: int) -> torch.Tensor:
    rows = [[c == "#" for c in row] for row in text.split()]
    return torch.tensor(rows, dtype=torch.bool).reshape(-1, k_tokens)


class Plans(unittest.TestCase):
    def test_every_maker(self) -> None:
        for name, (ends, made) in CASES.items():
            plan = Plan(ends, 2, 8, world=4, slices=made)
            plan.verify()
            pairs = int(allowed_by(made, ends[-1], ends[-1]).sum())
            self.assertIn(f"each head computes {pairs:,} (q, k) pair", plan.explain(), name)
            self.assertEqual(plan.slices, tuple(s.complete for s in made))

    def test_kinds_of_layers(self) -> None:
        ends, made = CASES["spans"]
        base = Plan(ends, 2, 8, world=4, slices=made)
        for more, pairs in (({}, allowed_by(made, 30, 30)), ({"window_left": 3}, allowed_by(made, 30, 30, left=3)),
                            ({"window_left": 3, "window_right": 1}, allowed_by(made, 30, 30, left=3, right=1)),
                            ({"slices": slices.documents(ends)}, allowed_by(slices.documents(ends), 30, 30))):  # fmt: skip
            plan = Plan.with_tokens_of(base, 4, 16, **more)  # type: ignore[arg-type]
            plan.verify()
            self.assertEqual(plan.distribution, base.distribution)
            self.assertIn(f"each head computes {int(pairs.sum()):,} (q, k) pairs", plan.explain())
        kind: dict[str, Any] = {"heads": 2, "head_dim": 8}
        plans = Plan.auto_for(ends, [(2, kind), (3, {**kind, "slices": slices.chunks(ends, 4)})], slices=made, world=4)
        self.assertEqual([len(plan.slices or ()) for plan in plans], [5, 8])
        self.assertEqual(plans[0].distribution, plans[1].distribution)

    def test_packings_as_numbers(self) -> None:
        for _, (ends, made) in CASES.items():
            one = Packing.of(ends, slices=made)
            other = Packing.of(torch.tensor([0, 3]), [0, 5], [-7], [])
            for packing in (one, other, one._replace(tokens_of=other), Packing.of(ends)):
                self.assertEqual(Packing.from_numbers(torch.tensor(packing.numbers()).tolist()), packing)


def compare(batch: Any, kv: tuple[int, int, int], bound: float, allowed: torch.Tensor, **told: Any) -> None:
    """o, dq, dk, dv (and dsinks) of this rank's tokens against the formula over the allowed pairs. kv: heads of k, dim, value dim."""
    context, (hk, dim, value_dim) = batch.context, kv
    sinks, formula = told.pop("sinks", None), {name: told[name] for name in ("softcap",) if name in told}
    n, m, hq = batch.cu_seqlens[-1], batch.cu_seqlens_k[-1], 2 * hk
    whole = [draw(*shape, seed=s) for s, shape in enumerate(((n, hq, dim), (m, hk, dim), (m, hk, value_dim)))]
    d_o, sides = draw(n, hq, value_dim, seed=9), "qkk"
    mine = [batch.shard(x, side).to(context.dtype).requires_grad_() for x, side in zip(whole, sides)]
    exact = [x.to(context.dtype).double().requires_grad_() for x in whole]
    if sinks is not None:
        mine.append(sinks.clone().requires_grad_())
        exact.append(sinks.double().requires_grad_())
        formula["sinks"] = exact[3]
    o = batch.attention(*mine, **told)
    got = [o, *gradients(o, batch.shard(d_o), mine)]
    o = dense(*exact[:3], [], allowed=allowed, **formula)
    want = [o, *gradients(o, d_o, exact)]
    for name, a, b, side in zip(("o", "dq", "dk", "dv"), got, want, "qqkk"):
        b = batch.shard(b, side)
        assert error(a, b) <= bound, f"{name} is off by {error(a, b):.1e} with {batch.plan.explain()}"
    if sinks is not None:
        total = got[4].clone()
        dist.all_reduce(total)
        assert error(total, want[4]) <= max(bound, 2e-6)


def everything(rank: int, world: int) -> None:
    for check in (values, drawn, of_layers, cross, refusals):
        check(rank, world)
        dist.barrier()


def values(rank: int, world: int) -> None:
    """Each maker's mask in each mode, with a window by the distances in the slice, softcap and sinks."""
    f64, f32, heads = torch.float64, torch.float32, (3, 8, 6)
    for dtype, bound, more in (
        (f64, 2e-14, {}),
        (f64, 2e-14, {"ring": 4, "layout": "zigzag"}),
        (f64, 2e-14, {"ulysses": 2, "ring": 2, "layout": "striped", "layout_parameter": 3}),
        (f32, 2e-6, {"ulysses": 4}),
        (f32, 2e-6, {"ring": 4, "layout": "balanced", "layout_parameter": 2, "circulate": "queries"}),
        (f32, 2e-6, {"ulysses": 2, "ring": 2, "circulate_forward": "queries"}),
        (f32, 2e-6, {"ring": 4, "gather": "together", "reproducible": True}),
    ):
        context = Context(heads=6, kv_heads=3, head_dim=8, value_dim=6, dtype=dtype, **more)  # type: ignore[arg-type]
        for ends, made in CASES.values():
            batch = context.batch(ends, slices=made)
            n = ends[-1]
            compare(batch, heads, bound, allowed_by(made, n, n))
            compare(
                batch,
                heads,
                bound,
                allowed_by(made, n, n, left=4),
                window_left=4,
                softcap=3.0,
                sinks=draw(6, dtype=f32),
            )
            compare(batch, heads, bound, allowed_by(made, n, n, left=4, right=2), window_left=4, window_right=2)
        context.close()


def disjoint(rng: random.Random, q_tokens: int, k_tokens: int, most: int) -> list[Slice]:
    """Slices of every sort that do not allow the same pair: one that would is left out."""
    kept: list[Slice] = []
    for _ in range(rng.randrange(most + 1)):
        q, k = (sorted(rng.randrange(n + 1) for _ in range(2)) for n in (q_tokens, k_tokens))
        start = rng.choice([None, rng.randrange(-9, 20), 1 << 40])
        # Limits near the distances that the slice has.
        at = -(k[1] - k[0] - (q[1] - q[0]) if start is None else start)
        low, high = (rng.choice([None, at + rng.randrange(-12, 12)]) for _ in range(2))
        new = Slice(*q, *k, start, low, high)
        both = sum(allowed_by([s], q_tokens, k_tokens).int() for s in [*kept, new])
        if int(both.max()) <= 1:  # type: ignore[union-attr]
            kept.append(new)
    return kept


def drawn(rank: int, world: int) -> None:
    """Drawn slices of every sort, of q and k tokens of different numbers too; rows that no slice reads have NaN."""
    rng = random.Random(3)
    context = Context(heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    for trial in range(24):
        lengths = [[rng.randrange(1, 14) for _ in range(3)] for _ in range(2)]
        q, k = ([sum(side[:i]) for i in range(4)] for side in lengths)
        k = k if trial % 2 else q
        made = disjoint(rng, q[-1], k[-1], 8)
        batch = context.batch(q, cu_seqlens_k=k if trial % 2 else None, slices=made)
        pairs = allowed_by(made, q[-1], k[-1])
        compare(batch, (2, 8, 8), 2e-14, pairs)
        whole = [draw(n, heads, 8, seed=s) for s, (n, heads) in enumerate(((q[-1], 4), (k[-1], 2), (k[-1], 2)))]
        want = dense(*whole, [], allowed=pairs)
        for x in whole[1:]:
            x[~pairs.any(0)] = torch.nan
        got = batch.attention(*(batch.shard(x, side) for x, side in zip(whole, "qkk")))
        assert error(got, batch.shard(want)) <= 2e-14
    context.close()


def of_layers(rank: int, world: int) -> None:
    """Batches by their slices; layers of other masks on the same tokens."""
    context = Context(heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    ends, made = CASES["shared_prefix"]
    batch = context.batch(ends, slices=made)
    assert batch is context.batch(
        torch.tensor(ends), slices=iter([s.complete for s in made])
    ) and batch is not context.batch(ends)
    assert batch.slices == tuple(s.complete for s in made) and context.batch(ends).slices is None
    chunks = batch.with_slices(slices.chunks(ends, 7))
    assert chunks.plan.distribution == batch.plan.distribution and torch.equal(chunks.tokens, batch.tokens)
    assert chunks is batch.with_slices(slices.chunks(ends, 7)) and batch.with_slices(made) is batch
    back = chunks.with_slices(slices.documents(ends))
    assert back.plan.distribution == batch.plan.distribution
    compare(chunks, (2, 8, 8), 2e-14, allowed_by(slices.chunks(ends, 7), 40, 40))
    compare(back, (2, 8, 8), 2e-14, allowed_by(slices.documents(ends), 40, 40))
    # Documents say where labels end, and where positions begin.
    ids = torch.arange(40)
    next_one = torch.full((40,), -100)
    next_one[:-1] = ids[1:]
    assert torch.equal(batch.labels(batch.shard(ids)), batch.shard(next_one))
    assert torch.equal(batch.positions, batch.tokens)
    context.close()
    # A context with a window: in each slice, by its distances.
    context = Context(heads=4, kv_heads=2, head_dim=8, window_left=5, dtype=torch.float64)
    compare(context.batch(ends, slices=made), (2, 8, 8), 2e-14, allowed_by(made, 40, 40, left=5))
    context.close()


def cross(rank: int, world: int) -> None:
    """k and v of other lengths than q."""
    q, k, starts = [0, 3, 20, 20, 41], [0, 17, 17, 30, 55], [20, 0, 0, 3]
    for more in (
        {},
        {"ulysses": 2, "ring": 2, "layout": "striped", "layout_parameter": 2},
        {"ring": 4, "circulate_forward": "queries"},
    ):
        context = Context(heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, **more)  # type: ignore[arg-type]
        for given in (None, starts):
            documents = [
                Slice(*q[d : d + 2], *k[d : d + 2], None if given is None else given[d], high=0) for d in range(4)
            ]
            batch = context.batch(q, cu_seqlens_k=torch.tensor(k), q_start=given)
            assert batch is context.batch(q, cu_seqlens_k=k, q_start=given)
            pairs = allowed_by(documents, 41, 55)
            compare(batch, (2, 8, 8), 2e-14, pairs)
            full = allowed_by([s._replace(high=None) for s in documents], 41, 55)
            compare(batch, (2, 8, 8), 2e-14, full, window_right=UNLIMITED)
            compare(
                batch,
                (2, 8, 6),
                2e-14,
                allowed_by(documents, 41, 55, left=6),
                window_left=6,
                sinks=draw(4, dtype=torch.float32),
            )
            ids = torch.arange(55)
            assert (
                torch.equal(batch.shard(ids, side="k"), batch.k_tokens)
                and len(batch.k_tokens) == batch.plan.share(rank).k_tokens
            )
            document = torch.bucketize(batch.k_tokens, torch.tensor(k)[1:], right=True)
            assert torch.equal(batch.k_positions, batch.k_tokens - torch.tensor(k)[document])
            if given:
                of_q = torch.bucketize(batch.tokens, torch.tensor(q)[1:], right=True)
                assert torch.equal(batch.positions, batch.tokens - torch.tensor(q)[of_q] + torch.tensor(given)[of_q])
        context.close()
    context = Context(heads=4, kv_heads=4, head_dim=8, dtype=torch.float64, ulysses=4)
    batch = context.batch(q, cu_seqlens_k=k)
    whole = draw(55, 4, 3)
    held = batch.to_heads(batch.shard(whole, "k"), "k")
    assert torch.equal(held, whole[:, batch.own_heads("k")])
    assert torch.equal(batch.to_tokens(held, "k"), batch.shard(whole, "k"))
    context.close()


def refusals(rank: int, world: int) -> None:
    """On every rank, before anything is sent; then the context goes on."""
    context, wrong = Context(heads=4, kv_heads=2, head_dim=8, dtype=torch.float64), cpattn.InvalidArgument
    twice = [Slice(0, 8, 0, 8), Slice(4, 9, 4, 9)]
    for words, call in (
        ("slices[1] is one that allows q token 7 with k token 4", lambda: context.batch([0, 20], slices=twice)),
        ("slices[0].q_end is 30, expected at most 20", lambda: context.batch([0, 20], slices=[Slice(0, 30, 0, 1)])),
        ("slices[0] is 3, a Slice is needed", lambda: context.batch([0, 20], slices=[3])),  # type: ignore[list-item]
        ("cu_seqlens_k has length 3, 2 is needed", lambda: context.batch([0, 20], cu_seqlens_k=[0, 3, 5])),
        (
            "q_start is 'x', a sequence of whole numbers",
            lambda: context.batch([0, 20], cu_seqlens_k=[0, 3], q_start="x"),
        ),  # type: ignore[arg-type]
        ("q_start is given, expected NULL without cu_seqlens_k", lambda: context.batch([0, 20], q_start=[1])),
        ("side is 'z', one of 'q', 'k'", lambda: context.batch([0, 20]).shard(torch.ones(20), side="z")),
        (
            "layers: a kind of layer has slices",
            lambda: Context(heads=2, head_dim=8, layers=[(1, {"heads": 2, "head_dim": 8, "slices": []})]),
        ),
    ):
        refused(wrong, words, call)
    ends, made = CASES["spans"]
    batch = context.batch(ends, slices=made)
    q = torch.ones(len(batch.tokens), 4, 8, dtype=torch.float64)
    refused(
        wrong,
        "window_right is 0 (causal), expected CPATTN_UNLIMITED: slices[2]",
        batch.attention,
        q,
        q[:, :2],
        q[:, :2],
        window_right=0,
    )
    # Ranks with different slices.
    other = context.batch(ends, slices=made[:-1] if rank == 3 else made)
    refused(
        cpattn.Disagreement,
        "rank",
        other.attention,
        *(torch.ones(len(other.tokens), h, 8, dtype=torch.float64) for h in (4, 2, 2)),
    )
    compare(batch, (2, 8, 8), 2e-14, allowed_by(made, 30, 30))
    context.close()


def compiled(rank: int, world: int) -> None:
    """Slices in compiled functions: they are not part of the graph, and a saved graph runs its own backward."""
    context = Context(heads=4, kv_heads=2, head_dim=8, plans=2, layout="balanced", layout_parameter=2)
    function = torch.compile(
        lambda q, k, v, batch: batch.attention(q, k, v, window_left=9), backend="aot_eager", fullgraph=True
    )
    for name in ("shared_prefix", "tree", "spans", "nothing"):
        ends, made = CASES[name]
        for batch in (
            context.batch(ends, slices=made),
            context.batch(ends),
            context.batch(ends, slices=made).with_slices(slices.chunks(ends, 5)),
        ):
            mine = [batch.shard(draw(ends[-1], h, 8, dtype=torch.float32)).requires_grad_() for h in (4, 2, 2)]
            o = function(*mine, batch)
            want = batch.attention(*mine, window_left=9)
            assert torch.equal(o, want), name
            # The batch of the graph is forgotten meanwhile.
            for end in (3, 4, 5):
                context.batch([0, end])
            d_o = torch.ones_like(o)
            for a, b in zip(torch.autograd.grad(o, mine, d_o), torch.autograd.grad(want, mine, d_o)):
                assert torch.equal(a, b), name
    batch = context.batch([0, 9, 20], cu_seqlens_k=[0, 4, 31], slices=[Slice(0, 20, 0, 31)])
    mine = [
        batch.shard(draw(n, h, 8, dtype=torch.float32), side)
        for n, h, side in ((20, 4, "q"), (31, 2, "k"), (31, 2, "k"))
    ]
    assert torch.equal(function(*mine, batch), batch.attention(*mine, window_left=9))
    leave(context)


def the_example(rank: int, world: int) -> list[float]:
    apart: list[float] = joint_attention.compare(1024, 77)
    return apart


class Processes(unittest.TestCase):
    def test_the_example(self) -> None:
        for apart in run(the_example, 4):
            self.assertLess(max(apart), 1e-5)

    def test_four(self) -> None:
        run(everything, 4, seconds=400)

    def test_two_compiled(self) -> None:
        run(compiled, 2, seconds=300)


if __name__ == "__main__":
    unittest.main()
