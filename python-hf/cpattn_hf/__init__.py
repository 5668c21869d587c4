# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context parallelism for Hugging Face Transformers and Diffusers: `cpattn_hf.transformers`, `cpattn_hf.diffusers`."""

__version__ = "0.2.0"
