# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random draws in a forward pass, such as those of dropout: each rank has draws of its own, since it has tokens of its own.

Usually a job gives all ranks one seed. With it the tokens of all ranks would get equal masks. So during a forward pass PyTorch's
generators have another seed on each rank, computed from their state before it, which makes a pass that is repeated from the same state
draw the same. Afterwards they are as before it, if nothing was drawn, or one draw later: the same on all ranks again, although ranks
have different numbers of tokens. What else a job draws from them, such as random words or an order of batches, is equal on all ranks.

Gradient checkpointing keeps the state of the generators at the beginning of a layer, so a layer that is computed again draws the same.
"""

from __future__ import annotations

import hashlib

import torch

from ..errors import Unsupported

# Options with which a model leaves out layers at random: all ranks must run the same layers.
LAYERS = ("layerdrop", "decoder_layerdrop")


def refuse_layerdrop(config: object) -> None:
    for name in LAYERS:
        if given := getattr(config, name, 0):
            raise Unsupported(
                f"config.{name} is {given}, which is not supported: each rank would leave out other layers. Set it to 0 before the model is made"
            )


def _generators(device: torch.device) -> list[torch.Generator]:
    """PyTorch's generators for the CPU and for the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call, unused-ignore]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]]


class Draws:
    """The draws of a forward pass on one rank, from its making to `end`."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._generators = _generators(device)
        self._before = [one.get_state() for one in self._generators]
        text = b"".join((rank.to_bytes(8, "little"), *(state.numpy().tobytes() for state in self._before)))
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        self._seeded = [one.manual_seed(seed).get_state() for one in self._generators]

    def end(self) -> None:
        for one, before, seeded in zip(self._generators, self._before, self._seeded, strict=True):
            drawn = not torch.equal(one.get_state(), seeded)
            one.set_state(before)
            if drawn:
                torch.empty((), dtype=torch.int64, device=one.device).random_(generator=one)
