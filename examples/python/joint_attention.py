# SPDX-License-Identifier: MIT OR Apache-2.0
"""Joint attention of image and text tokens, as diffusion transformers have it, over 4 processes: Ulysses 2 x ring 2.

    pip install ./python torch
    torchrun --nproc-per-node 4 examples/python/joint_attention.py

An image of 64 x 64 patches and a prompt of 77 tokens attend to each other and to themselves, without a mask. They are two
documents of one pack, so each of them is counted from 0 and is cut evenly, and one slice says that all tokens see all. Two samples in a pack
would be two slices. o and all gradients are compared with PyTorch's scaled_dot_product_attention of one process.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import cpattn
import cpattn.torch

HEADS, HEAD_DIM = 4, 64


def whole(tokens):
    """q, k, v and the gradient of o, the same in each process."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, HEADS, HEAD_DIM, generator=generator) for _ in range(4)]


def joint(image, text):
    """This process's tokens, and for them o, dq, dk and dv."""
    tokens = image + text
    context = cpattn.torch.Context(heads=HEADS, head_dim=HEAD_DIM, ulysses=2, ring=2)
    batch = context.batch([0, image, tokens], slices=cpattn.slices.pairs([((0, tokens), (0, tokens))]))
    *mine, d_o = map(batch.shard, whole(tokens))
    o = batch.attention(*(x.requires_grad_() for x in mine))
    results = [o.detach(), *torch.autograd.grad(o, mine, d_o)]
    dist.barrier()
    context.close()
    return batch.tokens, results


def alone(image, text):
    """The same of one process."""
    *inputs, d_o = (x.transpose(0, 1) for x in whole(image + text))
    o = scaled_dot_product_attention(*(x.requires_grad_() for x in inputs))
    return [x.detach().transpose(0, 1) for x in (o, *torch.autograd.grad(o, inputs, d_o))]


def compare(image=4096, text=77):
    """The largest difference of each result on any process, over the largest value."""
    tokens, results = joint(image, text)
    expected = alone(image, text)
    apart = torch.tensor([(got - want[tokens]).abs().max() / want.abs().max() for got, want in zip(results, expected)])
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.tolist()


def main():
    dist.init_process_group("gloo")
    if dist.get_world_size() != 4:
        raise SystemExit(
            f"{dist.get_world_size()} processes were started, 4 are needed: torchrun --nproc-per-node 4 {__file__}"
        )
    apart = compare()
    if dist.get_rank() == 0:
        print(
            "apart from one process: " + ", ".join(f"{name} {x:.1e}" for name, x in zip(("o", "dq", "dk", "dv"), apart))
        )
        assert max(apart) < 1e-5, apart
        print("ok")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
