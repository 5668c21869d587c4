# SPDX-License-Identifier: MIT OR Apache-2.0
"""Training steps in JAX over four devices of this process as ranks, compared with the same steps on one rank.

    capi/build && PYTHONPATH=python python3 examples/python/jax_ranks.py

The documents differ from step to step, and the step is traced once: cu_seqlens is an argument of it like the tokens.
"""

import argparse
import os
import sys
from functools import partial

# Before JAX makes its devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

try:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
except ImportError:
    print("skipped: JAX is not installed")
    sys.exit(0)

import numpy as np

import cpattn.jax

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, LAYERS, WINDOW = 31, 32, 4, 2, 8, 2, 15
# Packings with the same number of documents, some of them empty.
PACKINGS = [0, 40, 41, 100], [0, 7, 60, 96], [0, 100, 100, 100], [0, 25, 50, 90]
# Rows per rank, at least the most tokens of a rank.
ROWS = {1: 100, 4: 28}


def parameters():
    random = np.random.default_rng(1)
    shapes = {
        "q": (WIDTH, HEADS * DIM),
        "k": (WIDTH, KV_HEADS * DIM),
        "v": (WIDTH, KV_HEADS * DIM),
        "o": (HEADS * DIM, WIDTH),
    }
    layers = {name: 0.3 * random.standard_normal((LAYERS, *shape), np.float32) for name, shape in shapes.items()}
    layers["sinks"] = random.standard_normal((LAYERS, HEADS), np.float32)
    return {"layers": layers, "embed": 0.3 * random.standard_normal((VOCABULARY, WIDTH), np.float32)}


def rotate(x, positions):
    angle = positions[:, None] * 0.1 ** jnp.arange(DIM // 2)
    a, b, cos, sin = *jnp.split(x, 2, axis=-1), jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def loss(params, ids, labels, positions, cu_seqlens, *, context):
    """The loss of this rank's tokens. Padding rows have the label -100, like the ends of documents."""

    def layer(x, p):
        q, k, v = ((x @ p[name]).reshape(len(x), -1, DIM) for name in "qkv")
        q, k = rotate(q, positions), rotate(k, positions)
        o = context.attention(q, k, v, cu_seqlens, p["sinks"], window_left=WINDOW)
        return x + o.reshape(len(x), -1) @ p["o"], None

    x = jax.lax.scan(jax.checkpoint(layer), params["embed"][ids], params["layers"])[0]
    scores = jax.nn.log_softmax(x @ params["embed"].T)
    each = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    return -jnp.where(labels >= 0, each, 0).sum()


def train(ranks):
    over = (Mesh(np.array(jax.devices()[:ranks]), ("cp",)), "cp") if ranks > 1 else ()
    context = cpattn.jax.Context(*over, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, layout="zigzag_pack")
    mine = whole = partial(loss, context=context)
    if over:
        shards = P("cp")
        summed = lambda *given: jax.lax.psum(mine(*given), "cp")
        whole = jax.shard_map(summed, mesh=over[0], in_specs=(P(), shards, shards, shards, P()), out_specs=P())

    traced = []

    @jax.jit
    def step(params, *given):
        traced.append(given)
        value, gradients = jax.value_and_grad(whole)(params, *given)
        count = jnp.maximum((given[1] >= 0).sum(), 1)
        return value / count, jax.tree.map(lambda p, g: p - 0.3 * g / count, params, gradients)

    params, losses = jax.device_put(parameters(), NamedSharding(over[0], P()) if over else None), []
    for cu_seqlens in PACKINGS * 5:
        batch = context.batch(cu_seqlens, rows=ROWS[ranks])
        ids = np.arange(cu_seqlens[-1]) ** 2 % VOCABULARY
        value, params = step(params, batch.shard(ids), batch.labels(ids), batch.positions, batch.cu_seqlens)
        losses.append(float(value))
    assert len(traced) == 1, "other documents are not another program"
    return losses, params


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    (one, params_one), (four, params_four) = train(1), train(4)
    for a, b in zip(one, four):
        assert abs(a - b) < 1e-4 * a, (a, b)
    apart = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params_one, params_four)))
    assert one[-1] < 0.8 * one[0] and apart < 1e-3, (one, apart)
    print(
        f"loss {one[0]:.3f} to {one[-1]:.3f} in {len(one)} steps on one rank; on four {four[-1]:.3f}, parameters within {apart:.0e}: ok"
    )
