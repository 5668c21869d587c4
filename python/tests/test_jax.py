# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention of JAX arrays: values and gradients against the formula in f64, over devices of one process as ranks, and refusals."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense import allowed_by, dense, error, gradients

import cpattn

ROOT = Path(__file__).resolve().parents[2]
if not importlib.util.find_spec("jax"):
    raise unittest.SkipTest("no JAX here")

# Read when JAX makes its devices. Machine code that is not optimised takes a fifth less time in all.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cpattn.jax
from cpattn.jax import calls

ENDS = [0, 13, 13, 14, 50]
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 16, 8
BOUNDS = {"float16": 2e-3, "bfloat16": 1.2e-2, "float32": 1e-6, "float64": 1e-14}


def mesh(ranks: int, replicas: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: ranks * replicas])
    return Mesh(devices, ("cp",)) if replicas == 1 else Mesh(devices.reshape(replicas, ranks), ("dp", "cp"))


def context(ranks: int, over: Mesh | None = None, **options: Any) -> cpattn.jax.Context:
    where: Any = () if ranks == 1 else (over or mesh(ranks), "cp")
    kind: Any = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "timeout": 20, **options}
    return cpattn.jax.Context(*where, **kind)


def tensors(tokens: int = ENDS[-1], seed: int = 1) -> list[Any]:
    """q, k, v, sinks and d_o."""
    random = np.random.default_rng(seed)
    shapes = [
        (tokens, HEADS, DIM),
        (tokens, KV_HEADS, DIM),
        (tokens, KV_HEADS, VALUE_DIM),
        (HEADS,),
        (tokens, HEADS, VALUE_DIM),
    ]
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def whole(on: cpattn.jax.Context, ends: Any = ENDS, rows: int | None = None, checked: bool = True, **told: Any) -> Any:
    """Attention of a whole batch over the ranks of a context."""
    batch = on.batch(ends, rows)

    def attend(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        return on.attention(q, k, v, ends, *sinks, **told)

    def run(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        on_ranks: Any = attend
        if on.axis:
            shards, each = P("cp"), (P(),) * len(sinks)
            specs = (shards, shards, shards, *each)
            on_ranks = jax.shard_map(attend, mesh=mesh(on.world), in_specs=specs, out_specs=shards, check_vma=checked)
        return batch.unshard(on_ranks(batch.shard(q), batch.shard(k), batch.shard(v), *sinks))

    return run


def wanted(inputs: list[Any], d_o: Any, ends: list[int] = ENDS, **how: Any) -> list[Any]:
    """o and the gradients, by the formula."""
    given = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in inputs]
    o = dense(*given[:3], ends, sinks=given[3] if len(given) > 3 else None, **how)
    return [o.detach(), *gradients(o, torch.tensor(np.asarray(d_o, np.float64)), given)]


class Values(unittest.TestCase):
    def close(self, got: Any, want: list[Any], bound: float) -> None:
        for at, (mine, exact) in enumerate(zip(got, want, strict=True)):
            self.assertLess(error(torch.tensor(np.asarray(mine, np.float64)), exact), bound, at)

    def check(self, function: Any, inputs: list[Any], d_o: Any, bound: float, **how: Any) -> None:
        o, back = jax.vjp(jax.jit(function), *inputs)
        self.assertEqual(o.dtype, inputs[0].dtype)
        self.close([o, *back(jnp.asarray(d_o, o.dtype))], wanted(inputs, d_o, **how), bound)

    def test_ranks(self) -> None:
        q, k, v, sinks, d_o = tensors()
        striped = {"ulysses": 2, "layout": "striped", "layout_parameter": 3}
        cases = ((1, True, {}), (2, False, {"ulysses": 2}), (4, True, {"layout": "zigzag_pack"}), (4, False, striped))
        for ranks, checked, options in cases:
            with self.subTest(ranks=ranks, checked=checked, **options):
                attend = whole(context(ranks, **options), checked=checked, window_left=7, softcap=3.0)
                self.check(attend, [q, k, v, sinks], d_o, 2e-6, window=8, softcap=3.0)

    def test_kinds_of_layers_and_types(self) -> None:
        *qkv, _, d_o = tensors()
        on = context(4)
        for dtype in BOUNDS:
            with self.subTest(dtype), jax.enable_x64(dtype == "float64"):
                inputs = [jnp.asarray(x, dtype) for x in qkv]
                self.check(whole(on), inputs, np.asarray(jnp.asarray(d_o, dtype), np.float64), BOUNDS[dtype])
        # Other heads than the context was made with, on the same tokens.
        one = [x[:, :1] for x in (*qkv, d_o)]
        self.check(whole(on, scale=0.3), one[:3], one[3], 1e-6, scale=0.3)

    def test_lse(self) -> None:
        """lse and its gradient, alone and beside that of o, with sinks of each number: against the formula."""
        q, k, v, one, d_o = tensors()
        three = np.random.default_rng(5).standard_normal((HEADS, 3), np.float32)
        d_lse = np.random.default_rng(6).standard_normal((HEADS, ENDS[-1]), np.float32)
        place = np.arange(ENDS[-1])
        document = np.repeat(np.arange(4), np.diff(ENDS))
        allowed = torch.tensor((document[:, None] == document) & (place[:, None] >= place))
        for ranks, sinks in ((1, None), (4, None), (2, one), (4, three)):
            on = context(ranks)
            batch, given = on.batch(ENDS), [q, k, v, *(() if sinks is None else (sinks,))]

            def attend(*x: Any, on: Any = on) -> Any:
                return on.attention(*x[:3], ENDS, *x[3:], return_lse=True)

            run: Any = attend
            if on.axis:
                specs = (P("cp"),) * 3 + (P(),) * (len(given) - 3)
                run = jax.shard_map(attend, mesh=mesh(ranks), in_specs=specs, out_specs=(P("cp"), P(None, "cp")))

            def whole_batch(*x: Any, run: Any = run, batch: Any = batch) -> Any:
                o, lse = run(*map(batch.shard, x[:3]), *x[3:])
                return batch.unshard(o), batch.unshard(lse.T).T

            (o, lse), back = jax.vjp(jax.jit(whole_batch), *given)
            exact = [torch.tensor(x).double().requires_grad_() for x in given]
            keys = exact[1].repeat_interleave(HEADS // KV_HEADS, dim=1)
            scores = torch.einsum("qhd,khd->hqk", exact[0], keys) * DIM**-0.5
            scores = scores.masked_fill(~allowed, -torch.inf)
            if sinks is not None:
                more = exact[3].reshape(HEADS, 1, -1).expand(-1, ENDS[-1], -1)
                scores = torch.cat([scores, more], dim=2)
            values = exact[2].repeat_interleave(HEADS // KV_HEADS, dim=1)
            want_o = torch.einsum("hqk,khd->qhd", scores.softmax(2)[:, :, : ENDS[-1]], values)
            want_lse = scores.logsumexp(2)
            self.assertEqual((lse.dtype, lse.shape), (np.float32, (HEADS, ENDS[-1])))
            self.close([o, lse], [want_o.detach(), want_lse.detach()], 2e-6)
            for of_o in (0.0, 1.0):
                want = torch.autograd.grad(
                    [want_o, want_lse],
                    exact,
                    [torch.tensor(of_o * d_o).double(), torch.tensor(d_lse).double()],
                    retain_graph=True,
                )
                self.close(back((jnp.asarray(of_o * d_o), jnp.asarray(d_lse))), [*want], 3e-6)

    def test_eagerly(self) -> None:
        *qkv, _, d_o = tensors()
        on = context(2)
        for disabled in (False, True):
            with jax.disable_jit(disabled):
                o, back = jax.vjp(whole(on), *qkv)
                self.close([o, *back(jnp.asarray(d_o))], wanted(qkv, d_o), 1e-6)

    def test_alibi(self) -> None:
        *qkv, _, d_o = tensors()
        results = []
        for ranks in (1, 4):
            o, back = jax.vjp(jax.jit(whole(context(ranks, alibi_slopes=[0.5, 0.25, 0.1, 0.0]))), *qkv)
            results.append([o, *back(jnp.asarray(d_o))])
        self.close(results[1], [torch.tensor(np.asarray(x)).double() for x in results[0]], 1e-6)
        # Slopes of each document, of which some are those of the context above.
        rows = [[0.5, 0.25, 0.1, 0.0]] * (len(ENDS) - 1)
        for at, same in ((None, True), (0, False)):
            given = [[2.0] * HEADS if i == at else row for i, row in enumerate(rows)]
            o = whole(context(4), alibi_slopes=given)(*qkv)
            last = slice(ENDS[-2], None)  # a document whose slopes are not changed
            self.close([o[last]], [torch.tensor(np.asarray(results[0][0])).double()[last]], 1e-6)
            self.assertEqual(error(torch.tensor(np.asarray(o)), torch.tensor(np.asarray(results[0][0]))) < 1e-5, same)
        with self.assertRaisesRegex(cpattn.InvalidArgument, "alibi_slopes has a row for each of"):
            context(1, alibi_slopes=rows)
        plain = whole(context(1))(*qkv)
        self.assertGreater(error(torch.tensor(np.asarray(plain)), torch.tensor(np.asarray(results[0][0]))), 1e-2)

    def test_documents_are_data(self) -> None:
        """One compilation for several packings, with rows and documents to spare."""
        on, rows = context(4), 32
        spec = P("cp")
        attend = jax.jit(jax.shard_map(on.attention, mesh=mesh(4), in_specs=(spec, spec, spec, P()), out_specs=spec))
        for ends in ([0, 40, 90, 90, 90], [0, 5, 6, 70, 71], [0, 0, 0, 0, 3]):
            batch = on.batch(ends, rows)
            q, k, v, _, _ = tensors(ends[-1])
            o = attend(batch.shard(q, np.nan), batch.shard(k, np.nan), batch.shard(v, np.nan), batch.cu_seqlens)
            self.assertEqual(o.shape, (4 * rows, HEADS, VALUE_DIM))
            self.assertFalse(np.asarray(o)[batch.tokens < 0].any())
            self.close([batch.unshard(o)], wanted([q, k, v], tensors(ends[-1])[-1], ends)[:1], 1e-6)
        self.assertEqual(attend._cache_size(), 1)

    def test_slices(self) -> None:
        """Slices as data, one compilation for several of them, and as constants, with gradients, windows and a backward."""
        on, spec, n = context(4), P("cp"), 60
        cases = [
            cpattn.slices.shared_prefix(20, [11, 29]),
            cpattn.slices.tree([None, 0, 0], [30, 20, 10]),
            cpattn.slices.spans([0, n], [(3, 9), (30, 58)]),
            cpattn.slices.prefix_lm([0, 40, n], [17, 5]),
        ]
        longest = max(map(len, cases))
        for window in (None, 6):

            def attend(q: Any, k: Any, v: Any, packing: Any, window: Any = window) -> Any:
                return on.attention(q, k, v, packing, window_left=window)

            run = jax.jit(jax.shard_map(attend, mesh=mesh(4), in_specs=(spec, spec, spec, P()), out_specs=spec))
            for made in cases:
                batch = on.batch([0, 40, n], 24, slices=made + [cpattn.Slice(0, 0, 0, 0)] * (longest - len(made)))
                q, k, v, _, d_o = tensors(n)
                o, back = jax.vjp(
                    lambda *x, batch=batch: batch.unshard(run(*map(batch.shard, x), batch.packing)), q, k, v
                )
                self.assertTrue(jnp.array_equal(batch.unshard(run(*map(batch.shard, (q, k, v)), batch.packing)), o))
                exact = [torch.tensor(x).double().requires_grad_() for x in (q, k, v)]
                want = dense(*exact, [], allowed=allowed_by(made, n, n, left=window))  # type: ignore[misc]
                self.close(
                    [o, *back(jnp.asarray(d_o))], [want.detach(), *gradients(want, torch.tensor(d_o), exact)], 2e-6
                )
            self.assertEqual(run._cache_size(), 1)
        made = cases[0]
        batch = on.batch([0, n], slices=made)
        constant = jax.shard_map(
            lambda *x: on.attention(*x, [0, n], slices=made), mesh=mesh(4), in_specs=spec, out_specs=spec
        )
        data = jax.shard_map(lambda *x: on.attention(*x, batch.packing), mesh=mesh(4), in_specs=spec, out_specs=spec)
        rows = [batch.shard(x) for x in tensors(n)[:3]]
        self.assertTrue(jnp.array_equal(jax.jit(constant)(*rows), data(*rows)))
        both = jax.shard_map(
            lambda *x: on.attention(*x, batch.packing, slices=made), mesh=mesh(4), in_specs=spec, out_specs=spec
        )
        for words, call in (
            ("slices are given, and the batch's packing has slices", lambda: both(*rows)),
            (
                r"slices\[1\] is one that allows q token 19 with k token 0",
                lambda: on.batch([0, n], slices=2 * made[:1]),
            ),
            (
                "cu_seqlens is .*, 0 and the ends of documents, or Batch.packing",
                lambda: calls.packing_of([-1, 5, 0], None),
            ),
        ):
            with self.assertRaisesRegex(cpattn.InvalidArgument, words):
                call()

    def test_replicas(self) -> None:
        """Another axis of the mesh holds other batches, and sinks of all of them are the same."""
        both = mesh(2, 2)
        on = context(2, over=both)
        batch = on.batch(ENDS)
        ones, others, spec = tensors(), tensors(seed=2), P(("dp", "cp"))

        def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            run = jax.shard_map(
                lambda *x: on.attention(*x[:3], ENDS, x[3]), mesh=both, in_specs=(spec, spec, spec, P()), out_specs=spec
            )
            o = run(*(jnp.concatenate([batch.shard(x[0]), batch.shard(x[1])]) for x in (q, k, v)), sinks)
            half = len(o) // 2
            return batch.unshard(o[:half]), batch.unshard(o[half:])

        pairs = [jnp.stack(pair) for pair in zip(ones, others)]
        o, back = jax.vjp(jax.jit(attend), *pairs[:3], ones[3])
        got = back((pairs[4][0], pairs[4][1]))
        want = [wanted([*mine[:3], ones[3]], mine[4]) for mine in (ones, others)]
        for at in range(2):
            self.close([o[at], *(x[at] for x in got[:3])], want[at][:4], 1e-6)
        self.close([got[3]], [want[0][4] + want[1][4]], 1e-6)

    def test_alike_on_all_ranks(self) -> None:
        """What is equal on all ranks differs after attention, and gradients are summed."""
        on = context(2, kv_heads=HEADS)
        batch = on.batch(ENDS)
        x = tensors()[0][: batch.rows]

        def loss(x: Any) -> Any:
            return jax.lax.psum((on.attention(x, x, x, ENDS) ** 2).sum(), "cp")

        own = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        rows = torch.cat([own, own])[torch.tensor(np.argsort(np.where(batch.tokens < 0, 99, batch.tokens))[:50])]
        want = (dense(rows, rows, rows, ENDS) ** 2).sum()
        (exact,) = gradients(want, torch.ones((), dtype=torch.float64), [own])
        for checked in (True, False):
            run = jax.shard_map(loss, mesh=mesh(2), in_specs=P(), out_specs=P(), check_vma=checked)
            value, gradient = jax.value_and_grad(run)(jnp.asarray(x))
            self.assertLess(abs(float(value) - want.item()) / want.item(), 1e-6)
            self.close([gradient], [exact], 2e-6)
        out = jax.shard_map(lambda x: on.attention(x, x, x, ENDS), mesh=mesh(2), in_specs=P(), out_specs=P())
        with self.assertRaisesRegex(ValueError, "replication"):
            out(x)


class Transformations(unittest.TestCase):
    def test_training(self) -> None:
        """A scan over rematerialised layers in a compiled training step: the gradients are those of one rank."""
        width = HEADS * DIM
        random = np.random.default_rng(3)
        weights = random.standard_normal((3, 4, width, width), np.float32) * width**-0.5
        x = random.standard_normal((ENDS[-1], width), np.float32)

        def gradient(ranks: int) -> Any:
            on = context(ranks, kv_heads=HEADS)
            batch = on.batch(ENDS)

            def layer(x: Any, w: Any) -> Any:
                q, k, v = ((x @ w[i]).reshape(-1, HEADS, DIM) for i in range(3))
                return x + on.attention(q, k, v, ENDS).reshape(x.shape) @ w[3], None

            def loss(w: Any, x: Any) -> Any:
                y = jax.lax.scan(jax.checkpoint(layer), x, w)[0]
                own = (y**2).sum()
                return jax.lax.psum(own, "cp") if on.axis else own

            if on.axis:
                loss = jax.shard_map(loss, mesh=mesh(ranks), in_specs=(P(), P("cp")), out_specs=P())
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights, batch.shard(x)), batch

        (one, (dw, dx)), alone = gradient(1)
        for ranks in (2, 4):
            (value, (dw_n, dx_n)), batch = gradient(ranks)
            self.assertLess(abs(value - one) / one, 1e-6)
            for got, want in ((dw_n, dw), (batch.unshard(dx_n), alone.unshard(dx))):
                self.assertLess(error(torch.tensor(np.asarray(got)), torch.tensor(np.asarray(want))), 3e-6)

    def test_nothing_is_merged_moved_or_saved_in_part(self) -> None:
        """Equal calls, one that a loop could do without, and gradients of which the policy saves as much as it may."""
        *qkv, _, _ = tensors()
        on = context(4)
        attend = whole(on)

        def often(q: Any, k: Any, v: Any) -> Any:
            twice = jax.jit(attend)(q, k, v) + jax.jit(attend)(q, k, v)
            return jax.lax.scan(lambda sum, _: (sum + attend(q, k, v), None), twice, None, length=3)[0]

        kept = jax.checkpoint(often, policy=jax.checkpoint_policies.everything_saveable)
        want = jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))(*qkv)
        for function in (often, kept, jax.checkpoint(often)):
            got = jax.jit(jax.grad(lambda *x, f=function: f(*x).sum(), argnums=(0, 1, 2)))(*qkv)
            for mine, exact in zip(got, want, strict=True):
                self.assertLess(error(torch.tensor(np.asarray(mine)), 5 * torch.tensor(np.asarray(exact))), 1e-6)

    def test_more_devices_than_cores(self) -> None:
        """Independent calls of eight devices, of arrays that JAX moves in the background."""
        on, ends = context(8), [0, 500, 16000]
        batch = on.batch(ends)
        rows, shard = batch.rows, P("cp")

        def calls(x: Any) -> Any:
            x = x.reshape(rows, HEADS, DIM)
            k = x[:, :KV_HEADS]
            return sum(on.attention(x + i, k, k * i, ends, window_left=3) for i in range(6))

        run = jax.jit(jax.shard_map(calls, mesh=mesh(8), in_specs=shard, out_specs=shard))
        x = jnp.ones((8 * rows, HEADS * DIM), np.float32)
        # All keys of a query are alike, so that attention returns v.
        np.testing.assert_allclose(batch.unshard(run(x)), 15.0, rtol=1e-6)


