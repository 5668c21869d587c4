# SPDX-License-Identifier: MIT OR Apache-2.0
"""Groups that change size beside groups of one size: what the planner predicts for a step of a long-tailed mixture.

    python3 python/tests/measure_groups.py [--steps 3]

Lengths are 400 / (1 - x) - 300 for x drawn evenly from 0 to 1, up to 65,536. A rank has room for 8,192 tokens. The model: 32 q heads, 8 kv heads,
head_dim 128, 200 million parameters a layer outside of attention, bf16. Each is the sum over the passes of a step, a pass as long as its slowest group.
"""

import argparse
import random
import time
from itertools import accumulate
from pathlib import Path

import cpattn

MACHINE = (Path(__file__).parents[2] / "machines/h100_8x400g.machine").read_text()
SIZES = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    print("| ranks | documents | passes | sizes of groups | over the bound | dealing, ms | 8 ranks | 16 ranks |")
    print("|---|---|---|---|---|---|---|---|")
    for world, documents in ((64, 1000), (512, 6000)):
        draw = random.Random(7)
        rows = []
        for _ in range(steps):
            lengths = [min(int(400 / (1 - draw.random())) - 300, 65_536) for _ in range(documents)]
            ends = [0, *accumulate(lengths)]
            how = {
                "heads": 32, "head_dim": 128, "kv_heads": 8, "dtype": "bf16", "room": 8192, "world": world,
                "token_flops": 400_000_000, "machine": MACHINE,
            }  # fmt: skip
            began = time.perf_counter()
            dealt = cpattn.plan_groups(ends, sizes=SIZES, **how)
            took = time.perf_counter() - began
            fixed = [cpattn.plan_groups(ends, sizes=(size,), **how).makespan / dealt.makespan for size in SIZES[3:]]
            used = sorted({group.ranks for one in dealt.passes for group in one})
            rows.append((len(dealt.passes), used, dealt.makespan / dealt.bound, 1e3 * took, *fixed))
        passes, over, took, eight, sixteen = (sum(row[at] for row in rows) / steps for at in (0, 2, 3, 4, 5))
        sizes = ", ".join(map(str, sorted({size for row in rows for size in row[1]})))
        print(
            f"| {world} | {documents:,} | {passes:.0f} | {sizes} | {100 * (over - 1):.1f} % | {took:.0f} | {eight:.2f} × | {sixteen:.2f} × |"
        )


if __name__ == "__main__":
    main()
