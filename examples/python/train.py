# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains a small causal language model, on one process or over several, and shows that the losses are the same.

    pip install ./python
    torchrun --nproc-per-node 4 examples/python/train.py
    python3 examples/python/train.py --steps 50 --json one.json     # the baseline
    torchrun --nproc-per-node 4 examples/python/train.py --steps 50 --json four.json --against one.json --plot both.svg

One process is the baseline: PyTorch's scaled_dot_product_attention over each document. With several, each has a share of
every batch and uses cpattn for attention. All other code is the same: rotary embeddings, 9 q heads over 3 kv heads, AdamW,
packed documents of different lengths at every step, gradients summed over the processes.

The text is that of the two licences of this project, LICENSE-APACHE (whose authors let everyone copy and distribute it
verbatim) and LICENSE-MIT, read from the checkout byte by byte.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import cpattn.torch

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BATCH = 4, 9, 3, 16, 1024
WIDTH = HEADS * HEAD_DIM
ROOT = Path(__file__).resolve().parents[2]


# >>> context parallelism: all that a user writes
class Parallel:
    def __init__(self, **options):
        dist.init_process_group("gloo")
        self.context = cpattn.torch.Context(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, **options)

    def split(self, ids, cu_seqlens):
        self.batch = self.context.batch(cu_seqlens)
        mine = self.batch.shard(ids)
        return mine, self.batch.positions, self.batch.labels(mine)

    def attention(self, q, k, v):
        return self.batch.attention(q, k, v)

    def sum(self, tensor):
        dist.all_reduce(tensor)


# <<<


class Alone:
    """The baseline: one process has the whole of every batch."""

    def split(self, ids, cu_seqlens):
        self.lengths = cu_seqlens.diff().tolist()
        labels = torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in ids.split(self.lengths)])
        return ids, torch.cat([torch.arange(n) for n in self.lengths]), labels

    def attention(self, q, k, v):
        documents = zip(*(x.transpose(0, 1).split(self.lengths, dim=1) for x in (q, k, v)))
        o = [F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True) for qkv in documents]
        return torch.cat(o, dim=1).transpose(0, 1)

    def sum(self, tensor):
        pass


def rotate(x, positions):
    """Rotary embeddings, by each token's place in its document."""
    half = HEAD_DIM // 2
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    def __init__(self, parallel):
        super().__init__()
        self.parallel = parallel
        self.before_attention, self.before_mixing = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, positions):
        heads = self.qkv(self.before_attention(x)).view(len(x), -1, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        o = self.parallel.attention(rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(o.reshape(len(x), WIDTH))
        return x + self.down(F.gelu(self.up(self.before_mixing(x))))


class Model(nn.Module):
    def __init__(self, parallel):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer(parallel) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids, positions):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))


def corpus():
    return torch.tensor(list(b"".join((ROOT / name).read_bytes() for name in ("LICENSE-APACHE", "LICENSE-MIT"))))


def batches(steps):
    """Packed documents from random places of the text, of random lengths, one token included."""
    text, draw = corpus(), random.Random(1)
    for _ in range(steps):
        lengths = []
        while sum(lengths) < BATCH:
            lengths.append(min(draw.choice([1, 7, 60, 200, 500]) + draw.randrange(64), BATCH - sum(lengths)))
        starts = [draw.randrange(len(text) - n) for n in lengths]
        ids = torch.cat([text[start : start + n] for start, n in zip(starts, lengths)])
        yield ids, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def model_of(parallel):
    torch.manual_seed(0)
    return Model(parallel)


