# SPDX-License-Identifier: MIT OR Apache-2.0
"""Time of a forward and a backward over gloo, by layout and form, in one interleaved run; not a test.

    capi/build && PYTHONPATH=python python3 python/tests/measure.py [--rounds N] [--json FILE]

300 documents of 20 tokens on average over a ring of 4 processes: attention alone (over a transport that moves nothing), its
exchanges alone, and both. Wall time is that of the slowest rank, CPU time that of all.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cpattn.torch import Context
from processes import run
from tap import PHASES, Tap

# Layouts, and how k and v are gathered.
CASES = (("ZIGZAG", "AUTO"), ("ZIGZAG", "STEPS"), ("ZIGZAG_PACK", "AUTO"), ("BALANCED", "AUTO"), ("AUTO", "AUTO"))
Key = tuple[str, str, str]
HEADS, KV_HEADS, DIM = 8, 2, 64


def documents() -> list[int]:
    draw = random.Random(3)
    lengths = [draw.randrange(1, 40) for _ in range(300)]
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def job(rank: int, world: int, rounds: int) -> dict[Key, tuple[int, int, int, list[Any]]]:
    """By direction and case: exchanges, most messages to a peer in one, bytes that this rank sends, and rounds of phases of wall and
    CPU seconds."""
    cases: dict[Key, tuple[Any, ...]] = {}
    for layout, gather in CASES:
        parameter = 2 if layout == "BALANCED" else 0
        context = Context(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            ring=world,
            layout=layout,
            layout_parameter=parameter,
            gather=gather,
        )
        batch, tap = context.batch(documents()), Tap(context)
        n = len(batch.tokens)
        q, k, v, o, d_o, dq, dk, dv = (
            torch.randn(n, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS) + 3 * (HEADS,) + 2 * (KV_HEADS,)
        )
        forward = {"q": q, "k": k, "v": v, "o": o, "lse": torch.empty(HEADS, n)}
        backward = {**forward, "d_o": d_o, "dq": dq, "dk": dk, "dv": dv}
        cases["forward", layout, gather] = (context.rank.forward, batch.plan, forward, tap)
        cases["backward", layout, gather] = (context.rank.backward, batch.plan, backward, tap)
    out = {}
    for direction in ("forward", "backward"):
        here = {key: case for key, case in cases.items() if key[0] == direction}
        for call, plan, tensors, tap in here.values():
            tap.set("record")
            tap.batches.clear()
            call(plan, **tensors)
        times: dict[Key, list[Any]] = {key: [] for key in here}
        for _ in range(rounds):
            for key, (call, plan, tensors, tap) in here.items():
                times[key].append(tap.phases(lambda: call(plan, **tensors)))
        for key, (_, _, _, tap) in here.items():
            most = max(
                (sum(m.peer == p for m in sends) for _, _, sends, _ in tap.batches for p in range(world)), default=0
            )
            sent = sum(m.bytes for _, _, sends, _ in tap.batches for m in sends)
            out[key] = (len(tap.batches), most, sent, times[key])
    dist.barrier()
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the times go too")
    given = parser.parse_args()
    rounds = given.rounds
    ranks, rows = run(job, 4, rounds), []
    print(
        f"{documents()[-1]} tokens, 300 documents, ring 4 over gloo; medians of {rounds}, wall ms of the slowest rank (CPU ms of all)"
    )
    for key in ranks[0]:
        text = f"{key[0]:9}{key[1]:12}{key[2]:6}"
        row: dict[str, Any] = dict(zip(("direction", "layout", "gather"), key, strict=True))
        for i, phase in enumerate(PHASES):
            wall = statistics.median(max(rank[key][3][n][i][0] for rank in ranks) for n in range(rounds))
            cpu = statistics.median(sum(rank[key][3][n][i][1] for rank in ranks) for n in range(rounds))
            row[phase] = {"wall_ms": round(wall * 1e3, 2), "cpu_ms": round(cpu * 1e3, 2)}
            text += f"  {phase} {wall * 1e3:6.1f} ({cpu * 1e3:6.1f})"
        exchanges, most = (max(rank[key][i] for rank in ranks) for i in (0, 1))
        sent = sum(rank[key][2] for rank in ranks) / 1e6
        print(f"{text}  {exchanges} exchanges, at most {most} messages to a peer in one, {sent:.2f} MB in all")
        rows.append({**row, "exchange_count": exchanges, "most_messages": most, "sent_mb": round(sent, 3)})
    if given.json:
        models = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        machine = f"{models[0]}, {len(models)} cores"
        whole = {
            "bench": "python/tests/measure.py",
            "date": time.strftime("%Y-%m-%dT%H%MZ", time.gmtime()),
            "machine": machine,
        }
        given.json.write_text(json.dumps({**whole, "rounds": rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
