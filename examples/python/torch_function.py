# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context-parallel attention as a torch.autograd.Function, and its gradients checked by finite differences in f64.

    capi/build && PYTHONPATH=python python3 examples/python/torch_function.py

The function takes the whole batch and shards it over ranks that are threads, so that one process can check it. In a
training job each process has a rank of its own and passes its own tokens: the two calls in the middle are all it needs.
"""

import argparse
import sys

import cpattn

try:
    import torch
except ImportError:
    print("skipped: PyTorch is not installed")
    sys.exit(0)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, ranks):
        q, k, v = (x.detach().contiguous() for x in (q, k, v))
        o = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        ctx.kept = [None] * len(ranks)

        def job(number, rank):
            tq, tk = (list(plan.tokens(side, number)) for side in cpattn.Side)
            mine = {"q": q[tq], "k": k[tk], "v": v[tk], "o": torch.empty(len(tq), *o.shape[1:], dtype=o.dtype)}
            mine["lse"] = torch.empty(q.shape[1], len(tq), dtype=accumulator)
            rank.forward(plan, **mine)
            plan.unshard(cpattn.Side.Q, number, mine["o"], o)
            ctx.kept[number] = mine

        cpattn.on_all(ranks, job)
        ctx.plan, ctx.ranks, ctx.shapes = plan, ranks, (q.shape, k.shape, v.shape)
        return o

    @staticmethod
    def backward(ctx, d_o):
        plan, d_o = ctx.plan, d_o.detach().contiguous()
        dq, dk, dv = (torch.empty(s, dtype=d_o.dtype) for s in ctx.shapes)

        def job(number, rank):
            mine = ctx.kept[number]
            grads = {"d" + name: torch.empty_like(mine[name]) for name in "qkv"}
            rank.backward(plan, d_o=d_o[list(plan.tokens(cpattn.Side.Q, number))], **mine, **grads)
            plan.unshard(cpattn.Side.Q, number, grads["dq"], dq)
            plan.unshard(cpattn.Side.K, number, grads["dk"], dk)
            plan.unshard(cpattn.Side.K, number, grads["dv"], dv)

        cpattn.on_all(ctx.ranks, job)
        return dq, dk, dv, None, None


def inputs(dtype, tokens, heads, kv_heads, dim, seed):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, h, dim, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def check_gradients():
    documents, heads, kv_heads, dim = [0, 5, 6, 13], 4, 2, 3
    plan = cpattn.Plan(
        documents,
        heads,
        dim,
        kv_heads=kv_heads,
        dtype=cpattn.Dtype.F64,
        softcap=5.0,
        world=4,
        ulysses=2,
        ring=2,
        layout=cpattn.Layout.ZIGZAG,
    )
    ranks = cpattn.local_group(4)
    q, k, v = inputs(torch.float64, documents[-1], heads, kv_heads, dim, 1)
    assert torch.autograd.gradcheck(lambda q, k, v: Attention.apply(q, k, v, plan, ranks), (q, k, v))
    print("f64 gradcheck passes")


def check_bf16():
    """bf16, which NumPy has no type for, against PyTorch's own softmax in f64."""
    tokens, heads, dim = 96, 4, 32
    plan = cpattn.Plan([0, tokens], heads, dim, dtype=cpattn.Dtype.BF16, world=2)
    q, k, v = inputs(torch.bfloat16, tokens, heads, heads, dim, 2)
    o = Attention.apply(q, k, v, plan, cpattn.local_group(2))
    o.float().square().sum().backward()
    grads = [x.grad.double() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    s = torch.einsum("qhd,khd->hqk", wide[0], wide[1]) * dim**-0.5
    s = s.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    exact = torch.einsum("hqk,khd->qhd", s.softmax(-1), wide[2])
    exact.square().sum().backward()
    for name, got, want in zip(("o", "dq", "dk", "dv"), [o.double()] + grads, [exact] + [x.grad for x in wide]):
        error = ((got - want).square().mean() / want.square().mean()).sqrt().item()
        print(f"bf16 {name:2} relative RMS error {error:.1e}")
        assert error < 1e-2, f"{name} is off by {error}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    check_gradients()
    check_bf16()
    print("ok")
