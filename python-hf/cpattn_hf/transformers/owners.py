# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models whose parameters something else holds already, so that ContextParallel cannot try them: refused by the name of the owner.

What wraps or shards a model after ContextParallel is not looked at here. `fully_shard` (FSDP2) may come before: its parameters are whole in
a forward pass of the model itself. So may `deepspeed.zero.Init` (`zero`). A trial leaves both as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import DataParallel

from cpattn.arguments import refused
from cpattn.errors import Unsupported
from .zero import refuse_parallel, refuse_parts, whole_parts


def _flattened(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter belongs to FSDP1, with its use_orig_params or without."""
    return hasattr(parameter, "_fsdp_flattened") or getattr(parameter, "_is_flat_param", False)


def refuse_owners(model: Any, members: Sequence[int]) -> None:
    kind, inside = type(model).__name__, getattr(model, "module", None)
    if isinstance(model, DataParallel):
        raise Unsupported(
            f"the model is a DataParallel around a {type(inside).__name__}: give the model itself, and use a process for each device"
        )
    if isinstance(model, FullyShardedDataParallel) or (
        isinstance(model, torch.nn.Module) and any(map(_flattened, model.parameters()))
    ):
        raise Unsupported(
            f"the parameters of {kind} are sharded by FullyShardedDataParallel (FSDP1): ContextParallel(model) first, and then fully_shard "
            "(FSDP2), which is tested"
        )
    deepspeed = kind.startswith("DeepSpeed") and isinstance(
        inside, torch.nn.Module
    )  # an engine, which has the attributes of its model
    accepted = (
        isinstance(model, torch.nn.Module)
        and not deepspeed
        and all(hasattr(model, name) for name in ("config", "set_attn_implementation"))
    )
    if not accepted and isinstance(inside, torch.nn.Module):
        raise Unsupported(
            f"the model is a {kind} around a {type(inside).__name__}: ContextParallel(model) first, and then wrap it with {kind}"
        )
    if not accepted:
        raise refused("model", model, "a model of Transformers is needed, with config and set_attn_implementation")
    refuse_parts(model, members)
    refuse_parallel()


def refuse_pickle(*_: Any) -> Any:
    raise Unsupported(
        "a model with a ContextParallel cannot be copied or pickled (copy.deepcopy, pickle, torch.save of the model): do it before ContextParallel(model) or "
        "after close(), or save its weights (model.save_pretrained, model.state_dict)"
    )


@contextmanager
def trial(model: Any) -> Iterator[None]:
    """Inside of it the model runs, also with parameters in parts; afterwards each owner holds its parts as before.

    FSDP2 keeps the root's parameters whole after a forward pass, for a backward pass that does not come here, and so all parameters if a pass fails or with
    reshard_after_forward=False. An optimizer that is made then would get tensors that FSDP2 drops with the next backward pass."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        with whole_parts(model):
            yield
    except BaseException:
        for module in sharded:
            _end(module)
        raise
    finally:
        for module in sharded:
            module.reshard()


@contextmanager
def may_fail(model: Any) -> Iterator[None]:
    """Around a pass in a `trial` whose exception is no failure of the trial."""
    try:
        yield
    except Exception:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _end(module)


def _end(module: Any) -> None:
    """Ends a forward pass of FSDP2 that has failed: as long as it takes a module to be in one, `reshard` may do nothing. PyTorch has no public
    function for it."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = module._get_fsdp_state()
    state._state_ctx.iter_forward_root = None
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for one in (state, *filter(None, groups)):
        one._training_state = TrainingState.IDLE
