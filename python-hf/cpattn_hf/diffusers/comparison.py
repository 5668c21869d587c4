# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares a call over the ranks with the model alone: what a plan leaves whole on each rank (a text that joint attention then counts once for
each rank) and an attention that does not go over the ranks change results by a tenth or a half, and raise nothing.

Both calls round differently, by an amount that depends on the model. So the model alone is called twice: the second time each result of a
layer is off by one unit of its last place. What this changes is what rounding can; `FACTOR` times that is the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# The largest ratio of the models in python-hf/tests/diffusion.py on 2 and 3 ranks is 0.8 in float32, 0.3 under autocast to bfloat16.
FACTOR = 4.0
# What products of float32 may be rounded to, by PyTorch's setting.
_PRODUCTS = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}


def tensors(output: Any) -> list[Tensor]:
    """The tensors of what a model returns."""
    if isinstance(output, Mapping):
        return tensors(list(output.values()))
    if isinstance(output, list | tuple):
        return [tensor for one in output for tensor in tensors(one)]
    return [output] if isinstance(output, Tensor) else []


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest root mean square of a difference, in units of that of the expected tensor; infinite if shapes, or the places of NaN, differ."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float("inf")
    return max((_relative(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    a, b = found.double(), expected.double()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return float("inf")
    difference, size = ((x[finite].square().sum().sqrt().item()) for x in (a - b, b))
    return difference / size if size else float("inf") if difference else 0.0


@contextmanager
def repeatable(model: nn.Module) -> Iterator[None]:
    """Calls of a model that can be compared: in evaluation, without gradients and compilation, and without a trace in PyTorch's generators."""
    training = [module for module in model.modules() if module.training]
    devices = {one.device.index for one in model.parameters() if one.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(sorted(devices)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def moved(model: nn.Module) -> Iterator[None]:
    """Each result of a layer is off by one unit in its last place, upwards or downwards."""
    handles = [
        module.register_forward_hook(_off_by_one)
        for module in model.modules()
        if not any(True for _ in module.children())
    ]
    torch.manual_seed(1)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _off_by_one(_: nn.Module, __: Any, output: Any) -> Any:
    if not isinstance(output, Tensor) or not output.dtype.is_floating_point:
        return None
    unit = torch.finfo(output.dtype).eps / 2
    if output.dtype == torch.float32:
        unit = max(unit, _PRODUCTS[torch.get_float32_matmul_precision()])
    return output * (1 + unit * (2 * torch.randint_like(output, 2) - 1))


def reshard(model: nn.Module, inside: bool) -> None:
    """What fully_shard holds whole after a pass is put in parts: else an optimizer that is made then would get tensors that are none of the
    model's. `inside` of a pass of the model its own are needed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard() if inside and module is model else module.reshard()