class Batches(unittest.TestCase):
    def test_what_a_rank_gets(self) -> None:
        on = context(4, layout="zigzag_pack")
        for rows in (None, 20):
            batch = on.batch(ENDS, rows)
            each = 13 if rows is None else rows
            self.assertEqual(batch.rows, each)
            for rank in range(4):
                mine = batch.tokens.reshape(4, each)[rank]
                held = list(batch.plan.tokens(cpattn.Side.Q, rank))
                self.assertEqual(mine.tolist(), held + [-1] * (each - len(held)))
            ids = np.arange(50)
            np.testing.assert_array_equal(batch.shard(ids, -1), batch.tokens)
            np.testing.assert_array_equal(batch.unshard(batch.shard(ids)), ids)
            starts = np.repeat([0, 13, 14], [13, 1, 36])
            np.testing.assert_array_equal(batch.unshard(batch.positions), ids - starts)
            labels = [-100 if i in (12, 13, 49) else i + 1 for i in range(50)]
            np.testing.assert_array_equal(batch.unshard(batch.labels(ids)), labels)
            self.assertTrue((np.asarray(batch.labels(ids))[batch.tokens < 0] == -100).all())
        self.assertIs(on.batch(ENDS), on.batch(np.array(ENDS)))
        # The order in which JAX divides an array, and that of chunk r and chunk 2 * ranks - 1 - r.
        ids, chunks = np.arange(64), np.arange(64).reshape(8, 8)
        zigzag = np.concatenate([np.r_[chunks[r], chunks[7 - r]] for r in range(4)])
        for options, order in (({"layout": "contiguous"}, ids), ({"layout": "zigzag_pack", "ulysses": 1}, zigzag)):
            for ends in ([0, 64], [0, 5, 40, 64]):
                np.testing.assert_array_equal(context(4, **options).batch(ends).tokens, order)
        empty = on.batch([0])
        self.assertEqual(empty.shard(np.zeros((0, 3))).shape, (0, 3))


