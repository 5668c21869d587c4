# SPDX-License-Identifier: MIT OR Apache-2.0
"""For JAX, with tensors on the CPU: a `Context` for the job, inside and outside of `jax.jit` and `jax.shard_map`."""

from .context import Batch, Context

__all__ = ["Batch", "Context"]
