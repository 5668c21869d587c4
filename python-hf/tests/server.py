# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loaded last by the server from which processes.py forks ranks: what ranks and programs import besides the test modules, once for all."""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module

LATER = ["torch._dynamo.backends.debugging", "torch._inductor.compile_fx", "torch.distributed.fsdp", "cpattn.torch"]
if "transformers" in sys.modules or "programs" in sys.modules:
    LATER += ["transformers.trainer", "cpattn_hf.transformers", "models", "trl", "peft", "datasets"]
for name in LATER:
    with suppress(ImportError):
        import_module(name)

# The code of the models of test modules that have a table of them.
if "models" in sys.modules:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    here = os.path.dirname(__file__)
    mine = [
        module for module in sys.modules.values() if os.path.dirname(getattr(module, "__file__", None) or "") == here
    ]
    tables = [vars(module).get("MODELS", {}) for module in mine]
    kinds = {
        row[0] if isinstance(row, tuple) else name.split("-")[0] for table in tables for name, row in table.items()
    }
    for kind in sorted(kinds):
        with suppress(KeyError, ImportError):
            MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]

# Ranks do not look for garbage in what is loaded, nor copy its pages for that.
gc.collect()
gc.freeze()
