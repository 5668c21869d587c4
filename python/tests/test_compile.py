# SPDX-License-Identifier: MIT OR Apache-2.0
"""batch.attention in functions that torch.compile compiles: the results of eager mode, and the same calls in the same order."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import torch.distributed as dist
from processes import LONG, run
from torch import Tensor, nn

import cpattn
from cpattn.torch import Context

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 16


class Layer(nn.Module):
    """Two attentions that do not depend on each other: one with a window and a sink, one full with heads of another dim."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.other = nn.Linear(WIDTH, 3 * 2 * 4)
        self.out = nn.Linear(HEADS * DIM + 2 * 4, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        # As Transformers has them: heads first.
        q, k = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k))
        windowed = batch.attention(q, k, v, self.sinks, window_left=6, softcap=5.0)
        batch.attention(q, k, v)  # an unused result, but other ranks wait for the call
        full = batch.attention(*self.other(x).unflatten(1, (3, 2, 4)).unbind(1))
        again = batch.attention(*self.other(x).unflatten(1, (3, 2, 4)).unbind(1))
        return x + self.out(torch.cat([windowed.flatten(1), (full + again).flatten(1)], dim=1)).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x


def calls_of(context: Context) -> list[tuple[str, int, int]]:
    """What the rank runs from now on, in its order."""
    calls: list[tuple[str, int, int]] = []
    for name in ("forward", "backward"):

        def noted(
            plan: cpattn.Plan, *args: Any, _run: Any = getattr(context.rank, name), _name: str = name, **kwargs: Any
        ) -> None:
            calls.append((_name, plan.heads, plan.fingerprint))
            _run(plan, *args, **kwargs)

        setattr(context.rank, name, noted)
    return calls


def compiled(rank: int, world: int, *backend: str) -> None:
    torch.manual_seed(0)
    model, context = (
        Model(),
        Context(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, layout="balanced", layout_parameter=2),
    )
    calls = calls_of(context)

    def step(f: Any, cu_seqlens: list[int]) -> list[Tensor]:
        batch = context.batch(cu_seqlens)
        whole = torch.randn(cu_seqlens[-1], WIDTH, generator=torch.Generator().manual_seed(1))
        x = batch.shard(whole).requires_grad_()
        model.zero_grad()
        out = f(x, batch)
        out.square().sum().backward()
        return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item, union-attr]

    backends = {name: torch.compile(model, backend=name, fullgraph=True) for name in backend}
    # Of several lengths, so that shapes become dynamic; at the end one rank has 1 token, and the others none.
    for cu_seqlens in ([0, 5, 40], [0, 3, 4, 33, 61], [0, 1]):
        want, expected = step(model, cu_seqlens), list(calls)
        calls.clear()
        assert [name for name, *_ in expected] == ["forward"] * 8 + ["backward"] * 6, "the unused one has no backward"
        for backend, function in backends.items():
            if backend == "inductor" and cu_seqlens != [0, 5, 40]:
                continue  # it calls a C++ compiler, which takes many seconds
            got = step(function, cu_seqlens)
            # In the same order too, so that ranks with different graphs, because of different sizes, still make the same calls.
            assert calls == expected, f"{backend}: {calls}, not {expected}"
            calls.clear()
            for a, b in zip(got, want, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), (backend, cu_seqlens, (a - b).abs().max())
    # Under autocast as in eager mode.
    if "inductor" in backend or LONG:
        autocast(model, context)
    dist.barrier()
    context.close()


def autocast(model: Model, context: Context) -> None:
    batch = context.batch([0, 5, 40])
    x = batch.shard(torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = model(x, batch), torch.compile(model, backend="aot_eager", fullgraph=True)(x, batch)
    assert torch.allclose(got, want, rtol=1e-2, atol=1e-2)


def outlived(rank: int, world: int) -> None:
    """A graph whose batch is no longer referenced, and whose context is closed."""
    context = Context(heads=2, head_dim=4, plans=1)
    f = torch.compile(lambda q, batch: batch.attention(q, q, q).sum(), backend="aot_eager", fullgraph=True)
    q = torch.randn(len(context.batch([0, 30]).tokens), 2, 4, requires_grad=True)
    loss = f(q, context.batch([0, 30]))
    context.batch([0, 4])  # takes its place
    loss.backward()
    want = torch.autograd.grad(context.batch([0, 30]).attention(q, q, q).sum(), q)[0]
    assert torch.equal(q.grad, want)  # type: ignore[arg-type]
    loss = f(q, context.batch([0, 30]))
    dist.barrier()
    context.close()
    try:
        loss.backward()
    except cpattn.InvalidHandle as error:
        assert "the context is closed" in str(error)
    else:
        raise AssertionError("a closed context")


class Compiled(unittest.TestCase):
    def test_two(self) -> None:
        run(compiled, 2, "eager", "inductor", *(["aot_eager"] if LONG else []), seconds=570)

    def test_four(self) -> None:
        # Without Inductor, since each rank would run a C++ compiler.
        run(compiled, 4, "aot_eager", *(["eager"] if LONG else []), seconds=300)

    def test_outlived(self) -> None:
        run(outlived, 2)


if __name__ == "__main__":
    unittest.main()
