# SPDX-License-Identifier: MIT OR Apache-2.0
"""ALiBi slopes of each document: `cpattn.torch` against the formula, eagerly and compiled, and what is refused."""

from __future__ import annotations

import unittest
from typing import Any

import processes
import torch
import torch.distributed as dist
from dense import error, gradients

import cpattn
from cpattn.torch import Context

DOCUMENTS = [0, 5, 5, 6, 40, 52]
HEADS, KV_HEADS, DIM = 6, 3, 8
SLOPES = torch.tensor([[0.5], [9.0], [2.0], [0.03], [-0.2]]) / torch.arange(1.0, 1.0 + HEADS)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Causal attention in documents, with the slopes of the query's."""
    document = torch.arange(len(DOCUMENTS) - 1).repeat_interleave(torch.tensor(DOCUMENTS).diff())
    place = torch.arange(len(q))
    back = place[:, None] - place
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    s = s - slopes.double().expand(len(DOCUMENTS) - 1, -1)[document].T[:, :, None] * back.abs()
    s = s.masked_fill((back < 0) | (document[:, None] != document), -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(2), v)


def refused(words: str, function: Any, *given: Any, **named: Any) -> None:
    try:
        function(*given, **named)
    except cpattn.InvalidArgument as said:
        assert words in str(said), said
    else:
        raise AssertionError(words)


def all_of_it(rank: int, world: int) -> None:
    whole = [draw(DOCUMENTS[-1], h, DIM, seed=i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    d_o = draw(DOCUMENTS[-1], HEADS, DIM, seed=9)
    exact = [x.clone().requires_grad_() for x in whole]
    wants = []
    for slopes in (SLOPES, SLOPES[3]):
        o = formula(*exact, slopes)
        wants.append((o.detach(), *gradients(o, d_o, exact)))
    assert error(wants[0][0], wants[1][0]) > 0.05, "one row is another computation"
    function = torch.compile(
        lambda batch, q, k, v, slopes: batch.attention(q, k, v, alibi_slopes=slopes),
        backend="aot_eager",
        fullgraph=True,
    )
    for more in ({"ulysses": 3}, {"ring": 3, "layout": "zigzag", "circulate": "queries"}):
        context = Context(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float64, **more)  # type: ignore[arg-type]
        batch = context.batch(DOCUMENTS)
        for given, want in (
            (SLOPES, wants[0]),
            (SLOPES.tolist(), wants[0]),
            (SLOPES[3], wants[1]),
            (SLOPES[3].tolist(), wants[1]),
        ):
            for compiled in (False, True):
                if compiled and not isinstance(given, torch.Tensor):
                    continue
                mine = [batch.shard(x).requires_grad_() for x in whole]
                o = function(batch, *mine, given) if compiled else batch.attention(*mine, alibi_slopes=given)  # type: ignore[arg-type]
                for name, a, b in zip(("o", "dq", "dk", "dv"), (o, *gradients(o, batch.shard(d_o), mine)), want):
                    assert error(a, batch.shard(b)) < 1e-6, (
                        name,
                        more,
                        compiled,
                        error(a, batch.shard(b)),
                    )  # slopes are f32
        attend = lambda slopes: batch.attention(*map(batch.shard, whole), alibi_slopes=slopes)  # noqa: B023, E731
        refused(
            "alibi_slopes is of 4 rows of 6 (alibi_rows), expected 5 rows, one for each document", attend, SLOPES[:4]
        )
        refused("alibi_slopes[0] has length 5, 6 is needed", attend, SLOPES[:, :5])
        refused("alibi_slopes has length 5, 6 is needed", attend, SLOPES[0, :5])
        refused("alibi_slopes is 3, a sequence of numbers is needed", attend, 3)
        refused("alibi_slopes[1][0] is 'x', a finite number", attend, [SLOPES[0].tolist(), "xxxxxx"])
        refused("alibi_slopes.requires_grad is True", attend, SLOPES.clone().requires_grad_())
        dist.barrier()
        context.close()
    refused(
        "alibi_slopes has a row for each of 5 documents",
        Context,
        heads=HEADS,
        head_dim=DIM,
        alibi_slopes=SLOPES.tolist(),
    )
    layers = [(1, {"heads": HEADS, "head_dim": DIM, "alibi_slopes": SLOPES.tolist()})]
    refused("layers: alibi_slopes has a row for each", Context, heads=HEADS, head_dim=DIM, layers=layers)


class Slopes(unittest.TestCase):
    def test_against_the_formula(self) -> None:
        processes.run(all_of_it, 3)

    def test_plans(self) -> None:
        made = cpattn.Plan([0, 3, 5], 2, 4, alibi_slopes=[[0.5, 0.25], [1.0, 0.0]])
        self.assertIn("ALiBi slopes per document [0.5, 0.25, 1.0, 0.0]", made.explain())
        one = [cpattn.Plan([0, 3], 2, 4, alibi_slopes=x).fingerprint for x in ([0.5, 0.25], [[0.5, 0.25]])]
        self.assertEqual(one[0], one[1], "a batch of one document")
        other = cpattn.Plan.with_tokens_of(made, 2, 4, alibi_slopes=[[0.5, 0.25], [1.0, 0.5]])
        self.assertNotEqual(other.fingerprint, made.fingerprint)
        refused(
            "alibi_slopes is of 3 rows of 2 (alibi_rows), expected 2 rows",
            cpattn.Plan,
            [0, 3, 5],
            2,
            4,
            alibi_slopes=[[0.5, 0.25]] * 3,
        )
        refused(
            "alibi_slopes is of 1 rows of 2 (alibi_rows), expected 2 rows",
            cpattn.Plan,
            [0, 3, 5],
            2,
            4,
            alibi_slopes=[[0.5, 0.25]],
        )
        refused(
            "alibi_slopes[1] has length 1, 2 is needed", cpattn.Plan, [0, 3, 5], 2, 4, alibi_slopes=[[0.5, 0.25], [1.0]]
        )
        refused(
            "alibi_slopes[1] is 1.0, a sequence of numbers",
            cpattn.Plan,
            [0, 3, 5],
            2,
            4,
            alibi_slopes=[[0.5, 0.25], 1.0],
        )
        refused("alibi_slopes[1][0] is -inf", cpattn.Plan, [0, 3, 5], 2, 4, alibi_slopes=[[0.5, 0.25], [-1e300, 1.0]])


if __name__ == "__main__":
    unittest.main()
