# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dropout of hidden states by the places of tokens: training on n ranks is then exactly that on one.

Each `torch.nn.Dropout` of the model (those of LoRA too) drops an element by a hash of the place of its token in the batch, its place in
the token's row and the seed of its call, which is equal on all ranks (`draws.py`). The hash is Philox 4x32-10, computed with PyTorch's
64-bit numbers: counter (token, element / 4, 0, 1), key the seed; word `element mod 4` below p * 2^32 drops.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpattn.errors import Unsupported
from .attention import Current
from .draws import Draws, Seed, seed_of_call
from .images import decoder_of

LOW = 2**32 - 1
# Hashes that are computed at a time.
AT_A_TIME = 1 << 20


def hashed(tokens: Tensor, elements: int, seed: int) -> Tensor:
    """A word of 32 bits for each token and element, [tokens, elements], as int64."""
    fours = torch.arange((elements + 3) // 4, device=tokens.device)
    a, b = tokens[:, None].expand(-1, len(fours)), fours[None].expand(len(tokens), -1)
    c, d = torch.zeros_like(a), torch.ones_like(a)
    k0, k1 = seed & LOW, seed >> 32
    for _ in range(10):
        # The products are taken modulo 2^64; the shift would copy the sign.
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = ((q >> 32) & LOW) ^ b ^ k0, q & LOW, ((p >> 32) & LOW) ^ d ^ k1, p & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return torch.stack([a, b, c, d], dim=2).flatten(1)[:, :elements]


def factors(like: Tensor, rows: int, seed: Seed, p: float) -> Tensor:
    """What is multiplied with [rows, elements]: 0, or 1/(1 - p)."""
    tokens, elements = seed.tokens.to(like.device), like.numel() // rows
    each = max(1, 4 * AT_A_TIME // max(elements, 1))
    parts = [
        hashed(tokens[at : at + each], elements, seed.number) >= math.ceil(p * 2**32) for at in range(0, rows, each)
    ]
    return torch.cat(parts).to(like.dtype) / (1 - p)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def by_place(layer: nn.Dropout, x: Tensor) -> Tensor:
    """The forward of a `torch.nn.Dropout`."""
    # What runs before the text model of a batch with images has all tokens, and draws as in one process.
    if not layer.training or not layer.p or layer.p >= 1 or getattr(Current.forward, "outer", False):
        return nn.functional.dropout(x, layer.p, layer.training, layer.inplace)
    seed = seed_of_call(getattr(Current.forward, "draws", None))
    rows = len(seed.tokens)
    if not (x.ndim >= 2 and x.shape[0] == rows) and not (x.ndim >= 3 and x.shape[:2] == (1, rows)):
        raise Unsupported(
            f"a dropout gets a tensor of the shape {tuple(x.shape)}, (1, {rows}, ...) or ({rows}, ...) is needed for dropout='position', a row for "
            "each of this rank's tokens: use dropout='rank'"
        )
    return x * factors(x, rows, seed, layer.p).view(x.shape)


class ByPlace:
    """Replaces the forward of all dropouts of a model. Those of a vision tower have no tokens of the batch: they draw as in one process, also
    in a tower that is computed again."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def replace(self) -> None:
        """Also those that the model did not have before."""
        decoder, head = decoder_of(self._model), self._model.get_output_embeddings()
        for part in (self._model,) if decoder is None else (decoder, head):
            self._replace(part)

    @staticmethod
    def _replace(part: nn.Module | None) -> None:
        for layer in part.modules() if part is not None else ():
            if isinstance(layer, nn.Dropout) and "forward" not in vars(layer):
                layer.forward = partial(by_place, layer)  # type: ignore[method-assign]

    def restore(self) -> None:
        for layer in self._model.modules():
            forward: Any = vars(layer).get("forward")
            if isinstance(layer, nn.Dropout) and isinstance(forward, partial) and forward.func is by_place:
                del layer.forward

    @staticmethod
    def check(draws: Draws) -> None:
        """Refuses a forward pass in which something else drew random numbers too."""
        if not draws.all_known():
            raise Unsupported(
                "the model draws random numbers outside of torch.nn.Dropout and attention, for example in torch.nn.functional.dropout, or in a vision "
                "tower with vision='shard', and they would not be those of one process: use dropout='rank', or vision='all'"
            )
