# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention operations for the tests of kernels: drawn ones, and those of drawn plans; and what they must give, in f64, from the
definition of a band for each pair of rows."""

import random

import torch
from cpattn import Plan, slices
from cpattn.schedule import Band, Gradients, HeadMap, Lane, Mode, Op, OpKind, QRange, Range, Score, View

# As schedules say that there is no limit.
NONE = (1 << 63) - 1


def blank(kind=OpKind.ATTEND, **fields):
    """An operation with the fields that it needs."""
    views = dict.fromkeys("q k v running running_lse o lse d_o delta dq dk dv sinks dsinks".split())
    others = {
        "kind": kind, "lane": Lane.COMPUTE, "after": None, "name": "", "phase": "", "step": 0, "messages": (), "sums": (), "heads": HeadMap(0, 0, 1),
        "aligned": False, "accumulate_keys": False, "per_q_head": False, "gradients": Gradients.ALL, "score": Score(1.0, 0.0, NONE, NONE),
        "ranges": (), "k_ranges": (),
    }  # fmt: skip
    return Op(**(views | others | fields))


def drawn_range(draw, room, row, stripes=True):
    """A range of at most `room` rows."""
    length = draw.randint(1, max(1, room))
    block, period = length, length
    if stripes and draw.random() < 0.4:
        block = draw.randint(1, 4)
        period = block * draw.randint(1, 4)
    return Range(row, draw.randint(0, 20), length, block, period, 0)


def drawn_band(draw):
    """A band and its shift: any limits, also none, and none that allows no pair."""
    low = -NONE - 1 if draw.random() < 0.3 else draw.randint(-30, 10)
    high = NONE if draw.random() < 0.3 else draw.randint(-10, 30)
    q_begin, k_begin = (-NONE - 1 if draw.random() < 0.6 else draw.randint(0, 25) for _ in range(2))
    q_end, k_end = (NONE if draw.random() < 0.6 else draw.randint(10, 60) for _ in range(2))
    return Band(q_begin, q_end, k_begin, k_end, low, high, draw.choice((0, 0, draw.randint(-15, 15))))


def drawn_op(draw, heads=None, stripes=True, kind=OpKind.ATTEND):
    """An operation of ranges anywhere in its views, with gaps, whose k ranges may overlap or be read several times; no pair of rows
    is in two bands."""
    q_ranges, k_ranges, row = [], [], 0
    for _ in range(draw.randint(1, 3)):
        row += draw.choice((0, 0, draw.randint(0, 5)))
        q_ranges.append(drawn_range(draw, 12, row, stripes))
        row += q_ranges[-1].len
    q_rows, row = row + draw.randint(0, 4), 0
    for _ in range(draw.randint(1, 4)):
        row += draw.choice((0, 0, draw.randint(0, 5)))
        r = drawn_range(draw, 12, row, stripes)
        if k_ranges and draw.random() < 0.4:
            # It continues the positions of the range before.
            r = r._replace(pos=int(places(k_ranges[-1])[-1]) + 1)
        k_ranges.append(r)
        row += r.len
    k_rows = row + draw.randint(0, 4)
    of_q = []
    for r in q_ranges:
        pairs = [(k, drawn_band(draw)) for k in k_ranges if draw.random() < 0.8]
        of_q.append(QRange(r, (0, 0), Mode.ONLY, tuple(pairs)))
    heads_q, kv, offset, kv_offset, group = heads or drawn_heads(draw)
    window = tuple(NONE if draw.random() < 0.5 else draw.randint(0, 25) for _ in range(2))
    return blank(
        kind=kind,
        q=View(0, q_rows, 0, 0, heads_q),
        k=View(0, k_rows, 1, 0, kv),
        v=View(0, k_rows, 2, 0, kv),
        heads=HeadMap(offset, kv_offset, group),
        score=Score(0.3, draw.choice((0.0, 0.0, 2.0)), *window),
        ranges=tuple(of_q),
        k_ranges=tuple(k_ranges),
        per_q_head=draw.random() < 0.2,
    )


def drawn_heads(draw):
    """q heads, kv heads, offsets and group of a call: also a part of the heads of a kv head."""
    group, total_kv = draw.choice((1, 1, 2, 3)), draw.randint(1, 3)
    begin = draw.randint(0, group * total_kv - 1)
    end = draw.randint(begin + 1, group * total_kv)
    kv_begin, kv_end = begin // group, (end - 1) // group + 1
    return end - begin, kv_end - kv_begin, begin, kv_begin, group


def places(r):
    i = torch.arange(r.len)
    return r.pos + i // r.block * r.period + i % r.block


def allowed_of(op):
    """[q view rows, k view rows] of all pairs, and their distance with the shift; documents by row of the q view."""
    allowed = torch.zeros(op.q.rows, op.k.rows, dtype=torch.bool)
    distance = torch.zeros(op.q.rows, op.k.rows, dtype=torch.long)
    document = torch.zeros(op.q.rows, dtype=torch.long)
    for q in op.ranges:
        x = places(q.range)
        document[q.range.rows] = q.range.doc
        for k, band in q.pairs:
            y = places(k)
            d = y[None] - x[:, None] + band.shift
            inside = ((x >= band.q_begin) & (x < band.q_end))[:, None] & ((y >= band.k_begin) & (y < band.k_end))[None]
            inside &= (d >= band.low) & (d <= band.high) & (d >= -op.score.window_left) & (d <= op.score.window_right)
            assert not (allowed[q.range.rows, k.rows] & inside).any(), "a pair is in two bands"
            allowed[q.range.rows, k.rows] |= inside
            distance[q.range.rows, k.rows] = torch.where(inside, d, distance[q.range.rows, k.rows])
    return allowed, distance, document


def problem(op, dim=5, value_dim=3, dtype=torch.float64, seed=0, slopes=None, device="cpu"):
    """Random inputs of an operation, with NaN in all rows that no pair reads: q, k, v, d_o, and lse and delta of whole rows."""
    random_of = torch.Generator().manual_seed(seed)
    allowed, _, _ = allowed_of(op)
    shapes = ((op.q, dim), (op.k, dim), (op.v, value_dim), (op.q, value_dim))
    q, k, v, d_o = (
        torch.randn(view.rows, view.heads, d, generator=random_of, dtype=torch.float64).to(dtype) for view, d in shapes
    )
    of_q, of_k = allowed.any(1), allowed.any(0)
    q[~of_q], d_o[~of_q], k[~of_k], v[~of_k] = torch.nan, torch.nan, torch.nan, torch.nan
    o, lse, _ = expected_forward(op, q, k, v, slopes)
    # As if other calls had had some keys of the same rows.
    lse = torch.logaddexp(lse, torch.randn(lse.shape, generator=random_of, dtype=torch.float64))
    delta = torch.randn(lse.shape, generator=random_of, dtype=torch.float64)
    return q, k, v, d_o, lse, delta


def scores(op, q, k, slopes):
    allowed, distance, document = allowed_of(op)
    h = torch.arange(op.q.heads) + op.heads.q_offset
    kv = h // op.heads.group - op.heads.kv_offset
    q, k = q.double().nan_to_num(0), k.double().nan_to_num(0)
    s = torch.einsum("qhd,khd->hqk", q, k[:, kv]) * op.score.scale
    slope = torch.full_like(s, op.score.scale)
    if op.score.softcap:
        t = torch.tanh(s / op.score.softcap)
        s, slope = op.score.softcap * t, slope * (1 - t * t)
    if slopes is not None:
        of_row = slopes[None].expand(len(document), -1) if slopes.ndim == 1 else slopes[document]
        s = s - of_row[:, h].T.double()[:, :, None] * distance.abs()
    return s.masked_fill(~allowed, -torch.inf), slope, kv


def expected_forward(op, q, k, v, slopes=None):
    """o [q view rows, heads, value dim], lse [q view rows, heads], and the largest score of each head."""
    s, _, kv = scores(op, q, k, slopes)
    lse = s.logsumexp(2)
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", p, v.double().nan_to_num(0)[:, kv]), lse.T, s.flatten(1).amax(1)


def expected_backward(op, d_o, q, k, v, lse, delta, slopes=None):
    s, slope, kv = scores(op, q, k, slopes)
    q, k, v, d_o = (x.double().nan_to_num(0) for x in (q, k, v, d_o))
    lse = lse.T.masked_fill(lse.T == -torch.inf, 0)[..., None]
    p = (s - lse).exp()
    ds = p * (torch.einsum("qhd,khd->hqk", d_o, v[:, kv]) - delta.T[..., None]) * slope
    dq, dk, dv = (
        torch.einsum("hqk,khd->qhd", ds, k[:, kv]),
        torch.einsum("hqk,qhd->khd", ds, q),
        torch.einsum("hqk,qhd->khd", p, d_o),
    )
    if op.per_q_head:
        return dq, dk, dv
    return dq, *(torch.zeros(x.shape[0], op.k.heads, x.shape[2], dtype=x.dtype).index_add_(1, kv, x) for x in (dk, dv))


def strided(x):
    """The same values with other strides, as views of buffers may have them."""
    return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]]


MASKS = (
    {},
    {"window_left": 9},
    {"window_left": 5, "window_right": 3},
    {"softcap": 2.0},
    {"slices": [*slices.pairs([((0, 37), (0, 37))]), *slices.moved(slices.shared_prefix(20, [44, 27]), 37)]},
)
MESHES = (
    {"ring": 1},
    {"ulysses": 1, "layout": "zigzag"},
    {"ulysses": 1, "layout": "contiguous"},
    {"ulysses": 1, "layout": "balanced", "layout_parameter": 3},
    {"ulysses": 2, "layout": "striped", "layout_parameter": 3},
    {"ulysses": 1, "layout": "striped", "layout_parameter": 1},
    {"ulysses": 1, "circulate": "queries", "circulate_forward": "queries"},
    {"ulysses": 1, "ranks_per_node": 2},
    {"ulysses": 2, "gather": "others"},
    {"ulysses": 1, "passes": 2},
)


def drawn_plan(seed, dtype="f64", meshes=MESHES, masks=MASKS, heads_of=((4, 2), (3, 3), (6, 2)), **options):
    """A plan of 4 ranks with drawn documents, heads, mask and mesh."""
    draw = random.Random(seed)
    heads, kv_heads = draw.choice(heads_of)
    mesh, mask = draw.choice(meshes), draw.choice(masks)
    ends = [0, 37, 37, 101, 128]
    if "slices" not in mask:
        ends = [0, *sorted(draw.randint(0, 128) for _ in range(draw.randint(0, 4))), 128]
    return Plan(ends, heads, 8, kv_heads=kv_heads, dtype=dtype, world=4, **(mesh | mask | options))


def attention_ops(plan, direction):
    """The attention operations of all ranks."""
    kinds = (OpKind.ATTEND, OpKind.ATTEND_BACKWARD)
    return [op for rank in range(4) for op in plan.schedule(rank, direction).ops if op.kind in kinds]
