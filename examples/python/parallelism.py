# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context parallelism beside pipeline and tensor parallelism: a small language model over four processes, with the loss and the gradients of one.

    torchrun --nproc-per-node 4 examples/python/parallelism.py

    2 pipeline stages x 2 context ranks            2 tensor-parallel x 2 context ranks
    stage 0: ranks 0 1 | layers 0 1                heads 0 1: ranks 0 1
    stage 1: ranks 2 3 | layers 2 3                heads 2 3: ranks 2 3
    ranks 0 and 2 hold the same tokens             ranks 0 and 2 hold the same tokens

A `Context` belongs to the context ranks of one stage, or of one part of the heads: attention exchanges tokens there and nowhere else. What is
beside it is PyTorch's own: `torch.distributed.pipelining`, `parallelize_module`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from cpattn.torch import Context

WIDTH, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY = 32, 4, 2, 8, 4, 40
# Packs of the micro-batches: each has other lengths, and so another plan. The third has too few tokens for two ranks.
PACKS = [0, 9, 30], [0, 5, 12], [0, 1], [0, 17, 17, 40]
SPLIT = {**dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel), **dict.fromkeys(("o", "down"), RowwiseParallel)}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {
            "q": HEADS * DIM,
            "k": KV_HEADS * DIM,
            "v": KV_HEADS * DIM,
            "o": (HEADS * DIM, WIDTH),
            "up": 2 * WIDTH,
            "down": (2 * WIDTH, WIDTH),
        }
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(*(size if isinstance(size, tuple) else (WIDTH, size)), bias=False))

    def forward(self, x, batch):
        q, k, v = (layer(x).unflatten(1, (-1, DIM)) for layer in (self.q, self.k, self.v))
        x = x + self.o(batch.attention(q, k, v).flatten(1))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Some layers of the model: all, or those of a pipeline stage. `forward` gets rows that all micro-batches have, of which a rank uses as many
    as it has tokens, since pipelining sends tensors of one shape; and the micro-batch's number, for its batch."""

    def __init__(self, layers=range(LAYERS)):
        super().__init__()
        every = [Layer() for _ in range(LAYERS)]  # all are made, so that each has the weights of its place
        embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleDict({str(at): every[at] for at in layers})
        self.embed, self.head = embed if 0 in layers else None, head if LAYERS - 1 in layers else None
        self.batches = []

    def forward(self, x, number):
        batch = self.batches[int(number)]
        rows, x = len(x), x[: len(batch.tokens)]
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x, batch)
        x = x if self.head is None else self.head(x)
        return F.pad(x, (0, 0, 0, rows - len(x)))


def loss_of(logits, labels):
    """This rank's part of the sum over all tokens: each of all micro-batches counts once."""
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / sum(ends[-1] for ends in PACKS)


def rows_of(batches):
    """The most tokens that a rank has of a micro-batch."""
    return max(batch.plan.share(rank).q_tokens for batch in batches for rank in range(batch.context.world))