class Refusals(unittest.TestCase):
    def refused(self, kind: type[Exception], text: str, job: Any) -> None:
        with self.assertRaisesRegex(kind, text):
            job()

    def test_at_once(self) -> None:
        on, (q, k, v, sinks, _) = context(2), tensors()
        batch, attend = on.batch(ENDS), whole(on)
        wrong, none = cpattn.InvalidArgument, cpattn.Unsupported
        q32, k32, v32 = (jnp.stack([x, x]) for x in (q, k, v))
        self.refused(none, "does not support jax.vmap.*cu_seqlens", lambda: jax.vmap(attend)(q32, k32, v32))
        twice = jax.grad(lambda q: jax.grad(lambda q: attend(q, k, v).sum())(q).sum())
        self.refused(none, "differentiable once", lambda: twice(q))
        self.refused(
            TypeError, "forward-mode", lambda: jax.jvp(lambda q: context(1).attention(q, k, v, ENDS), (q,), (q,))
        )
        self.refused(none, "dropout is 0.1.*cpattn.torch", lambda: context(1, dropout=0.1))
        self.refused(
            wrong,
            "2 ranks of the axis 'cp'.*inside jax.shard_map",
            lambda: on.attention(*map(batch.shard, (q, k, v)), ENDS),
        )
        four = jax.shard_map(lambda q: on.attention(q, q, q, ENDS), mesh=mesh(4), in_specs=P("cp"), out_specs=P("cp"))
        self.refused(
            wrong, "axis 'cp' has 4 devices here, the context's mesh has 2", lambda: four(jnp.zeros((200, 2, 8)))
        )
        both = context(2, over=mesh(2, 2))
        part = jax.shard_map(
            lambda q: both.attention(q, q, q, ENDS),
            mesh=mesh(2, 2),
            in_specs=P("cp"),
            out_specs=P("cp"),
            axis_names={"cp"},
        )
        self.refused(
            none,
            "compiler divides arrays over 'dp'.*all axes of the mesh",
            lambda: jax.jit(part)(jnp.zeros((52, 2, 8))),
        )
        self.refused(wrong, "the number of rows per rank is 24, at least 26 is needed", lambda: on.batch(ENDS, 24))
        few = jax.shard_map(lambda q: on.attention(q, q, q, ENDS), mesh=mesh(2), in_specs=P("cp"), out_specs=P("cp"))
        self.refused(
            wrong, "the number of rows per rank is 20, at least 26 is needed", lambda: few(jnp.zeros((40, 2, 8)))
        )
        self.refused(wrong, "k.dtype is float16, float32 is needed", lambda: attend(q, k.astype(np.float16), v))
        self.refused(wrong, "q.dtype is int32", lambda: attend(q.astype(np.int32), k, v))
        self.refused(wrong, "sinks.dtype is float16, float32", lambda: attend(q, k, v, sinks.astype(np.float16)))
        self.refused(wrong, r"sinks has the shape \(3,\), \(4,\) or \(4, n\)", lambda: attend(q, k, v, sinks[:3]))
        self.refused(wrong, r"v has the shape \(52, 8\)|v has the shape", lambda: attend(q, k, v.reshape(50, 16)))
        self.refused(wrong, r"q is \[1\], an array of JAX or NumPy", lambda: context(1).attention([1], k, v, ENDS))  # type: ignore[arg-type]
        self.refused(
            wrong,
            r"q has the shape \(\), \[rows, heads, dim\]",
            lambda: context(1).attention(jnp.float32(1), k, v, ENDS),
        )
        for ends in ([0.0, 13.5, 50.0], [[0, 50]], [False, True]):
            traced = jax.jit(context(1).attention)
            self.refused(
                wrong, "cu_seqlens is .*, a sequence of whole numbers", lambda: traced(q, k, v, jnp.asarray(ends))
            )
        zero = jax.jit(lambda q, k, v, ends: context(1).attention(q, k, v, ends, scale=0.0))
        self.refused(wrong, "scale is 0.0, a number other than 0", lambda: zero(q, k, v, jnp.asarray(ENDS)))
        spread = jax.sharding.NamedSharding(mesh(4), P(None, "cp"))
        parts = jax.device_put(q, spread)
        alone = context(1, kv_heads=HEADS).attention
        for function in (alone, jax.jit(alone)):
            self.refused(
                none,
                "divides arrays over 4 devices.*inside jax.shard_map",
                lambda: function(parts, parts, parts, jnp.asarray(ENDS)),
            )
        ids = np.arange(50, dtype=np.uint8)
        self.refused(wrong, "ignore is -100, which uint8 cannot represent: convert ids", lambda: batch.labels(ids))
        self.refused(wrong, "fill is 1.5, which uint8 cannot represent: convert whole", lambda: batch.shard(ids, 1.5))
        self.refused(wrong, "fill is <Side.K: 1>, a number is needed", lambda: batch.shard(ids, cpattn.Side.K))
        self.refused(wrong, "whole has the shape .50, 4, 16., .14, ", lambda: on.batch([0, 14]).shard(q))
        self.refused(
            wrong,
            "heads.*4.*kv_heads|kv_heads",
            lambda: attend(q, np.repeat(k, 2, 1)[:, :3], np.repeat(v, 2, 1)[:, :3]),
        )

    def test_contexts(self) -> None:
        wrong = cpattn.InvalidArgument
        self.refused(wrong, "ulysses 2 x ring 1 uses 2 of the group's 4 ranks", lambda: context(4, ulysses=2, ring=1))
        self.refused(
            wrong,
            "axis is 'tp', one of the mesh's axes is needed: 'cp'",
            lambda: cpattn.jax.Context(mesh(2), "tp", heads=2, head_dim=8),
        )
        self.refused(wrong, "give both, or neither", lambda: cpattn.jax.Context(mesh(2), heads=2, head_dim=8))
        self.refused(wrong, "timeout", lambda: context(2, timeout=0))
        self.refused(wrong, "windows is no argument of Context: is window_left meant", lambda: context(2, windows=3))
        on = context(1)
        on.close()
        self.refused(cpattn.InvalidHandle, "is closed", lambda: whole(on))
        # While a run goes on: its ranks are freed when it ends.
        on = context(2)
        (rank, _) = on.on_ranks(lambda number, rank: (on.close(), rank)[1])
        self.refused(cpattn.InvalidHandle, "is closed", rank.poll)

    def test_while_it_runs(self) -> None:
        """An error that depends on data fails on all devices, with cpattn's message, and the next call works."""
        on = context(4)
        spec = P("cp")
        attend = jax.jit(jax.shard_map(on.attention, mesh=mesh(4), in_specs=(spec, spec, spec, spec), out_specs=spec))
        batch = on.batch(ENDS)
        q, k, v = (batch.shard(x) for x in tensors()[:3])
        same, other = np.tile(batch.cu_seqlens, 4), np.tile(batch.cu_seqlens, 4)
        other[11] += 1
        for ends, text in (
            (other, r"cu_seqlens is \[0, 13, 13, 14, 50\] on rank 0 and .* on rank 2"),
            (3 * same, "the number of rows per rank is .*, at least 38 is needed"),
        ):
            with self.assertRaisesRegex(jax.errors.JaxRuntimeError, text):
                attend(q, k, v, ends).block_until_ready()
        want = wanted(tensors()[:3], tensors()[-1])[0]
        self.assertLess(error(torch.tensor(np.asarray(batch.unshard(attend(q, k, v, same)))), want), 1e-6)
        # JAX would raise the failures again when the program ends.
        dispatch.runtime_tokens.clear()
        self.assertFalse(cpattn.jax.calls._deposits or cpattn.jax.calls._meetings)


