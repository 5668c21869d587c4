# SPDX-License-Identifier: MIT OR Apache-2.0
"""MLA in its latent form (DeepSeek: 512 latent columns, 64 that are rotated) on two ranks, against PyTorch with a key and a value of each head.

The projections from the latent are multiplied into q and out of o, so all q heads read one kv head of 576 columns, and v is the first 512 of
k: a view of it.
"""

from __future__ import annotations

import unittest

import torch
import torch.distributed as dist
from dense import dense, error, gradients
from processes import run
from torch import Tensor

from cpattn.torch import Context

DOCUMENTS = [0, 21, 21, 60, 61]
HEADS, NOPE, ROPE, VALUE, LATENT = 3, 128, 64, 128, 512
SCALE = (NOPE + ROPE) ** -0.5


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """q by head (what meets the latent, and what is rotated), the latent, k's rotated part, and both projections; on every rank the same."""
    random, n = torch.Generator().manual_seed(1), DOCUMENTS[-1]
    shapes = ((n, HEADS, NOPE), (n, HEADS, ROPE), (n, LATENT), (n, ROPE), (HEADS, NOPE, LATENT), (HEADS, VALUE, LATENT))
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    return [(x * LATENT**-0.5 if i > 3 else x).to(dtype) for i, x in enumerate(made)]


def by_head(nope: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, to_k: Tensor, to_v: Tensor) -> Tensor:
    k = torch.einsum("tl,hnl->thn", latent, to_k)
    k = torch.cat([k, k_rope[:, None].expand(-1, HEADS, -1)], -1)
    return dense(torch.cat([nope, rope], -1), k, torch.einsum("tl,hvl->thv", latent, to_v), DOCUMENTS, scale=SCALE)


def everything(rank: int, world: int) -> None:
    for dtype, bound, mesh in (
        (torch.float64, 1e-13, {"ring": 2}),
        (torch.float64, 1e-13, {"ulysses": 2}),
        (torch.float32, 1e-6, {"ring": 2, "layout": "zigzag"}),
        (torch.bfloat16, 1e-2, {"ring": 2}),
    ):
        exact = [x.double().requires_grad_() for x in inputs(dtype)]
        want = by_head(*exact)
        d_o = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        of_inputs = gradients(want, d_o, exact)

        options = {
            "heads": HEADS,
            "kv_heads": 1,
            "head_dim": LATENT + ROPE,
            "value_dim": LATENT,
            "scale": SCALE,
            "dtype": dtype,
        }
        context = Context(**options, **mesh)  # type: ignore[arg-type]
        batch = context.batch(DOCUMENTS)
        # The projections in f64: what is compared is attention alone.
        nope, rope, latent, k_rope = (batch.shard(x.detach()).requires_grad_() for x in exact[:4])
        to_k, to_v = (x.detach().requires_grad_() for x in exact[4:])
        q = torch.cat([torch.einsum("thn,hnl->thl", nope, to_k), rope], -1).to(dtype)
        k = torch.cat([latent, k_rope], -1)[:, None].to(dtype)
        o = torch.einsum("thl,hvl->thv", batch.attention(q, k, k[..., :LATENT]).double(), to_v)
        found = gradients(o, batch.shard(d_o), [nope, rope, latent, k_rope])
        for name, a, b in zip(("o", "q", "q rotated", "latent", "k rotated"), (o, *found), (want, *of_inputs)):
            assert error(a, batch.shard(b)) <= bound, (
                f"{name} is off by {error(a, batch.shard(b)):.1e}: {dtype}, {mesh}"
            )
        dist.barrier()
        context.close()


class Latent(unittest.TestCase):
    def test_the_latent_form_is_the_form_by_head(self) -> None:
        run(everything, 2)


if __name__ == "__main__":
    unittest.main()
