# SPDX-License-Identifier: MIT OR Apache-2.0
"""One rank of the measurement that `benches/hosts/run` starts on the hosts of `examples/hosts`.

A case is a direction and a mask. In each round every case runs once. All ranks meet before and after it; between, each measures its time, and one rank of each host
reads the counters of the host's interface. So the counters contain the messages of the run and of two meetings, nothing else.

Over MPI the ranks meet in MPI_Barrier, over gloo in dist.barrier. Tensors are NumPy's over both. Each rank writes a JSON file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpattn
import numpy as np
from cpattn import Direction, Plan, Rank, Side

COUNTERS = Path("/sys/class/net/cpattn0/statistics")
DEADLINE = 300.0


class OverMpi:
    """MPI_COMM_WORLD of Open MPI, which is the MPI that `examples/hosts` starts."""

    def __init__(self) -> None:
        self._mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
        provided = ctypes.c_int()
        multiple = 3  # MPI_THREAD_MULTIPLE
        self._mpi.MPI_Init_thread(None, None, multiple, ctypes.byref(provided))
        self._comm = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._mpi, "ompi_mpi_comm_world")))
        transport = ctypes.c_void_p()
        cpattn._library.call("mpi_group", ctypes.byref(self._comm), int(DEADLINE * 1000), ctypes.byref(transport))
        self.rank = Rank(transport)
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        self.number, self.world, self.local, self.each = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in names)
        each = ctypes.c_uint32()
        cpattn._library.call("mpi_ranks_per_node", ctypes.byref(self._comm), ctypes.byref(each))
        if each.value != self.each:
            raise RuntimeError(f"MPI says {each.value} ranks share a host, its launcher {self.each}")

    def meet(self) -> None:
        self._mpi.MPI_Barrier(self._comm)

    def end(self) -> None:
        self.rank.close()
        self._mpi.MPI_Finalize()


class OverGloo:
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from cpattn.torch import GlooTransport

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._dist = dist
        self.rank = Rank(GlooTransport(timeout=DEADLINE))
        self.number, self.world, self.local, self.each = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )

    def meet(self) -> None:
        self._dist.barrier()

    def end(self) -> None:
        self.meet()
        self.rank.close()
        self._dist.destroy_process_group()


def counters() -> list[int]:
    """Bytes that this host has sent and received."""
    return [int((COUNTERS / name).read_text()) for name in ("tx_bytes", "rx_bytes")]


def crossing(plan: Plan, ulysses: int, each: int, direction: Direction, queries: bool, causal: bool, once: bool) -> int:
    """The bytes of rows that cross a link between hosts: what each rank reads and its host does not hold, once for each host
    (`once`), or once for each such rank. For one document on a ring; `queries`: the backward sends q's side round. Ulysses lies
    inside a host: its ranks read the rows of all of them, for the heads that each holds, so k and v once for each that holds a head."""
    size, dims = 4, plan.head_dim + plan.value_dim
    if direction == Direction.FORWARD:
        row = plan.kv_heads * dims * size
    elif queries:
        # q, dO, lse and delta one way, dq the other.
        row = plan.heads * ((dims + 2) * size + plan.head_dim * 4)
    else:
        row = plan.kv_heads * dims * (size + 4)
    moving, staying = (Side.Q, Side.K) if queries and direction == Direction.BACKWARD else (Side.K, Side.Q)
    here = [np.array(plan.positions(staying, rank)) for rank in range(plan.world)]
    there = [np.array(plan.positions(moving, rank)) for rank in range(plan.world)]
    apart = each if once else ulysses
    readers = [range(rank, rank + apart) for rank in range(0, plan.world, apart)]
    copies = 1 if once or moving == Side.Q else max(1, ulysses // plan.kv_heads)
    rows = 0
    for ranks in readers:
        own = np.concatenate([here[rank] for rank in ranks])
        host = ranks[0] // each
        for owner in range(plan.world):
            if owner // each != host:
                read = np.ones(len(there[owner]), bool)
                if causal:
                    read = there[owner] >= own.min() if moving == Side.Q else there[owner] <= own.max()
                rows += int(read.sum())
    return rows * row * copies


def tensors(plan: Plan, rank: int) -> dict[str, np.ndarray]:
    n, random = plan.share(rank).q_tokens, np.random.default_rng(rank)
    shapes: dict[str, tuple[int, ...]] = {name: (n, plan.heads, plan.head_dim) for name in ("q", "o", "d_o", "dq")}
    shapes |= {name: (n, plan.kv_heads, plan.head_dim) for name in ("k", "v", "dk", "dv")}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()} | {
        "lse": np.full((plan.heads, n), np.nan, np.float32)
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("mpi", "gloo"), required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--ulysses", type=int, required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--circulate", required=True)
    parser.add_argument("--levels", type=int, choices=(1, 2), required=True)
    parser.add_argument("--masks", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--into", type=Path, required=True, help="a folder for this rank's figures")
    given = parser.parse_args()
    over = OverMpi() if given.engine == "mpi" else OverGloo()
    if over.each % given.ulysses or given.kv_heads % given.ulysses and given.ulysses % given.kv_heads:
        sys.exit(
            f"--ulysses is {given.ulysses}, a divisor of the {over.each} ranks of a host is needed that divides --kv-heads or that they divide"
        )
    queries = given.circulate == "queries"

    runs: dict[tuple[str, str], Callable[[], None]] = {}
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    results: list[np.ndarray] = []
    for mask in given.masks.split(","):
        plan = Plan(
            [0, given.tokens],
            given.heads,
            given.head_dim,
            kv_heads=given.kv_heads,
            world=over.world,
            ulysses=given.ulysses,
            ring=over.world // given.ulysses,
            layout=given.layout.upper(),
            circulate=given.circulate.upper(),
            window_right=0 if mask == "causal" else cpattn.UNLIMITED,
            gather="STEPS",
            ranks_per_node=over.each if given.levels == 2 else 0,
        )
        all_of = tensors(plan, over.number)
        forward = {name: all_of[name] for name in ("q", "k", "v", "o", "lse")}
        for direction, call, args, written in (
            (Direction.FORWARD, over.rank.forward, forward, ("o", "lse")),
            (Direction.BACKWARD, over.rank.backward, all_of, ("dq", "dk", "dv")),
        ):
            key = (direction.name.lower(), mask)
            runs[key] = lambda call=call, plan=plan, args=args: call(plan, **args)
            bound, every = (
                crossing(plan, given.ulysses, over.each, direction, queries, mask == "causal", once)
                for once in (True, False)
            )
            cases[key] = {
                "rounds": [],
                "bound_bytes": bound,
                "row_bytes_by_rank": every,
                "workspace": plan.workspace(over.number, direction),
            }
            results += [args[name] for name in written]

    for each in range(given.rounds + 1):  # the first prepares plans and connections
        for key, run in runs.items():
            over.meet()
            # Every rank has left the meeting before it is counted as over; no rank begins before all hosts have counted.
            time.sleep(0.02)
            before = counters()
            over.meet()
            began = time.monotonic()
            run()
            seconds = time.monotonic() - began
            over.meet()
            time.sleep(0.02)
            if each:
                after = counters()
                cases[key]["rounds"].append([seconds, *(b - a for a, b in zip(before, after, strict=True))])
    finite = all(np.isfinite(x).all() for x in results)
    text = {"rank": over.number, "local": over.local, "each": over.each, "finite": finite}
    text["cases"] = [dict(zip(("direction", "mask"), key, strict=True)) | case for key, case in cases.items()]
    (given.into / f"{over.number}.json").write_text(json.dumps(text))
    over.end()


if __name__ == "__main__":
    main()
