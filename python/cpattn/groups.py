# SPDX-License-Identifier: MIT OR Apache-2.0
"""Documents over groups of ranks that change size: short ones on small groups, which work apart, long ones on groups of many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int32, c_uint32, pointer
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _header
from ._library import call
from ._signature import resolved, spelled
from .arguments import c_array, refused, whole
from .errors import InvalidArgument
from .options import CHOSEN, RUNS, Dtype, PlanOptions, at_least_1, checked, dtype_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@resolved
class RankGroup(NamedTuple):
    """A group of `ranks` consecutive ranks from `first_rank` on, and the indices of its documents."""

    first_rank: int
    ranks: int
    documents: tuple[int, ...]


@resolved
class Groups(NamedTuple):
    """What `plan_groups` returns. Each pass has the groups with documents; other ranks have nothing to do in it.

    `makespan` is the cost of all passes, each as long as its most expensive group, and `bound` is what no dealing can be below:
    picoseconds of one layer's forward and backward on a machine, otherwise multiply-adds divided by 1,024."""

    passes: tuple[tuple[RankGroup, ...], ...]
    makespan: int
    bound: int


@spelled(PlanOptions)
def plan_groups(
    cu_seqlens: Sequence[int],
    heads: int,
    head_dim: int,
    *,
    sizes: Sequence[int],
    room: int,
    world: int = 1,
    machine: str | None = None,
    most_passes: int = 0,
    token_flops: int = 0,
    dtype: Dtype | str | object = Dtype.F32,
    **options: Unpack[PlanOptions],
) -> Groups:
    """Deals documents over groups of `world` ranks, by what a document costs a group of each size.

    `sizes` are the allowed numbers of ranks of a group: ascending, each a multiple of the one before; the last divides `world`. A rank has
    room for `room` tokens in a pass; a step has several passes if all ranks have no room for all tokens at once, and at most
    `most_passes`, unless that is 0. `token_flops` are the operations of a token outside of attention in one layer's forward, such as twice
    the parameters of a layer: without them short documents count for almost nothing. `machine` is the text of a machine's description. `options` are
    those of a `Plan`, except for those of its mesh, its layout and its runs. All ranks get the same result."""
    ends = c_array("cu_seqlens", c_int32, cu_seqlens)
    if not len(ends):
        raise InvalidArgument("cu_seqlens has length 0, at least 1 is needed: give [0] for no documents")
    heads = at_least_1("heads", heads)
    if found := [name for name in (*CHOSEN, *sorted(RUNS - {"ranks_per_node"})) if name in options]:
        raise InvalidArgument(
            f"{found[0]} is given, which each group's own plan decides: leave it out here, and give it to the plan"
        )
    members: dict[str, Any] = checked(options, heads, "plan_groups")
    members |= {"heads": heads, "head_dim": at_least_1("head_dim", head_dim), "dtype": dtype_of(dtype)}
    members |= {"cu_seqlens_q": ends, "documents": len(ends) - 1}
    if machine is not None and not isinstance(machine, str):
        raise refused("machine", machine, "the text of a machine's description, or None, is needed")
    if machine is not None and "\0" in machine:
        raise InvalidArgument("machine has a zero byte: remove it, the text of a machine's description has none")
    numbers = c_array("sizes", c_uint32, sizes)
    limits = _header.GroupLimits(
        sizes=numbers,
        size_count=len(numbers),
        room=whole("room", room, 1, 2**62),
        token_flops=whole("token_flops", token_flops, 0, 2**62),
        world=at_least_1("world", world),
        passes=whole("most_passes", most_passes, 0, 2**32 - 1),
        ranks_per_node=members.pop("ranks_per_node", 0),
    )
    known = {name for name, *_ in _header.Problem._fields_}
    problem = _header.Problem(**{name: value for name, value in members.items() if name in known})
    places, info = [(c_uint32 * (len(ends) - 1))() for _ in range(3)], _header.GroupsInfo()
    text = None if machine is None else machine.encode()
    call("plan_groups", pointer(problem), pointer(limits), text, *places, byref(info))
    passes: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(info.passes)]
    for document, (at, first, ranks) in enumerate(zip(*places)):
        passes[at].setdefault((first, ranks), []).append(document)
    found_passes = tuple(
        tuple(RankGroup(first, ranks, tuple(documents)) for (first, ranks), documents in sorted(one.items()))
        for one in passes
    )
    return Groups(found_passes, info.makespan, info.bound)
