# SPDX-License-Identifier: MIT OR Apache-2.0
"""`batch.scan`: states passed on along documents, beside a loop over all segments in one process, with both kernels; gradients; calls in
graphs and under checkpointing; refusals. And `Rank.scan` without PyTorch's groups."""

from __future__ import annotations

import random
import unittest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from processes import LONG, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cpattn
from cpattn.torch import Batch, Context

# Shapes of decay and state without the first dim, and whether decays are matrices.
KINDS: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [
    ((2, 3, 1), (2, 3, 4), False),
    ((2, 1, 1), (2, 3, 4), False),
    ((2, 3, 4), (2, 3, 4), False),
    ((1, 1, 4), (2, 3, 4), False),
    ((), (), False),
    ((3, 3), (3, 2), True),
    ((2, 3, 3), (2, 3, 4), True),
    ((1, 3, 3), (2, 3, 4), True),
]


def in_order(batch: Batch) -> list[list[tuple[int, int]]]:
    """The segments of each document, in the order of positions, as (rank, row)."""
    every: dict[int, list[tuple[int, int, int]]] = {}
    for rank in range(batch.context.world):
        for row, s in enumerate(batch.plan.segments(rank)):
            every.setdefault(s.document, []).append((s.begin, rank, row))
    return [[(rank, row) for _, rank, row in sorted(of)] for of in every.values()]


