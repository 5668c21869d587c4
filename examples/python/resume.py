# SPDX-License-Identifier: MIT OR Apache-2.0
"""A training job that can be stopped, and goes on with another mesh or another number of ranks, with the losses of a job that nobody stopped.

    torchrun --nproc-per-node 4 examples/python/resume.py --folder run --context 2 --steps 5     # 2 replicas x 2 context ranks
    torchrun --nproc-per-node 3 examples/python/resume.py --folder run --context 3 --steps 10    # goes on with 1 x 3

SIGTERM at any rank, as SLURM sends before a time limit, ends the job after the step: all ranks learn of it together, and save once. If a rank
dies, the others end with an error within `--timeout` seconds; with `--max-restarts 1` torchrun starts all of them again, from what was saved
last (`--die 3` tries it: the last rank kills itself once, in step 3). TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is needed for that with PyTorch 2.11
and gloo: else the ranks that are started again look for the addresses of those before.

Parameters are sharded over all ranks by FSDP2, and saved by torch.distributed.checkpoint, which reads them on any number of ranks. What a step
computes depends on its number alone: which packs, which of their tokens are on which rank, and so which sums, is the plan's.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from cpattn.torch import Context
from parallelism import DIM, HEADS, KV_HEADS, VOCABULARY, Model

PACKS = 4  # in each step, over all replicas


def packs(step):
    """The documents and the tokens of a step, the same on all ranks."""
    draw = torch.Generator().manual_seed(step)
    for _ in range(PACKS):
        ends = [0, *torch.randint(1, 25, (3,), generator=draw).cumsum(0).tolist()]
        yield ends, torch.randint(VOCABULARY, (ends[-1],), generator=draw)


class Job:
    def __init__(self, folder, context, timeout=60.0, dtype=torch.float32):
        self.folder, world = Path(folder), dist.get_world_size()
        if world % context or PACKS % (world // context):
            raise SystemExit(
                f"{world} ranks and --context {context}: the number of replicas must be whole, and divide {PACKS}"
            )
        mesh = init_device_mesh("cpu", (world // context, context), mesh_dim_names=("replica", "context"))
        self.replica, self.replicas = mesh.get_local_rank("replica"), world // context
        self.context = Context(
            mesh.get_group("context"), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, timeout=timeout
        )
        torch.manual_seed(5)
        self.model = Model().to(dtype)
        shards = init_device_mesh("cpu", (world,))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=shards)
        fully_shard(self.model, mesh=shards)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step, self.asked = 0, False
        signal.signal(signal.SIGTERM, self.ask)
        self.load()

    def ask(self, *_):
        """Also in the middle of a call of attention, which goes on: a rank that stopped here would leave the others waiting."""
        self.asked = True

    def train(self, steps):
        """Up to so many steps. Returns the losses of those that this job has run."""
        losses = []
        while self.step < steps:
            losses.append(self.run(list(packs(self.step))))
            self.step += 1
            asked = torch.tensor([self.asked])
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)  # all ranks stop after the same step
            if asked or self.step % 2 == 0 or self.step == steps:
                self.save()
            if asked:
                break
        return losses

    def run(self, work):
        count = sum(ends[-1] - len(ends) + 1 for ends, _ in work)  # the last token of a document has no label
        mine = work[self.replica :: self.replicas]
        self.model.batches = [self.context.batch(ends) for ends, _ in mine]
        total = torch.zeros((), dtype=self.context.dtype)
        for number, (batch, (_, ids)) in enumerate(zip(self.model.batches, mine)):
            own = batch.shard(ids)
            part = (
                F.cross_entropy(self.model(own, number), batch.labels(own), ignore_index=-100, reduction="sum") / count
            )
            # fully_shard takes the mean of gradients over all ranks, and each has a part of the sum.
            (part * dist.get_world_size()).backward()
            total += part.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self):
        """All ranks write their shards; then rank 0 says that all are there. What was saved before stays valid until then."""
        name = f"step-{self.step}"
        dcp.save(self.state(), checkpoint_id=self.folder / name)
        if dist.get_rank() == 0:
            (self.folder / "new").write_text(name)
            os.replace(self.folder / "new", self.folder / "latest")
        dist.barrier()

    def load(self):
        if not (self.folder / "latest").exists():
            return
        name, state = (self.folder / "latest").read_text(), self.state()
        dcp.load(state, checkpoint_id=self.folder / name)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(name.split("-")[1])

    def close(self):
        dist.barrier()
        self.context.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--context", type=int, required=True, help="ranks that share a pack")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--die", type=int, help="the last rank kills itself once, in this step")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(given.folder).mkdir(exist_ok=True)
    job = Job(given.folder, given.context, given.timeout)
    first = job.step
    if (
        given.die is not None
        and rank == dist.get_world_size() - 1
        and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    ):

        def die(*_):
            if job.step == given.die:
                os.kill(os.getpid(), signal.SIGKILL)

        job.model.layers["2"].register_forward_pre_hook(die)
    losses = job.train(given.steps)
    if rank == 0:
        for at, loss in enumerate(losses, first):
            print(f"step {at}: loss {loss:.6f}", flush=True)
        print(
            f"{dist.get_world_size()} ranks, {given.context} share a pack: saved after step {job.step - 1}", flush=True
        )
    job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
