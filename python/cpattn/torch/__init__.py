# SPDX-License-Identifier: MIT OR Apache-2.0
"""For PyTorch. A training job needs `Context` and `Batch`; `attention` and `GlooTransport` are the parts they use."""

from .attention import attention
from .context import Batch, Context
from .gloo import GlooTransport, check_ring

__all__ = ["Batch", "Context", "GlooTransport", "attention", "check_ring"]
