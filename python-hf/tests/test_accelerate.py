# SPDX-License-Identifier: MIT OR Apache-2.0
"""Groups that accelerate has made (`ParallelismConfig(cp_size=...)`): ContextParallel takes them, in the place of accelerate's own context parallelism."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch

try:
    import transformers
    from accelerate import Accelerator, ParallelismConfig
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
except ImportError:
    raise unittest.SkipTest("transformers or accelerate is not installed") from None

import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()
PACKS = [23, 1, 17, 9, 40], [5, 31, 2, 8]


def _environment(rank: int, world: int) -> None:
    """As torchrun does. accelerate takes its ParallelismConfig on devices only; these processes end with the test."""
    ParallelismConfig._validate_accelerator = lambda *_: None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


def _by_hand(rank: int, world: int, file: str) -> dict[str, float]:
    """Accelerator with 2 replicas x 2 ranks, without windows, and with windows, which it refuses until its own context parallelism is left out."""
    _environment(rank, world)
    references, found = torch.load(file), {}
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=2))
    for name, expected in references.items():
        model = models.build(name)
        cp = ContextParallel(model, mesh=accelerator.torch_device_mesh, timeout=100)
        assert (cp.ranks, cp.replicas) == (2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        windows = name == "gemma3"
        try:
            wrapped, _ = accelerator.prepare(model, optimizer)
            found[f"{name}: windows are taken"] = float(windows)
        except ValueError as error:
            assert windows and "sliding_attention" in str(error), error
            accelerator._prepare_cp = lambda *args: args
            wrapped, _ = accelerator.prepare(model, optimizer)
        hooked = [
            part for part, module in model.named_modules() if module._forward_pre_hooks and part.endswith("self_attn")
        ]
        out = wrapped(**models.batch(PACKS[cp.replica]))
        accelerator.backward(out.loss)
        # DDP has the mean over the replicas.
        found[f"{name}: gradients"] = models.apart(models.gradients(model), (expected[0][1] + expected[1][1]) / 2)
        found[f"{name}: loss"] = abs(out.loss.item() / expected[cp.replica][0] - 1)
        found[f"{name}: no hooks of accelerate were there to take"] = float(not hooked and not windows)
        found[f"{name}: hooks of accelerate are left"] = float(
            any(module._forward_pre_hooks for part, module in model.named_modules() if part.endswith("self_attn"))
        )
        cp.close()
    return found


def _trained(rank: int, world: int, config: bool) -> list[float]:
    """Losses of four steps of Trainer, and an evaluation; of one process the same batches."""
    _environment(rank, world)
    model = models.build("gemma3")  # its windows are refused by accelerate's own
    draw = torch.Generator().manual_seed(3)
    data = [{"input_ids": torch.randint(3, models.WORDS, (5 + n % 13,), generator=draw).tolist()} for n in range(64)]
    groups = ParallelismConfig(cp_size=2, dp_shard_size=2) if config else None
    kind: Any = Trainer
    if world > 1:
        kind = (
            ContextParallel(model, mesh=groups.get_device_mesh("cpu")) if groups else ContextParallel(model, replicas=2)
        ).trainer(Trainer)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, max_steps=4, gradient_accumulation_steps=2 if world > 1 else 4, per_device_train_batch_size=3, per_device_eval_batch_size=4 if world > 1 else 8,
            logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", seed=5, lr_scheduler_type="constant", optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
            parallelism_config=groups,
        )  # fmt: skip
        trainer = kind(
            model=model,
            args=args,
            data_collator=DataCollatorWithFlattening(),
            train_dataset=data,
            eval_dataset=data[:8],
        )
        trainer.train()
        return [
            *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry),
            trainer.evaluate()["eval_loss"],
        ]


def _refused(rank: int, world: int) -> str:
    _environment(rank, world)
    model = models.build("llama")
    cp = ContextParallel(model, replicas=2)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, use_cpu=True, report_to=[], parallelism_config=ParallelismConfig(cp_size=4))
        try:
            cp.trainer(Trainer)(model=model, args=args, train_dataset=[])
        except Error as error:
            return f"{type(error).__name__}: {error}"
    return "not refused"


class Accelerate(unittest.TestCase):
    def test_groups_of_an_accelerator(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(
                {name: [models.alone(name, models.batch(pack)) for pack in PACKS] for name in ("llama", "gemma3")}, file
            )
            for found in processes.run(_by_hand, 4, file, seconds=200):
                self.assertLessEqual(max(found.values()), 1e-5, found)

    def test_groups_of_a_trainer(self) -> None:
        one = processes.run(_trained, 1, False, seconds=200)[0]
        self.assertEqual(len(one), 5)
        for several in processes.run(_trained, 4, True, seconds=300):
            for a, b in zip(several, one, strict=True):
                self.assertLessEqual(abs(a / b - 1), 5e-7, (several, one))

    def test_another_size_is_refused(self) -> None:
        for said in processes.run(_refused, 4):
            self.assertIn(
                "InvalidArgument: cp_size of accelerate's ParallelismConfig is 4, and ContextParallel has 2 groups of 2 ranks",
                said,
            )


if __name__ == "__main__":
    unittest.main()
