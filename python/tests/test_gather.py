# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Batch.gather` and `Batch.halo` on several processes against the dense mask: which rows, their values, and gradients."""

from __future__ import annotations

import random
import unittest
from itertools import pairwise
from typing import Any

import cpattn
import processes
import torch
from cpattn import Disagreement, InvalidArgument, Slice, slices
from cpattn.torch import Context

FAR = cpattn.UNLIMITED


def _dense(q: list[int], k: list[int], start: list[int] | None, made: Any, left: int, right: int) -> torch.Tensor:
    """The mask, pair by pair."""
    if made is None:
        made = [
            Slice(a, b, c, d, None if start is None else start[i])
            for i, ((a, b), (c, d)) in enumerate(zip(pairwise(q), pairwise(k)))
        ]
    mask = torch.zeros(q[-1], k[-1], dtype=torch.bool)
    for one in made:
        for at in range(one.q_begin, one.q_end):
            for key in range(one.k_begin, one.k_end):
                distance = (key - one.k_begin) - (at - one.q_begin + one.complete.q_start)
                mask[at, key] |= one.allows(at, key) and -left <= distance <= right
    return mask


def _cases() -> list[dict[str, Any]]:
    draw = random.Random(5)

    def ends(documents: int, most: int) -> list[int]:
        made = [0]
        for _ in range(documents):
            made.append(made[-1] + draw.randrange(0, most))
        return made

    cases: list[dict[str, Any]] = [
        {"cu": ends(5, 17), "left": draw.choice([FAR, 0, 3, 9]), "right": draw.choice([0, 2, FAR])} for _ in range(6)
    ]
    cases += [
        {"cu": [0, 2], "left": FAR, "right": 0},  # ranks without tokens
        {"cu": [0, 0, 37], "left": 4, "right": 0, "layout": "zigzag"},
        {
            "cu": [0, 14, 30],
            "made": slices.shared_prefix(5, [3, 2, 4]) + slices.moved(slices.chunks([0, 16], 5), 14),
            "left": FAR,
            "right": FAR,
        },
        {"cu": [0, 40], "made": slices.block_diffusion(20, 4), "left": FAR, "right": FAR},
        {"cu": [0, 18, 33], "made": slices.prefix_lm([0, 18, 33], [4, 9]), "left": 5, "right": FAR},
        {
            "cu": [0, 9, 30],
            "made": [Slice(0, 7, 20, 30), Slice(8, 30, 2, 9, low=-30, high=-3)],
            "left": FAR,
            "right": FAR,
        },
        {"cu": [0, 4, 20], "k": [0, 17, 41], "left": FAR, "right": 0},
        {"cu": [0, 4, 20], "k": [0, 17, 41], "start": [3, 0], "left": 6, "right": 2},
        {"cu": [0, 8], "made": [], "left": FAR, "right": FAR},
    ]
    return cases


def _right(rank: int, world: int) -> list[str]:
    wrong: list[str] = []
    for number, case in enumerate(_cases()):
        cu, k, start, made = case["cu"], case.get("k", case["cu"]), case.get("start"), case.get("made")
        options = {"cu_seqlens_k": k, "q_start": start} if "k" in case else {}
        with_layout = {"layout": case["layout"], "ring": world} if "layout" in case else {}
        context = Context(heads=2, head_dim=8, timeout=60, own_tokens=True, **with_layout)
        batch, window = (
            context.batch(cu, slices=made, **options),
            {"window_left": case["left"], "window_right": case["right"]},
        )
        dense = _dense(cu, k, start, made, case["left"], case["right"])
        for side in ("k", "q"):
            mask, total, own = (dense, k[-1], batch.tokens) if side == "k" else (dense.T, cu[-1], batch.k_tokens)
            held = batch.k_tokens if side == "k" else batch.tokens
            draw = torch.Generator().manual_seed(number)
            whole = (
                torch.randn(total, 3, 2, generator=draw),
                torch.randn(total, generator=draw).bfloat16(),
                torch.arange(total),
            )
            x = [one[held] for one in whole]
            for one in x[:2]:
                one.requires_grad_()
            reads = batch.reads(side, **window)
            got = batch.gather(x, side, **window)
            every = [mask[tokens].any(0).nonzero().flatten() for tokens in _owners(batch, side)]
            bits = []
            for _ in range(2):
                for one in x[:2]:
                    one.grad = None
                rows = batch.gather(x, side, **window).rows
                weights = [_weights(one, of) for of, one in enumerate(every)]
                (rows[0] * weights[rank][0]).sum().add((rows[1] * weights[rank][1]).sum()).backward()
                bits.append([one.grad for one in x[:2]])
            sums = torch.zeros(total, 3, 2), torch.zeros(total)
            for tokens, of in zip(every, weights):
                for total_of, one in zip(sums, of):
                    total_of[tokens] += one.float()
            at = every[rank]
            document = torch.searchsorted(torch.tensor(k if side == "k" else cu), at, right=True) - 1
            twice = torch.arange(1.0, 1 + len(held)).double().requires_grad_()
            (first,) = torch.autograd.grad(
                batch.gather(twice, side, **window).rows.pow(3).sum(), twice, create_graph=True
            )
            first.sum().backward()
            readers = sum(torch.isin(held, of).double() for of in every)
            checks = {
                "second derivative": torch.allclose(twice.grad, 6 * twice.detach() * readers),
                "tokens": torch.equal(got.tokens, at),
                "values": all(torch.equal(one, of[at]) for one, of in zip(got.rows, whole)),
                "documents": torch.equal(got.documents, document),
                "positions": torch.equal(got.positions, _positions(batch, side)[at]),
                "mask": torch.equal(reads.mask(), mask[own][:, at]),
                "bytes": reads.bytes(*x) == sum(one.numel() * one.element_size() for one in got.rows),
                "gradients": torch.equal(bits[0][0], sums[0][held])
                and torch.equal(bits[0][1], sums[1][held].bfloat16()),
                "same bits": all(torch.equal(a, b) for a, b in zip(*bits)),
            }
            wrong += [f"case {number}, side {side}: {name}" for name, right in checks.items() if not right]
        wrong += _halo(batch, cu, number) + _attention(batch, dense, window, number)
        context.close()
    return wrong


