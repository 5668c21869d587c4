# SPDX-License-Identifier: MIT OR Apache-2.0
"""Forward and backward of NumPy arrays over six ranks (threads), compared with the formula written out in NumPy.

capi/build && PYTHONPATH=python python3 examples/python/numpy_ranks.py
"""

import argparse

import numpy as np

import cpattn


def formula(q, k, v, d_o, documents, left, sinks=None):
    """Attention and its gradients by the book, one document and head at a time."""
    o, dq, dk, dv = np.zeros_like(d_o), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    dsinks = np.zeros(q.shape[1])
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    for a, e in zip(documents, documents[1:]):
        n = np.arange(e - a)
        back = n[:, None] - n[None, :]
        allowed = (back >= 0) & (back <= left)
        for h in range(q.shape[1] if e > a else 0):
            g = h // group
            s = np.where(allowed, scale * q[a:e, h] @ k[a:e, g].T, -np.inf)
            with_sink = s if sinks is None else np.concatenate([s, np.full((e - a, 1), sinks[h])], axis=1)
            top = with_sink.max(axis=1, keepdims=True)
            l = (top + np.log(np.exp(with_sink - top).sum(axis=1, keepdims=True)))[:, 0]
            p = np.exp(s - l[:, None])
            o[a:e, h], lse[h, a:e] = p @ v[a:e, g], l
            delta = (d_o[a:e, h] * o[a:e, h]).sum(axis=1)
            ds = p * (d_o[a:e, h] @ v[a:e, g].T - delta[:, None])
            dq[a:e, h] = scale * ds @ k[a:e, g]
            dk[a:e, g] += scale * ds.T @ q[a:e, h]
            dv[a:e, g] += p.T @ d_o[a:e, h]
            if sinks is not None:
                dsinks[h] -= (np.exp(sinks[h] - l) * delta).sum()
    return o, lse, dq, dk, dv, dsinks


def main(dtype, code, bound):
    rng = np.random.default_rng(5)
    documents, heads, kv_heads, dim, value_dim, left = [0, 61, 61, 62, 200], 6, 3, 16, 8, 49
    tokens = documents[-1]
    q, k, v, d_o = (
        rng.standard_normal((tokens, h, d)).astype(dtype)
        for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    )
    sinks = rng.standard_normal(heads).astype(np.float32)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    plan = cpattn.Plan(
        documents,
        heads,
        dim,
        kv_heads=kv_heads,
        value_dim=value_dim,
        dtype=code,
        window_left=left,
        sinks=True,
        world=6,
        ulysses=3,
        ring=2,
        layout=cpattn.Layout.STRIPED,
        layout_parameter=8,
    )
    plan.verify()
    o, dq, dk, dv = (np.full_like(x, np.nan) for x in (d_o, q, k, v))
    lse = np.full((heads, tokens), np.nan, accumulator)

    def job(number, rank):
        tq, tk = plan.tokens(cpattn.Side.Q, number), plan.tokens(cpattn.Side.K, number)
        mine = {"q": q[tq], "k": k[tk], "v": v[tk], "sinks": sinks}
        mine["o"] = np.empty((len(tq), heads, value_dim), dtype)
        mine["lse"] = np.empty((heads, len(tq)), accumulator)
        rank.forward(plan, **mine)
        grads = {"dq": np.empty_like(mine["q"]), "dk": np.empty_like(mine["k"]), "dv": np.empty_like(mine["v"])}
        grads["dsinks"] = np.empty(heads, accumulator)
        rank.backward(plan, d_o=d_o[tq], **mine, **grads)
        plan.unshard(cpattn.Side.Q, number, mine["o"], o)
        plan.unshard(cpattn.Side.Q, number, grads["dq"], dq)
        plan.unshard(cpattn.Side.K, number, grads["dk"], dk)
        dv[tk] = grads["dv"]
        lse[:, tq] = mine["lse"]
        return grads["dsinks"]

    dsinks = cpattn.on_all(cpattn.local_group(6), job)[0]
    want = formula(*(x.astype(np.float64) for x in (q, k, v, d_o)), documents, left, sinks.astype(np.float64))
    for name, got, exact in zip(("o", "lse", "dq", "dk", "dv", "dsinks"), (o, lse, dq, dk, dv, dsinks), want):
        error = np.sqrt(np.mean((got.astype(np.float64) - exact) ** 2) / np.mean(exact**2))
        print(f"{np.dtype(dtype).name} {name:6} relative RMS error {error:.1e}")
        assert error < bound, f"{name} is off by {error}"


def refusals():
    plan = cpattn.Plan([0, 4], 2, 8)
    (rank,) = cpattn.local_group(1)
    q, o, lse = np.zeros((4, 2, 8), np.float32), np.zeros((4, 2, 8), np.float32), np.zeros((2, 4), np.float32)
    good = {"q": q, "k": q.copy(), "v": q.copy(), "o": o, "lse": lse}
    rank.forward(plan, **good)
    for change, word in (
        ({"q": q.astype(np.float64)}, "q.dtype"),
        ({"q": q.astype(np.int32)}, "q.dtype"),
        ({"v": q[:3]}, "v.tokens"),
        ({"k": np.zeros((4, 2, 16), np.float32)[:, :, ::2]}, "k.strides[2]"),
        ({"lse": lse[:, None]}, "lse.ndim"),
        ({"o": q}, "overlaps q"),
        ({"q": q[::-1]}, "q.strides[0]"),
        ({"o": None}, "o is NULL"),
    ):
        try:
            rank.forward(plan, **{**good, **change})
        except cpattn.Error as e:
            assert word in str(e), f"{e} does not say {word}"
        else:
            raise AssertionError(f"{change} was not refused")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main(np.float32, cpattn.Dtype.F32, 1e-6)
    main(np.float64, cpattn.Dtype.F64, 1e-14)
    main(np.float16, cpattn.Dtype.F16, 1e-3)
    refusals()
    print("ok")
