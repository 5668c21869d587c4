# SPDX-License-Identifier: MIT OR Apache-2.0
"""DeepSpeed's ZeRO-3: parameters that each rank holds a part of. DeepSpeed itself is imported only where a model has such parameters.

ZeRO-3 gathers a module's parameters with a hook before the module's forward, and drops them after it, once `deepspeed.initialize` has
wrapped the model. A model made under `deepspeed.zero.Init` (Transformers does so where HfDeepSpeedConfig or TrainingArguments of stage 3
are there before the model) has parts, and no hooks yet: for the trial they are gathered here, as much at a time as FSDP would.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpattn.errors import InvalidArgument, Unsupported


def in_parts(model: nn.Module | None) -> list[nn.Parameter]:
    return [parameter for parameter in (model.parameters() if model is not None else ()) if hasattr(parameter, "ds_id")]


def shape_of(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def engaged(model: nn.Module) -> bool:
    """Whether ZeRO-3's hooks are there already."""
    return any(hasattr(module, "ds_id") for module in model.modules())


def refuse_parts(model: nn.Module, members: Sequence[int]) -> None:
    """Refuses models whose parameters `whole_parts` cannot gather."""
    if not (parts := in_parts(model)):
        return
    name = type(model).__name__
    for parameter in parts:
        holders = dist.get_process_group_ranks(parameter.ds_process_group)  # type: ignore[attr-defined]
        if set(holders) - set(members):
            raise Unsupported(
                f"{name} has parameters that ZeRO-3 holds in parts on the ranks {holders}, and the group of this ContextParallel has the ranks "
                f"{list(members)}: make one over all of these ranks, with replicas for groups of ranks with batches of their own"
            )


