# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether the ranks of a group have one model with equal weights: parameters and buffers, compared by hashes.

Ranks share a forward pass, so other weights on a rank would be mixed in without an error. A hash is one pass over a tensor on its device:
sums modulo 2^64 of its 32-bit words, each times an odd number of its place. What is sharded (DTensors of FSDP2 or of tensor parallelism, the
parts of ZeRO-3) is compared between the ranks that hold the same shards, as with HSDP; a shard that one rank holds alone is compared with none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..engine import EngineTransport
from ..errors import Disagreement
from .agree import digests, digest, refusing

# Words that are hashed at a time: their products are of 64 bits.
AT_A_TIME = {"cpu": 1 << 16}
ELSEWHERE = 1 << 22
# An odd number of 64 bits (of the golden ratio), as a signed one.
ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# What a user can do.
NEED = (
    "load the same weights on all ranks, or draw them with the same seed; give compare_weights=False where something makes them equal afterwards "
    "(DDP, deepspeed.initialize)"
)
# What differs in the lists below, in errors.
WHAT = "parameters and buffers"


class Item(NamedTuple):
    """A parameter or buffer as this rank holds it. `place` says which shard it is, None for a whole one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Any
    local: Tensor


def _item(name: str, tensor: Any) -> Item:
    if hasattr(tensor, "ds_id"):  # ZeRO-3
        part = getattr(tensor, "ds_tensor", None)
        rank = torch.distributed.get_rank(tensor.ds_process_group)
        return Item(
            name, tuple(tensor.ds_shape), tensor.dtype, ("part", rank), tensor.new_empty(0) if part is None else part
        )
    if hasattr(tensor, "_fsdp_flattened") or getattr(tensor, "_is_flat_param", False):  # FSDP1
        return Item(name, (), tensor.dtype, ("flat", torch.distributed.get_rank()), tensor)
    if isinstance(tensor, DTensor):
        at, placements = tensor.device_mesh.get_coordinate(), tensor.placements
        place = tuple(
            ("outside",) if at is None else (dim, at[dim])
            for dim, one in enumerate(placements)
            if not one.is_replicate()
        )
        return Item(name, tuple(tensor.shape), tensor.dtype, place or None, tensor.to_local())
    return Item(name, tuple(tensor.shape), tensor.dtype, None, tensor)


def items_of(model: nn.Module) -> Iterator[Item]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield _item(name, tensor.detach() if not hasattr(tensor, "ds_id") else tensor)


def _words(tensor: Tensor) -> Tensor:
    """The 32-bit words of a tensor: a view, unless it is not contiguous or does not end or begin at a word."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    data = tensor.resolve_neg().contiguous().view(-1).view(torch.uint8)
    if len(data) % 4:
        data = torch.cat([data, data.new_zeros(-len(data) % 4)])
    elif data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _plain(tensor: Any) -> Iterator[Tensor]:
    """The tensors with storage that a tensor consists of: a quantized one, for example, of numbers and scales."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif not tensor.is_meta:
        yield tensor


def hashes(tensors: Sequence[Tensor]) -> list[int]:
    """A number for each tensor that differs, as good as always, for another content. Waits for a device once for each device, not for each tensor."""
    found: dict[torch.device, list[tuple[int, Tensor]]] = {}
    factors: dict[torch.device, Tensor] = {}
    for at, tensor in enumerate(tensors):
        for plain in _plain(tensor):
            words = _words(plain)
            each = AT_A_TIME.get(plain.device.type, ELSEWHERE)
            if plain.device not in factors:
                places = torch.arange(1, each + 1, device=plain.device)
                factors[plain.device] = (places * ODD) ^ (places << 17) | 1
            total = torch.zeros((), dtype=torch.int64, device=plain.device)
            for part, one in enumerate(torch.split(words, each)):
                total += (one * factors[plain.device][: len(one)]).sum() * (2 * part + 1)
            found.setdefault(plain.device, []).append((at, total))
    numbers = [0] * len(tensors)
    for of in found.values():
        for (at, _), total in zip(of, torch.stack([total for _, total in of]).tolist(), strict=True):
            numbers[at] = (numbers[at] * 3 + total) % (1 << 64)
    return numbers


def same_weights(transport: EngineTransport, model: nn.Module, need: str = NEED) -> None:
    """Raises Disagreement on all ranks unless their models have the same parameters and buffers with equal content, with the name of the first that
    differs; the sentence ends with `need`, what a user can do. All ranks of the transport call it."""
    if transport.world == 1:
        return
    with refusing(transport):
        items = list(items_of(model))
        numbers = dict(zip((one.name for one in items), hashes([one.local for one in items]), strict=True))
    kinds = [repr((*one[:3], one.place is None)).encode() for one in items]
    whole, shards = ([one for one in items if (one.place is None) is alike] for alike in (True, False))
    everyone = [0] * transport.world
    if (at := _first(transport, kinds, everyone)) is not None:
        mine = (
            f"{items[at].name} of the shape {items[at].shape} and the type {items[at].dtype}"
            if at < len(items)
            else "no more"
        )
        _differ(
            transport,
            f"the model's {WHAT} differ over the ranks of this group: after {at} that are alike, rank {transport.rank} has {mine}",
            need,
        )
    if (at := _first(transport, [numbers[one.name].to_bytes(8, "little") for one in whole], everyone)) is not None:
        _differ(
            transport, f"{whole[at].name} differs over the ranks of this group (this is rank {transport.rank})", need
        )
    if shards:
        holders = digests(transport, WHAT, digest(repr([one.place for one in shards]).encode()))
        if (at := _first(transport, [numbers[one.name].to_bytes(8, "little") for one in shards], holders)) is not None:
            _differ(
                transport,
                f"{shards[at].name} differs over ranks of this group that hold the same shard (this is rank {transport.rank})",
                need,
            )


def _differ(transport: EngineTransport, what: str, need: str) -> None:
    raise Disagreement(f"{what}: {need}", next(rank for rank in range(transport.world) if rank != transport.rank))


def _first(transport: EngineTransport, mine: list[bytes], classes: Sequence[int]) -> int | None:
    """The first entry of the ranks' lists that is not equal on all ranks of a class, None if there is none."""
    prefixes = [1, *accumulate((digest(one) for one in mine), lambda before, one: digest(f"{before} {one}".encode()))]

    def differ(length: int) -> bool:
        answers = digests(transport, WHAT, prefixes[min(length, len(mine))])
        known: dict[int, int] = {}
        return any(known.setdefault(of, one) != one for of, one in zip(classes, answers, strict=True))

    # Longer than any list: a shorter one is a prefix of others.
    low, high = 0, 1 << 24
    if not differ(high):
        return None
    while high - low > 1:  # the first `low` are alike
        middle = (low + high) // 2
        low, high = (low, middle) if differ(middle) else (middle, high)
    return low
