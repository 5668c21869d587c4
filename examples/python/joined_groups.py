# SPDX-License-Identifier: MIT OR Apache-2.0
"""Groups of ranks that join for long documents and work apart on short ones, over 4 processes.

    pip install ./python torch transformers
    torchrun --nproc-per-node 4 examples/python/joined_groups.py

A rank has room for so many tokens. Documents that fit in two ranks are dealt into packs for two pairs of ranks, which work at the same time
without a message between the pairs; longer ones go to all four ranks together. There is a context for each kind of group, made once, and
each step uses one of them. Gradients are summed over all ranks in either case, so a step has the gradients of one process with the same
documents, which is compared here.
"""

import argparse
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

import cpattn
import cpattn.torch
from cpattn_hf.transformers import balanced

HEADS, HEAD_DIM, WORDS, ROOM = 4, 16, 97, 64
LENGTHS = [30, 128, 7, 256, 90, 200, 64, 64, 12, 50, 100, 21]


class Model(nn.Module):
    """One layer of attention over words."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.words, self.qkv, self.out = (
            nn.Embedding(WORDS, width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, WORDS),
        )

    def loss(self, ids, labels, attention):
        """The sum over tokens that have a label."""
        q, k, v = self.qkv(self.words(ids)).view(len(ids), 3, HEADS, HEAD_DIM).unbind(1)
        logits = self.out(attention(q, k, v).flatten(1))
        return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def pack(documents):
    """The words of documents, their labels, and cu_seqlens."""
    words = [torch.randint(WORDS, (LENGTHS[i],), generator=torch.Generator().manual_seed(i)) for i in documents]
    labels = [torch.cat([x[1:], torch.tensor([-100])]) for x in words]
    return torch.cat(words), torch.cat(labels), [0, *accumulate(map(len, words))]


def steps():
    """(the number of ranks of a group, a pack for each group) of each step."""
    long = [i for i, n in enumerate(LENGTHS) if n > 2 * ROOM]
    short = [i for i, n in enumerate(LENGTHS) if n <= 2 * ROOM]
    for ranks, documents in ((2, short), (4, long)):
        for step in balanced([LENGTHS[i] for i in documents], ranks * ROOM, replicas=4 // ranks):
            yield ranks, [[documents[i] for i in one] for one in step]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters()]


def alone(model, packs):
    """The gradients of a step in one process."""
    ids, labels, cu = pack(sum(packs, []))
    document = torch.arange(len(cu) - 1).repeat_interleave(torch.tensor(cu).diff())
    mask = (document[:, None] == document) & torch.ones(len(ids), len(ids)).tril().bool()
    attention = lambda *qkv: nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in qkv), attn_mask=mask
    ).transpose(0, 1)
    return gradients(model, model.loss(ids, labels, attention) / (labels >= 0).sum())


def train():
    """For each step its ranks, its packs, and the largest difference of a gradient from that of one process."""
    rank = dist.get_rank()
    first = rank // 2 * 2
    of_heads = {"heads": HEADS, "head_dim": HEAD_DIM}
    # Each process is in a pair and in the whole. All of them make the contexts in one order.
    contexts = {
        2: cpattn.torch.Context([first, first + 1], **of_heads),
        4: cpattn.torch.Context([0, 1, 2, 3], **of_heads),
    }
    torch.manual_seed(0)
    model = Model()
    for ranks, packs in steps():
        documents = packs[rank // ranks]
        loss, counted = sum(p.sum() for p in model.parameters()) * 0, torch.zeros(1)
        if documents:
            ids, labels, cu = pack(documents)
            batch = contexts[ranks].batch(cu)
            mine = batch.shard(labels)
            loss, counted[0] = model.loss(batch.shard(ids), mine, batch.attention), (mine >= 0).sum()
        dist.all_reduce(counted)
        found = gradients(model, loss / counted[0])
        for gradient in found:
            dist.all_reduce(gradient)
        found = [x.clone() for x in found]
        apart = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, alone(model, packs)))
        yield ranks, packs, apart
    dist.barrier()
    for context in contexts.values():
        context.close()


def main():
    dist.init_process_group("gloo")
    if dist.get_world_size() != 4:
        raise SystemExit(
            f"{dist.get_world_size()} processes were started, 4 are needed: torchrun --nproc-per-node 4 {__file__}"
        )
    for ranks, packs, apart in train():
        if dist.get_rank() == 0:
            lengths = "; ".join(" ".join(str(LENGTHS[i]) for i in one) for one in packs)
            print(
                f"{4 // ranks} x {ranks} ranks, documents of {lengths}: gradients {apart:.0e} from those of one process"
            )
        assert apart < 1e-5, apart
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