class Programs(unittest.TestCase):
    def run_program(self, *arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_cpattn_does_not_import_jax(self) -> None:
        self.run_program("-c", "import sys, cpattn; assert 'jax' not in sys.modules")

    def test_calls_in_flight(self) -> None:
        """A program that closes the context before it has read a result, or that ends without: the calls run before."""
        program = """
import os, sys
os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
import jax, numpy as np, cpattn.jax, time
spec = jax.sharding.PartitionSpec("cp")
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("cp",))
on = cpattn.jax.Context(mesh, "cp", heads=3, head_dim=8)
ranks, runs = on.on_ranks, []
def counted(job):
    time.sleep(1)
    results = ranks(job)
    os.write(1, b"ran ")
    return results
on.on_ranks = counted
x = on.batch([0, 5, 20]).shard(np.ones((20, 3, 8), np.float32))
attend = jax.jit(jax.shard_map(lambda q: on.attention(q, q, q, [0, 5, 20]), mesh=mesh, in_specs=spec, out_specs=spec))
jax.jit(jax.grad(lambda q: attend(q).sum()))(x)
if sys.argv[1] == "close":
    on.close()
elif sys.argv[1] == "raise":
    raise KeyError("of the program")
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for how in ("close", *(() if sys.version_info[:2] == (3, 12) else ("end", "raise"))):
            with self.subTest(how):
                done = subprocess.run(
                    [sys.executable, "-c", program, how], env=environment, capture_output=True, text=True, timeout=120
                )
                self.assertEqual((done.returncode, done.stdout), (how == "raise", "ran ran "), done.stderr)
                self.assertEqual(
                    done.stderr.splitlines()[-1:], ["KeyError: 'of the program'"] if how == "raise" else []
                )

    def test_the_example(self) -> None:
        self.assertIn("ok", self.run_program(str(ROOT / "examples/python/jax_ranks.py")))

    def test_the_documentation(self) -> None:
        """The program in docs/python.md, unchanged."""
        text = (ROOT / "docs/python.md").read_text().split("## JAX")[1]
        program = text.split("```python\n")[1].split("```")[0]
        self.assertIn("(80, 4, 16)", self.run_program("-c", program + "print(o.shape)"))


if __name__ == "__main__":
    unittest.main()