def draw(batch: Batch, kind: Any, seed: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Decays, states and weights of all ranks, the same on each: slow decay, and NaN where nobody may read."""
    generator, (of_decay, of_state, matrix) = torch.Generator().manual_seed(seed), kind
    counts = [len(batch.plan.segments(rank)) for rank in range(batch.context.world)]

    def drawn(shape: tuple[int, ...]) -> list[Tensor]:
        return [torch.rand(count, *shape, generator=generator, dtype=dtype) for count in counts]

    decay, state, weights = drawn(of_decay), [2 * x - 1 for x in drawn(of_state)], drawn(of_state)
    decay = [0.2 * (x - 0.5) + torch.eye(x.shape[-1], dtype=dtype) if matrix else 1 - 0.05 * x for x in decay]
    for document in in_order(batch):
        for rank, row in document[:1] + document[-1:]:
            decay[rank][row] = torch.nan
        rank, row = document[-1]
        state[rank][row] = torch.nan
    return decay, state, weights


def expected(batch: Batch, decay: list[Tensor], state: list[Tensor], matrix: bool) -> list[list[Tensor]]:
    """The initial states of all ranks, by a loop in one process."""
    initial = [[torch.zeros_like(of[0])] * len(of) if len(of) else [] for of in state]
    for document in in_order(batch):
        running: Tensor | None = None
        for rank, row in document:
            if running is not None:
                initial[rank][row] = running
            by = decay[rank][row]
            after = None if running is None else by @ running if matrix else by * running
            running = state[rank][row] if after is None else after + state[rank][row]
    return initial


def own(of: list[Tensor], rank: int, dtype: torch.dtype) -> Tensor:
    return of[rank].to(dtype).requires_grad_()


def compare(batch: Batch, kind: Any, seed: int, dtype: torch.dtype, form: str) -> None:
    rank, matrix = batch.context.number, kind[2]
    # What the ranks have are float32 numbers, if they are to be in that type.
    decay, state, weights = ([x.double() for x in of] for of in draw(batch, kind, seed, dtype))
    for of in (*decay, *state):
        of.requires_grad_()
    want = expected(batch, decay, state, matrix)
    loss = sum(((x * w).sum() for of, by in zip(want, weights) for x, w in zip(of, by)), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    mine, ended = own([x.detach() for x in decay], rank, dtype), own([x.detach() for x in state], rank, dtype)
    got = batch.scan(mine, ended, matrix=matrix, form=form)
    assert got.shape == ended.shape and got.dtype == dtype
    (got * weights[rank].to(dtype)).sum().backward()
    bound = 1e-13 if dtype == torch.float64 else 4e-6

    def close(name: str, x: Tensor | None, y: Tensor | None) -> None:
        assert x is not None
        y = torch.zeros_like(x) if y is None else y
        # A decay that nobody reads has no gradient here, and 0 there.
        assert not x.isnan().any(), (name, kind, seed, x)
        largest = max(1.0, float(y.abs().max())) if y.numel() else 1.0
        assert x.numel() == 0 or (x - y).abs().max() <= bound * largest, (name, kind, seed, form, x, y)

    close("initial", got.detach(), torch.stack(want[rank]).detach() if want[rank] else torch.empty_like(got))
    close("decay", mine.grad, decay[rank].grad)
    close("state", ended.grad, state[rank].grad)


def drawn(rank: int, world: int, kernels: str, problems: int) -> None:
    pick = random.Random(f"{world} {kernels}")
    for seed in range(problems):
        ulysses = pick.choice([d for d in range(1, world + 1) if world % d == 0])
        layout = pick.choice(["contiguous", "zigzag", "zigzag_pack", "balanced"])
        context = Context(
            heads=4, head_dim=8, layout=layout, layout_parameter=2 if layout == "balanced" else 0, ulysses=ulysses,
            ring=world // ulysses, kernels=kernels, own_tokens=True, dtype=torch.bfloat16,
        )  # fmt: skip
        lengths = [pick.choice([0, 1, 2, pick.randrange(40)]) for _ in range(pick.randrange(1, 6))]
        batch = context.batch([sum(lengths[:n]) for n in range(len(lengths) + 1)])
        for kind in pick.sample(KINDS, 3):
            for form in pick.sample(["auto", "chain", "tree", "direct"], 2):
                compare(batch, kind, seed, pick.choice([torch.float32, torch.float64]), form)
        dist.barrier()
        context.close()


def in_programs(rank: int, world: int, kernels: str) -> None:
    """In a graph, under checkpointing, in two batches whose backward passes come after both forward passes."""
    context = Context(heads=4, head_dim=8, layout="contiguous", ring=world, ulysses=1, kernels=kernels)
    batches = context.batch([0, 5, 40]), context.batch([0, 3, 4, 33, 61])
    inputs = []
    for batch in batches:
        count = len(batch.segments())
        generator = torch.Generator().manual_seed(rank)
        inputs.append([torch.rand(count, 2, 3, n, generator=generator, requires_grad=True) for n in (1, 4)])

    def step(function: Any) -> list[Tensor]:
        losses = [function(*x, batch).square().sum() for x, batch in zip(inputs, batches)]
        return [g for loss, x in zip(losses, inputs) for g in torch.autograd.grad(loss, x)]

    def layer(decay: Tensor, state: Tensor, batch: Batch) -> Tensor:
        return batch.scan(decay * 0.9, state.sin()) + batch.scan(decay, state)

    want = step(layer)
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for function in (graph, lambda *x: checkpoint(layer, *x, use_reentrant=False)):
        for x, y in zip(step(function), want, strict=True):
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-6), (x, y)
    dist.barrier()
    context.close()


def twice(rank: int, world: int, kernels: str) -> None:
    """The gradient of a gradient, beside a loop over all ranks' numbers in one process that is differentiated twice."""
    context = Context(heads=4, head_dim=8, layout="zigzag", ring=world, ulysses=1, kernels=kernels)
    batch = context.batch([0, 3, 40])
    for kind in KINDS:
        generator, (of_decay, of_state, matrix) = torch.Generator().manual_seed(5), kind
        counts = [len(batch.plan.segments(r)) for r in range(world)]

        def drawn(shape: tuple[int, ...]) -> list[Tensor]:
            every = [torch.rand(n, *shape, generator=generator, dtype=torch.float64) for n in counts]
            return [(x - 0.3).requires_grad_() for x in every]

        decay, state = drawn(of_decay), drawn(of_state)

        def second(losses: list[Tensor], of: list[Tensor]) -> list[Tensor]:
            how = {"allow_unused": True, "materialize_grads": True}
            first = torch.autograd.grad(sum(losses, torch.zeros(())), of, create_graph=True, **how)
            size = sum((x.square().sum() for x in first), torch.zeros(()))
            return [x.detach() for x in (*first, *torch.autograd.grad(size, of, **how))]

        initial = expected(batch, decay, state, matrix)
        want = second([x.pow(3).sum() for of in initial for x in of], [*decay, *state])
        got = second([batch.scan(decay[rank], state[rank], matrix=matrix).pow(3).sum()], [decay[rank], state[rank]])
        for x, y in zip(got, want[rank::world], strict=True):
            assert (x - y).abs().max() <= 1e-12 * max(1.0, float(y.abs().max())), (kind, x, y)
    dist.barrier()
    context.close()


def constants(rank: int, world: int, kernels: str) -> None:
    """A rank whose decays and states are constants, and one without tokens, take part in the backward pass."""
    context = Context(heads=4, head_dim=8, layout="contiguous", ring=world, ulysses=1, kernels=kernels, timeout=60)
    for length in (2, 40):  # with 2 tokens a rank has none
        batch = context.batch([0, length])
        count = len(batch.segments())
        layers = [batch.scan]
        if length == 40:
            layers.append(torch.compile(lambda x, y: batch.scan(x, y), backend="aot_eager", fullgraph=True))
        for layer in layers:
            decay, state = (torch.full((count, 2), 0.5, requires_grad=count > 0 and rank < world - 1) for _ in range(2))
            initial = layer(decay, state)
            assert initial.requires_grad
            (0 * initial.sum() if rank < world - 1 else initial.sum()).backward()
            if state.requires_grad:
                behind = sum(bool(batch.plan.segments(r)) for r in range(rank + 1, world)) - 1
                # What a state adds to the last rank's, half of it for each segment between.
                last = len(batch.plan.segments(world - 1)) > 0
                want = 0.5**behind if last else 0.0
                assert state.grad is not None and torch.allclose(state.grad, torch.full_like(state, want)), (
                    rank,
                    state.grad,
                )
        # Where no gradient goes through on any rank.
        with torch.no_grad():
            assert not batch.scan(decay, state).requires_grad
    dist.barrier()
    context.close()


def precise(rank: int, world: int, kernels: str) -> None:
    """Decays' gradients stay float32's where the backward pass is called under autocast, in graphs as well."""
    context = Context(heads=4, head_dim=8, layout="contiguous", ring=world, ulysses=1, kernels=kernels)
    batch = context.batch([0, 40])
    generator = torch.Generator().manual_seed(rank)
    decay, state = (torch.rand(1, 2, 3, n, generator=generator, requires_grad=True) for n in (3, 4))

    def layer(decay: Tensor, state: Tensor) -> Tensor:
        return batch.scan(decay, state, matrix=True)

    want = torch.autograd.grad(layer(decay, state).square().sum(), (decay, state))
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            got = torch.autograd.grad(function(decay, state).square().sum(), (decay, state))
        for x, y in zip(got, want, strict=True):
            assert (x - y).abs().max() <= 1e-6 * max(1.0, float(y.abs().max())), (rank, x, y)
    dist.barrier()
    context.close()


def refusals(rank: int, world: int, kernels: str) -> list[str]:
    context = Context(heads=4, head_dim=8, layout="contiguous", ring=world, ulysses=1, kernels=kernels)
    batch, said = context.batch([0, 5, 40]), []
    count = len(batch.segments())

    def refused(decay: Any, state: Any, **how: Any) -> None:
        try:
            batch.scan(decay, state, **how)
        except cpattn.InvalidArgument as error:
            said.append(str(error))
        else:
            raise AssertionError((decay, state, how))

    good = torch.ones(count, 2, 3)
    refused(good[:, :1], torch.ones(count + 1, 2, 3))
    refused(good.half(), good.half())
    refused(good.double(), good)
    refused(torch.ones(count, 2), good)
    refused(torch.ones(count, 3, 3), good)
    refused(good, good, matrix=True)
    refused(good, good[0], matrix=True)
    refused(good, good, form="ring")
    refused(None, good)
    # Nothing of it has moved: the group goes on.
    assert batch.scan(good, good).shape == good.shape
    # Ranks that scan other dims find out, and go on.
    other = good[:, :1] if rank == 0 else good[:, :, :2]
    try:
        batch.scan(other, other)
    except cpattn.Disagreement as error:
        said.append(str(error))
    assert batch.scan(good, good).shape == good.shape
    dist.barrier()
    context.close()
    return said


class Scan(unittest.TestCase):
    def test_beside_one_process(self) -> None:
        for kernels in ("cpattn", "torch"):
            for world in (2, 4) if LONG else (3,) if kernels == "torch" else (4,):
                with self.subTest(kernels=kernels, world=world):
                    run(drawn, world, kernels, 40 if LONG else 8, seconds=400)

    def test_in_programs(self) -> None:
        for kernels in ("cpattn", "torch"):
            with self.subTest(kernels=kernels):
                run(in_programs, 2, kernels, seconds=400)

    def test_differentiated_twice(self) -> None:
        for kernels in ("cpattn", "torch"):
            with self.subTest(kernels=kernels):
                run(twice, 2, kernels, seconds=400)

    def test_constants_and_no_tokens(self) -> None:
        for kernels in ("cpattn", "torch"):
            with self.subTest(kernels=kernels):
                run(constants, 3, kernels, seconds=400)

    def test_under_autocast(self) -> None:
        for kernels in ("cpattn", "torch"):
            with self.subTest(kernels=kernels):
                run(precise, 3, kernels, seconds=400)

    def test_refusals(self) -> None:
        words = [
            r"state has 3 rows and decay 2, 2 are needed: one for each segment|state has 2 rows and decay 1, 1 are needed",
            r"state.dtype is torch.float16 and decay.dtype torch.float16, torch.float32 or torch.float64",
            r"state.dtype is torch.float32 and decay.dtype torch.float64",
            r"state.ndim is 3 and decay.ndim 2, as many dims",
            r"decay has the shape \(., 3, 3\) and state \(., 2, 3\), dims of 1 or as those of state",
            r"\(., 2, 3\), \[segments, ..., K, K\] to \[segments, ..., K, V\] is needed",
            r"state.ndim is 2 and decay.ndim 3, \[segments, ..., K, V\]",
            r"form is 'ring'",
            r"decay is None, a tensor is needed",
            r"another plan|runs the scan of 40 tokens",
        ]
        for kernels in ("cpattn", "torch"):
            for said in run(refusals, 2, kernels):
                self.assertEqual(len(said), len(words), said)
                for text, word in zip(said, words):
                    self.assertRegex(text, word)

    def test_ranks_as_threads(self) -> None:
        """`Rank.scan` of NumPy's arrays: each rank halves the state and adds its own number."""
        plan = cpattn.Plan([0, 8], 1, 1, world=4, ring=4, ulysses=1, layout="contiguous")
        self.assertEqual([plan.segments(rank) for rank in (0, 3)], [((0, 0, 2),), ((0, 6, 8),)])

        def job(number: int, rank: cpattn.Rank) -> list[float]:
            found = []
            for how in ({}, {"matrix": True, "form": "tree"}, {"reverse": True, "form": "direct"}):
                initial = np.full((1, 1, 1), np.nan, np.float32)
                decay, state = np.full_like(initial, 0.5), np.full_like(initial, 1 << number)
                rank.scan(plan, decay=decay, state=state, initial_state=initial, **how)  # type: ignore[arg-type]
                found.append(initial.item())
            return found

        found = cpattn.on_all(cpattn.local_group(4), job)
        self.assertEqual([of[0] for of in found], [0, 1, 2.5, 5.25])
        self.assertEqual([of[1] for of in found], [0, 1, 2.5, 5.25])
        self.assertEqual([of[2] for of in found], [6, 8, 8, 0])


if __name__ == "__main__":
    unittest.main()
