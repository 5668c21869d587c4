# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernels by their names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...arguments import refused
from .flash import FlashAttention2, FlashAttention3, FlashAttention4
from .kernel import Kernel
from .math import Math
from .torch_cpu import TorchCpu
from .torch_cudnn import Cudnn
from .torch_device import TorchDevice


def torch_kernel(device: torch.device) -> Kernel:
    """PyTorch's own for a device."""
    return TorchCpu() if device.type == "cpu" else TorchDevice()


def flex_kernel(device: torch.device) -> Kernel:
    # Its import takes a second.
    from .flex import Flex

    return Flex(device)


KERNELS: dict[str, Callable[[torch.device], Kernel]] = {
    "math": lambda _: Math(),
    "torch": torch_kernel,
    "flex": flex_kernel,
    "cudnn": lambda _: Cudnn(),
    "flash_attn": lambda _: FlashAttention2(),
    "flash_attn_3": lambda _: FlashAttention3(),
    "flash_attn_4": lambda _: FlashAttention4(),
}

# What Transformers calls kernels.
OF_MODELS = {
    "eager": "math",
    "sdpa": "torch",
    "flex_attention": "flex",
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_3",
    "flash_attention_4": "flash_attn_4",
}


def of_model(implementation: str, device: torch.device | str) -> Kernel:
    """The kernel of what a model's `attn_implementation` names: kernels="model"."""
    if implementation not in OF_MODELS:
        known = ", ".join(map(repr, OF_MODELS))
        raise refused(
            "attn_implementation",
            implementation,
            f"one of {known} is needed for kernels='model': name a kernel, or give one",
        )
    return find(OF_MODELS[implementation], device)


def find(kernel: str | Kernel, device: torch.device | str) -> Kernel:
    """The kernel of a name on a device, or the object itself. Raises InvalidArgument for other names and objects, Unsupported for a
    kernel that does not run here."""
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str) or kernel not in KERNELS:
        names = ", ".join(map(repr, KERNELS))
        raise refused(
            "kernels",
            kernel,
            f"'cpattn', one of {names}, or a Kernel is needed: cpattn.torch.kernels.varlen makes one of two functions",
        )
    return KERNELS[kernel](torch.device(device))
