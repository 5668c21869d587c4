# SPDX-License-Identifier: MIT OR Apache-2.0
"""Executes the schedules of plans with PyTorch alone: its tensors, its operators, and sends and receives of torch.distributed.

    pip install ./python torch
    torchrun --nproc-per-node 4 examples/python/execute_schedule.py

cpattn plans: which rank holds what, and the list of each rank's operations with all their arguments (`cpattn.schedule`). `Executor`
is one method for each kind of operation. It runs the list in its order on one thread. With two streams, one for each `op.lane`, and
an event for each `op.after`, the same methods overlap communication and computation.

To compute, use `cpattn.torch` with kernels="torch" or another: it keeps its memory, overlaps and refuses. This is the program to read
before one writes an executor, and shares no code with that one, so that each is a check of the list.

o, lse and all gradients of each case are compared with attention over the whole batch in one process.
"""

import argparse

import cpattn
import torch
import torch.distributed as dist
from cpattn import Plan, Side
from cpattn.schedule import Gradients, Op, Schedule, Tensor
from cpattn.torch import TORCH_DTYPES

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
DOCUMENTS = [0, 37, 37, 101, 128]
# Documents 2 and 3 see a prefix of 20 tokens; the first tokens of the batch see each other in both directions.
SLICES = [
    *cpattn.slices.pairs([((0, 37), (0, 37))]),
    *cpattn.slices.moved(cpattn.slices.shared_prefix(20, [44, 27]), 37),
]
CASES = {
    "ulysses": {"ring": 1},
    "ring": {"ulysses": 1, "layout": "zigzag", "sinks": True},
    "ring in which q circulates": {
        "ulysses": 1,
        "circulate": "queries",
        "circulate_forward": "queries",
        "softcap": 2.0,
        "sinks": True,
    },
    "hybrid, a window, stripes": {
        "ulysses": 2,
        "layout": "striped",
        "layout_parameter": 3,
        "window_left": 9,
        "alibi_slopes": [0.5, 0.25, 0.125, 0.0],
    },
    "several sinks of a head": {"ulysses": 2, "sinks": 3},
    "two nodes": {"ulysses": 1, "ranks_per_node": 2},
    "two passes, packed inputs": {"ulysses": 1, "passes": 2, "pack_inputs": True},
    "gathered": {"ulysses": 2, "gather": "others"},
    "same bits on any number of ranks": {"ulysses": 2, "reproducible": True, "sinks": True},
    "same bits, several sinks": {"ulysses": 1, "reproducible": True, "sinks": 3},
    "slices": {"ulysses": 1, "layout": "balanced", "layout_parameter": 2, "slices": SLICES},
    "slices, hybrid, q circulates": {"ulysses": 2, "circulate": "queries", "slices": SLICES},
}


