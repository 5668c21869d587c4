# SPDX-License-Identifier: MIT OR Apache-2.0
"""Drawn plans of any mask, mesh, layout and score through the executor, against dense attention in f64.

Ranks are threads (`mail`). The workspace, results, and rows of k and v that nobody reads are NaN.
"""

from __future__ import annotations

import os
import random
import unittest
from typing import Any, NamedTuple

import torch
from doubles import flash_attn_2
from mail import group, on_all
from torch import Tensor

import cpattn
from cpattn import Plan, Side
from cpattn.torch.kernels import Kernel, find
from cpattn.torch.kernels.flash import FlashAttention2

# With CPATTN_DRAWN more plans are drawn, from another place.
COUNT, FIRST = int(os.environ.get("CPATTN_DRAWN", 60)), int(os.environ.get("CPATTN_DRAWN_FROM", 0))


class Problem(NamedTuple):
    cu_seqlens: list[int]
    cu_seqlens_k: list[int]
    slices: list[cpattn.Slice]
    options: dict[str, Any]
    dtype: torch.dtype
    lse_gradient: bool


def draw(
    seed: int, dtype: torch.dtype = torch.float64, softcap: bool = True, slopes: bool = True, value_dim: bool = True
) -> Problem:
    """A problem, without those options that a kernel lacks."""
    d = random.Random(seed)
    lengths = [d.choice([0, 1, 2, 5, 9, 17, 24]) for _ in range(d.randint(1, 4))]
    cu = cumulated(lengths)
    of_k = cumulated([n + d.choice([0, 0, 3, 7]) for n in lengths]) if d.random() < 0.2 else cu
    kv, each = d.choice([1, 2, 3]), d.choice([1, 2, 3])
    heads, dim, world = kv * each, d.choice([4, 8]), d.choice([1, 2, 3, 4, 4])
    ulysses = d.choice([u for u in (1, 2, 3, 4) if world % u == 0 and u <= heads])
    options: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv,
        "head_dim": dim,
        "world": world,
        "ulysses": ulysses,
        "ring": world // ulysses,
    }
    if value_dim and d.random() < 0.2:
        options["value_dim"] = d.choice([2, 6, 12])
    options |= d.choice(
        [
            {},
            {"layout": "zigzag"},
            {"layout": "zigzag_pack"},
            {"layout": "contiguous"},
            {"layout": "striped", "layout_parameter": 3},
            {"layout": "balanced", "layout_parameter": 2},
        ]
    )
    for name, values in (
        ("circulate", ["keys", "queries"]),
        ("circulate_forward", ["keys", "queries"]),
        ("gather", ["others", "steps", "together"]),
        ("pack_inputs", [True]),
    ):
        if d.random() < 0.4:
            options[name] = d.choice(values)
    if kv > 1 and d.random() < 0.2:
        options["passes"] = 2
    if world == 4 and d.random() < 0.3:
        options["ranks_per_node"] = 2
    if dtype == torch.bfloat16 and d.random() < 0.3:
        options["wire"] = "bf16"
    if d.random() < 0.3:
        options["scale"] = d.choice([0.3, 1.0])
    if softcap and d.random() < 0.25:
        options["softcap"] = 1.5
    if slopes and d.random() < 0.25:
        options["alibi_slopes"] = [d.randint(0, 6) / 16 for _ in range(heads)]
        if d.random() < 0.5:
            options["alibi_slopes"] = [[d.randint(0, 6) / 16 for _ in range(heads)] for _ in lengths]
    if d.random() < 0.35:
        options["sinks"] = d.choice([1, 1, 3])
    if d.random() < 0.3:
        options["window_left"] = d.choice([0, 3, 8])
    if d.random() < 0.3:
        options["window_right"] = d.choice([0, 2, cpattn.UNLIMITED])
    slices = [cpattn.Slice(a, b, c, e) for (a, b), (c, e) in zip(pairs(cu), pairs(of_k))]
    if of_k is cu and d.random() < 0.4:
        slices = some_slices(d, cu)
        options["slices"] = slices
        if options.get("window_right") == 0:  # refused where a slice has later keys
            del options["window_right"]
    elif of_k is not cu:
        options["cu_seqlens_k"] = of_k
    return Problem(cu, of_k, list(slices), options, dtype, d.random() < 0.4)


