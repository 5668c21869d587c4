# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every transformer of the installed Diffusers, by hand: the results and gradients of one process, or the reason of its refusal.

    python3 python-hf/tests/sweep_diffusers.py [--worlds 2 3 5]

It prints the distances of each case of diffusion_cases.py, the largest of each class, which is the table of docs/diffusers.md, and the classes that
are refused. It ends with 1 if a class with a `_cp_plan` has no case, or one is further apart than the tests allow.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import defaultdict
from typing import Any

import diffusers
import diffusion_cases
import processes
import torch
import torch.distributed as dist
from cpattn import Unsupported
from cpattn_hf.diffusers import ContextParallel
from cpattn_hf.diffusers.plans import MODELS, plan_of
from diffusers.models import transformers
from diffusion_cases import BOUND, GRADIENT_BOUND
from test_diffusers import distance_of, gradients

diffusers.utils.logging.set_verbosity_error()


def meshes(world: int) -> list[dict[str, int]]:
    """Over a ring, over Ulysses as far as 3 heads go, and what is chosen."""
    return [
        {},
        {"ring": world},
        *([{"ulysses": world}] if world <= 3 else []),
        *([{"ulysses": 2, "ring": world // 2}] if world % 2 == 0 and world > 2 else []),
    ]


def _compare(rank: int, world: int) -> list[tuple[str, str, str, float, float]]:
    found = []
    for case in diffusion_cases.CASES:
        model, inputs = diffusion_cases.build(case)
        with torch.no_grad():
            expected = diffusion_cases.results(model(**inputs))
        exact = gradients(model, inputs)
        for mesh in meshes(world):
            model, inputs = diffusion_cases.build(case)
            cp = ContextParallel(model, timeout=100, gradients="sum", **mesh)
            with torch.no_grad():
                results = diffusion_cases.apart(diffusion_cases.results(model(**inputs)), expected)
            sums = gradients(model, inputs)
            for one in sums:
                dist.all_reduce(one)
            found.append((type(model).__name__, case, f"{world} {mesh or ''}", results, distance_of(sums, exact)))
            cp.close()
    return found


def refused() -> dict[str, str]:
    """The classes that are neither compared nor without a reason."""
    reasons = {}
    for name, kind in inspect.getmembers(transformers, inspect.isclass):
        if issubclass(kind, diffusers.ModelMixin) and name not in MODELS:
            model: Any = kind.__new__(kind)
            try:
                plan_of(model, None)
            except Unsupported as error:
                reasons[name] = str(error).split(":")[0]
            else:
                reasons[name] = "NOT REFUSED"
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 5])
    worlds = parser.parse_args().worlds
    most: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for world in worlds:
        for ranks in zip(*processes.run(_compare, world, seconds=1000), strict=True):
            kind, case, mesh = ranks[0][:3]
            results, sums = (max(one[at] for one in ranks) for at in (3, 4))
            most[kind] = [max(results, most[kind][0]), max(sums, most[kind][1])]
            print(f"{case} on {mesh}: results {results:.1e}, gradients {sums:.1e}", flush=True)
    print(f"\nDiffusers {diffusers.__version__}, PyTorch {torch.__version__}, {worlds} ranks\n")
    for kind, (results, sums) in most.items():
        print(f"| `{kind}` | {results:.1e} | {sums:.1e} |")
    reasons = refused()
    print(f"\n{len(reasons)} other classes:")
    for name, reason in reasons.items():
        print(f"{name}: {reason}")
    far = [kind for kind, (results, sums) in most.items() if not (results <= BOUND and sums <= GRADIENT_BOUND)]
    lacking = [name for name in MODELS if name not in most]
    print(f"\ntoo far: {far}, without a case: {lacking}")
    sys.exit(bool(far or lacking or "NOT REFUSED" in reasons.values()))


if __name__ == "__main__":
    main()
