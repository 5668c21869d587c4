# SPDX-License-Identifier: MIT OR Apache-2.0
"""cpattn.torch over several processes, against the formula on the whole batch."""

from __future__ import annotations

import os
import random
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._python_dispatch
from dense import dense, error, gradients
from processes import run

import cpattn
from cpattn import Layout
from cpattn.torch import Context, check_ring

DOCUMENTS = [0, 5, 5, 6, 40, 41, 93]  # an empty one, and two of one token


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(
        dtype
    )


def compare(
    context: Context, cu_seqlens: list[int], heads: tuple[int, int, int, int], bound: float, **formula: Any
) -> None:
    """o, dq, dk, dv (and dsinks) of this rank's tokens against the formula."""
    hq, hk, dim, value_dim = heads
    n, sinks = cu_seqlens[-1], formula.get("sinks")
    whole = [
        draw(n, h, d, dtype=context.dtype, seed=s) for s, (h, d) in enumerate(((hq, dim), (hk, dim), (hk, value_dim)))
    ]
    d_o = draw(n, hq, value_dim, dtype=context.dtype, seed=9)
    batch = context.batch(cu_seqlens)
    mine = [batch.shard(x).requires_grad_() for x in whole]
    exact = [x.double().requires_grad_() for x in whole]
    if sinks is not None:
        mine.append(sinks.clone().requires_grad_())
        exact.append(sinks.double().requires_grad_())
        formula["sinks"] = exact[3]
    o = batch.attention(*mine)
    got = [o, *gradients(o, batch.shard(d_o), mine)]
    o = dense(*exact[:3], cu_seqlens, **formula)
    want = [batch.shard(x) for x in (o, *gradients(o, d_o, exact)[:3])]
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want):
        assert error(a, b) <= bound, f"{name} is off by {error(a, b):.1e} with {batch.plan.explain()}"
    if sinks is not None:
        total = got[4].clone()
        dist.all_reduce(total)
        assert error(total, gradients(dense(*exact[:3], cu_seqlens, **formula), d_o, exact)[3]) <= max(bound, 2e-6)