def tokens_of(batches, rows):
    """This rank's tokens and labels of all micro-batches, [micro-batches, rows]. Labels of other ranks' tokens come over the group."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for batch in batches:
        ids = batch.shard(torch.randint(VOCABULARY, (batch.cu_seqlens[-1],), generator=draw))
        found.append(
            [F.pad(one, (0, rows - len(ids)), value=fill) for one, fill in ((ids, 0), (batch.labels(ids), -100))]
        )
    return [torch.stack(one) for one in zip(*found)]


def alone(dtype=torch.float32):
    """The loss and the gradients on one process."""
    torch.manual_seed(5)
    model = Model().to(dtype)
    context = Context([dist.get_rank()], heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype)
    model.batches = [context.batch(ends) for ends in PACKS]
    ids, labels = tokens_of(model.batches, rows_of(model.batches))
    losses = [loss_of(model(one, number), labels[number]) for number, one in enumerate(ids)]
    sum(losses).backward()
    context.close()
    return sum(losses).item(), {name: one.grad for name, one in model.named_parameters()}


def pipeline(schedule=Schedule1F1B, dtype=torch.float32, stages=((0, 1), (2, 3)), where=(0, 1), **options):
    """The loss and this rank's gradients over 2 pipeline ranks x 2 context ranks. `where` is the pipeline rank of each stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "context"))
    context = Context(mesh.get_group("context"), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, **options)
    batches = [context.batch(ends) for ends in PACKS]
    rows = rows_of(batches)
    ids, labels = tokens_of(batches, rows)
    mine = []
    for number, layers in enumerate(stages):
        torch.manual_seed(5)
        model = Model(layers).to(dtype)
        if where[number] == mesh.get_local_rank("pipeline"):
            model.batches = batches
            hidden = torch.empty(rows, WIDTH, dtype=dtype)
            enters = ids[0] if number == 0 else hidden
            leaves = torch.empty(rows, VOCABULARY, dtype=dtype) if number == len(stages) - 1 else hidden
            mine.append(
                PipelineStage(
                    model,
                    number,
                    len(stages),
                    torch.device("cpu"),
                    input_args=(enters,),
                    output_args=(leaves,),
                    group=mesh.get_group("pipeline"),
                )
            )
    # With scale_grads gradients would be divided by the number of micro-batches, and packs are not of one size.
    how = {"n_microbatches": len(PACKS), "loss_fn": loss_of, "scale_grads": False}
    run = schedule(mine if len(mine) > 1 else mine[0], **how)
    losses = []
    run.step(
        *([ids.flatten()] if any(one.is_first for one in mine) else []), number=torch.arange(len(PACKS)),
        **({"target": labels.flatten(), "losses": losses} if any(one.is_last for one in mine) else {}),
    )  # fmt: skip
    gradients = {}
    for stage in mine:
        for name, one in stage.submod.named_parameters():
            dist.all_reduce(one.grad, group=mesh.get_group("context"))
            gradients[name] = one.grad
    total = torch.stack([*losses, torch.zeros((), dtype=dtype)]).sum().detach()
    dist.all_reduce(total)  # of the ranks that have the last stage
    dist.barrier()
    context.close()
    return total.item(), gradients


def tensors(dtype=torch.float32, **options):
    """The loss and the gradients over 2 tensor-parallel ranks x 2 context ranks: the heads of a rank are a part of the model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "context"))
    torch.manual_seed(5)
    model = Model().to(dtype)
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tensor"], {name: how() for name, how in SPLIT.items()})
    context = Context(
        mesh.get_group("context"), heads=HEADS // 2, kv_heads=KV_HEADS // 2, head_dim=DIM, dtype=dtype, **options
    )
    model.batches = [context.batch(ends) for ends in PACKS]
    ids, labels = tokens_of(model.batches, rows_of(model.batches))
    total = sum(loss_of(model(one, number), labels[number]) for number, one in enumerate(ids))
    total.backward()
    found = total.detach()
    dist.all_reduce(found, group=mesh.get_group("context"))
    gradients = {}
    for name, one in model.named_parameters():
        dist.all_reduce(
            one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad, group=mesh.get_group("context")
        )
        gradients[name] = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
    dist.barrier()
    context.close()
    return found.item(), gradients


def apart(found, expected):
    """The largest distance of gradients, in units of the largest of a parameter, and of the losses."""
    far = [
        (found[1][name] - one).abs().max() / one.abs().max() for name, one in expected[1].items() if name in found[1]
    ]
    return max(max(far).item(), abs(found[0] / expected[0] - 1))


def main():
    dist.init_process_group("gloo")
    expected = alone()
    for what, found in (
        ("2 pipeline stages x 2 context ranks", pipeline()),
        ("2 tensor-parallel x 2 context ranks", tensors()),
    ):
        far = apart(found, expected)
        assert far < 1e-5, far
        if dist.get_rank() == 0:
            print(f"{what}: loss {found[0]:.6f}, that of one process; at most {far:.1e} apart")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