def train(parallel, steps, dtype, device="cpu"):
    model = model_of(parallel).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    losses = []
    for ids, cu_seqlens in batches(steps):
        mine, positions, labels = (x.to(device) for x in parallel.split(ids.to(device), cu_seqlens))
        # The mean over all tokens of the batch with a next token. Each process adds its part.
        count = int((cu_seqlens.diff() - 1).clamp(min=0).sum())
        loss = F.cross_entropy(model(mine, positions), labels, reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parallel.sum(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        parallel.sum(total)
        losses.append(total.item())
    return losses


def refused(found):
    """Ends all processes if one was refused. Equal errors are printed once, by the first process that has them."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, found)
    if found is not None and said.index(found) == dist.get_rank():
        print(f"rank {dist.get_rank()}: {found}" if said.count(found) < len(said) else found, file=sys.stderr)
    if any(text is not None for text in said):
        dist.barrier()  # torchrun ends all processes when the first has ended
        dist.destroy_process_group()
        sys.exit(2)


def draw(runs):
    """Losses by step as an SVG: the first run as a wide line, the others on top of it."""
    width, height, left, top = 640, 360, 50, 20
    steps, most = max(len(losses) for _, losses in runs), max(max(losses) for _, losses in runs)
    x = lambda i: left + (width - left - 20) * i / max(steps - 1, 1)
    y = lambda loss: top + (height - top - 40) * (1 - loss / most)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for i in range(6):
        loss = most * i / 5
        parts.append(
            f'<path d="M{left} {y(loss):.1f}H{width - 20}" stroke="#ddd"/><text x="8" y="{y(loss) + 4:.1f}">{loss:.2f}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{height - 12}">step 1</text><text x="{width - 70}" y="{height - 12}">step {steps}</text>'
    )
    for i, (name, losses) in enumerate(runs):
        color, stroke = ("#f5a742", 6) if i == 0 else ("#1d4ed8", 1.5)
        points = " ".join(f"{x(n):.1f},{y(loss):.1f}" for n, loss in enumerate(losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{stroke}"/>')
        parts.append(f'<text x="{width - 300}" y="{top + 20 + 18 * i}" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description="Trains a small language model; see the top of the file.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the losses go")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG of them")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="the JSON of another run: compared, and in the plot"
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="an SVG timeline of the processes")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the same as a JSON for Perfetto")
    parser.add_argument("--dtype", choices=["f32", "f64"], default="f32")
    parser.add_argument("--ulysses", type=int, default=0)
    parser.add_argument("--ring", type=int, default=0)
    parser.add_argument("--layout", choices=[layout.name.lower() for layout in cpattn.Layout], default="auto")
    parser.add_argument(
        "--layout-parameter",
        type=int,
        default=0,
        help="striped: the tokens of a stripe; balanced: the chunks of a rank",
    )
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps is {given.steps}, at least 1 is needed")
    if given.layout in ("striped", "balanced") and given.layout_parameter < 1:
        parser.error(f"--layout {given.layout} needs --layout-parameter, at least 1")
    # Read before the training, so that a missing file is found at once.
    other = json.loads(given.against.read_text()) if given.against else None
    if other and len(other["losses"]) != given.steps:
        parser.error(f"--against {given.against} has {len(other['losses'])} steps, --steps is {given.steps}")
    dtype = {"f32": torch.float32, "f64": torch.float64}[given.dtype]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        layout, found = cpattn.Layout[given.layout.upper()], None
        mesh = {"ulysses": given.ulysses, "ring": given.ring}
        try:
            parallel = Parallel(dtype=dtype, layout=layout, layout_parameter=given.layout_parameter, **mesh)
            parallel.split(*next(batches(1)))  # makes a plan
        except cpattn.Error as error:
            found = f"error: {error}"
        refused(found)
        name = f"cpattn, {world} processes"
    else:
        parallel, name = Alone(), "scaled_dot_product_attention, 1 process"
    recorded = given.timeline or given.trace
    if recorded:
        if world == 1:
            parser.error("--timeline and --trace need several processes, and this is one")
        parallel.context.record()
    losses = train(parallel, given.steps, dtype)
    events = parallel.context.trace() if recorded else []  # on rank 0: of all
    if int(os.environ.get("RANK", "0")) == 0:
        if given.json:
            given.json.write_text(
                json.dumps({"name": name, "processes": world, "dtype": given.dtype, "losses": losses}) + "\n"
            )
        print(f"{name}: {given.steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
        runs = [(name, losses)]
        if other:
            runs.insert(0, (other["name"], other["losses"]))
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, other["losses"], strict=True))
            print(f"largest relative difference to {other['name']}: {worst:.1e}")
        if given.timeline:
            given.timeline.write_text(cpattn.timeline_svg(events))
        if given.trace:
            given.trace.write_text(cpattn.chrome_trace(events))
        if given.plot:
            given.plot.write_text(draw(runs))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
