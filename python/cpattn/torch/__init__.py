# SPDX-License-Identifier: MIT OR Apache-2.0
"""For PyTorch. A training job needs `Context` and `Batch`, which use `GlooTransport`."""

from .context import Batch, Context
from .dropout import dropout_mask
from .dtypes import TORCH_DTYPES
from .gloo import GlooTransport, check_ring

__all__ = ["TORCH_DTYPES", "Batch", "Context", "GlooTransport", "check_ring", "dropout_mask"]
