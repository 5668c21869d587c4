# SPDX-License-Identifier: MIT OR Apache-2.0
"""One rank of several, each a process, over NCCL: forward and backward, compared with one rank on the CPU.

    capi/build --cuda
    rm -f id; PYTHONPATH=python python3 examples/python/nccl_ranks.py 0 2 id & \\
              PYTHONPATH=python python3 examples/python/nccl_ranks.py 1 2 id; wait

The arguments are the rank, how many there are, and a file that brings the unique id from rank 0 to the others; a job
would broadcast it. CUDA_VISIBLE_DEVICES gives each process its device: the first that it sees is taken.
"""

import os
import sys
import time

import cpattn
from cuda_ranks import DEVICE, DIM, DOCUMENTS, HEADS, KV_HEADS, batch, memory, on_cpu, part, report


def unique_id(rank, path):
    """Rank 0 makes it, the others wait for it."""
    if rank == 0:
        with open(path + ".fresh", "wb") as file:
            file.write(cpattn.nccl_unique_id())
        os.rename(path + ".fresh", path)
    end = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < end:
        time.sleep(0.001)
    with open(path, "rb") as file:
        return file.read()


def main():
    number, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = memory()
    whole = batch()
    want = on_cpu(whole)
    plan = cpattn.Plan(
        DOCUMENTS, HEADS, DIM, kv_heads=KV_HEADS, dtype=cpattn.Dtype.F16, world=world, ulysses=1, ring=world
    )
    rank = cpattn.nccl_group(unique_id(number, path), rank=number, world=world, device=DEVICE)
    report(number, part(device, plan, whole, want, number, rank))
    rank.close()
    print("ok")


if __name__ == "__main__":
    main()
