# SPDX-License-Identifier: MIT OR Apache-2.0
"""States passed between the segments of drawn documents over drawn shares, beside one loop in f64: results and gradients."""

from __future__ import annotations

import unittest
from itertools import accumulate, permutations
from typing import Any

import torch

try:
    import transformers  # noqa: F401 (the package needs it)
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import processes
import torch.distributed as dist
from cpattn.torch.group import Collectives
from cpattn_hf.transformers.hybrids.states.passing import Passing
from cpattn_hf.transformers.hybrids.states.segments import Segment, segments_of

DRAWS = 60


def _shares(draw: torch.Generator, tokens: int, world: int) -> list[torch.Tensor]:
    """Chunks of drawn lengths to drawn ranks, in an order of their own: some ranks may have none."""
    chunks = list(torch.arange(tokens).split(int(torch.randint(1, 12, (1,), generator=draw))))
    owner = torch.randint(0, world, (len(chunks),), generator=draw).tolist()
    order = torch.randperm(len(chunks), generator=draw).tolist()
    empty = torch.zeros(0, dtype=torch.int64)
    return [torch.cat([empty, *(chunks[at] for at in order if owner[at] == rank)]) for rank in range(world)]


def _loop(every: list[list[Segment]], decay: list[Any], state: list[Any], matrix: bool) -> list[torch.Tensor]:
    """The initial states by rank, of one process."""
    flat = sorted((one.document, one.first, rank, at) for rank, some in enumerate(every) for at, one in enumerate(some))
    found = [list(of.unbind(0)) for of in state]
    before = None
    for document, first, rank, at in flat:
        if first == 0:
            initial = torch.zeros_like(state[rank][at])
        else:
            r, i = before
            d = decay[r][i]
            came = found[r][i]
            initial = (torch.zeros_like(came) if every[r][i].starts else d @ came if matrix else d * came) + state[r][i]
        found[rank][at], before = initial, (rank, at)
    return [torch.stack(of) if of else whole for of, whole in zip(found, state, strict=True)]


def _drawn(rank: int, world: int) -> list[str]:
    talk, wrong = Collectives(tuple(range(world)), 60.0), []
    for number in range(DRAWS):
        draw = torch.Generator().manual_seed(number)
        lengths = torch.randint(1, 40, (int(torch.randint(1, 5, (1,), generator=draw)),), generator=draw).tolist()
        ends = [0, *accumulate(lengths)]
        every = [[one for one in segments_of(of, ends) if not one.whole] for of in _shares(draw, ends[-1], world)]
        matrix, shape = bool(number % 2), [2, 3, 4]
        wide = {True: [2, 3, 3], False: [2, 1, 1] if number % 4 else shape}[matrix]
        rand = lambda *of: torch.rand(*of, generator=draw, dtype=torch.float64)
        # Slow decay, and nothing that could be read where the first of a document has no decay, or the last no next one.
        decay = [(rand(len(of), *wide) if not matrix else torch.eye(3) - 0.2 * rand(len(of), *wide)) for of in every]
        state, weight = ([rand(len(of), *shape) for of in every] for _ in range(2))
        for d in decay:
            d.requires_grad_()
        for s in state:
            s.requires_grad_()
        expected = _loop(every, decay, state, matrix)
        sum((e * w).sum() for e, w in zip(expected, weight, strict=True)).backward()
        mine = [one.detach().float() for one in (decay[rank], state[rank])]
        for at, one in enumerate(every[rank]):
            if one.ends:
                mine[0][at], mine[1][at] = 0, 0
        own = [one.clone().requires_grad_() for one in mine]
        found = Passing(every, rank, talk).scan(*own, matrix)
        (found * weight[rank]).sum().backward()
        for what, a, b in (
            ("states", found.detach(), expected[rank].detach()),
            *(
                (name, x.grad, y.grad)
                for name, x, y in zip(("decay", "state"), own, (decay[rank], state[rank]), strict=True)
            ),
        ):
            b = torch.zeros(a.shape) if b is None else b
            if len(a) and not float((a - b).abs().max()) <= 1e-5 * max(1.0, float(b.abs().max())):
                wrong.append(f"{number}, {what}: {float((a - b).abs().max()):.1e}")
    dist.barrier()
    talk.close()
    return wrong


class States(unittest.TestCase):
    def test_drawn_segments(self) -> None:
        for wrong in processes.run(_drawn, 3, seconds=200):
            self.assertEqual(wrong, [])

    def test_what_is_sent(self) -> None:
        """A state goes to the ranks that have a later segment of its document, and its gradient's way to those that have an earlier one."""
        ends = [0, 40, 50]
        every = [[one for one in segments_of(of, ends) if not one.whole] for of in torch.arange(50).tensor_split(5)]
        passing = Passing(every, 1, None)
        self.assertEqual([len(passing._sent(1, to, True)) for to in range(5)], [1, 0, 0, 0, 0])
        self.assertEqual([len(passing._sent(1, to, False)) for to in range(5)], [0, 0, 1, 1, 0])
        self.assertEqual(len(every[4]), 0)
        for number in range(DRAWS):
            draw = torch.Generator().manual_seed(number)
            ends = [0, *accumulate(torch.randint(1, 40, (4,), generator=draw).tolist())]
            every = [[one for one in segments_of(of, ends) if not one.whole] for of in _shares(draw, ends[-1], 4)]
            passing, counts = Passing(every, 0, None), [0] * 4
            for of, to in permutations(range(4), 2):
                for one in (of, to):
                    counts[one] += len(passing._sent(of, to, False))
            self.assertEqual(passing.sent(), counts, number)

    def test_autocast(self) -> None:
        """States and their gradients have the same bits under autocast, and are in f32."""
        every = [[Segment(0, a, a + 8, a, a == 0, a == 32) for a in range(0, 40, 8)]]
        for matrix in (False, True):
            found = []
            for enabled in (False, True):
                draw = torch.Generator().manual_seed(1)
                decay = torch.rand(5, 2, *((8, 8) if matrix else (1, 1)), generator=draw, requires_grad=True)
                state = torch.rand(5, 2, 8, 4, generator=draw, requires_grad=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    initial = Passing(every, 0, None).scan(decay, state, matrix)
                    gradients = torch.autograd.grad(initial.square().sum(), (decay, state))
                found.append((initial, *gradients))
            for alone, cast in zip(*found, strict=True):
                self.assertEqual(cast.dtype, torch.float32)
                self.assertTrue(torch.equal(alone, cast), matrix)


if __name__ == "__main__":
    unittest.main()
