# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bytes and memory of a recurrent layer by both forms, a gated delta net of Qwen3.5, of one document over 2, 4 and 8 processes; not a test.

    capi/build && PYTHONPATH=python:python-hf:python/tests:python-hf/tests python3 python-hf/tests/measure_recurrent.py [--tokens N]

Bytes are counted, forward and backward: what a process hands to the exchanges of the layer for other ranks, and what the schedules of its scans
send. Activations are counted as well: the tensors that the
layer's backward pass keeps, each storage once, without parameters. The process with the most of each.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import transformers

import hybrids
from cpattn import Plan, Rank
from cpattn.torch.group import Collectives
from cpattn_hf.transformers import ContextParallel
from cpattn_hf.transformers.mixers import ARGUMENT
from processes import run

transformers.utils.logging.set_verbosity_error()
SIZES = {
    "hidden_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def _cost(rank: int, world: int, tokens: int, recurrent: str) -> tuple[int, int]:
    model = hybrids.build("qwen3_5_text", **SIZES, max_position_embeddings=tokens)
    layer = model.model.layers[0].linear_attn
    cp = ContextParallel(model, recurrent=recurrent, layout="contiguous", ulysses=1, ring=world, timeout=300)
    forward = cp.shard({"input_ids": torch.full((1, tokens), 3), "cu_seqlens": torch.tensor([0, tokens])})
    x = torch.randn(tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))[forward.tokens]
    x.requires_grad_()
    sent, kept, usual, scan = [0], {}, Collectives.exchange, Rank.scan
    fixed = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def exchange(self: Any, to: torch.Tensor, data: torch.Tensor, arriving: list[int], leaving: list[int]) -> None:
        sent[0] += sum(leaving) - leaving[rank]
        usual(self, to, data, arriving, leaving)

    def scanned(self: Rank, plan: Plan, *, decay: torch.Tensor, state: torch.Tensor, **how: Any) -> None:
        scan(self, plan, decay=decay, state=state, **how)
        heads, keys = state.shape[1], int(decay.shape[2] ** 0.5)  # of matrices
        how.pop("initial_state")
        schedule = plan.scan_schedule(rank, heads, keys, state.shape[2] // keys, **how)
        sent[0] += sum(one.bytes for op in schedule.ops for one in op.messages if one.send)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    Collectives.exchange, Rank.scan = exchange, scanned  # type: ignore[method-assign, assignment]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        out = layer(x[None], **{ARGUMENT: forward})
    out.square().sum().backward()
    dist.barrier()
    cp.close()
    return sent[0], sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    print(f"one document of {tokens} tokens, f32, forward and backward; the process with the most")
    for world in (2, 4, 8):
        for recurrent in ("states", "heads"):
            ranks = run(_cost, world, tokens, recurrent, seconds=600)
            sent, kept = (max(one[at] for one in ranks) / 1e6 for at in range(2))
            print(f"{world} processes, {recurrent}: {sent:8.2f} MB sent, {kept:8.1f} MB of activations", flush=True)


if __name__ == "__main__":
    main()
