# SPDX-License-Identifier: MIT OR Apache-2.0
"""Host time of an operation of a schedule with kernels of others, beside PyTorch's own calls.

    CPATTN_LIBRARY=... PYTHONPATH=python:python/tests python3 benches/executor/host_time.py [--json] [--quick]

The kernel returns at once, messages are not moved, and tensors have few rows, so that the host is all there is. What is timed is the
processor time of the thread. "PyTorch" are the calls into PyTorch that such a run makes, recorded once and made again by
themselves; "beside" is the rest. Each is the first quartile of 60 runs, the least of four such; both take turns.
"""

import argparse
import json
import time
import unittest.mock

import torch
from mail import Office, Post, Talk
from torch.overrides import TorchFunctionMode

from cpattn import Direction, Plan, Side
from cpattn.torch.executor import Executor
from cpattn.torch.kernels import Honours, Kernel, packed

HEADS, KV_HEADS, DIM, ENDS = 4, 2, 8, [0, 9, 9, 31, 64]
MESHES = {
    "one rank": {},
    "ring of 2": {"world": 2, "ring": 2, "layout": "zigzag"},
    "ring of 4": {"world": 4, "ring": 4},
    "ring of 2, ulysses of 2": {"world": 4, "ring": 2, "ulysses": 2},
}
# Which the mode sees too, and which are no calls of operators.
ATTRIBUTES = ("__get__", "stride", "is_contiguous", "numel", "size", "__len__")


class Nothing(Kernel):
    """Returns the same zeros for the same call."""

    name = "nothing"
    honours = Honours(dtypes=(torch.float32,), strides=True)

    def __init__(self):
        self._results = {}

    def forward(self, q, k, v, call):
        return self._of((id(call), "forward"), lambda: (torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])))

    def backward(self, d_o, q, k, v, o, lse, call, delta=None):
        return self._of((id(call), "backward"), lambda: tuple(torch.zeros(x.shape) for x in (q, k, v)))

    def _of(self, key, make):
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]


class Still(Post):
    """A network that moves nothing."""

    def post(self, batch):
        return []

    def wait(self, works):
        pass


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ not in ATTRIBUTES:
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def again(self):
        with torch.no_grad():
            for function, args, kwargs in self.calls:
                function(*args, **kwargs)


def tensors(plan):
    q, k = (len(plan.tokens(side, 0)) for side in (Side.Q, Side.K))
    made = {
        name: torch.randn(rows, heads, DIM)
        for name, rows, heads in (("q", q, HEADS), ("k", k, KV_HEADS), ("v", k, KV_HEADS), ("d_o", q, HEADS))
    }
    return (
        made
        | {"o": torch.empty(q, HEADS, DIM), "lse": torch.empty(HEADS, q)}
        | {"d" + name: torch.empty_like(made[name]) for name in "qkv"}
    )


def quartile(run, count):
    times = []
    for _ in range(count):
        begun = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - begun)
    return sorted(times)[count // 4] / 1e3


def measured(mesh, rounds, count):
    """For each direction: operations, and microseconds of a run and of PyTorch's calls in it."""
    plan = Plan(ENDS, HEADS, DIM, kv_heads=KV_HEADS, **mesh)
    office = Office(mesh.get("world", 1))
    talk = Talk(office, 0)
    talk.agree = lambda first, end, number: [number] * (end - first)
    rank, every = Executor(talk, Still(office, 0), Nothing()), tensors(plan)
    of_forward = {name: every[name] for name in ("q", "k", "v", "o", "lse")}
    for way, run in (
        (Direction.FORWARD, lambda: rank.forward(plan, **of_forward)),
        (Direction.BACKWARD, lambda: rank.backward(plan, **every)),
    ):
        for _ in range(3):
            run()
        with Calls() as of_torch:
            run()
        pairs = [(quartile(run, count), quartile(of_torch.again, count)) for _ in range(rounds)]
        yield way, len(plan.schedule(0, way).ops), *(min(one) for one in zip(*pairs))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two runs of each: no times, but a check that it runs")
    of = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    # The kernel's results are no attention.
    with unittest.mock.patch.object(packed, "tried", lambda *_: None):
        for name, mesh in MESHES.items():
            for way, ops, whole, of_torch in measured(mesh, *((1, 2) if of.quick else (4, 60))):
                rows.append(
                    {
                        "mesh": name,
                        "direction": way.name.lower(),
                        "operations": ops,
                        "us": whole / ops,
                        "pytorch_us": of_torch / ops,
                    }
                )
    if of.json:
        print(json.dumps(rows))
        return
    print("| mesh | direction | operations | µs an operation | PyTorch | beside |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            "| {mesh} | {direction} | {operations} | {us:.0f} | {pytorch_us:.0f} |".format(**row),
            f"{row['us'] - row['pytorch_us']:.0f} |",
        )


if __name__ == "__main__":
    main()
