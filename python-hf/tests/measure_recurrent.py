# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bytes and memory of a recurrent layer by both forms, a gated delta net of Qwen3.5, of one document over 2, 4 and 8 processes; not a test.

    capi/build && PYTHONPATH=python:python-hf:python/tests:python-hf/tests python3 python-hf/tests/measure_recurrent.py [--tokens N]

Bytes are counted: what a process hands to the exchanges of the layer, forward and backward, for other ranks. Activations are counted as well: the tensors that the
layer's backward pass keeps, each storage once, without parameters. The process with the most of each.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import transformers

import hybrids
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
    sent, kept, usual = [0], {}, Collectives.exchange
    fixed = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def exchange(self: Any, to: torch.Tensor, data: torch.Tensor, arriving: list[int], leaving: list[int]) -> None:
        sent[0] += sum(leaving) - leaving[rank]
        usual(self, to, data, arriving, leaving)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    Collectives.exchange = exchange  # type: ignore[method-assign]
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