class Executor:
    """A rank's tensors, by `Tensor`, and the operations on them."""

    def __init__(self, tensors: dict[Tensor, torch.Tensor], slopes: torch.Tensor | None = None):
        self.tensors, self.slopes, self.buffers = tensors, slopes, []

    def run(self, schedule: Schedule) -> None:
        self.buffers = []
        for b in schedule.buffers:
            # What nothing writes must show.
            if b.written:
                made = torch.full(b.shape, torch.nan, dtype=TORCH_DTYPES[b.dtype])
                if b.tensor is not None:
                    self.tensors[b.tensor] = made
            self.buffers.append(made if b.written else self.tensors[b.tensor])
        for op in schedule.ops:
            getattr(self, op.kind.name.lower())(op)

    def at(self, view) -> torch.Tensor:
        return self.buffers[view.buffer][view.place]

    def exchange(self, op: Op) -> None:
        batch = [
            dist.P2POp(dist.isend if m.send else dist.irecv, self.at(m.view), m.peer, tag=m.tag) for m in op.messages
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    def sum(self, op: Op) -> None:
        for s in op.sums:
            dst = self.at(s.dst)
            wide = torch.float64 if dst.dtype == torch.float64 else torch.float32
            dst.copy_(sum(self.at(source).to(wide) for source in s.sources))

    def merge(self, op: Op) -> None:
        for o, lse in zip(op.sums[::2], op.sums[1::2]):
            (a, b), (of_a, of_b) = ([self.at(source) for source in s.sources] for s in (o, lse))
            merged, total = merge((a, of_a[..., 0]), (b, of_b[..., 0]))
            self.write_partial(o.dst, lse.dst, slice(None), merged, total)

    def write_partial(self, o, lse, rows: slice, values: torch.Tensor, logs: torch.Tensor) -> None:
        self.at(o)[rows] = values
        # The second word is a rounding error, which this program does not keep.
        self.at(lse)[rows] = torch.stack([logs, torch.zeros_like(logs)], 2)[..., : self.at(lse).shape[2]]

    def delta(self, op: Op) -> None:
        delta = self.at(op.delta)
        delta.copy_((self.at(op.o).to(delta.dtype) * self.at(op.d_o)).sum(2, keepdim=True))

    def sink_gradient(self, op: Op) -> None:
        sink, part = self.at(op.sinks), self.at(op.dsinks)
        part.zero_()
        # One word for each sink, or 28, of which this program uses the first.
        part.unflatten(2, (sink.shape[2], -1))[..., 0] = -((sink - self.at(op.lse)).exp() * self.at(op.delta)).sum(
            0, keepdim=True
        )

    def sink_total(self, op: Op) -> None:
        dst = self.at(op.sums[0].dst)
        dst.copy_(self.at(op.sums[0].sources[0]).unflatten(2, (dst.shape[2], -1)).sum(3))

    def scores(self, op: Op, q_range):
        """Of a q range: the scores of its pairs [heads, q, keys], their derivative by the product q·k, the rows of the keys in the call's
        views, and the kv head of each q head."""
        q, k = self.at(op.q), self.at(op.k)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        x, allowed, distance, rows = positions(q_range.range)[:, None], [], [], []
        for keys, band in q_range.pairs:
            y = positions(keys)
            d = y - x + band.shift
            inside = (
                (x >= band.q_begin)
                & (x < band.q_end)
                & (y >= band.k_begin)
                & (y < band.k_end)
                & (d >= band.low)
                & (d <= band.high)
            )
            allowed.append(inside & (d >= -op.score.window_left) & (d <= op.score.window_right))
            distance.append(d)
            rows.append(torch.arange(keys.row, keys.row + keys.len))
        none = torch.empty(len(x), 0, dtype=torch.long)
        allowed, distance = torch.cat([none.bool(), *allowed], 1), torch.cat([none, *distance], 1)
        rows = torch.cat([none[:0].flatten(), *rows])
        heads = torch.arange(op.q.heads) + op.heads.q_offset
        kv = heads // op.heads.group - op.heads.kv_offset
        s = torch.einsum("qhd,khd->hqk", q[q_range.range.rows].to(wide), k[rows][:, kv].to(wide)) * op.score.scale
        slope = torch.full_like(s, op.score.scale)
        if op.score.softcap:
            t = torch.tanh(s / op.score.softcap)
            s, slope = op.score.softcap * t, slope * (1 - t * t)
        if self.slopes is not None:
            s = s - self.slopes[heads].to(wide)[:, None, None] * distance.abs()
        return s.masked_fill(~allowed, -torch.inf), slope, rows, kv

    def attend(self, op: Op) -> None:
        for q in op.ranges:
            s, _, rows, kv = self.scores(op, q)
            lse = s.logsumexp(2)
            o = torch.einsum("hqk,khd->qhd", weights(s, lse[..., None]), self.at(op.v)[rows][:, kv].to(s.dtype))
            lse, mine = lse.T, q.range.rows
            if q.mode.continues:
                o, lse = merge((self.at(op.running)[mine], self.at(op.running_lse)[mine][..., 0]), (o, lse))
            if not q.mode.finishes:
                self.write_partial(op.running, op.running_lse, mine, o, lse)
                continue
            if op.sinks:
                sinks = self.at(op.sinks).logsumexp(2).expand_as(lse).to(lse.dtype)
                o, lse = merge((o, lse), (torch.zeros_like(o), sinks))
            self.write_partial(op.o, op.lse, mine, o, lse)

    def attend_backward(self, op: Op) -> None:
        # A call that does not add to dk and dv writes every row of its k ranges.
        for keys in op.k_ranges if op.dk and not op.accumulate_keys else ():
            self.at(op.dk)[keys.rows] = 0
            self.at(op.dv)[keys.rows] = 0
        for q in op.ranges:
            s, slope, rows, kv = self.scores(op, q)
            of_q = lambda view: self.at(view)[q.range.rows].to(s.dtype)  # noqa: E731
            d_o, v = of_q(op.d_o), self.at(op.v)[rows][:, kv].to(s.dtype)
            p = weights(s, of_q(op.lse).permute(1, 0, 2))
            ds = p * (torch.einsum("qhd,khd->hqk", d_o, v) - of_q(op.delta).permute(1, 0, 2)) * slope
            if op.gradients != Gradients.KEYS:
                dq = torch.einsum("hqk,khd->qhd", ds, self.at(op.k)[rows][:, kv].to(s.dtype))
                self.at(op.dq)[q.range.rows] = dq + (of_q(op.dq) if q.mode.continues else 0)
            if op.gradients != Gradients.QUERIES:
                to = torch.arange(op.q.heads) if op.per_q_head else kv
                for view, left, right in ((op.dk, ds, of_q(op.q)), (op.dv, p, d_o)):
                    self.at(view).index_put_(
                        (rows[:, None], to[None, :]), torch.einsum("hqk,qhd->khd", left, right), accumulate=True
                    )


def positions(r):
    i = torch.arange(r.len)
    return r.pos + i // r.block * r.period + i % r.block


def weights(s, lse):
    """exp(s - lse), 0 for rows without keys."""
    return (s - lse.masked_fill(lse == -torch.inf, 0)).exp()


def merge(a, b):
    """Two partial results of the same rows, each o and lse, as one."""
    lse = torch.logaddexp(a[1], b[1])
    return sum(o * weights(part, lse)[..., None] for o, part in (a, b)), lse


def dense(inputs, options, allowed, distance):
    """o, lse and the gradients of q, k, v and the sinks, in one process, by automatic differentiation."""
    q, k, v, sinks, d_o = (x.clone().requires_grad_() for x in inputs)
    group = q.shape[1] // k.shape[1]
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * HEAD_DIM**-0.5
    if cap := options.get("softcap"):
        s = cap * torch.tanh(s / cap)
    if slopes := options.get("alibi_slopes"):
        s = s - torch.tensor(slopes)[:, None, None] * distance.abs()
    s = s.masked_fill(~allowed, -torch.inf)
    if options.get("sinks"):
        s = torch.cat([s, sinks[:, None].expand(-1, len(q), -1)], 2)
    lse = s.logsumexp(2)
    p = (s - lse[..., None]).exp()[:, :, : len(k)]
    o = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))
    gradients = torch.autograd.grad(o, [q, k, v] + [sinks] * bool(options.get("sinks")), d_o)
    return [o, lse.T[..., None], *gradients]