def _owners(batch: Any, side: str) -> list[torch.Tensor]:
    """The tokens of each rank that read."""
    of = cpattn.Side.Q if side == "k" else cpattn.Side.K
    return [torch.tensor(batch.plan.tokens(of, rank), dtype=torch.int64) for rank in range(batch.context.world)]


def _positions(batch: Any, side: str) -> torch.Tensor:
    """The positions of all tokens that are read, from the plan."""
    of, plan = cpattn.Side.K if side == "k" else cpattn.Side.Q, batch.plan
    made = torch.zeros((batch.cu_seqlens_k if side == "k" else batch.cu_seqlens)[-1], dtype=torch.int64)
    for rank in range(plan.world):
        made[torch.tensor(plan.tokens(of, rank), dtype=torch.int64)] = torch.tensor(
            plan.positions(of, rank), dtype=torch.int64
        )
    return made


def _weights(tokens: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    return torch.randn(len(tokens), 3, 2, generator=draw), torch.randn(len(tokens), generator=draw).bfloat16()


def _attention(batch: Any, dense: torch.Tensor, window: dict[str, int], number: int) -> list[str]:
    """Attention over gathered keys beside that of the kernels, with gradients."""
    if not dense.any(1).all():
        return []
    draw = torch.Generator().manual_seed(number)
    made = [torch.randn(n, 2, 8, generator=draw) for n in (dense.shape[0], dense.shape[1], dense.shape[1])]
    out = torch.randn(dense.shape[0], 2, 8, generator=draw)[batch.tokens]
    both = []
    for kernels in (True, False):
        q, k, v = (
            x[tokens].requires_grad_() for x, tokens in zip(made, (batch.tokens, batch.k_tokens, batch.k_tokens))
        )
        if kernels:
            o = batch.attention(q, k, v, **window)
        else:
            keys, values = batch.gather((k, v), **window).rows
            scores = torch.einsum("qhd,khd->hqk", q, keys) / 8**0.5
            o = torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(~batch.reads(**window).mask(), -torch.inf).softmax(-1), values
            )
        (o * out).sum().backward()
        both.append((o.detach(), q.grad, k.grad, v.grad))
    right = all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(*both))
    return [] if right else [f"case {number}: attention"]


def _halo(batch: Any, cu: list[int], number: int) -> list[str]:
    """A convolution over each document, and its gradient."""
    draw = torch.Generator().manual_seed(number)
    whole, weight = torch.randn(cu[-1], 2, generator=draw).double(), torch.randn(4, 2, generator=draw).double()
    x = whole[batch.tokens].requires_grad_()
    halo = batch.halo(x, 3)
    y = (halo.rows[halo.places] * weight).sum(1)
    out = torch.randn(cu[-1], 2, generator=draw).double()
    (y * out[batch.tokens]).sum().backward()
    whole.requires_grad_()
    padded = [
        torch.cat([whole.new_zeros(3, 2), whole[a:b]]).unfold(0, 4, 1).transpose(1, 2) for a, b in pairwise(cu) if a < b
    ]
    expected = torch.cat([(one * weight).sum(1) for one in padded])
    (expected * out).sum().backward()
    right = torch.allclose(y, expected[batch.tokens]) and torch.allclose(x.grad, whole.grad[batch.tokens])
    return [] if right else [f"case {number}: halo"]


def _refused(rank: int, world: int) -> list[str]:
    context, said = Context(heads=2, head_dim=8, timeout=60), []
    batch = context.batch([0, 5, 21])
    x = torch.zeros(len(batch.tokens), 3)

    def refusal(kind: type[Exception], call: Any) -> None:
        try:
            call()
            said.append("not refused")
        except kind as error:
            said.append(str(error))

    refusal(InvalidArgument, lambda: batch.gather(x[1:]))
    refusal(InvalidArgument, lambda: batch.gather([x, 3]))
    refusal(InvalidArgument, lambda: batch.gather(x, side="v"))
    refusal(InvalidArgument, lambda: batch.halo(x, -1))
    refusal(Disagreement, lambda: batch.gather(x, window_left=rank))
    refusal(Disagreement, lambda: batch.gather(x if rank else x.double()))
    again = batch.gather(x.double().requires_grad_()).rows  # calls after errors work, and second derivatives are right
    assert len(again) == len(batch.reads())
    context.close()
    return said


class Gather(unittest.TestCase):
    def test_rows_values_and_gradients_of_the_dense_mask(self) -> None:
        for world in (2, 3):
            for wrong in processes.run(_right, world, seconds=200):
                self.assertEqual(wrong, [], f"{world} processes")

    def test_refusals(self) -> None:
        expected = [
            "a row for each",
            "x[1] is 3",
            "side is 'v'",
            "taps is -1",
            "gather other rows",
            "of another shape or type",
        ]
        for said in processes.run(_refused, 2):
            for text, error in zip(expected, said, strict=True):
                self.assertIn(text, error)


if __name__ == "__main__":
    unittest.main()
