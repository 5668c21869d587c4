# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's CUDA tensors in one process on one device: a step of `lease`. Each check prints a line; a failure does not stop the others.
With `--device cpu` the same checks run without a GPU, except those of NCCL and of graphs.

    PYTHONPATH=python CPATTN_LIBRARY=... python3 benches/peers/pytorch.py [--device cpu] [--only CHECK] [--communicator own]

    dense      o and the gradients of q, k, v beside f64, for head dims of 64, 128 and 256
    losses     examples/python/train.py under autocast, bf16 and f16: those of PyTorch alone, with each communicator; the example sums
               gradients over the process group between the calls of the context
    threads    the same over four ranks as threads on the device (`cpattn.peer_group`; on the CPU `local_group`)
    graph      forward and backward captured by torch.cuda.graph, replayed over other values: the bits of the usual calls
"""

import argparse
import contextlib
import pathlib
import sys
import tempfile
import traceback

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    sys.exit(f"not run: {error}")

HERE = pathlib.Path(__file__).resolve().parent
# In the repository, and in a folder that `prepare` made.
EXAMPLES = next(
    p for p in (HERE / "bin/capi/repository/examples/python", HERE.parents[1] / "examples/python") if p.exists()
)
sys.path.insert(0, str(EXAMPLES))

import cpattn.torch
import threads
import train

DOCUMENTS = [0, 1, 130, 500, 1024]
HALF = (torch.bfloat16, torch.float16)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Here(train.Parallel):
    """The example over a process group that is there already."""

    def __init__(self, **options):
        self.context = cpattn.torch.Context(
            heads=train.HEADS, kv_heads=train.KV_HEADS, head_dim=train.HEAD_DIM, **options
        )


def losses(device, communicator):
    for dtype in trained(device):
        with torch.autocast(device, dtype):
            parallel = Here(dtype=dtype, device=device, kernels="cpattn", communicator=communicator)
            got = train.train(parallel, steps_on(device), torch.float32, device)
        parallel.context.close()
        compare(device, dtype, got)


def of_threads(device, _):
    for dtype in trained(device):
        compare(device, dtype, threads.losses(device, dtype, 4, steps_on(device)))


def trained(device):
    return HALF if device == "cuda" else HALF[:1]


def steps_on(device):
    return 50 if device == "cuda" else 2


def compare(device, dtype, got):
    """With the losses of PyTorch alone."""
    with torch.autocast(device, dtype):
        want = train.train(train.Alone(), len(got), torch.float32, device)
    worst = max(abs(a - b) / b for a, b in zip(got, want))
    print(f"  {dtype}: {want[0]:.4f} to {want[-1]:.4f}, largest relative difference {worst:.1e}")
    assert len(want) < 50 or want[-1] < 0.9 * want[0], "it learns"
    assert worst < 8 * ROUNDING[dtype], "losses differ by more than rounding"


def inputs(device, dtype, dim):
    torch.manual_seed(1)
    shapes = ((8, dim), (2, dim), (2, dim))
    q, k, v = (torch.randn(DOCUMENTS[-1], *shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v, torch.randn_like(q)


def dense(q, k, v):
    """By the formula, in f64."""
    ends = torch.tensor(DOCUMENTS, device=q.device)
    place = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(ends, place, right=True)
    allowed = (document[:, None] == document) & (place[:, None] >= place)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    return torch.einsum("hqk,khd->qhd", s.masked_fill(~allowed, -torch.inf).softmax(2), v)


def beside_dense(device, communicator):
    for dtype in HALF:
        for dim in (64, 128, 256) if device == "cuda" else (64,):
            q, k, v, d_o = inputs(device, dtype, dim)
            context = cpattn.torch.Context(
                heads=8,
                kv_heads=2,
                head_dim=dim,
                dtype=dtype,
                device=device,
                kernels="cpattn",
                communicator=communicator,
            )
            o = context.batch(DOCUMENTS).attention(q, k, v)
            exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
            want = dense(*exact)
            found = [o, *torch.autograd.grad(o, (q, k, v), d_o)]
            expected = [want, *torch.autograd.grad(want, exact, d_o.double())]
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected)]
            print(f"  {dtype} {dim}: o, dq, dk, dv", " ".join(f"{e:.1e}" for e in errors))
            assert max(errors) < 2 * ROUNDING[dtype]
            context.close()


def graph(device, communicator):
    q, k, v, d_o = inputs(device, torch.bfloat16, 128)
    context = cpattn.torch.Context(
        heads=8,
        kv_heads=2,
        head_dim=128,
        dtype=torch.bfloat16,
        device=device,
        kernels="cpattn",
        communicator=communicator,
    )
    batch = context.batch(DOCUMENTS)

    def both():
        o = batch.attention(q, k, v)
        return [o, *torch.autograd.grad(o, (q, k, v), d_o)]

    # As PyTorch asks: some runs on another stream before the capture. They also prepare the plan.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = both()
    for seed in (2, 3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (q, k, v, d_o):
                x.normal_()
        captured.replay()
        replayed = [x.clone() for x in results]
        assert all(torch.equal(a, b) for a, b in zip(replayed, both())), "a replay gives other bits"
    context.close()


CHECKS = {"dense": beside_dense, "losses": losses, "threads": of_threads, "graph": graph}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--only", choices=sorted(CHECKS), action="append", help="this check; may be given more than once"
    )
    parser.add_argument(
        "--communicator", choices=["own", "torch"], help="this one alone, of the two that there are on CUDA"
    )
    given = parser.parse_args()
    device = given.device
    on_cuda = device == "cuda"
    if given.communicator and not on_cuda:
        parser.error(
            f"--communicator is {given.communicator}, and --device {device}: only CUDA tensors are sent over NCCL"
        )
    if on_cuda and not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=store, rank=0, world_size=1)
        for what in given.only or [name for name in CHECKS if on_cuda or name != "graph"]:
            both = ("own", "torch") if on_cuda and what != "threads" else ("own",)
            for communicator in [name for name in both if given.communicator in (None, name)]:
                check, name = CHECKS[what], f"{what}, communicator {communicator}"
                print(name, flush=True)
                try:
                    check(device, communicator)
                except Exception:  # noqa: BLE001 (the others are to run)
                    traceback.print_exc()
                    failed.append(name)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    print(f"failed: {'; '.join(failed)}" if failed else "ok")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