def compare(name, rank, world, dtype=torch.float64):
    """The largest difference of a case's results on this rank, over the largest value."""
    options, tokens = CASES[name], DOCUMENTS[-1]
    plan = Plan(DOCUMENTS, HEADS, HEAD_DIM, kv_heads=KV_HEADS, dtype=dtype, world=world, **options)
    random = torch.Generator().manual_seed(1)
    shapes = (
        (tokens, HEADS, HEAD_DIM),
        (tokens, KV_HEADS, HEAD_DIM),
        (tokens, KV_HEADS, HEAD_DIM),
        (HEADS, int(options.get("sinks", 0))),
        (tokens, HEADS, HEAD_DIM),
    )
    inputs = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
    mine = torch.tensor(plan.tokens(Side.Q, rank), dtype=torch.long)
    q, k, v, sinks, d_o = inputs
    given = {Tensor.Q: q[mine], Tensor.K: k[mine], Tensor.V: v[mine], Tensor.D_O: d_o[mine]}
    slopes = options.get("alibi_slopes")
    executor = Executor(given | {Tensor.SINKS: sinks[None]}, slopes and torch.tensor(slopes))
    executor.run(plan.schedule(rank, "forward"))
    executor.run(plan.schedule(rank, "backward"))

    place = torch.arange(tokens)
    distance = place[None, :] - place[:, None]
    slices = options.get("slices") or cpattn.slices.documents(DOCUMENTS)
    allowed = torch.zeros(tokens, tokens, dtype=torch.bool)
    for part in slices:
        x, y = place[part.q_begin : part.q_end, None], place[None, part.k_begin : part.k_end]
        d = y - part.k_begin - (x - part.q_begin + part.complete.q_start)
        allowed[part.q_begin : part.q_end, part.k_begin : part.k_end] |= (d >= part.complete.low) & (
            d <= part.complete.high
        )
    allowed &= distance >= -options.get("window_left", tokens)
    expected = dense(inputs, options, allowed, distance)
    worst = 0.0
    for tensor, want in zip((Tensor.O, Tensor.LSE, Tensor.DQ, Tensor.DK, Tensor.DV, Tensor.DSINKS), expected):
        got, want = executor.tensors[tensor], want[None] if tensor == Tensor.DSINKS else want[mine]
        difference = ((got - want).abs().max() / want.abs().max()).item() if want.numel() else 0.0
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    dist.init_process_group("gloo")
    for name in CASES:
        worst = torch.tensor(compare(name, dist.get_rank(), dist.get_world_size()))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name:34} largest difference {worst.item():.1e}")
            assert worst < 1e-12, name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
