# SPDX-License-Identifier: MIT OR Apache-2.0
"""For PyTorch: `Context` and `Batch` are what a training job needs, `attention` and `GlooTransport` the parts of them."""

from .attention import attention
from .context import Batch, Context
from .gloo import GlooTransport, check_ring

__all__ = ["Batch", "Context", "GlooTransport", "attention", "check_ring"]
