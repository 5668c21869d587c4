# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention kernels of others in cpattn's schedules: `Context(..., kernels="torch")`, or an object of one's own.

A plan says which rows of q attend to which rows of k. A `Kernel` computes that on tensors of PyTorch. `Work` stands between the
two: made once for an attention operation of a schedule, it turns the operation's ranges and bands into what kernels take, and a
kernel's results into f32 partial results.

| name | what computes | where |
|---|---|---|
| "math" | PyTorch's products and softmax, f32 or f64 | any device |
| "torch" | PyTorch's flash and memory-efficient attention | CPU and devices |
| "cudnn" | cuDNN by PyTorch's operators | its devices |
| "flex" | FlexAttention: any band, softcap and slopes in one call | CPU (forward) and devices |
| "flash_attn", "flash_attn_3", "flash_attn_4" | FlashAttention's packages, or Hugging Face's `kernels` | their devices |
| `varlen(forward, backward)` | two functions of the usual signature | theirs |
"""

from .kernel import Honours, Kernel, refuse
from .math import Math
from .names import find, of_model
from .rectangles import Rectangles
from .rows import Rows
from .scratch import Fresh, Memory, Scratch
from .varlen import varlen
from .work import Work

__all__ = [
    "Fresh",
    "Honours",
    "Kernel",
    "Math",
    "Memory",
    "Rectangles",
    "Rows",
    "Scratch",
    "Work",
    "find",
    "of_model",
    "refuse",
    "varlen",
]
