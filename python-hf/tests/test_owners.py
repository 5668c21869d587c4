# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models whose parameters belong to something else: refused with its name and the way out. And what a call must not be given."""

from __future__ import annotations

import os
import tempfile
import unittest
import warnings
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()


def _said(call: Any) -> str:
    try:
        call()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _owners(rank: int, world: int, folder: str) -> dict[str, str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn import DataParallel
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}  # for tp_plan

    def inside(**options: Any) -> Any:
        model = models.build("llama")
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
        return model

    split = models.build("llama", num_attention_heads=4, num_key_value_heads=4, hidden_size=32)
    if rank == 0:
        split.save_pretrained(folder)
    dist.barrier()
    pack = models.batch([20, 20])
    found = {
        name: _said(lambda: ContextParallel(model))
        for name, model in (
            ("DDP", DistributedDataParallel(models.build("llama"))),
            ("DP", DataParallel(models.build("llama"))),
            ("FSDP1", FullyShardedDataParallel(models.build("llama"), device_id=torch.device("cpu"))),
            ("FSDP1, inside", inside()),
            ("FSDP1, its parameters", inside(use_orig_params=True)),
            ("tensor parallel", transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")),
            ("no model", torch.nn.Linear(2, 2)),
            ("no module", "llama"),
        )
    }
    # Whole in a forward pass, and so taken: FSDP2 before ContextParallel.
    model = models.build("llama")
    for part in (*model.model.layers, model):
        fully_shard(part)
    cp = ContextParallel(model)
    model(**pack).loss.backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.full_tensor()
    found["FSDP2"] = f"{models.apart(models.gradients(model), models.alone('llama', pack)[1]) <= 1e-5}"
    cp.close()
    return found


class Owners(unittest.TestCase):
    def test_owners_of_parameters(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for found in processes.run(_owners, 2, folder):
                self.assertEqual(found.pop("FSDP2"), "True")
                for name, words in (
                    (
                        "DDP",
                        "Unsupported: the model is a DistributedDataParallel around a LlamaForCausalLM: ContextParallel(model) first",
                    ),
                    ("DP", "Unsupported: the model is a DataParallel around a LlamaForCausalLM: give the model itself"),
                    ("FSDP1", "sharded by FullyShardedDataParallel (FSDP1): ContextParallel(model) first"),
                    ("FSDP1, inside", "of LlamaForCausalLM are sharded by FullyShardedDataParallel (FSDP1)"),
                    ("FSDP1, its parameters", "of LlamaForCausalLM are sharded by FullyShardedDataParallel (FSDP1)"),
                    (
                        "tensor parallel",
                        "tensor parallelism has split over the ranks [0, 1], and the ranks [0, 1] of these are in one group",
                    ),
                    ("no model", "InvalidArgument: model is Linear("),
                    ("no module", "InvalidArgument: model is 'llama', a model of Transformers is needed"),
                ):
                    self.assertIn(words, found[name])


if __name__ == "__main__":
    unittest.main()
