# SPDX-License-Identifier: MIT OR Apache-2.0
"""The check of the links between the processes of a torch.distributed group, over gloo.

    torchrun --nproc-per-node 4 -m cpattn.torch.ring --timeout 20

prints the latency and rate of each link. If a link fails, each rank prints its name and what to try, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch.distributed as dist

from ..errors import Error
from ..ring import table
from .gloo import check_ring


def main() -> int:
    """The program: returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Checks the links between the processes that torchrun started, over gloo."
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="timeout in seconds (default: 60)")
    parser.add_argument(
        "--bytes", type=int, default=4 << 20, help="size of the large message in bytes (default: 4194304)"
    )
    arguments = parser.parse_args()
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        print(
            f"{missing[0]} is not set: start this with torchrun --nproc-per-node N -m cpattn.torch.ring",
            file=sys.stderr,
        )
        return 2
    dist.init_process_group("gloo")
    try:
        links = check_ring(timeout=arguments.timeout, bytes=arguments.bytes)
    except Error as error:
        print(
            f"rank {dist.get_rank()}: {error}",
            *([f"({error.__cause__})"] if error.__cause__ else []),
            file=sys.stderr,
            flush=True,
        )
        # A normal exit could wait for a dead or stopped rank.
        os._exit(1)
    if dist.get_rank() == 0:
        print(table(links), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
