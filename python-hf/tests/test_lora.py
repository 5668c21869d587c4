# SPDX-License-Identifier: MIT OR Apache-2.0
"""Adapters of PEFT under DDP with checkpointing of both kinds: the losses of one process."""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any

try:
    import peft
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers or peft is not installed") from None

import models
import processes
from cpattn import Unsupported
from cpattn_hf.transformers import ContextParallel
from transformers import Trainer, TrainingArguments

transformers.utils.logging.set_verbosity_error()
# Whether checkpointing is reentrant, and whether the model has it already.
KINDS = {"reentrant": (True, False), "not reentrant": (False, False), "reentrant, by the model": (True, True)}


def _losses(rank: int, world: int) -> dict[str, list[float]]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    found = {}
    data = [{"input_ids": list(range(5, 5 + n)), "labels": list(range(5, 5 + n))} for n in (31, 17, 24, 40)]
    for name, (reentrant, before) in KINDS.items():
        model = models.build("llama")
        how = {"use_reentrant": reentrant}
        if before:
            models.checkpointing(model, reentrant)
            model.enable_input_require_grads()
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        kind: Any = Trainer if world == 1 else ContextParallel(model).trainer(Trainer)
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {
                "use_cpu": True, "max_steps": 3, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 1,
                "logging_steps": 1, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "seed": 1, "logging_nan_inf_filter": False,
                # What Trainer chooses here fails without context parallelism too.
                **({"ddp_find_unused_parameters": False} if world == 1 else {}),
                **({} if before else {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how}),
            }  # fmt: skip
            trainer = kind(model=adapted, args=TrainingArguments(folder, **options), train_dataset=data)
            trainer.train()
            found[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            if world > 1 and reentrant:
                try:
                    kind(
                        model=adapted,
                        args=TrainingArguments(folder, **options, ddp_find_unused_parameters=True),
                        train_dataset=data,
                    )
                except Unsupported as error:
                    found[f"{name}, refused"] = "ddp_find_unused_parameters is True" in str(error)
    return found


class Lora(unittest.TestCase):
    def test_losses_of_one_process(self) -> None:
        one = processes.run(_losses, 1)[0]
        for found in processes.run(_losses, 2):
            for name in KINDS:
                self.assertEqual(len(found[name]), 3)
                for a, b in zip(found[name], one[name], strict=True):
                    self.assertLessEqual(abs(a - b), 1e-6 * b, (name, found, one))
            self.assertTrue(found["reentrant, refused"] and found["reentrant, by the model, refused"])


if __name__ == "__main__":
    unittest.main()
