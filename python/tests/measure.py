# SPDX-License-Identifier: MIT OR Apache-2.0
"""Time of a forward and a backward over gloo, by layout, in one interleaved run; not a test.

    capi/build && PYTHONPATH=python python3 python/tests/measure.py

300 documents of 20 tokens on average over a ring of 4 processes: what many short documents cost is messages.
"""

import argparse
import random
import statistics
import time

import cpattn
import torch
import torch.distributed as dist
from cpattn.torch import Context
from processes import run

LAYOUTS = ("ZIGZAG", "ZIGZAG_PACK", "BALANCED", "AUTO")


def job(rank: int, world: int, rounds: int) -> None:
    draw = random.Random(3)
    lengths = [draw.randrange(1, 40) for _ in range(300)]
    cu_seqlens = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cases = {}
    for layout in LAYOUTS:
        parameter = 2 if layout == "BALANCED" else 0
        context = Context(heads=8, kv_heads=2, head_dim=64, ring=world, layout=cpattn.Layout[layout], layout_parameter=parameter)
        batch = context.batch(cu_seqlens)
        n = len(batch.tokens)
        q, k, v = (torch.randn(n, heads, 64, requires_grad=True) for heads in (8, 2, 2))
        counts: list[int] = []
        move = context.transport.exchange

        def counting(operation, step, sends, recvs, stream=None, move=move, counts=counts):  # type: ignore[no-untyped-def]
            by_peer = [sum(m.peer == peer for m in sends) for peer in range(world)]
            counts.append(max(by_peer))
            move(operation, step, sends, recvs, stream)

        context.transport.exchange = counting  # type: ignore[method-assign]
        cases[layout] = (context, batch, (q, k, v), counts, [], [])
    for _ in range(rounds + 1):
        for context, batch, (q, k, v), counts, forwards, backwards in cases.values():
            counts.clear()
            dist.barrier()
            began = time.perf_counter()
            o = batch.attention(q, k, v)
            half = time.perf_counter()
            o.sum().backward()
            forwards.append(half - began)
            backwards.append(time.perf_counter() - half)
    if rank == 0:
        print(f"{cu_seqlens[-1]} tokens, 300 documents, ring {world} over gloo; medians of {rounds}")
        for layout, (_, _, _, counts, forwards, backwards) in cases.items():
            forward, backward = (statistics.median(times[1:]) * 1e3 for times in (forwards, backwards))
            print(f"{layout:12} forward {forward:7.1f} ms, backward {backward:7.1f} ms; "
                  f"at most {max(counts)} messages to a peer in one of {len(counts)} exchanges")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    run(job, 4, parser.parse_args().rounds)
