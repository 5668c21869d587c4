# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernels by their names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..._check import refused
from .kernel import Kernel
from .math import Math
from .torch_cpu import TorchCpu



def torch_kernel(device: torch.device) -> Kernel:
    """PyTorch's own for a device."""
    return TorchCpu()


KERNELS: dict[str, Callable[[torch.device], Kernel]] = {"math": lambda _: Math(), "torch": torch_kernel}


def find(kernel: str | Kernel, device: torch.device | str) -> Kernel:
    """The kernel of a name on a device, or the object itself. Raises InvalidArgument for other names and objects, Unsupported for a
    kernel that does not run here."""
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str) or kernel not in KERNELS:
        names = ", ".join(map(repr, KERNELS))
        raise refused("kernels", kernel, f"'cpattn', one of {names}, or a Kernel is needed: cpattn.torch.kernels.varlen makes one of two functions")
    return KERNELS[kernel](torch.device(device))