def cumulated(lengths: list[int]) -> list[int]:
    return [sum(lengths[:at]) for at in range(len(lengths) + 1)]


def pairs(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip(ends, ends[1:]))


def some_slices(d: random.Random, cu: list[int]) -> list[cpattn.Slice]:
    """Blocks of q with a band of some keys each: no pair is in two of them."""
    total, made = cu[-1], []
    ends = sorted({0, total, *(d.randint(0, total) for _ in range(3))})
    for a, b in zip(ends, ends[1:]):
        keys = sorted({0, total, *(d.randint(0, total) for _ in range(2))})
        for c, e in zip(keys, keys[1:]):
            if d.random() < 0.6:
                low, high = d.choice([(None, None), (None, 0), (-4, 3), (0, None), (-6, -1)])
                made.append(cpattn.Slice(a, b, c, e, low=low, high=high))
    return made


def pairs_of(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Which pairs are allowed, their distances k_pos - q_pos, and the document of each q."""
    q, k = p.cu_seqlens[-1], p.cu_seqlens_k[-1]
    allowed, distance = torch.zeros(q, k, dtype=torch.bool), torch.zeros(q, k, dtype=torch.float64)
    sliced = "slices" in p.options
    right = p.options.get("window_right", cpattn.UNLIMITED if sliced else 0)
    left = p.options.get("window_left", cpattn.UNLIMITED)
    for one in p.slices:
        one = one.complete
        x, y = torch.arange(one.q_begin, one.q_end)[:, None], torch.arange(one.k_begin, one.k_end)[None]
        d = y - one.k_begin - (x - one.q_begin + one.q_start)
        inside = (d >= max(one.low, -left)) & (d <= min(one.high, right))
        part = allowed[one.q_begin : one.q_end, one.k_begin : one.k_end]
        assert not (part & inside).any()
        part |= inside
        distance[one.q_begin : one.q_end, one.k_begin : one.k_end][inside] = d[inside].double()
    document = torch.searchsorted(torch.tensor(p.cu_seqlens), torch.arange(q), right=True) - 1
    return allowed, distance, document


class Dense(NamedTuple):
    """o, lse, dq, dk, dv and dsinks, and what roundings can do to dq, dk, dv and dsinks, as multiples of the rounding."""

    results: list[Tensor]
    rounded: list[Tensor]


def reference(p: Problem, inputs: list[Tensor], gradients: list[Tensor], sinks: Tensor) -> Dense:
    """In f64 by automatic differentiation.

    The gradient of a score is p·(d_o·v − delta). Where both are equal, as in rows with one key, it is 0, and what is found is their
    rounding: delta is computed from the o that was stored, so it is off by up to that rounding times Σ|d_o·o|, and d_o·v and the
    sum of delta by some roundings of Σ|d_o|·(|v| + |o|). A part of that arrives in dq and dk, as p, q and k pass it on. dsinks is a sum
    over rows of both signs, whose weights are off by what lse is.
    """
    q, k, v, s = (x.double().clone().requires_grad_() for x in (*inputs, sinks))
    allowed, distance, document = pairs_of(p)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * p.options.get("scale", q.shape[2] ** -0.5)
    if cap := p.options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if (slopes := p.options.get("alibi_slopes")) is not None:
        table = torch.tensor(slopes, dtype=torch.float64)
        table = table[document].t() if table.ndim == 2 else table[:, None].expand(-1, len(q))
        scores = scores - table[:, :, None] * distance.abs()
    scores = scores.masked_fill(~allowed, -torch.inf)
    scores = torch.cat([scores, s[:, None].expand(-1, len(q), -1)], 2)
    lse = scores.logsumexp(2)
    some = lse.detach() > -torch.inf
    p_of = torch.where(some[..., None], (scores - lse.masked_fill(~some, 0.0)[..., None]).exp(), 0.0)
    o = torch.einsum("hqk,khd->qhd", p_of[:, :, : len(k)], v.repeat_interleave(group, 1))
    loss = (o * gradients[0].double()).sum()
    if p.lse_gradient:
        loss = loss + (lse.masked_fill(~some, 0.0) * gradients[1].double()).sum()
    found = torch.autograd.grad(loss, [q, k, v, s], allow_unused=True)
    results = [
        o.detach(),
        lse.detach(),
        *(x.new_zeros(x.shape) if g is None else g for g, x in zip(found, (q, k, v, s))),
    ]
    with torch.no_grad():
        weights, d_o = p_of[:, :, : len(k)], gradients[0].double().abs()
        keys, values = (x.abs().repeat_interleave(group, 1) for x in (k, v))
        # The derivative of softcap is at most 1.
        off = (
            weights
            * p.options.get("scale", q.shape[2] ** -0.5)
            * (torch.einsum("qhd,khd->hqk", d_o, values) + (d_o * o.abs()).sum(2).t()[:, :, None])
        )
        dk = torch.einsum("hqk,qhd->khd", off, q.abs()).unflatten(1, (-1, group)).sum(2)
        of_row = (d_o * o.abs()).sum(2).t()
        if p.lse_gradient:
            of_row = of_row + gradients[1].double().abs()
        rounded = [
            torch.einsum("hqk,khd->qhd", off, keys), dk, torch.zeros_like(v), torch.einsum("hqs,hq->hs", p_of[:, :, len(k) :], of_row)
        ]  # fmt: skip
    return Dense(results, rounded)


def compare(p: Problem, kernel: Kernel, bound: float, lse_bound: float) -> None:
    """Raises unless each rank has its rows of every result."""
    o = p.options
    try:
        plan = Plan(p.cu_seqlens, dtype=p.dtype, **o)
    except cpattn.Error:
        # Not every mesh has every option.
        o = {
            name: value
            for name, value in o.items()
            if name not in ("circulate_forward", "ranks_per_node", "passes", "gather")
        }
        plan = Plan(p.cu_seqlens, dtype=p.dtype, **o)
    total, of_k = p.cu_seqlens[-1], p.cu_seqlens_k[-1]
    generator = torch.Generator().manual_seed(total)

    def random_of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(p.dtype)

    heads, kv, dim, value = o["heads"], o["kv_heads"], o["head_dim"], o.get("value_dim", o["head_dim"])
    inputs = [random_of(total, heads, dim), random_of(of_k, kv, dim), random_of(of_k, kv, value)]
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    gradients = [random_of(total, heads, value), random_of(heads, total).to(wide)]
    sinks = torch.randn(heads, int(o.get("sinks", 0)), generator=generator)
    want, rounded = reference(p, inputs, gradients, sinks)
    # One rounding of o, and those of sums of so many products.
    rounding = torch.finfo(p.dtype).eps / 2 + max(dim, value) * torch.finfo(wide).eps / 2
    unread = ~pairs_of(p)[0].any(0)
    for x in inputs[1:]:
        x[unread] = torch.nan

    def job(number: int, rank: Any) -> list[Tensor]:
        q, k = (torch.tensor(plan.tokens(side, number), dtype=torch.int64) for side in (Side.Q, Side.K))
        mine = {"q": inputs[0][q], "k": inputs[1][k], "v": inputs[2][k]}
        more = {"sinks": sinks} if o.get("sinks") else {}
        made = {
            "o": torch.full((len(q), heads, value), torch.nan, dtype=p.dtype),
            "lse": torch.full((heads, len(q)), torch.nan, dtype=wide),
        }
        rank.forward(plan, **mine, **more, **made)
        results = {"d" + name: torch.full_like(x, torch.nan) for name, x in mine.items()}
        results |= {"d" + name: torch.full(x.shape, torch.nan, dtype=wide) for name, x in more.items()}
        # Values of tensors that autograd would have: those of the caller.
        d_o, d_lse = gradients[0][q], gradients[1][:, q].contiguous()
        lost = made["lse"] == -torch.inf
        d_lse[lost] = torch.nan
        rank.backward(plan, **mine, **more, **made, **results, d_o=d_o, d_lse=d_lse if p.lse_gradient else None)
        expected = [want[0][q], want[1][:, q], want[2][q], want[3][k], want[4][k], want[5]]
        found = [*made.values(), *results.values()]
        for name, a, b in zip(("o", "lse", "dq", "dk", "dv", "dsinks"), found, expected):
            if name == "lse":
                assert torch.equal(a == -torch.inf, b == -torch.inf), name
                a, b = (torch.where(x == -torch.inf, 0.0, x) for x in (a, b))
                off = (a - b).abs().max().item() if a.numel() else 0.0
                assert off <= lse_bound, (name, off, number)
                continue
            assert not a.isnan().any(), (name, number)
            if not b.numel():
                continue
            most = (bound if name != "dsinks" else max(bound, 2e-6)) * rms(b)
            if name != "o":
                of_rounding = rounded[("dq", "dk", "dv", "dsinks").index(name)]
                rows = of_rounding if name == "dsinks" else of_rounding[q if name == "dq" else k]
                most += (rounding + (lse_bound if name == "dsinks" else 0.0)) * rms(rows)
            assert rms(a.double() - b) <= most, (name, rms(a.double() - b), most, number)
        return found

    ranks = group(o["world"], kernel)
    first = on_all(ranks, job)
    for a, b in zip(first, on_all(ranks, job), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), "a second run has the bits of the first"


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


class Drawn(unittest.TestCase):
    def test_math(self) -> None:
        kernel = find("math", "cpu")
        for seed in range(FIRST, FIRST + COUNT):
            with self.subTest(seed=seed):
                compare(draw(seed), kernel, 1e-12, 1e-12)

    def test_types(self) -> None:
        kernel = find("math", "cpu")
        for seed in range(FIRST, FIRST + COUNT // 6):
            for dtype, bound, of_lse in (
                (torch.float32, 2e-6, 3e-6),
                (torch.bfloat16, 8e-3, 1e-5),
                (torch.float16, 2e-3, 1e-5),
            ):
                with self.subTest(seed=seed, dtype=dtype):
                    compare(draw(seed, dtype), kernel, bound, of_lse)

    def test_pytorch_on_the_cpu(self) -> None:
        """o comes back in bf16 there, and delta is computed from it."""
        kernel = find("torch", "cpu")
        for seed in range(FIRST, FIRST + COUNT // 3):
            for dtype, bound, of_lse in (
                (torch.float64, 1e-12, 1e-12),
                (torch.float32, 4e-6, 4e-6),
                (torch.bfloat16, 3e-2, 2e-3),
            ):
                with self.subTest(seed=seed, dtype=dtype):
                    compare(draw(seed, dtype, softcap=False, slopes=False, value_dim=False), kernel, bound, of_lse)

    def test_slopes_and_sinks_of_flash_attention(self) -> None:
        """A sink is a score beside the others: a number added to all scores of a row is no matter of o without it."""
        kernel, seen = FlashAttention2(flash_attn_2), 0
        for seed in range(FIRST, FIRST + COUNT):
            p = draw(seed, torch.bfloat16, softcap=False, value_dim=False)
            heads, ulysses = p.options["heads"], p.options["ulysses"]
            # Slopes need all keys of a row on its rank.
            options = {
                name: p.options[name]
                for name in (
                    "heads",
                    "kv_heads",
                    "head_dim",
                    "window_left",
                    "window_right",
                    "scale",
                    "cu_seqlens_k",
                    "slices",
                )
                if name in p.options
            }
            options |= {
                "world": ulysses,
                "ulysses": ulysses,
                "ring": 1,
                "sinks": 1 + seed % 2,
                "alibi_slopes": [0.1 + head / 4 for head in range(heads)],
            }
            with self.subTest(seed=seed):
                try:
                    compare(p._replace(options=options), kernel, 4e-2, 4e-3)
                except cpattn.Unsupported as error:
                    self.assertIn("alibi_slopes only where each rank has all keys", str(error))
                else:
                    seen += 1
        self.assertGreater(seen, COUNT // 5)


if __name__ == "__main__":
    unittest.main()
