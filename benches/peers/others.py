# SPDX-License-Identifier: MIT OR Apache-2.0
"""The schedules with kernels of others, in one process beside PyTorch alone: the first step of `lease`, in two minutes.

    PYTHONPATH=python CPATTN_LIBRARY=... python3 benches/peers/others.py [--device cpu] [--tiny] [--limit-s 110]

For each kernel that is there ("torch", FlashAttention's packages, "flex") packs of documents go forward and backward through
`Context(kernels=...)`. o, dq, dk and dv of whole short documents, and o and dq of drawn rows of the longest one, are compared with
products and softmax in f64. Times are medians of steps that take turns with the same step by PyTorch alone: a loop of
`scaled_dot_product_attention` over the documents, and on a device FlexAttention with a mask of documents. The last line is JSON;
before each case one has what was found so far, and the case as `running`, so that a run that is ended keeps its rows.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback

try:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention as sdpa
except ImportError as error:
    sys.exit(f"not run: {error}")

import cpattn
import cpattn.torch
from cpattn.torch.kernels import find

KERNELS = ("torch", "flash_attn", "flash_attn_3", "flash_attn_4", "flex")
HEADS, KV_HEADS = 16, 4
# Ends of documents: many short ones and a long one.
PACK, TINY = (0, 100, 357, 1000, 1024, 3000, 16384), (0, 5, 38, 300)
SAMPLED, ROWS = 1024, 64
"""Whole documents of up to so many tokens are compared, and so many rows of the longest."""
NEEDS_S = {"flex": 45.0}
"""A case begins only while so much is left: compilers take their time."""
BOUND = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-4}


def inputs(device, dtype, ends, head_dim):
    random = torch.Generator().manual_seed(1)
    q, k, v, d_o = (
        torch.randn(ends[-1], n, head_dim, generator=random).to(device, dtype)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return [x.requires_grad_() for x in (q, k, v)], d_o


def documents(ends):
    return list(zip(ends, ends[1:]))


def by_sdpa(ends):
    def attend(q, k, v):
        parts = [
            sdpa(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True)[0]
            for a, b in documents(ends)
        ]
        return torch.cat(parts, 1).transpose(0, 1)

    return attend


def by_flex(ends, device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.bucketize(torch.arange(ends[-1], device=device), torch.tensor(ends[1:], device=device), right=True)
    mask = create_block_mask(
        lambda b, h, i, j: (document[i] == document[j]) & (i >= j), None, None, ends[-1], ends[-1], device=device
    )
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask, enable_gqa=True)[
        0
    ].transpose(0, 1)


def step(attend, leaves, d_o):
    o = attend(*leaves)
    return o, *torch.autograd.grad(o, leaves, d_o)


def errors(found, leaves, d_o, ends):
    """The largest error of each result over its largest value, of whole short documents and of drawn rows of the longest."""
    a, b = max(documents(ends), key=lambda ends: ends[1] - ends[0])
    drawn = torch.randperm(b - a, generator=torch.Generator().manual_seed(2))[:ROWS].to(d_o.device)
    cases, left = [(a, b, drawn)], SAMPLED
    for first, end in sorted(documents(ends), key=lambda ends: ends[1] - ends[0]):
        if (left := left - (end - first)) >= 0 and (first, end) != (a, b):
            cases.append((first, end, None))
    worst = dict.fromkeys(("o", "dq", "dk", "dv"), 0.0)
    for first, end, rows in cases:
        q, k, v = (x.detach()[first:end].double() for x in leaves)
        place = torch.arange(end - first, device=q.device) if rows is None else rows
        q, d = q[place], d_o[first:end][place].double()
        exact = [x.requires_grad_() for x in (q, k, v)]
        wide = [x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)]
        s = torch.einsum("qhd,khd->hqk", q, wide[0]) * q.shape[2] ** -0.5
        s = s.masked_fill(place[:, None] < torch.arange(end - first, device=q.device), -torch.inf)
        o = torch.einsum("hqk,khd->qhd", s.softmax(2), wide[1])
        want = o, *torch.autograd.grad(o, exact, d)
        # dk and dv need all rows of a document.
        for name, x, y in list(zip(worst, found, want))[: 2 if rows is not None else 4]:
            x = x[first:end] if rows is None or name in ("dk", "dv") else x[first:end][place]
            error = ((x.double() - y).abs().max() / y.abs().max()).item()
            worst[name] = max(worst[name], error if error == error else torch.inf)
    return worst


def timed(run, device):
    def wait():
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    wait()
    begun = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begun


def case(name, kernel, device, dtype, ends, head_dim, rounds):
    """A row: errors, and times beside PyTorch alone."""
    leaves, d_o = inputs(device, dtype, ends, head_dim)
    context = cpattn.torch.Context(
        heads=HEADS, kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype, device=device, kernels=kernel
    )
    try:
        sides = {"ours": context.batch(list(ends)).attention, "sdpa": by_sdpa(ends)}
        if name == "flex" and device.type != "cpu":
            sides["flex"] = by_flex(ends, device)
        row = {"kernel": name, "dtype": str(dtype), "head_dim": head_dim, "tokens": ends[-1]}
        row["errors"] = errors(step(sides["ours"], leaves, d_o), leaves, d_o, ends)
        for attend in sides.values():
            step(attend, leaves, d_o)
        times = {side: [] for side in sides}
        for _ in range(rounds):
            for side, attend in sides.items():
                times[side].append(timed(lambda attend=attend: step(attend, leaves, d_o), device))
        row |= {f"{side}_s": statistics.median(found) for side, found in times.items()}
        row["ok"] = max(row["errors"].values()) < BOUND[dtype]
        return row
    finally:
        context.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few tokens, one round")
    parser.add_argument(
        "--limit-s", type=float, default=110.0, help="no case begins after it, nor one that needs more than is left"
    )
    of = parser.parse_args()
    device, until = torch.device(of.device), time.monotonic() + of.limit_s
    on_cpu = device.type == "cpu"
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device")
    ends, dims, rounds = (TINY, (64,), 1) if of.tiny else (PACK, (128, 64), 10)
    rows, missing, failed = [], {}, []

    def tell(**more):
        print(json.dumps({"rows": rows, "missing": missing, "failed": failed, **more}), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl" if device.type == "cuda" else None
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            for name in KERNELS:
                try:
                    kernel = find(name, device)
                except cpattn.Unsupported as error:
                    missing[name] = str(error)
                    continue
                if on_cpu and name == "flex":
                    missing[name] = "PyTorch compiles no backward of FlexAttention for the CPU"
                    continue
                dtypes = [dtype for dtype in (torch.bfloat16, torch.float32) if dtype in kernel.honours.dtypes]
                for dtype, dim in [(dtype, dim) for dtype in dtypes for dim in dims]:
                    what = f"{name} {dtype} {dim}"
                    if time.monotonic() + NEEDS_S.get(name, 0.0) > until:
                        missing[what] = "no time was left"
                        continue
                    tell(running=what)
                    try:
                        rows.append(case(name, kernel, device, dtype, ends, dim, rounds))
                    except Exception:  # noqa: BLE001 (the others are to run)
                        traceback.print_exc()
                        failed.append(what)
                        continue
                    print(what, json.dumps(rows[-1]), flush=True)
                    if not rows[-1]["ok"]:
                        failed.append(what)
        finally:
            dist.destroy_process_group()
    print(f"failed: {'; '.join(failed)}" if failed else "ok", flush=True)
    tell()
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
