# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models that tensor parallelism has split (`DistributedConfig(tp_size=...)`, `tp_plan`, `parallelize_module`): heads are local to a rank.

Ranks with one part of the heads share a pass: they are the group. The ranks that hold the other parts, the peers, run the same pass in
groups of their own, on the same tokens, and sum activations with this rank inside of layers. So peers must have the same batch and the same
distribution of tokens, which they compare over a transport of their own; a rank that refuses tells its peers too, which would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cpattn.errors import Unsupported
from cpattn.torch import GlooTransport
from cpattn.torch.group import compare, compare_settings, digest, digests, refusing
from .draws import generators

NAME = "tp"
# Other ways in which Transformers distributes a model, by the names of sizes in its DistributedConfig.
OTHERS = {"ep_size": "experts", "pp_size": "layers"}


def along(mesh: torch.Tensor, names: Sequence[str], at: Sequence[int], name: str) -> tuple[int, ...]:
    """The ranks of a mesh along one dimension, through the rank at these coordinates."""
    dim = list(names).index(name)
    return tuple(mesh[tuple(slice(None) if one == dim else place for one, place in enumerate(at))].tolist())


def peers_of(model: Any) -> tuple[int, ...]:
    """The ranks that hold the parts of the model's heads, with this one; none where nothing has split them."""
    config = getattr(model.config, "distributed_config", None)
    for name, what in OTHERS.items():
        if (size := getattr(config, name, None) or 1) > 1:
            raise Unsupported(
                f"{name} of the model's DistributedConfig is {size}, which splits {what} over ranks and is not supported beside ContextParallel: leave it out"
            )
    sharded = {id(one) for module in model.modules() if isinstance(module, FSDPModule) for one in module.parameters()}  # type: ignore[attr-defined, unused-ignore]
    found = set[tuple[int, ...]]()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
        if (at := mesh.get_coordinate()) is None:
            raise Unsupported(
                f"{name} is a DTensor of a mesh {mesh.mesh.tolist()} without this rank ({dist.get_rank()}): use ContextParallel on the ranks that have it"
            )
        if NAME in names:
            found.add(along(mesh.mesh, names, at, NAME))
        elif id(parameter) in sharded:
            continue  # of FSDP2 alone
        elif mesh.ndim == 1:
            found.add(tuple(mesh.mesh.tolist()))
        else:
            raise Unsupported(
                f"{name} is a DTensor of a mesh with the dimensions {names}, and none of them is {NAME!r}: name that of tensor parallelism so"
            )
    found = {one for one in found if len(one) > 1}
    if len(found) > 1:
        raise Unsupported(
            f"parameters of {type(model).__name__} are split over the ranks {sorted(found)}, different ones for different parameters: one list is needed"
        )
    return found.pop() if found else ()


class Peers:
    """The ranks that hold the other parts of a model, and this one. Without any all this does nothing."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.transport: GlooTransport | None = None

    def find(self, model: Any, members: Sequence[int], timeout: float) -> None:
        self.ranks = peers_of(model)
        if not self.ranks:
            return
        me = dist.get_rank()
        if others := sorted(set(self.ranks) & set(members) - {me}):
            raise Unsupported(
                f"{type(model).__name__} has parameters that tensor parallelism has split over the ranks {list(self.ranks)}, and the ranks {sorted([me, *others])} of these are in "
                "one group of ContextParallel, which needs ranks with the same part: give it mesh= with the dimensions 'cp' and 'tp', or group= with the "
                "ranks that hold this one's part; or load the model without tp_plan"
            )
        self.transport = GlooTransport(list(self.ranks), timeout=timeout)

    @property
    def number(self) -> int:
        """Which part this rank holds."""
        return self.ranks.index(dist.get_rank()) if self.ranks else 0

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Tells the peers, which wait in `compare`, if this rank raises."""
        if self.transport is None:
            yield
            return
        with refusing(self.transport):
            yield

    def compare_settings(self, settings: Mapping[str, Any]) -> None:
        if self.transport is not None:
            compare_settings(self.transport, settings)

    def compare_pass(self, model: Any, data: bytes, group: GlooTransport) -> None:
        """Compares the bytes of a batch and of its distribution, and the state of generators where a model draws. `group` is the transport of the ranks that
        share the pass with this one: they learn of it if their peers agree and those of this rank do not."""
        if self.transport is None:
            return
        need = f"the ranks {list(self.ranks)} hold parts of one model, and need the same"
        with refusing(group):
            compare(self.transport, "batches", digest(data), f"{need} batch, with one distribution of its tokens")
            drawn = generators(next(model.parameters()).device) if model.training and _draws(model) else []
            states = b"".join(one.get_state().numpy().tobytes() for one in drawn)
            compare(
                self.transport,
                "random generators",
                digest(states),
                f"{need} draws of dropout: torch.manual_seed with one number on all",
            )
        digests(group, "batches or random generators", 1)

    def refuse(self, kind: str, parts: Mapping[str, object]) -> None:
        """Refuses what counts the heads of the whole model, or was not tried."""
        for what, there in parts.items():
            if self.ranks and there:
                raise Unsupported(
                    f"{kind} is split over {len(self.ranks)} ranks by tensor parallelism and has {what}, which is not supported: load it without tensor parallelism"
                )

    def close(self) -> None:
        if self.transport is not None:
            self.transport.release()
        self.transport = None


def _draws(model: Any) -> bool:
    """Whether a model has dropout, as a module or by its config."""
    config = model.config.get_text_config().to_dict()
    modules = any(isinstance(one, torch.nn.Dropout) and one.p > 0 for one in model.modules())
    return modules or any(
        "drop" in name and isinstance(value, int | float) and value > 0 for name, value in config.items()
    )