def refused(kind: type[Exception], words: str, call: Any, *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except kind as e:
        assert words in str(e), f"{e} does not say {words!r}"
    else:
        raise AssertionError(f"nothing refused: {words}")


def leave(context: Context) -> None:
    """Not before all ranks have joined, where nothing else made them meet."""
    dist.barrier()
    context.close()


def everything(rank: int, world: int) -> None:
    for check in (
        results,
        nodes,
        kinds,
        contexts,
        precision,
        strides,
        exchanges,
        gradcheck,
        log_sum_exp,
        shares,
        overlaps,
        subgroups,
        refusals,
        second_derivatives,
        disagreements,
        leaving,
        stays_failed,
    ):
        check(rank, world)
        dist.barrier()


def results(rank: int, world: int) -> None:
    f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16
    shape = (9, 3, 8, 8)
    for dtype, bound, more in (
        (f64, 1e-14, {}),
        (f64, 1e-14, {"ring": 4, "layout": Layout.ZIGZAG}),
        (f64, 1e-14, {"ulysses": 4}),
        (f64, 1e-14, {"ulysses": 2, "ring": 2, "layout": Layout.STRIPED, "layout_parameter": 3}),
        (f32, 1e-6, {"ulysses": 2, "ring": 2, "layout": Layout.ZIGZAG_PACK}),
        (
            f32,
            1e-6,
            {"ring": 4, "layout": Layout.BALANCED, "layout_parameter": 2, "circulate": cpattn.Circulate.QUERIES},
        ),
        (f32, 1e-6, {"ulysses": 2, "ring": 2, "circulate_forward": "queries"}),
        (bf16, 1e-2, {"ulysses": 2, "ring": 2}),
    ):
        context = Context(heads=9, kv_heads=3, head_dim=8, dtype=dtype, **more)
        compare(context, DOCUMENTS, shape, bound)
        compare(context, [0, 2], shape, bound)  # two ranks have no token
        context.close()
    context = Context(
        heads=4,
        kv_heads=2,
        head_dim=8,
        value_dim=6,
        window_left=9,
        softcap=3.0,
        sinks=True,
        dtype=f64,
        ulysses=2,
        ring=2,
    )
    compare(context, DOCUMENTS, (4, 2, 8, 6), 2e-14, window=10, softcap=3.0, sinks=draw(4, dtype=f32))
    compare(context, DOCUMENTS, (4, 2, 8, 6), 2e-14, window=10, softcap=3.0, sinks=draw(4, 3, dtype=f32))
    context.close()
    # Strides of any kind, as slices of one projection have them.
    context = Context(heads=9, kv_heads=3, head_dim=8, dtype=f64)
    batch = context.batch(DOCUMENTS)
    qkv = batch.shard(draw(93, 15, 8)).transpose(0, 1).contiguous().transpose(0, 1)
    q, k, v = qkv.split([9, 3, 3], dim=1)
    assert torch.equal(batch.attention(q, k, v), batch.attention(q.contiguous(), k.contiguous(), v.contiguous()))
    context.close()


def nodes(rank: int, world: int) -> None:
    """What torchrun tells of its nodes is the default; groups that lie in them unevenly are refused with the way out."""
    shape, pair = (9, 3, 8, 8), [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    three = dist.new_group([0, 1, 2])
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        context = Context(heads=9, kv_heads=3, head_dim=8, dtype=torch.float64, ring=4)
        told = "2 nodes of 2 ring ranks"
        assert told in context.batch(DOCUMENTS).plan.explain()
        compare(context, DOCUMENTS, shape, 1e-14)
        leave(context)
        for group, more in ((None, {"ranks_per_node": 0}), (pair, {})):
            context = Context(group, heads=9, kv_heads=3, head_dim=8, ring=dist.get_world_size(group), **more)  # type: ignore[arg-type]
            assert told not in context.batch(DOCUMENTS).plan.explain()
            leave(context)
        context = Context(heads=9, kv_heads=3, head_dim=8, dtype=torch.float64, ring=4, gather="together")
        assert told in context.batch(DOCUMENTS).plan.explain()
        compare(context, DOCUMENTS, shape, 1e-14)
        leave(context)
        if rank < 3:
            for words in (
                "node of size 1, expected a node of size 2",
                "LOCAL_WORLD_SIZE is 2",
                "give ranks_per_node, 0 if",
            ):
                refused(cpattn.InvalidArgument, words, Context, three, heads=9, head_dim=8)
        differing(rank)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def three_nodes(rank: int, world: int) -> None:
    """Nodes of torchrun that a mesh does not fit are refused with the way out."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for words in (
        "expected a multiple or a divisor of the 3 Ulysses ranks",
        "ranks_per_node is 2 from LOCAL_WORLD_SIZE: give ranks_per_node, 0",
    ):
        refused(cpattn.InvalidArgument, words, Context, heads=9, kv_heads=3, head_dim=8, ulysses=3, ring=2)


def differing(rank: int) -> None:
    """Ranks that are told different numbers are refused, all of them, with the same words and long before the timeout; the group
    is usable afterwards."""
    out, way = (
        "all ranks of the group need the same. Give ranks_per_node on all of them:",
        "or 0 if all links are alike",
    )
    environment, argument = "LOCAL_WORLD_SIZE", "ranks_per_node"
    divides = "a number that divides the ranks of each node"
    for told, given, found in (
        ("2233", None, f"{environment} 2 on ranks 0-1; {environment} 3 on ranks 2-3: {out} {divides}, {way}"),
        (
            "2442",
            None,
            f"{environment} 2 on ranks 0, 3; {environment} 4 on ranks 1-2: {out} 2, which divides all of these, {way}",
        ),
        (
            ["2", "", "two", "2"],
            None,
            f"{environment} 2 on ranks 0, 3; an invalid {environment} on ranks 1-2: {out} {divides}, {way}",
        ),
        (["-2", "2", "2", "2"], None, f"an invalid {environment} on rank 0; {environment} 2 on ranks 1-3: {out}"),
        (
            [None, "2", "2", "2"],
            None,
            f"neither {argument} nor {environment} on rank 0; {environment} 2 on ranks 1-3: {out} {divides}",
        ),
        ("2222", [2, 2, 2, 4], f"{argument} 2 on ranks 0-2; {argument} 4 on rank 3: {out} 2, which divides"),
        ("2222", [0, 2, 2, 2], f"{argument} 0 on rank 0; {argument} 2 on ranks 1-3: {out} {divides}"),
        ("2222", [-1, 2, 2, 2], f"an invalid {argument} on rank 0; {argument} 2 on ranks 1-3: {out}"),
        ("2222", [2, "two", True, None], f"{argument} 2 on rank 0; an invalid {argument} on ranks 1-3: {out}"),
        # A rank without the argument has torchrun's, even if the number is the same.
        ("2222", [2, ..., 2, 2], f"{argument} 2 on ranks 0, 2-3; {environment} 2 on rank 1: {out} 2"),
        # What all were given alike, and none can use.
        (
            ["two"] * 4,
            None,
            f"{environment} is 'two', a whole number of at least 1 is needed, or {argument}, 0 if all links",
        ),
        ("0000", None, f"{environment} is '0', a whole number of at least 1 is needed"),
        ("2222", [-1] * 4, f"{argument} is -1, at least 0 is needed"),
        ("2222", [3] * 4, f"{argument} is 3, expected a divisor of the 4 ranks"),
        ("2222", [1 << 70] * 4, f"{argument} is {1 << 70}, at most {(1 << 60) - 2} is needed"),
    ):
        os.environ.pop(environment, None)
        if told[rank] is not None:
            os.environ[environment] = str(told[rank])
        more = {} if given is None or given[rank] is ... else {argument: given[rank]}
        begin = time.monotonic()
        try:
            Context(heads=9, head_dim=8, timeout=60.0, **more)  # type: ignore[arg-type]
        except cpattn.InvalidArgument as error:
            said = str(error)
        else:
            raise AssertionError(f"nothing refused: {found}")
        assert found in said, f"{said} does not say {found}"
        assert time.monotonic() - begin < 30.0
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, said)
        assert set(of_all) == {said}, of_all
    os.environ[environment] = ["2", "2", "3", "3"][rank]
    context = Context(heads=9, kv_heads=3, head_dim=8, dtype=torch.float64, ring=4, ranks_per_node=2)
    assert "2 nodes of 2 ring ranks" in context.batch(DOCUMENTS).plan.explain()
    compare(context, DOCUMENTS, (9, 3, 8, 8), 1e-14)
    leave(context)


def kinds(rank: int, world: int) -> None:
    """Layers of several kinds over one batch: each is right, on the tokens of the batch. With balanced layouts, plans made one by
    one would give ranks other tokens."""
    total = DOCUMENTS[-1]
    for more in (
        {},
        {"ring": 4, "layout": "balanced", "layout_parameter": 4},
        {"ring": 2, "ulysses": 2, "layout": "striped", "layout_parameter": 3},
    ):
        context = Context(heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, **more)  # type: ignore[arg-type]
        batch = context.batch(DOCUMENTS)
        for (hq, hk, dim, value_dim), told, formula in (
            ((4, 2, 8, 8), {}, {}),
            ((4, 2, 8, 8), {"window_left": 4}, {"window": 5}),
            ((6, 1, 4, 6), {"softcap": 2.0, "window_left": 9}, {"softcap": 2.0, "window": 10}),
            ((4, 4, 16, 8), {"scale": 0.5}, {"scale": 0.5}),
            ((8, 2, 8, 8), {"sinks": draw(8, dtype=torch.float32)}, {"sinks": draw(8, dtype=torch.float32)}),
        ):
            whole = [draw(total, h, d, seed=s) for s, (h, d) in enumerate(((hq, dim), (hk, dim), (hk, value_dim)))]
            d_o = draw(total, hq, value_dim, seed=9)
            mine, exact = [batch.shard(x).requires_grad_() for x in whole], [x.requires_grad_() for x in whole]
            o = batch.attention(*mine, **told)
            want = dense(*exact, DOCUMENTS, **formula)
            for a, b in zip([o, *gradients(o, batch.shard(d_o), mine)], [want, *gradients(want, d_o, exact)]):
                assert error(a, batch.shard(b)) < 1e-12, (more, told)
        held = {plan.distribution for plan in (batch.plan, *batch._plans.values())}
        assert len(held) == 1 and len(batch._plans) == 5, "one distribution, a plan for each kind"
        refused(cpattn.InvalidArgument, "window_left is -1, at least 0", batch.attention, *mine, window_left=-1)
        leave(context)


def contexts(rank: int, world: int) -> None:
    """Two contexts of one group. Balanced layouts go by mask area: plans made one by one have equal counts of other tokens, and a
    run on the tensors of the other gives no error. Contexts have the tokens of the first, or are refused, or ask to be apart."""
    cu_seqlens, balanced = [0, 32, 64, 512], {"ring": 4, "layout": "balanced", "layout_parameter": 4}
    full = cpattn.Plan(cu_seqlens, 2, 8, world=4, **balanced)  # type: ignore[arg-type]
    fresh = cpattn.Plan(cu_seqlens, 2, 8, world=4, window_left=15, **balanced)  # type: ignore[arg-type]
    assert [full.share(r).q_tokens for r in range(4)] == [fresh.share(r).q_tokens for r in range(4)], "equal counts"
    assert (
        full.tokens(cpattn.Side.Q, rank) != fresh.tokens(cpattn.Side.Q, rank)
        and full.distribution != fresh.distribution
    )

    first = Context(heads=2, head_dim=8, dtype=torch.float64, **balanced)  # type: ignore[arg-type]
    windowed = Context(heads=2, head_dim=8, window_left=15, dtype=torch.float64, **balanced)  # type: ignore[arg-type]
    batch, other = first.batch(cu_seqlens), windowed.batch(cu_seqlens)
    assert (
        torch.equal(batch.tokens, other.tokens)
        and batch.plan.distribution == other.plan.distribution == full.distribution
    )
    whole = [draw(512, 2, 8, seed=s) for s in range(3)]
    want = dense(*whole, cu_seqlens, window=16)
    assert error(other.attention(*(batch.shard(x) for x in whole)), batch.shard(want)) < 1e-13
    # The words of both.
    for more, found in (
        ({"ring": 4, "layout": "zigzag"}, "options.layout is zigzag"),
        ({"ring": 4, "layout": "balanced", "layout_parameter": 2}, "options.layout is balanced(2)"),
        ({"ulysses": 2}, "options.ulysses is 2"),
    ):
        third = Context(heads=2, head_dim=8, **more)  # type: ignore[arg-type]
        refused(cpattn.InvalidArgument, found, third.batch, cu_seqlens)
        refused(
            cpattn.InvalidArgument,
            f"layout balanced(4), ulysses 1 x ring 4, distribution {full.distribution:016x}",
            third.batch,
            cu_seqlens,
        )
        leave(third)
    # Where no context could have it, it is not made.
    refused(
        cpattn.InvalidArgument,
        "ulysses is 3, expected a divisor of the world of 4",
        Context,
        heads=2,
        head_dim=8,
        ulysses=3,
    )
    apart = Context(heads=2, head_dim=8, dtype=torch.float64, ring=4, layout="zigzag", own_tokens=True)
    assert apart.batch(cu_seqlens).plan.distribution != full.distribution
    compare(apart, cu_seqlens, (2, 2, 8, 8), 1e-13)
    leave(apart)
    # What was decided stays while a context that follows it is open, also after the first has left.
    leave(first)
    second = Context(heads=4, head_dim=8, dtype=torch.float64)
    assert second.batch(cu_seqlens).plan.distribution == full.distribution
    leave(second)
    leave(windowed)
    alone = Context(heads=2, head_dim=8, dtype=torch.float64, window_left=15, **balanced)  # type: ignore[arg-type]
    assert alone.batch(cu_seqlens).plan.distribution == fresh.distribution
    leave(alone)


def precision(rank: int, world: int) -> None:
    """Under autocast q, k and v are cast; elsewhere another dtype is refused."""
    context = Context(heads=4, kv_heads=2, head_dim=8, ring=2, ulysses=2)
    batch = context.batch(DOCUMENTS)
    whole = [draw(93, h, 8, seed=s, dtype=torch.float32) for s, h in enumerate((4, 2, 2))]
    # What rotary embeddings leave under autocast.
    q, k, v = (batch.shard(x) for x in whole)
    v = v.bfloat16()
    refused(cpattn.InvalidArgument, "v.dtype is torch.bfloat16, torch.float32 is needed", batch.attention, q, k, v)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = batch.attention(*inputs)
    assert o.dtype == torch.bfloat16
    exact = [x.requires_grad_() for x in whole]
    want = dense(*exact, DOCUMENTS)
    d_o = draw(93, 4, 8, seed=9, dtype=torch.float32)
    got = [o, *gradients(o, batch.shard(d_o), inputs)]
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    for a, b in zip(got, [want, *gradients(want, d_o, exact)]):
        assert error(a, batch.shard(b)) < 1e-2
    leave(context)


def strides(rank: int, world: int) -> None:
    """Heads first, as Transformers has them, slices of one projection, expanded heads: nothing is copied by PyTorch, results and
    gradients are those of compact tensors, and gradients lie as their tensors do."""
    for more in (
        {"ring": 4},
        {"ring": 2, "ulysses": 2},
        {"ulysses": 4},
        {"ring": 4, "circulate": "queries"},
        {"ring": 4, "circulate_forward": "queries"},
    ):
        context = Context(heads=4, kv_heads=4, head_dim=8, **more)  # type: ignore[arg-type]
        batch = context.batch(DOCUMENTS)
        n = len(batch.tokens)
        qkv = [batch.shard(draw(93, 4, 8, dtype=torch.float32, seed=s)) for s in range(3)]
        d_o = batch.shard(draw(93, 4, 8, dtype=torch.float32, seed=9))
        heads_first = [x.transpose(0, 1).contiguous()[None] for x in qkv]
        fused = torch.cat(qkv, dim=1)
        expanded = [x[:, :1].expand(n, 4, 8) for x in qkv]
        d_o_heads_first = d_o.transpose(0, 1).contiguous().transpose(0, 1)
        for plain, made in (
            (qkv, [x[0].transpose(0, 1) for x in heads_first]),
            (qkv, list(fused.split(4, dim=1))),
            (qkv, [x.mT.contiguous().mT for x in qkv]),
            ([x.contiguous() for x in expanded], expanded),
        ):
            inputs = [[x.detach().requires_grad_() for x in those] for those in (plain, made)]
            with Copies() as copies:
                o = batch.attention(*inputs[1])
                got = [o, *gradients(o, d_o_heads_first, inputs[1])]
            assert copies.count == 0 or made[0].stride(-1) != 1 and n > 1, (more, copies.count)
            o = batch.attention(*inputs[0])
            for a, b in zip(got, [o, *gradients(o, d_o, inputs[0])]):
                assert torch.equal(a, b), more
            if n > 1 and made[0].stride(-1) == 1 and made is not expanded:
                assert got[1].stride() == torch.empty_like(inputs[1][0]).stride()
        leave(context)


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (
            torch.ops.aten.clone.default,
            torch.ops.aten.copy_.default,
            torch.ops.aten._to_copy.default,
        )
        return function(*args, **(kwargs or {}))


def exchanges(rank: int, world: int) -> None:
    """The two all-to-alls: whole sequences of some heads, and back; each is the gradient of the other."""
    context = Context(heads=9, kv_heads=3, head_dim=8, dtype=torch.float64, ulysses=4)
    batch, total = context.batch(DOCUMENTS), DOCUMENTS[-1]
    for heads, kv_heads in ((None, None), (6, None), (8, 2)):
        h, hk = heads or 9, kv_heads or heads or 3
        first, end = rank * h // 4, (rank + 1) * h // 4
        x, y = draw(total, h, 5), draw(total, hk, 5)
        of = {"heads": heads, "kv_heads": kv_heads}
        mine = batch.shard(x).requires_grad_()
        held = batch.to_heads(mine, **of)
        assert torch.equal(held, x[:, first:end]), "all tokens, in the batch's order"
        back = batch.to_tokens(held * 2, **of)
        assert torch.equal(back, 2 * mine)
        weight = draw(total, h, 5, seed=3)
        assert torch.equal(gradients(back, batch.shard(weight), [mine])[0], 2 * batch.shard(weight))
        # Heads first, and those that several ranks use.
        own = batch.shard(y).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        k = batch.to_heads(own, "k", **of)
        group = h // hk
        assert torch.equal(k, y[:, first // group : -(-end // group)])
        users = torch.tensor(
            [sum(r * h // 4 // group <= i < -(-((r + 1) * h // 4) // group) for r in range(4)) for i in range(hk)]
        )
        assert error(gradients(k, torch.ones_like(k), [own])[0], users[None, :, None].expand(len(own), hk, 5)) == 0
    refused(cpattn.InvalidArgument, "x.ndim is 2", batch.to_heads, torch.zeros(1, 2))
    refused(cpattn.InvalidArgument, "heads", batch.to_heads, batch.shard(draw(total, 7, 5)))
    refused(
        cpattn.InvalidArgument,
        "ulysses is 4, expected at most heads = 3",
        batch.to_heads,
        batch.shard(draw(total, 3, 5)),
        heads=3,
    )
    leave(context)
    context = Context(heads=4, head_dim=8, ring=2, ulysses=2)
    refused(cpattn.Unsupported, "kind other on a ring", context.batch(DOCUMENTS).to_heads, torch.zeros(1, 4, 5))
    leave(context)


class Whole(torch.autograd.Function):
    """Between a whole batch that every rank has and its shards, so that finite differences see one function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, batch: Any) -> torch.Tensor:
        ctx.batch = batch
        whole = mine.new_zeros(batch.cu_seqlens[-1], *mine.shape[1:])
        whole[batch.tokens] = mine
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.batch.shard(grad), None


def gradcheck(rank: int, world: int) -> None:
    """Finite differences in f64, over two processes."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank >= 2:
        return
    global Gather, Whole
    context = Context(groups[0], heads=2, kv_heads=1, head_dim=3, dtype=torch.float64, softcap=5.0, ring=2)
    batch = context.batch([0, 2, 5])
    reduce = dist.all_reduce
    dist.all_reduce = lambda x: reduce(x, group=groups[0])  # type: ignore[assignment]
    inputs = [draw(5, h, 3, seed=h).requires_grad_() for h in (2, 1, 1)]

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return Gather.apply(batch.attention(*(batch.shard(Whole.apply(x)) for x in inputs)), batch)

    def with_lse(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o, lse = batch.attention(*(batch.shard(Whole.apply(x)) for x in inputs), return_lse=True)
        return Gather.apply(o, batch), Gather.apply(lse.T, batch)

    try:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradcheck(with_lse, inputs)
        assert error(function(*inputs), dense(*inputs, [0, 2, 5], softcap=5.0)) < 1e-14
    finally:
        dist.all_reduce = reduce
    context.close()


def log_sum_exp(rank: int, world: int) -> None:
    """lse and its gradient alone, with sinks, and beside rows that attend to nothing, whose gradient may be anything."""
    context = Context(heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, ring=2, ulysses=2)
    for sinks, documents in ((None, [0, 24]), (draw(4), [0, 9, 24])):
        slices = [cpattn.Slice(0, 10, 0, 10, high=0), cpattn.Slice(14, 24, 2, 8)] if sinks is None else None
        batch = context.batch(documents, slices=slices)
        whole = [draw(24, heads, 8, seed=heads) for heads in (4, 2, 2)]
        mine, exact = [batch.shard(x).requires_grad_() for x in whole], [x.clone().requires_grad_() for x in whole]
        extra = [] if sinks is None else [sinks.float().requires_grad_()]
        o, lse, largest = batch.attention(*mine, *extra, return_lse=True, return_max_logit=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert not largest.requires_grad and largest.dtype == torch.float32
        assert lse.shape == (4, len(batch.tokens)) and lse.dtype == torch.float64
        place = torch.arange(24)
        allowed = (place[:, None] >= place) & ((place[:, None] < 9) == (place < 9))
        if sinks is None:
            allowed = (place[:, None] >= place) & (place[:, None] < 10)
            allowed[14:, 2:8] = True
        scores = torch.einsum("qhd,khd->hqk", exact[0], exact[1].repeat_interleave(2, 1)) / 8**0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        assert error(largest, scores.detach().amax((1, 2))) < 1e-7
        held = [x.double().detach().requires_grad_() for x in extra]
        all_scores = torch.cat([scores, *(x[:, None, None].expand(4, 24, 1) for x in held)], dim=2)
        want = torch.logsumexp(all_scores, 2)
        assert error(lse.nan_to_num(neginf=0), want[:, batch.tokens].nan_to_num(neginf=0)) < 1e-14
        lost = ~allowed.any(1)
        assert torch.equal(lse[0] == float("-inf"), lost[batch.tokens] & (sinks is None))
        # Of lse alone: d_lse is 2 lse, which is -inf where lse is.
        got = torch.autograd.grad((lse * lse).sum(), mine[:2] + extra)
        finite = want if sinks is not None else want[:, ~lost]
        expected = torch.autograd.grad((finite * finite).sum(), exact[:2] + held)
        for name, a, b in zip(("dq", "dk"), got, expected):
            assert torch.isfinite(a).all() and error(a, batch.shard(b.nan_to_num())) < 1e-13, (name, sinks is None)
        if extra:
            dsinks = got[2].clone()
            dist.all_reduce(dsinks)
            assert error(dsinks, expected[2]) < 1e-6
    # One token, so that the other ranks have none: its lse is its score.
    batch = context.batch([0, 1])
    whole = [draw(1, heads, 8, seed=heads) for heads in (4, 2, 2)]
    mine = [batch.shard(x).requires_grad_() for x in whole]
    _, lse = batch.attention(*mine, return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), mine[:2])
    assert error(dq, batch.shard(whole[1].repeat_interleave(2, 1)) / 8**0.5) < 1e-14
    assert error(dk, batch.shard(whole[0].unflatten(1, (2, 2)).sum(2)) / 8**0.5) < 1e-14
    refused(cpattn.InvalidArgument, "return_lse is 'yes'", batch.attention, *mine, return_lse="yes")
    leave(context)


def shares(rank: int, world: int) -> None:
    """shard, positions, labels and shift of each rank, from its own tokens alone."""
    generator = random.Random(4)
    for layout, parameter in ((Layout.ZIGZAG, 0), (Layout.CONTIGUOUS, 0), (Layout.STRIPED, 2)):
        context = Context(heads=2, head_dim=4, ring=2, ulysses=2, layout=layout, layout_parameter=parameter)
        for _ in range(6):
            lengths = [generator.choice([0, 1, 2, 9, 30]) for _ in range(generator.randrange(1, 9))]
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
            total = int(cu_seqlens[-1])
            batch = context.batch(cu_seqlens)
            held = [torch.empty(0)] * world
            dist.all_gather_object(held, batch.tokens)
            assert torch.cat(held).sort().values.tolist() == list(range(total)), "every token is held once"
            place = torch.cat([torch.arange(n) for n in lengths])
            end = torch.cat([torch.full((n,), n) for n in lengths])
            assert torch.equal(batch.positions, place[batch.tokens])
            ids = torch.arange(total) * 7 + 1
            assert torch.equal(batch.shard(ids), ids[batch.tokens])
            for by, rows, fill in (
                (1, ids, -100),
                (-1, ids.to(torch.uint8), 255),
                (3, torch.stack([ids, -ids], dim=1).float(), 0.5),
                (2, torch.stack([ids, -ids] * 6, dim=1).view(-1, 2, 3, 2).to(torch.complex128).conj(), 1 - 2j),
                (1, torch.stack([ids, -ids]).t().half(), 0),
                (-2, ids % 3 == 0, True),
                (1, ids[:, None][:, :0], 0),
            ):
                at = (place + by).clamp(min=0)
                ok = (place + by >= 0) & (at < end)
                want = torch.full_like(rows, fill)
                want[ok] = rows[(torch.arange(total) + by)[ok]]
                got = batch.shift(batch.shard(rows), by, fill)
                assert torch.equal(got, want[batch.tokens]), (layout, lengths, by)
            labels = batch.labels(batch.shard(ids))
            assert torch.equal(labels, torch.where(place + 1 < end, ids + 7, -100)[batch.tokens])
        context.close()
    context = Context(heads=2, head_dim=4, plans=2)
    first, second = context.batch([0, 3]), context.batch([0, 4])
    assert context.batch(torch.tensor([0, 3])) is first, "batches are cached by cu_seqlens"
    context.batch([0, 5])
    assert context.batch([0, 3]) is first and context.batch([0, 4]) is not second, "the least recently used one goes"
    context.close()


def overlaps(rank: int, world: int) -> None:
    """The user's collectives while a run is under way, and messages larger than those that are joined."""
    context = Context(heads=8, kv_heads=8, head_dim=64, ring=2, ulysses=2)
    cu_seqlens = [0, 700, 2000]
    batch = context.batch(cu_seqlens)
    q, k, v = (batch.shard(draw(2000, 8, 64, seed=s, dtype=torch.float32)) for s in range(3))
    want = batch.attention(q, k, v)
    assert (
        error(want, batch.shard(dense(*(draw(2000, 8, 64, seed=s, dtype=torch.float32) for s in range(3)), cu_seqlens)))
        < 1e-6
    )
    for _ in range(3):
        totals = [torch.full((1000,), float(rank)) for _ in range(8)]
        works = [dist.all_reduce(total, async_op=True) for total in totals]
        assert torch.equal(batch.attention(q, k, v), want), "a run repeats bit for bit"
        for work, total in zip(works, totals):
            work.wait()
            assert total.eq(sum(range(world))).all()
    context.close()


def subgroups(rank: int, world: int) -> None:
    """Two groups of two ranks each, with batches of their own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    context = Context(groups[rank % 2], heads=3, kv_heads=3, head_dim=8, dtype=torch.float64)
    assert (context.world, context.number) == (2, rank // 2)
    compare(context, [0, 10 + rank % 2, 40], (3, 3, 8, 8), 1e-14)
    context.close()
    refused(
        cpattn.InvalidArgument,
        f"process {rank} is not a member of group",
        Context,
        groups[1 - rank % 2],
        heads=2,
        head_dim=4,
    )


def refusals(rank: int, world: int) -> None:
    """Messages name the argument of the caller, the value found and the value needed."""
    shape = {"heads": 2, "head_dim": 4}
    refused(cpattn.Unsupported, "device is meta, which has no memory", Context, **shape, device="meta")
    refused(
        cpattn.Unsupported,
        "device is xpu, cpu or cuda is needed with kernels='cpattn'",
        Context,
        **shape,
        device="xpu",
        kernels="cpattn",
    )
    refused(cpattn.InvalidArgument, "workers is 2", Context, **shape, device="cuda", kernels="cpattn", workers=2)
    refused(
        cpattn.InvalidArgument,
        "workers is 2, 1 is needed with kernels='math'",
        Context,
        **shape,
        kernels="math",
        workers=2,
    )
    refused(cpattn.InvalidArgument, "kernels is 'maths', ", Context, **shape, kernels="maths")
    refused(cpattn.InvalidArgument, "kernels is 3, 'cpattn', ", Context, **shape, kernels=3)
    refused(
        cpattn.InvalidArgument,
        "communicator is 'own', 'torch' or None is needed",
        Context,
        **shape,
        kernels="math",
        communicator="own",
    )
    # No NCCL in this library, or no driver. Without NCCL rank 0 says so, and the others that it did.
    refused(cpattn.Unsupported, "cpattn_nccl_", Context, **shape, device="cuda", kernels="cpattn")
    refused(cpattn.InvalidArgument, "dtype is torch.int32", Context, **shape, dtype=torch.int32)
    refused(cpattn.InvalidArgument, "timeout is 0", Context, **shape, timeout=0)
    refused(cpattn.InvalidArgument, "heads is 0", Context, **{**shape, "heads": 0})
    refused(
        cpattn.InvalidArgument,
        "nonsense is no argument of Context; its arguments are alibi_slopes, circulate, circulate_forward, communicator, ",
        Context,
        **shape,
        nonsense=1,
    )
    # Found before anything waits for another rank.
    for words, options in (
        ("heads is 2.5, a whole number is needed", {"heads": 2.5}),
        ("kv_heads is 0, at least 1 is needed", {"kv_heads": 0}),
        ("layout is 'zigzap', one of 'auto', ", {"layout": "zigzap"}),
        ("plans is 0, at least 1 is needed", {"plans": 0}),
        ("plans is -3, at least 1 is needed", {"plans": -3}),
        ("timeout is True, a finite number is needed", {"timeout": True}),
        ("timeout is nan, a finite number is needed", {"timeout": float("nan")}),
        ("timeout is None, a finite number is needed", {"timeout": None}),
        ("timeout is '5', a finite number is needed", {"timeout": "5"}),
        ("timeout is 1e+300 seconds, 0.001 to 1e9 seconds are needed", {"timeout": 1e300}),
        ("workers is 2.5, a whole number is needed", {"workers": 2.5}),
        ("device is 'gpu', a device of PyTorch is needed", {"device": "gpu"}),
        ("dtype is 'f32', one of torch.float16, ", {"dtype": "f32"}),
        (
            f"group is 'world', a process group, None or ascending global ranks below {world} are needed",
            {"group": "world"},
        ),
    ):
        refused(cpattn.InvalidArgument, words, Context, **{**shape, **options})
    refused(cpattn.InvalidArgument, "bytes is 2.5, a whole number is needed", check_ring, bytes=2.5)
    for words, mesh in (
        ("ulysses 2 x ring 1 uses 2 of the group's 4 ranks", {"ulysses": 2, "ring": 1}),
        ("ulysses is 7, expected a divisor of the world of 4", {"ulysses": 7}),
        ("ring is 3, expected a divisor", {"ring": 3}),
        ("passes is 3", {"passes": 3, "ring": 4}),
    ):
        begun = time.monotonic()
        refused(cpattn.InvalidArgument, words, Context, **shape, **mesh)
        assert time.monotonic() - begun < 60, "no rank waits for its timeout of 300 s"
    context = Context(**shape, kv_heads=1, ring=4)
    refused(cpattn.InvalidArgument, "cu_seqlens", context.batch, [0, 8, 5])
    batch = context.batch([0, 16])
    q, k, v = (torch.randn(4, h, 4) for h in (2, 1, 1))
    for words, args in (
        ("q.dtype is torch.float64, torch.float32 is needed", (q.double(), k, v)),
        ("v.dtype is torch.float16", (q, k, v.half())),
        ("q.device is meta", (q.to("meta"), k, v)),
        ("v is None, a tensor is needed", (q, k, None)),
        ("sinks is 1.5, a tensor is needed", (q, k, v, 1.5)),
        ("sinks.device is meta", (q, k, v, torch.zeros(2, device="meta"))),
        ("q has the layout torch.sparse_coo, torch.strided is needed", (q.to_sparse(), k, v)),
        ("v is a nested tensor, torch.strided is needed", (q, k, torch.nested.nested_tensor([v], layout=torch.jagged))),
        ("q.tokens", (torch.randn(16, 2, 4), k, v)),
        ("v.heads", (q, q, v)),
        ("heads", (torch.randn(4, 3, 4), q, q)),
        ("v.ndim", (q, k, v[:, 0])),
        ("sinks", (q, k, v, torch.zeros(3))),
    ):
        refused(cpattn.InvalidArgument, words, batch.attention, *args)
    refused(cpattn.InvalidArgument, "whole is [1], a tensor is needed", batch.shard, [1])
    refused(cpattn.InvalidArgument, "whole has the shape (15,), (16, ...) is needed", batch.shard, torch.zeros(15))
    refused(cpattn.InvalidArgument, "ids has the shape (16,), (4, ...) is needed", batch.labels, torch.zeros(16))
    refused(cpattn.InvalidArgument, "ids has the layout torch.sparse_coo", batch.labels, torch.zeros(4).to_sparse())
    for by, words in (
        (1.5, "by is 1.5, a whole number"),
        (float("nan"), "by is nan, a whole number"),
        (None, "by is None, a whole number"),
        (2**70, "by is 1180591620717411303424, at most 2147483648"),
        (-(2**70), "by is -1180591620717411303424, at least -2147483648"),
    ):
        refused(cpattn.InvalidArgument, words, batch.shift, torch.zeros(4), by, 0)
    for fill, dtype in (
        (float("nan"), torch.int64), (1.5, torch.int64), (256, torch.uint8), (2, torch.bool), (None, torch.int64),
        ("x", torch.float32), (None, torch.float32), (1e6, torch.float16), (2**70, torch.int64), (1j, torch.float64),
    ):  # fmt: skip
        words = f"fill is {fill!r}, which {dtype} cannot represent"
        refused(cpattn.InvalidArgument, words, batch.shift, torch.zeros(4, dtype=dtype), 1, fill)
    assert batch.shift(torch.zeros(4), 16, 0.5).tolist() == [0.5] * 4, "no row lies that far on"
    assert batch.shift(torch.zeros(4, dtype=torch.bool), -(2**31), True).all()
    refused(cpattn.InvalidArgument, "cu_seqlens is tensor", context.batch, torch.zeros(2).to_sparse())
    batch.attention(q, k, v)  # refusals touched nothing
    leave(context)


def second_derivatives(rank: int, world: int) -> None:
    """Refused where they would be used, also where the first derivative starts from a constant; never taken for zero."""
    context = Context(heads=2, head_dim=4, sinks=True, ring=4)
    batch, (q, k, v) = context.batch([0, 16]), (torch.randn(4, 2, 4, requires_grad=True) for _ in range(3))
    sinks = torch.zeros(2, requires_grad=True)
    for weight in (torch.ones(4, 2, 4), torch.ones(4, 2, 4, requires_grad=True)):
        loss = (weight * batch.attention(q, k, v, sinks)).sum()
        dq, dk, dv, dsinks = torch.autograd.grad(loss, (q, k, v, sinks), create_graph=True)
        for x in (dq, dk, dv, dsinks):
            refused(cpattn.Unsupported, "attention is differentiable once", (x.sum() + q.sum()).backward)
        again = torch.autograd.grad((batch.attention(q, k, v, sinks) * weight).sum(), (q, k, v, sinks))
        for x, y in zip((dq, dk, dv, dsinks), again):
            assert torch.equal(x.detach(), y) and not y.requires_grad
    leave(context)


def disagreements(rank: int, world: int) -> None:
    """Ranks with different plans: all of them have the error, and may go on."""
    context = Context(heads=2, head_dim=4, ring=4, dtype=torch.float64)
    odd = context.batch([0, 7, 16] if rank == 3 else [0, 8, 16])
    q = torch.randn(4, 2, 4, dtype=torch.float64)
    for _ in range(2):
        refused(cpattn.Disagreement, "rank", odd.attention, q, q, q)
        refused(cpattn.Disagreement, "shift by 1", odd.labels, torch.zeros(4))
        compare(context, DOCUMENTS, (2, 2, 4, 4), 1e-14)
    even = context.batch([0, 16])
    for dtype in (torch.int64, torch.float32):  # as many bytes as int32, or not
        refused(cpattn.Disagreement, "", even.shift, torch.zeros(4, dtype=torch.int32 if rank == 1 else dtype), 1, 0)
    if rank == 2:
        refused(cpattn.Disagreement, "", even.labels, torch.zeros(4))
    else:
        refused(cpattn.Disagreement, "", even.attention, q, q, q)
    context.close()


def leaving(rank: int, world: int) -> None:
    """A rank that closes its context while others need it: they have an error at once, but for a message that gloo took
    just then: that one fails at the deadline."""
    context = Context(heads=2, head_dim=4, ring=4, timeout=20.0)
    batch = context.batch([0, 16])
    q = torch.randn(4, 2, 4)
    batch.attention(q, q, q)
    began = time.monotonic()
    if rank == 2:
        context.close()
        refused(cpattn.InvalidHandle, "the context is closed", batch.labels, torch.zeros(4))
    else:
        refused(cpattn.PeerError, "rank", batch.attention, q, q, q)
    assert time.monotonic() - began < 60
    context.close()


def stays_failed(rank: int, world: int) -> None:
    """An engine that raises on one rank: that rank raises it, the others have an error at once, and the user's group
    still works, also for a new context."""
    context = Context(heads=2, head_dim=4, ring=4, timeout=60.0)
    batch = context.batch([0, 16])
    q = torch.randn(4, 2, 4)
    batch.attention(q, q, q)
    dist.barrier()
    if rank == 1:
        context.transport.engine.post = broken  # type: ignore[method-assign]
        refused(ZeroDivisionError, "by zero", batch.attention, q, q, q)
    else:
        refused(cpattn.PeerError, "", batch.attention, q, q, q)
    for _ in range(2):
        refused(cpattn.PeerError, "", batch.attention, q, q, q)
        refused(cpattn.PeerError, "rank 1", batch.labels, torch.zeros(4))
        refused(cpattn.PeerError, "", context.rank.poll)
    context.close()
    closed = "the context is closed"
    refused(cpattn.InvalidHandle, closed, batch.attention, q, q, q)
    refused(cpattn.InvalidHandle, closed, batch.labels, torch.zeros(4))
    refused(cpattn.InvalidHandle, closed, context.batch, [0, 16])
    refused(cpattn.InvalidHandle, closed, context.record)
    refused(cpattn.InvalidHandle, closed, context.trace)
    refused(cpattn.InvalidHandle, "this rank is closed", context.rank.poll)
    context.close()
    context = Context(heads=2, head_dim=4, dtype=torch.float64)
    compare(context, DOCUMENTS, (2, 2, 4, 4), 1e-14)
    context.close()


def broken(*args: Any) -> None:
    raise ZeroDivisionError("by zero")


def alone(rank: int, world: int) -> None:
    context = Context(heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    compare(context, DOCUMENTS, (4, 2, 8, 8), 1e-14)
    batch = context.batch([0, 3])
    assert batch.labels(torch.tensor([4, 5, 6])).tolist() == [5, 6, -100]
    for dtype in (torch.uint8, torch.bool):
        refused(cpattn.InvalidArgument, f"ignore is -100, which {dtype}", batch.labels, torch.ones(3, dtype=dtype))
    assert batch.shift(torch.tensor([1, 2, 3], dtype=torch.uint8), 1, 255).tolist() == [2, 3, 255]
    for numbers in ([0, 1.7, 3], torch.tensor([0, 1.7, 3.2])):
        refused(cpattn.InvalidArgument, "a sequence of whole numbers is needed", context.batch, numbers)
    for timeout in (float("inf"), 1e-9, float("nan")):
        refused(
            cpattn.InvalidArgument, f"timeout is {timeout}", lambda t: Context(heads=1, head_dim=4, timeout=t), timeout
        )
    context.close()


class Processes(unittest.TestCase):
    def test_four(self) -> None:
        run(everything, 4, seconds=400)

    def test_six(self) -> None:
        run(three_nodes, 6)

    def test_one(self) -> None:
        run(alone, 1)

    def test_no_process_group(self) -> None:
        with self.assertRaisesRegex(cpattn.InvalidArgument, "init_process_group"):
            Context(heads=2, head_dim=4)


if __name__ == "__main__":
    unittest.main()
