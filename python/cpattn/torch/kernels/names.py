# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernels by their names."""

from __future__ import annotations

import torch

from ..._check import refused
from .kernel import Kernel
from .math import Math

KERNELS: dict[str, type[Kernel]] = {"math": Math}


def find(kernel: str | Kernel, device: torch.device | str) -> Kernel:
    """The kernel of a name on a device, or the object itself. Raises InvalidArgument for other names and objects, Unsupported for a
    kernel that does not run here."""
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str) or kernel not in KERNELS:
        names = ", ".join(map(repr, KERNELS))
        raise refused("kernels", kernel, f"'cpattn', one of {names}, or a Kernel is needed: cpattn.torch.kernels.varlen makes one of two functions")
    return KERNELS[kernel]()
