# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random draws in a forward pass, such as those of dropout: each rank has draws of its own, since it has tokens of its own.

Usually a job gives all ranks one seed. With it the tokens of all ranks would get equal masks. So during a forward pass PyTorch's
generators have another seed on each rank, computed from their state before it, which makes a pass that is repeated from the same state
draw the same. Afterwards they are as before it, if nothing was drawn, or one draw later: the same on all ranks again, although ranks
have different numbers of tokens. What else a job draws from them, such as random words or an order of batches, is equal on all ranks.

Gradient checkpointing keeps the state of the generators at the beginning of a layer, so a layer that is computed again draws the same.

Attention's dropout is a hash of the tokens' places in the batch, the head and a seed, which needs to be the same on all ranks: one for
each call of attention in a forward pass, from rank 0's generator. Each call also draws a number from the rank's own generator. A layer that
is computed again draws the same number, by which it finds the seed of its call.
"""

from __future__ import annotations

import hashlib
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cpattn.engine import EngineTransport
from cpattn.errors import Unsupported

# Options with which a model leaves out layers at random: all ranks must run the same layers.
LAYERS = ("layerdrop", "decoder_layerdrop")


def refuse_layerdrop(config: object) -> None:
    for name in LAYERS:
        if rate := getattr(config, name, 0):
            raise Unsupported(
                f"config.{name} is {rate}, which is not supported: each rank would leave out other layers. Set it to 0 before the model is made"
            )


def generators(device: torch.device) -> list[torch.Generator]:
    """PyTorch's generators for the CPU and for the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call, unused-ignore]
    return [
        torch.default_generator,
        torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index],
    ]


def _digest(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")


def _number(generator: torch.Generator | None = None) -> int:
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator))


class Seed:
    """The seed of a call that drops by places of tokens, and the places in the batch of the tokens of this rank's model."""

    def __init__(self, number: int, tokens: Tensor) -> None:
        self.number, self.tokens = number, tokens


# By the number that a call drew from the rank's own generator.
_known: WeakValueDictionary[int, Seed] = WeakValueDictionary()


class Draws:
    """The draws of a forward pass on one rank, from its making to `end`."""

    def __init__(
        self,
        rank: int,
        replica: int,
        device: torch.device,
        transport: EngineTransport,
        tokens: Tensor,
        distribution: int,
    ) -> None:
        self._transport, self._tokens = transport, tokens
        self._generators = generators(device)
        self._before = [one.get_state() for one in self._generators]
        states = [state.numpy().tobytes() for state in self._before]
        # Odd, as all that ranks tell each other while a forward pass is under way. Replicas have batches of their own, and one seed.
        self._common = _digest(replica.to_bytes(8, "little"), *states) | 1
        self.seeds: list[Seed] = []
        # Passes that begin with one state and have other tokens on this rank draw other numbers: `_known` tells them apart.
        mine = rank.to_bytes(8, "little"), distribution.to_bytes(8, "little")
        self._seeded = [one.manual_seed(_digest(*mine, *states)).get_state() for one in self._generators]

    def _next(self, drawn: int) -> Seed:
        """The seed of the next call. All ranks have the same calls."""
        if not self.seeds:
            self._common = self._transport.agree(0, self._transport.world, self._common)[0]
        number = _digest(self._common.to_bytes(8, "little"), len(self.seeds).to_bytes(8, "little"))
        self.seeds.append(Seed(number, self._tokens))
        _known[drawn] = self.seeds[-1]
        return self.seeds[-1]

    def all_known(self) -> bool:
        """Whether nothing was drawn but seeds."""
        first = torch.Generator()
        first.set_state(self._seeded[0])
        for _ in self.seeds:
            _number(first)
        states = [first.get_state(), *self._seeded[1:]]
        return all(torch.equal(one.get_state(), state) for one, state in zip(self._generators, states, strict=True))

    def end(self) -> None:
        for one, before, seeded in zip(self._generators, self._before, self._seeded, strict=True):
            drawn = not torch.equal(one.get_state(), seeded)
            one.set_state(before)
            if drawn:
                torch.empty((), dtype=torch.int64, device=one.device).random_(generator=one)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def seed_of_call(draws: Draws | None) -> Seed:
    """The seed of a call in this forward pass, or of one that the backward pass computes again."""
    drawn, again = _number(), torch._C._current_graph_task_id() != -1
    if not again and draws is not None:
        return draws._next(drawn)
    if (found := _known.get(drawn)) is None:
        raise Unsupported(
            "a layer with dropout is computed again in the backward pass with other random numbers than before, as gradient checkpointing with "
            "preserve_rng_state=False does: leave that out, or set dropout to 0"
        )
    return found
