# SPDX-License-Identifier: MIT OR Apache-2.0
"""Faults over gloo: processes that die, stop, stop for a while, never start, start too late, leave, abort and end, compute for too long or
plan something else, in the middle of training steps; or one is killed while rank 0 holds the store and ends with its error.

    capi/build && PYTHONPATH=python python3 python/tests/faults.py --trials 1000

Each trial is a job of new processes. Its ranks run attention forward and backward over ever new documents and compare every
result with the formula, until something fails or the steps are done. After the fault every rank that is left must end within
the deadline and some slack, with an error that names the rank that the fault was done to, and never with a wrong result; no
process may be left over.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from subprocess import Popen

import torch
from dense import dense, error, gradients
from processes import Outcome, start

import cpattn
from cpattn.torch import Context

KINDS = ("killed", "holder", "meanwhile", "stopped", "paused", "absent", "late", "left", "aborts", "slow", "plans")
# What the error says of the rank at fault, after its number. It may be killed or stopped before it comes.
SAYS = {
    "killed": "(gives no answer|did not come)",
    "holder": "(gives no answer|did not come)",
    "meanwhile": "(gives no answer|did not come)",
    "stopped": "(gives no answer|did not come)",
    "paused": "(gives no answer|did not come|came late|is in no call of the group)",
    "absent": "did not come",
    "late": "did not come",
    "left": "has left the group",
    "aborts": "aborted the run",
    "slow": "is in no call of the group",
}
DEADLINE, SLACK, STEPS = 1.5, 20.0, 8


def drawn_victim(draw: random.Random, world: int, kind: str) -> int:
    """Which rank the fault is done to. When rank 0 holds the store it is another one."""
    return draw.randrange(1, world) if kind == "holder" else draw.randrange(world)


def step(context: Context, cu_seqlens: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, heads = cu_seqlens[-1], (4, 2, 2, 4)
    *whole, d_o = (torch.randn(n, h, 8, generator=generator, dtype=torch.float64) for h in heads)
    batch = context.batch(cu_seqlens)
    labels = batch.labels(batch.shard(torch.arange(n)))
    ends = set(cu_seqlens)
    want_labels = torch.tensor([-100 if t + 1 in ends else t + 1 for t in range(n)])
    mine, exact = ([f(x).requires_grad_() for x in whole] for f in (batch.shard, torch.clone))
    o = batch.attention(*mine)
    got = [o, *gradients(o, batch.shard(d_o), mine)]
    o = dense(*exact, cu_seqlens)
    want = [batch.shard(x) for x in (o, *gradients(o, d_o, exact))]
    wrong = [name for name, a, b in zip(("o", "dq", "dk", "dv"), got, want) if not error(a, b) < 1e-13]
    if wrong or not torch.equal(labels, batch.shard(want_labels)):
        raise AssertionError(f"WRONG RESULT: {wrong}")


def job(rank: int, world: int, kind: str, seed: int) -> str:
    """How it ended on this rank. Everything but the fault is drawn the same on all ranks."""
    draw = random.Random(seed)
    victim, delay, odd = drawn_victim(draw, world, kind), draw.random() * 0.4, draw.randrange(STEPS)
    ulysses = draw.choice([u for u in (1, 2, 3, 4) if world % u == 0])
    if rank == victim and kind in ("killed", "holder", "meanwhile", "stopped"):
        number = signal.SIGSTOP if kind == "stopped" else signal.SIGKILL
        threading.Timer(delay, os.kill, (os.getpid(), number)).start()
    if rank == victim and kind == "paused":
        # For less than the deadline, or just over it, or until the others have given up.
        more = random.Random(seed + 1)
        pause = DEADLINE * more.choice([more.uniform(0.3, 0.8), more.uniform(0.9, 1.6), more.uniform(1.6, 2.6)])
        me = os.getpid()
        Popen(["sh", "-c", f"sleep {delay}; kill -STOP {me}; sleep {pause}; kill -CONT {me}"])
    if rank == victim and kind == "absent":
        time.sleep(DEADLINE + SLACK)
        return "absent"
    if rank == victim and kind == "late":
        # A rank may wait for ten seconds to be connected, whatever the deadline: the store shares a core with many.
        time.sleep(DEADLINE + 11)
    # A rank that plans something else is told so; it is not a matter of time.
    try:
        context = Context(
            heads=4,
            kv_heads=2,
            head_dim=8,
            dtype=torch.float64,
            ulysses=ulysses,
            ring=world // ulysses,
            timeout=60.0 if kind == "plans" else DEADLINE,
        )
        for at in range({"plans": STEPS, "paused": 40}.get(kind, 1000)):
            cuts = sorted(draw.choices(range(1, 40), k=3))
            cu_seqlens = [0, *cuts, 40]
            if kind == "plans" and at == odd:
                try:
                    step(context, [0, *(c + 1 for c in cuts), 41] if rank == victim else cu_seqlens, at)
                except cpattn.Disagreement:
                    pass
                else:
                    raise AssertionError("WRONG RESULT: ranks with different plans ran")
            if kind in ("left", "aborts", "slow") and rank == victim and at == odd:
                if kind == "left":
                    context.close()
                    return "left"
                if kind == "aborts":
                    context.rank.abort()
                    os.kill(os.getpid(), signal.SIGKILL)  # the other ranks need no answer of it
                time.sleep(DEADLINE + 4)
            if kind == "meanwhile" and rank == (victim + 1) % world and at == 0:
                time.sleep(delay + 0.5)  # its call comes while the others look for the rank at fault
            step(context, cu_seqlens, at)
        for _ in range(60 if kind == "paused" else 0):
            time.sleep(0.1)
            context.rank.poll()
    except cpattn.PeerError as failure:
        failed = time.monotonic()
        # Once failed stays failed, and says so at once.
        if "context" in locals() and kind != "holder":
            try:
                step(context, [0, 40], 0)
            except cpattn.PeerError as again:
                assert again.peer == failure.peer, f"WRONG RANK: {failure}, then {again}"
            else:
                raise AssertionError("WRONG RESULT: a failed transport ran") from failure
            if time.monotonic() - failed > SLACK / 2:
                raise AssertionError("SLOW: a failed transport waited") from failure
        return f"PeerError by {failure.peer}: {failure}"
    return "done"


def trial(kind: str, world: int, seed: int, slack: float = SLACK) -> list[Outcome]:
    """Raises AssertionError when something is not as it must be."""
    victim = drawn_victim(random.Random(seed), world, kind)
    waits = lambda rank: kind in ("plans", "late", "slow", "paused") or rank != victim
    outcomes = start(job, world, kind, seed, seconds=DEADLINE + 2 * slack, until=waits, inside=kind == "holder")
    if kind == "paused" and all(outcome.value == "done" for outcome in outcomes):
        return outcomes  # it was back in time
    # Stopped while connections are being made, on a machine where others got no core either, it need not stand out.
    joining = "not all ranks made their transport", "cannot be told"
    if kind == "paused" and all(all(part in str(outcome.value) for part in joining) for outcome in outcomes):
        return outcomes
    for rank, outcome in enumerate(outcomes):
        if rank == victim and kind in ("killed", "holder", "meanwhile", "stopped", "absent", "left", "aborts"):
            continue
        what = f"{kind}, seed {seed}, rank {rank} of {world} (victim {victim}): {outcome}"
        assert outcome.error is None, what
        assert outcome.value is not None, f"no answer: {what}"
        expected = "done" if kind == "plans" else f"PeerError by {victim}: "
        assert outcome.value.startswith(expected), what
        assert kind == "plans" or re.search(f"rank {victim} {SAYS[kind]}", outcome.value), what
        assert kind == "plans" or outcome.seconds < DEADLINE + slack, f"late: {what}"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of these")
    parser.add_argument(
        "--slack", type=float, default=SLACK, help="seconds beyond the deadline, on a machine that has much else to do"
    )
    parser.add_argument("--verbose", action="store_true", help="what each rank said")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    began, slowest, told, failed = time.monotonic(), 0.0, Counter[str](), 0
    for i in range(given.trials):
        kind, world = kinds[i % len(kinds)], (3, 4, 2)[i // len(kinds) % 3]
        try:
            outcomes = trial(kind, world, given.seed * 1_000_003 + i, given.slack)
        except AssertionError as wrong:
            failed += 1
            print(f"FAILED {wrong}", flush=True)
            continue
        slowest = max([slowest, *(o.seconds for o in outcomes if o.value and o.value.startswith("PeerError"))])
        told[kind] += 1
        if given.verbose:
            print(
                f"{kind}:",
                *(f"  {rank}: {o.seconds:.1f} s: {o.value}" for rank, o in enumerate(outcomes)),
                sep="\n",
                flush=True,
            )
        if (i + 1) % 50 == 0:
            print(f"{i + 1} trials, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{given.trials} trials ({dict(told)}), slowest answer after {slowest:.1f} s of a deadline of {DEADLINE} s: {failed or 'none'} failed"
    )
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
