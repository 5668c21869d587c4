# SPDX-License-Identifier: MIT OR Apache-2.0
"""axolotl-ringmaster beside cpattn.torch on one machine: the same kernel in both, ranks over gloo, one thread each.

    pip install axolotl-ringmaster==0.2.7 transformers
    CPATTN_LIBRARY=... PYTHONPATH=python python3 benches/ringmaster/compare.py --world 2 --tokens 2048

A step is attention and its gradients, f32, 8 heads of 64. Ulysses: PyTorch's CPU kernel, by
`scaled_dot_product_attention` there and `kernels="torch"` here. Ring: products and softmax, "math" in both, since its ring has no other
kernel on the CPU; by its two ways of moving k and v. Steps alternate; times are medians of the slowest rank, CPU times are sums over
ranks. Peaks are those of processes that ran one side only, less what they had before the first step.

o of each side is compared with attention over the whole batch in f64.
"""

import argparse
import os
import random
import resource
import statistics
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HEADS, HEAD_DIM = 8, 64
# How k and v move, whether the batch is packed, and the kv heads: its point-to-point ring wants as many as q heads on the CPU.
CASES = {
    "ulysses, dense": ("ulysses", False, 4),
    "ulysses, packed": ("ulysses", True, 4),
    "ring (allgather), dense": ("allgather", False, 4),
    "ring (allgather), packed": ("allgather", True, 4),
    "ring (point to point), dense": ("alltoall", False, 8),
}


def documents(tokens, packed):
    if not packed:
        return [0, tokens]
    draw = random.Random(1)
    return sorted({0, tokens, *(draw.randrange(tokens) for _ in range(15))})


class Theirs:
    def __init__(self, way, cu_seqlens, kv_heads, rank, world):
        from ringmaster.config import Backend, LoadBalance, RingmasterConfig, RotateMethod
        from ringmaster.runtime import CPRuntime, set_runtime

        group, tokens = dist.group.WORLD, cu_seqlens[-1]
        config = RingmasterConfig(
            size=world, backend=Backend.ULYSSES if way == "ulysses" else Backend.RING, load_balance=LoadBalance.NONE
        )
        runtime = CPRuntime(config=config, cp_group=group)
        runtime.varlen = (
            (torch.tensor(cu_seqlens, dtype=torch.int32), max(b - a for a, b in zip(cu_seqlens, cu_seqlens[1:])))
            if len(cu_seqlens) > 2
            else None
        )
        self.rows = torch.arange(tokens).chunk(world)[rank]
        # What a layer of a model of Transformers is to its attention function.
        module = SimpleNamespace(
            training=True,
            is_causal=True,
            num_key_value_groups=HEADS // kv_heads,
            config=SimpleNamespace(_attn_implementation=""),
        )
        if way == "ulysses":
            from ringmaster.strategies.ulysses import make_ulysses_attention

            runtime.ulysses_group = group
            attend = make_ulysses_attention("sdpa")
        else:
            from ringmaster.strategies.ring import make_ring_attention

            runtime.ring_group = group
            attend = make_ring_attention("math", "math", RotateMethod(way))
        set_runtime(runtime)

        def call(q, k, v):
            o, _ = attend(module, *(x.transpose(0, 1)[None] for x in (q, k, v)), None, scaling=HEAD_DIM**-0.5)
            # [1, tokens, heads, dim]
            return o[0]

        self.attend = call


class Ours:
    def __init__(self, way, cu_seqlens, kv_heads, rank, world):
        from cpattn import Side
        from cpattn.torch import Context

        mesh = {"ring": 1} if way == "ulysses" else {"ulysses": 1}
        self.context = Context(
            heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, kernels="torch" if way == "ulysses" else "math", **mesh
        )
        self.batch = self.context.batch(cu_seqlens)
        self.rows = torch.as_tensor(self.batch.shard(torch.arange(cu_seqlens[-1]), Side.Q))
        self.attend = self.batch.attention


