# SPDX-License-Identifier: MIT OR Apache-2.0
"""The training example over ranks that are threads of one process, with tensors of PyTorch on one device: for `pytorch.py`.

Each thread has a model, and on CUDA a stream. Its backward runs on the thread itself: PyTorch has one thread of its own for each device,
on which a rank would wait for another that is queued behind it.
"""

import contextlib
import threading

import torch

import cpattn
import train


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rank, plan):
        q, k, v = (x.detach().contiguous() for x in (q, k, v))
        o, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        rank.forward(plan, stream_of(q), q=q, k=k, v=v, o=o, lse=lse)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rank, ctx.plan = rank, plan
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, o, lse = (x.detach() for x in ctx.saved_tensors)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        given = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o.contiguous(), "dq": dq, "dk": dk, "dv": dv}
        ctx.rank.backward(ctx.plan, stream_of(q), **given)
        return dq, dk, dv, None, None


def stream_of(tensor):
    return torch.cuda.current_stream().cuda_stream if tensor.is_cuda else None


class Thread(train.Alone):
    """One rank: what the example calls."""

    def __init__(self, number, rank, world, dtype, shared, meeting):
        self.number, self.rank, self.world, self.dtype, self.shared, self.meeting = (
            number,
            rank,
            world,
            dtype,
            shared,
            meeting,
        )

    def split(self, ids, cu_seqlens):
        ids, positions, labels = super().split(ids, cu_seqlens)
        dtype = {torch.bfloat16: cpattn.Dtype.BF16, torch.float16: cpattn.Dtype.F16}[self.dtype]
        ends = cu_seqlens.tolist()
        self.plan = cpattn.Plan(
            ends,
            train.HEADS,
            train.HEAD_DIM,
            kv_heads=train.KV_HEADS,
            dtype=dtype,
            world=self.world,
            ulysses=1,
            ring=self.world,
        )
        mine = torch.tensor(list(self.plan.tokens(cpattn.Side.Q, self.number)), dtype=torch.int64)
        return ids[mine.to(ids.device)], positions[mine], labels[mine.to(labels.device)]

    def attention(self, q, k, v):
        return Attention.apply(*(x.to(self.dtype) for x in (q, k, v)), self.rank, self.plan)

    def sum(self, tensor):
        """In the order of the ranks, through memory that all threads see."""
        self.shared[self.number] = tensor.clone()
        self.meet(tensor)
        total = sum(self.shared[1:], self.shared[0])
        self.meet(tensor)
        tensor.copy_(total)

    def meet(self, tensor):
        if tensor.is_cuda:
            torch.cuda.synchronize()
        self.meeting.wait(120)


def losses(device, dtype, world, steps):
    """Those of one rank; all have the same."""
    ranks = cpattn.peer_group([0] * world) if device == "cuda" else cpattn.local_group(world)
    shared, meeting, one_by_one, usual = [None] * world, threading.Barrier(world), threading.Lock(), train.model_of

    def model_of(parallel):
        with one_by_one:  # the generator is the process's
            return usual(parallel)

    def job(number, rank):
        with contextlib.ExitStack() as within:
            if device == "cuda":
                within.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            within.enter_context(torch.autocast(device, dtype))
            within.enter_context(torch.autograd.set_multithreading_enabled(False))
            try:
                return train.train(Thread(number, rank, world, dtype, shared, meeting), steps, torch.float32, device)
            except BaseException:
                meeting.abort()
                raise

    train.model_of = model_of
    try:
        found = cpattn.on_all(ranks, job)
    finally:
        train.model_of = usual
        for rank in ranks:
            rank.close()
    assert all(each == found[0] for each in found)
    return found[0]
