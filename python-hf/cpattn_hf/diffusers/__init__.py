# SPDX-License-Identifier: MIT OR Apache-2.0
"""For Hugging Face Diffusers: `ContextParallel(transformer)`, without other changes of the model's code or of the pipeline around it."""

from ..floors import refuse_older

refuse_older("diffusers")  # before anything of it is imported

from .parallel import ContextParallel

__all__ = ["ContextParallel"]
