# SPDX-License-Identifier: MIT OR Apache-2.0
"""A `DeviceMesh` of PyTorch as an argument: where a program has made its groups already, ContextParallel takes them.

The dimension "cp" has the ranks that share a pass. Others are replicas with batches of their own (data parallel, of any name): then the group is
the whole mesh, so that a trainer counts its processes. With "tp" it is the ranks with this one's part of the heads (`tensors`). Other dimensions over
which something splits a model are refused.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cpattn.arguments import refused
from cpattn.errors import InvalidArgument, Unsupported
from cpattn.torch.group import Members

NAME = "cp"
# Names of dimensions over which a model or its tokens are split.
SPLIT = ("pp", "sp", "ep")
# That over which heads are split, each rank with a part of the model's weights.
PARTS = "tp"


def group_of(mesh: Any, group: Members, replicas: int) -> tuple[Members, int]:
    """The group and the number of replicas, from a mesh if there is one."""
    if mesh is None:
        return group, replicas
    if group is not None or replicas != 1:
        other = f"group is {group!r}" if group is not None else f"replicas is {replicas!r}"
        raise InvalidArgument(
            f"mesh and {other} are both given: leave one of them out, mesh says which ranks are a group"
        )
    if not isinstance(mesh, DeviceMesh):
        raise refused("mesh", mesh, "a torch.distributed.device_mesh.DeviceMesh is needed")
    names = mesh.mesh_dim_names or ()
    if NAME not in names:
        raise InvalidArgument(f"mesh has the dimensions {names}, {NAME!r} is needed: name it with mesh_dim_names")
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    for name in SPLIT:
        if sizes.get(name, 1) > 1:
            raise Unsupported(
                f"mesh has the dimension {name!r} of {sizes[name]} ranks, which is not supported beside {NAME!r}: make the mesh without it"
            )
    if (at := mesh.get_coordinate()) is None:
        raise InvalidArgument(
            f"mesh has the ranks {mesh.mesh.flatten().tolist()}, without this one: use ContextParallel on those ranks"
        )
    ranks, dimensions = mesh.mesh, list(names)
    if PARTS in names:  # of the heads: the group has those with this rank's part
        ranks = ranks.select(dimensions.index(PARTS), at[dimensions.index(PARTS)])
        dimensions.remove(PARTS)
    if ranks.numel() == sizes[NAME]:
        return mesh.get_group(NAME), 1
    members = ranks.movedim(dimensions.index(NAME), -1).flatten().tolist()
    if any(a >= b for a, b in pairwise(members)):
        raise Unsupported(
            f"mesh has the dimensions {sizes} with {NAME!r} before others than {PARTS!r}, so that ranks that share a pass are not consecutive: put {NAME!r} "
            f"last, or before {PARTS!r}, or give mesh[{NAME!r}] without a trainer"
        )
    return members, len(members) // sizes[NAME]
