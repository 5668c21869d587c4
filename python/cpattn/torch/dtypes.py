# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's dtypes and those of plans."""

from __future__ import annotations

import torch

from ..arguments import attempt
from ..options import Dtype

DTYPES = dict(zip((torch.float16, torch.bfloat16, torch.float32, torch.float64), Dtype, strict=True))
# PyTorch's dtypes by those of plans and schedules.
TORCH_DTYPES = {of_plan: dtype for dtype, of_plan in DTYPES.items()}


def holds(dtype: torch.dtype, number: object) -> bool:
    """Whether the type can represent the number, rounded if it is a float type. PyTorch would silently round it to an integer."""
    value = attempt(lambda: torch.empty(2, dtype=dtype).fill_(number)[0].item())  # type: ignore[call-overload]
    return value is not None and (dtype.is_floating_point or dtype.is_complex or bool(value == number))
