# SPDX-License-Identifier: MIT OR Apache-2.0
"""For Hugging Face Transformers: `ContextParallel(model)`, without other changes of the model's code."""

from ..floors import refuse_older

refuse_older("transformers")  # before anything of it is imported

from .balance import balanced
from .collate import SharedPrefixCollator, encode_slices
from .pack import Pack
from .parallel import ContextParallel

__all__ = ["ContextParallel", "Pack", "SharedPrefixCollator", "balanced", "encode_slices"]
