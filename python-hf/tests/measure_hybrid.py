# SPDX-License-Identifier: MIT OR Apache-2.0
"""Time and memory of a hybrid's layer, a gated delta net of Qwen3.5, beside an all_to_all by hand, over gloo; not a test.

    capi/build && PYTHONPATH=python:python-hf:python/tests python3 python-hf/tests/measure_hybrid.py [--rounds N]

By hand each process has the same number of consecutive tokens of one document and half of the heads, as is simplest. Here tokens are where the
model's attention layers have them. Both run Transformers' functions in PyTorch, forward and backward. Time is that of the CPU, of both
processes together, in one interleaved run; memory is what the larger process grows by in its first call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import hybrids
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.mixers import ARGUMENT
from peak import peak
from processes import run

transformers.utils.logging.set_verbosity_error()
SIZES = {
    "hidden_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
TOKENS = (1024, 4096)


class _ToHeads(torch.autograd.Function):
    """[ranks, tokens, columns] of the tokens of a rank, to the columns of this rank for all tokens; and back in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _ToHeads.apply(gradient)  # its own inverse


def _by_hand(layer: Any, x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The layer on `x`, this rank's part of the tokens, in order."""
    n, keys, values = len(x), layer.num_k_heads // world, layer.num_v_heads // world
    q, k, v = layer.in_proj_qkv(x).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    parts = [part.view(n, world, -1) for part in (q, k, v, layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x))]
    widths = [part.shape[-1] for part in parts]
    every = _ToHeads.apply(torch.cat(parts, -1).transpose(0, 1)).flatten(0, 1)  # type: ignore[no-untyped-call]
    q, k, v, z, b, a = every.split(widths, -1)
    weights = [
        w.unflatten(0, (world, -1))[rank]
        for w in layer.conv1d.weight.split([layer.key_dim, layer.key_dim, layer.value_dim])
    ]
    taps, mixed = layer.conv_kernel_size, torch.cat([q, k, v], -1).T[None]
    mixed = F.silu(F.conv1d(F.pad(mixed, (taps - 1, 0)), torch.cat(weights), groups=mixed.shape[1]))[0].T
    q, k, v = (
        one.view(1, n * world, -1, dim)
        for one, dim in zip(
            mixed.split(widths[:3], -1), (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim), strict=True
        )
    )
    own = slice(rank * values, (rank + 1) * values)
    decay = -layer.A_log[own].float().exp() * F.softplus(a.float() + layer.dt_bias[own])
    each = values // keys
    q, k = (one.repeat_interleave(each, 2) for one in (q, k))
    o, _ = qwen.torch_chunk_gated_delta_rule(
        q,
        k,
        v,
        g=decay[None],
        beta=b.sigmoid()[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    o = layer.norm(o.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim)).view(world, n, -1)
    mine = _ToHeads.apply(o).transpose(0, 1).reshape(n, -1)  # type: ignore[no-untyped-call]
    return layer.out_proj(mine)


def _ways(rank: int, world: int, tokens: int) -> dict[str, Callable[[], torch.Tensor]]:
    model = hybrids.build("qwen3_5_text", **SIZES, max_position_embeddings=tokens)
    layer, cp = model.model.layers[0].linear_attn, ContextParallel(model)
    hidden = torch.randn(tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    forward = cp.shard({"input_ids": torch.full((1, tokens), 3), "cu_seqlens": torch.tensor([0, tokens])})
    n = tokens // world
    mine = {"mixer": forward.tokens, "all_to_all": torch.arange(rank * n, (rank + 1) * n)}
    rows = {name: hidden[places].requires_grad_() for name, places in mine.items()}
    ways = {
        "mixer": lambda x: layer(x[None], **{ARGUMENT: forward})[0],
        "all_to_all": lambda x: _by_hand(layer, x, rank, world),
    }

    def call(name: str) -> torch.Tensor:
        out: torch.Tensor = ways[name](rows[name])
        out.square().sum().backward()
        whole = torch.zeros(tokens, out.shape[1])
        whole[mine[name]] = out.detach()
        return whole

    return {name: partial(call, name) for name in ways}


def _same(ways: dict[str, Callable[[], torch.Tensor]]) -> None:
    made = [way() for way in ways.values()]
    for one in made:
        dist.all_reduce(one)
    apart = float((made[0] - made[1]).norm() / made[1].norm())
    assert apart < 1e-5, apart


def _times(rank: int, world: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    ways = _ways(rank, world, tokens)
    _same(ways)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            began = time.process_time()
            way()
            times[name].append(time.process_time() - began)
    dist.barrier()
    return times


def _grows(rank: int, world: int, tokens: int, name: str) -> float:
    """In a process of its own: what one call has freed would be there for the next."""
    grown = peak(_ways(rank, world, tokens)[name])
    dist.barrier()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"one document, f32, 2 processes over gloo, forward and backward; medians of {rounds}")
    for tokens in TOKENS:
        ranks, text = run(_times, 2, tokens, rounds, seconds=600), f"{tokens} tokens"
        for name in ("mixer", "all_to_all"):
            cpu = statistics.median(sum(rank[name][at] for rank in ranks) for at in range(rounds))
            text += f"  {name} {cpu * 1e3:6.0f} ms, {max(run(_grows, 2, tokens, name, seconds=600)):5.1f} MB"
        print(text, flush=True)


if __name__ == "__main__":
    main()
