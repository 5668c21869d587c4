# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loaded last by the server from which processes.py forks ranks: what ranks and programs import besides the test modules, once for all."""

import gc
import sys
from contextlib import suppress
from importlib import import_module

LATER = ["torch.fx.experimental.symbolic_shapes", "cpattn.torch"]
if "transformers" in sys.modules or "programs" in sys.modules:
    LATER += ["transformers.trainer", "cpattn.transformers", "models", "trl", "peft", "datasets"]
for name in LATER:
    with suppress(ImportError):
        import_module(name)

# Ranks do not look for garbage in what is loaded, nor copy its pages for that.
gc.collect()
gc.freeze()
