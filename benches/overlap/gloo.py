# SPDX-License-Identifier: MIT OR Apache-2.0
"""The measurement of `main.rs` over gloo, from Python: attention alone, its exchanges alone, both. See there.

    benches/overlap/run --engines gloo

prints one JSON object for each mesh and direction. Each rank is a process, with the exchanges called through Python's lock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python/tests"))

import cpattn
import torch
import torch.distributed as dist
from cpattn.torch import Context
from processes import run
from tap import PHASES, Tap

HEADS, HEAD_DIM = 8, 128


def job(rank: int, world: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    cases = []
    for mesh, ulysses, ring, layout in (("ring", 1, world, "ZIGZAG"), ("ulysses", world, 1, "CONTIGUOUS")):
        context = Context(
            heads=HEADS,
            kv_heads=HEADS,
            head_dim=HEAD_DIM,
            ulysses=ulysses,
            ring=ring,
            layout=cpattn.Layout[layout],
            timeout=600.0,
        )
        batch = context.batch([0, tokens])
        n = len(batch.tokens)
        inputs = {name: torch.rand(n, HEADS, HEAD_DIM) - 0.5 for name in ("q", "k", "v")}
        forward = dict(inputs, o=torch.empty(n, HEADS, HEAD_DIM), lse=torch.empty(HEADS, n))
        gradients = {name: torch.empty(n, HEADS, HEAD_DIM) for name in ("dq", "dk", "dv")}
        backward = dict(forward, d_o=torch.rand(n, HEADS, HEAD_DIM) - 0.5, **gradients)
        tap = Tap(context)
        for direction, call, tensors, outputs in (
            ("forward", context.rank.forward, forward, ("o", "lse")),
            ("backward", context.rank.backward, backward, tuple(gradients)),
        ):
            tap.set("record")
            tap.batches.clear()
            call(batch.plan, **tensors)
            want = [tensors[name].clone() for name in outputs]
            times = []
            for _ in range(rounds):
                times.append(tap.phases(lambda: call(batch.plan, **tensors)))
                assert all(torch.equal(tensors[name], x) for name, x in zip(outputs, want)), "a run has other bits"
            sent = sum(m.bytes for _, _, sends, _ in tap.batches for m in sends)
            cases.append(
                {"mesh": mesh, "direction": direction, "exchanges": len(tap.batches), "bytes": sent, "times": times}
            )
        dist.barrier()
        context.close()
    return cases


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    ranks = run(job, 4, given.tokens, given.rounds, seconds=3000)
    for case in zip(*ranks, strict=True):
        # By round and phase: wall time of the slowest rank, CPU time of all.
        rounds = [
            [(max(w for w, _ in phase), sum(c for _, c in phase)) for phase in zip(*row, strict=True)]
            for row in zip(*(rank["times"] for rank in case), strict=True)
        ]
        first = case[0]
        line: dict[str, Any] = {
            "transport": "gloo",
            "mesh": first["mesh"],
            "direction": first["direction"],
            "exchanges_of_rank_0": first["exchanges"],
            "bytes_sent_by_rank_0": first["bytes"],
        }
        for i, phase in enumerate(PHASES):
            wall, cpu = (round(statistics.median(row[i][k] for row in rounds), 6) for k in (0, 1))
            line[phase] = {"wall_s": wall, "cpu_s": cpu}
        line["exposed"] = {
            "wall_s": round(statistics.median(b[0] - a[0] for a, _, b in rounds), 6),
            "cpu_s": round(statistics.median(b[1] - a[1] for a, _, b in rounds), 6),
            "wall_over_attention": round(statistics.median(b[0] / a[0] - 1 for a, _, b in rounds), 4),
            "cpu_over_attention": round(statistics.median(b[1] / a[1] - 1 for a, _, b in rounds), 4),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