def inputs(tokens, kv_heads, rows):
    """q, k, v and the gradient of o of some rows, the same for both."""
    random_of = torch.Generator().manual_seed(1)
    whole = [torch.randn(tokens, n, HEAD_DIM, generator=random_of) for n in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, d_o = (x[rows] for x in whole)
    return whole, [x.requires_grad_() for x in (q, k, v)], d_o


def step(attend, leaves, d_o):
    for x in leaves:
        x.grad = None
    o = attend(*leaves)
    o.backward(d_o)
    return o.detach()


def error(o, whole, rows, cu_seqlens):
    """The largest error of o, over the largest value."""
    q, k, v = (x.double() for x in whole[:3])
    document = torch.bucketize(torch.arange(len(k)), torch.tensor(cu_seqlens[1:]), right=True)
    allowed = (document[rows][:, None] == document[None]) & (rows[:, None] >= torch.arange(len(k))[None])
    group, worst, largest = HEADS // k.shape[1], 0.0, 0.0
    for h in range(HEADS):
        s = (q[rows, h] @ k[:, h // group].T * HEAD_DIM**-0.5).masked_fill(~allowed, -torch.inf)
        want = s.softmax(1) @ v[:, h // group]
        worst, largest = max(worst, (o[:, h] - want).abs().max().item()), max(largest, want.abs().max().item())
    return worst / largest


def measured(attend, leaves, d_o):
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step(attend, leaves, d_o)
    times = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    slowest, total = times.clone(), times.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return slowest[0].item(), total[1].item()


def job(rank, world, port, name, tokens, steps, side, results):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    way, packed, kv_heads = CASES[name]
    cu_seqlens = documents(tokens, packed)
    answer, sides = {}, {}
    for kind in (Theirs, Ours) if side is None else (side,):
        try:
            made = kind(way, cu_seqlens, kv_heads, rank, world)
            whole, leaves, d_o = inputs(tokens, kv_heads, made.rows)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            o = step(made.attend, leaves, d_o)
            answer[kind.__name__, "peak"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            answer[kind.__name__, "error"] = error(o, whole, made.rows, cu_seqlens) if side is None else None
            sides[kind.__name__] = (made.attend, leaves, d_o)
        except Exception as failure:  # noqa: BLE001 (what the other package raises)
            answer[kind.__name__, "failure"] = f"{type(failure).__name__}: {failure}"
    if side is None and len(sides) == 2:
        times = {kind: [] for kind in sides}
        for _ in range(steps):
            for kind, of in sides.items():
                times[kind].append(measured(*of))
        for kind, found in times.items():
            answer[kind, "wall"], answer[kind, "cpu"] = (statistics.median(x) for x in zip(*found))
    results.put((rank, answer))
    dist.barrier()
    dist.destroy_process_group()


def run(world, name, tokens, steps, side=None):
    """The answers of all ranks."""
    spawn = mp.get_context("spawn")
    results, port = spawn.Queue(), random.randrange(20000, 50000)
    processes = [
        spawn.Process(target=job, args=(rank, world, port, name, tokens, steps, side, results)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=500)[1] for _ in processes]
    for process in processes:
        process.join(60)
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--case", choices=CASES, action="append")
    of = parser.parse_args()
    print(f"{of.world} ranks, {of.tokens} tokens; cpattn / ringmaster\n")
    print("| case | time | CPU time | peak MB | largest error |\n|---|---|---|---|---|")
    for name in of.case or CASES:
        both, alone = (
            run(of.world, name, of.tokens, of.steps),
            [run(of.world, name, of.tokens, 0, side) for side in (Theirs, Ours)],
        )
        failures = {kind: text for answer in both for (kind, what), text in answer.items() if what == "failure"}
        if failures:
            print(f"| {name} | {'; '.join(f'{kind}: {text}' for kind, text in failures.items())} | | | |")
            continue
        first = both[0]
        theirs, ours = ([first[kind, what] for what in ("wall", "cpu")] for kind in ("Theirs", "Ours"))
        wall, cpu = (f"{1e3 * a:.0f} / {1e3 * b:.0f} ms = {a / b:.2f}" for a, b in zip(ours, theirs))
        peaks = [max(answer[kind, "peak"] for answer in answers) for kind, answers in zip(("Theirs", "Ours"), alone)]
        errors = [max(answer[kind, "error"] for answer in both) for kind in ("Theirs", "Ours")]
        print(
            f"| {name} | {wall} | {cpu} | {peaks[1]:.0f} / {peaks[0]:.0f} | {errors[1]:.0e} / {errors[0]:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