@contextmanager
def whole_parts(model: nn.Module) -> Iterator[None]:
    """Inside of it the model runs, although its parameters are in parts: those outside of lists of layers are whole all the time, those of a
    layer while it runs. All ranks that hold parts call it."""
    if not in_parts(model) or engaged(model):
        yield
        return
    import deepspeed  # type: ignore[import-not-found, import-untyped, unused-ignore]

    whole: set[int] = set()  # the parameters that are gathered now
    entered: dict[nn.Module, tuple[Any, set[int]]] = {}

    def enter(owner: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        missing = [one for one in parameters if hasattr(one, "ds_id") and id(one) not in whole]
        context = deepspeed.zero.GatheredParameters(missing)
        context.__enter__()
        entered[owner] = context, {id(one) for one in missing}
        whole.update(entered[owner][1])

    def leave(owner: nn.Module, *_: Any) -> None:
        context, mine = entered.pop(owner)
        whole.difference_update(mine)
        context.__exit__(None, None, None)

    layers = [
        layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module if in_parts(layer)
    ]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    hooks = [layer.register_forward_pre_hook(lambda layer, _: enter(layer, layer.parameters())) for layer in layers]
    hooks += [layer.register_forward_hook(leave, always_call=True) for layer in layers]
    try:
        enter(model, (parameter for parameter in model.parameters() if id(parameter) not in inside))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for owner in list(entered):
            leave(owner)


def at_once(model: nn.Module, layers: Set[nn.Module]) -> None:
    """Has ZeRO-3 gather all parameters of the blocks around these layers before a block's forward, and none inside of it: the layers use weights
    of their modules themselves, or call these once for each document, which ranks have different numbers of. This is what
    `deepspeed.utils.set_z3_leaf_module` does, which would import DeepSpeed; `deepspeed.initialize` may come later, and reads the attribute then."""
    blocks = list(_blocks(model, layers))
    if any(not hasattr(block, "_z3_leaf") for block in blocks) and engaged(model):
        raise Unsupported(
            f"{type(model).__name__} is the model of a DeepSpeed engine with ZeRO-3 already, and has {type(blocks[0]).__name__}, which has "
            "to be gathered at once: ContextParallel(model) first, and then deepspeed.initialize"
        )
    owners = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    for block in blocks:
        if not hasattr(block, "_z3_leaf"):
            block._z3_leaf = True  # type: ignore[assignment, unused-ignore]
            block.register_forward_pre_hook(partial(_whole, any(owners[id(one)] > 1 for one in block.parameters())))


def _blocks(outer: nn.Module, layers: Set[nn.Module]) -> Iterator[nn.Module]:
    for block in outer.children():
        inside = [layer for layer in block.modules() if layer in layers]
        if inside and (isinstance(outer, nn.ModuleList) or any(layer in inside for layer in block.children())):
            yield block
        elif inside:
            yield from _blocks(block, layers)


def _whole(shared: bool, block: nn.Module, args: tuple[Any, ...]) -> None:
    """Before the forward of a block that ZeRO-3 gathers at once: it reduces the gradients when those of the block's positional inputs are there,
    which is at once if none of them has any."""
    if not torch.is_grad_enabled() or not any(
        hasattr(one, "ds_id") and one.requires_grad for one in block.parameters()
    ):
        return
    name, inputs = type(block).__name__, [one for one in args if isinstance(one, Tensor) and one.is_floating_point()]
    if shared:
        raise Unsupported(
            f"{name} shares parameters with another block, whose gradients ZeRO-3 would reduce too early: use ZeRO-2 or FSDP2"
        )
    if not inputs:
        raise Unsupported(
            f"{name} is called without a positional tensor, for which ZeRO-3 would reduce its gradients too early: use ZeRO-2 or FSDP2"
        )
    if not any(one.requires_grad for one in inputs):
        inputs[0].requires_grad_()


def refuse_parallel() -> None:
    """Refuses DeepSpeed's own parallelism beside this one, with which it divides gradients by other numbers of ranks, or splits weights."""
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None or not groups.dist.is_initialized():
        return
    if (size := groups._get_sequence_parallel_world_size()) > 1:
        raise Unsupported(
            f"DeepSpeed's sequence parallelism is on, over {size} ranks (sp_size, sequence_parallel_size, UlyssesSPAttentionHF): leave it out, "
            "ContextParallel takes its place"
        )
    split = getattr(groups, "_TENSOR_MODEL_PARALLEL_GROUP", None)  # from DeepSpeed 0.16.4 on
    if (size := groups._get_model_parallel_world_size() if split is None else groups.dist.get_world_size(split)) > 1:
        raise Unsupported(
            f"DeepSpeed's tensor parallelism is on, over {size} ranks (autotp_size, tp_model_init, mpu): leave it out"
        )
    if groups._EXPERT_PARALLEL_GROUP:
        raise Unsupported(
            "DeepSpeed's expert parallelism is on (expert_parallel, deepspeed.moe), which was not tried together with this: leave it out"
        )


def refuse_combining(model: nn.Module, gradients: str) -> None:
    """Refuses gradients that DeepSpeed combines in another way than ContextParallel was told, since they would be too large or too small."""
    if (mean := _mean(model)) is None:
        return
    if mean and gradients == "sum":
        raise InvalidArgument(
            "gradients is 'sum', and DeepSpeed takes the mean of gradients over all processes: 'mean' is needed"
        )
    if not mean and gradients == "mean":
        raise InvalidArgument(
            "gradients is 'mean', and gradient_allreduce_op of DeepSpeed's config is 'sum': leave gradient_allreduce_op out, or give gradients='sum'"
        )


def _mean(model: nn.Module) -> bool | None:
    """Whether the model's DeepSpeed engine takes the mean of gradients. None: there is no engine, or it cannot be seen from here (ZeRO 0 to 2
    around a model that contains this one)."""
    deepspeed = sys.modules.get("deepspeed")
    if (kind := getattr(deepspeed, "DeepSpeedEngine", None)) is None:
        return None
    for hook in model._forward_pre_hooks.values():  # the engine's own hook holds the engine
        for cell in getattr(hook, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                if isinstance(engine := cell.cell_contents, kind):
                    return bool(getattr(engine, "gradient_average", True))
    # ZeRO-3 takes nothing but the mean.
    return True if any(hasattr(parameter, "_z3_optimizer") for parameter in model.parameters()) else None
