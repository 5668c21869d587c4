# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which kernels and which communicator a context has: its arguments `kernels` and `communicator`.

kernels="cpattn" is the library with its own ranks, on the CPU over gloo and on CUDA over NCCL. The planner alone (`capi/build --planner`) has none. Every other kernel runs in the executor
of `cpattn.torch.executor`, over the backend of the process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._library import library_features
from ..arguments import refused
from ..engine import EngineTransport
from ..errors import InvalidArgument, Unsupported
from . import nccl
from .agree import digest, compare, refusing
from .gloo import Members, members_of
from .kernels import Kernel, find

OWN = "cpattn"

# Groups of global ranks, with these and the default group that they belong to: itself, since its id may be that of a later one.
_groups: list[tuple[tuple[int, ...], object, dist.ProcessGroup]] = []


def checked(kernels: str | Kernel | None, device: torch.device, workers: int) -> str | Kernel:
    """The argument `kernels`, or its default on this device."""
    own = "kernels" in library_features()
    chosen = kernels if kernels is not None else OWN if own and device.type == "cpu" else "torch"
    if not isinstance(chosen, str | Kernel):
        raise refused("kernels", kernels, "'cpattn', a name of cpattn.torch.kernels, or a Kernel is needed")
    if device.type == "meta":
        raise Unsupported("device is meta, which has no memory: a device with memory is needed")
    if chosen == OWN and device.type not in ("cpu", "cuda"):
        raise Unsupported(f"device is {device}, cpu or cuda is needed with kernels='cpattn': give kernels='torch'")
    if chosen == OWN and not own:
        raise Unsupported(
            "kernels is 'cpattn', and the library is the planner alone: give kernels='torch' or another kernel, or install the full wheel"
        )
    if chosen != OWN and workers != 1:
        raise InvalidArgument(
            f"workers is {workers}, 1 is needed with kernels={shown(chosen)}: workers are threads of kernels='cpattn'; see torch.set_num_threads"
        )
    if device.type == "cuda" and workers != 1:
        raise InvalidArgument(f"workers is {workers}, 1 is needed on {device}: workers are CPU threads")
    return chosen


def shown(kernels: str | Kernel) -> str:
    return repr(kernels.name if isinstance(kernels, Kernel) else kernels)


def communicator(communicator: str | None, kernels: str | Kernel, device: torch.device) -> str:
    """The argument `communicator`. With a kernel of others messages go over the group's backend."""
    if kernels == OWN:
        return nccl.checked("own" if communicator is None else communicator, device)
    if communicator == "own":
        raise InvalidArgument(
            f"communicator is 'own', 'torch' or None is needed with kernels={shown(kernels)}: messages go over the backend of the group"
        )
    return nccl.checked("torch" if communicator is None else communicator, torch.device("cuda"))


def process_group(group: Members) -> dist.ProcessGroup | None:
    """The group whose backend moves tensors; None is the default group. For global ranks that are not all, one is made, which their
    members alone call, and kept for the next context."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    members = members_of(group)
    if members == tuple(range(dist.get_world_size())):
        return None
    world: object = dist.group.WORLD
    _groups[:] = [one for one in _groups if one[1] is world]  # others ended with theirs
    for known, _, open_group in _groups:
        if known == members:
            return open_group
    group_of_members: dist.ProcessGroup = dist.new_group(list(members), use_local_synchronization=True)
    _groups.append((members, world, group_of_members))
    return group_of_members


def numbered(device: torch.device) -> torch.device:
    """The device with its number, as tensors have it."""
    if device.index is not None or device.type == "cpu":
        return device
    every: Any = torch.accelerator
    there = every.is_available() and every.current_accelerator().type == device.type
    return torch.device(device.type, every.current_device_index() if there else 0)


def agreed(transport: EngineTransport, kernels: str | Kernel, device: torch.device) -> Kernel | None:
    """The kernel, or None for those of this library. All ranks call it, and are refused if they have different ones."""
    with refusing(transport):
        kernel = None if kernels == OWN else find(kernels, device)
    name = OWN if kernel is None else kernel.name
    compare(transport, "kernels", digest(name.encode()), f"kernels is {name!r} on this rank, all ranks need the same")
    return kernel
