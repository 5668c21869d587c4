# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trainers of other projects: subclasses of Trainer with a compute_loss around Trainer's. A double stands for axolotl's, with its structure."""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()


class Packing(Trainer):
    """A mixin with a loader of its own, as axolotl's for packs."""

    def get_train_dataloader(self) -> Any:
        sampler = BatchSampler(SequentialSampler(self.train_dataset), self.args.train_batch_size, True)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare_data_loader(loader)


class Distributed(Trainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.mixed_in = True


class AxolotlTrainer(Packing, Distributed, Trainer):
    """Counts tokens over all processes, and calls Trainer's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        tokens = (inputs["labels" if "labels" in inputs else "input_ids"] != -100).sum()
        if dist.is_initialized():
            dist.all_reduce(tokens)
        self.tokens = getattr(self, "tokens", 0) + int(tokens)
        return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)


class Scaled(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (2 * found[0], found[1]) if return_outputs else 2 * found


class Added(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss += 1
        return (loss, out) if return_outputs else loss


class Twice(AxolotlTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        super().compute_loss(model, dict(inputs), return_outputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Alone(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**inputs)
        return (out.loss, out) if return_outputs else out.loss


def _trainer(rank: int, world: int, kind: type[Any], folder: str, model: Any) -> Any:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    draw = torch.Generator().manual_seed(3)
    data = [{"input_ids": torch.randint(3, models.WORDS, (5 + n % 13,), generator=draw).tolist()} for n in range(48)]
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=3, per_device_eval_batch_size=4, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no", seed=5, lr_scheduler_type="constant", optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
    )  # fmt: skip
    return kind(
        model=model, args=args, data_collator=DataCollatorWithFlattening(), train_dataset=data, eval_dataset=data[:8]
    )


def _right(rank: int, world: int) -> tuple[list[float], int]:
    model, kind = models.build("llama"), AxolotlTrainer
    if world > 1:
        kind = ContextParallel(model).trainer(kind)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(rank, world, kind, folder, model)
        trainer.train()
        assert trainer.mixed_in
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        tokens = trainer.tokens
        return [*losses, trainer.evaluate()["eval_loss"]], tokens


def _refused(rank: int, world: int) -> dict[str, str]:
    said = {}
    for kind in (Scaled, Added, Twice, Alone):
        model = models.build("llama")
        cp = ContextParallel(model, timeout=60)
        with tempfile.TemporaryDirectory() as folder:
            try:
                _trainer(rank, world, cp.trainer(kind), folder, model).train()
                said[kind.__name__] = "not refused"
            except Error as error:
                said[kind.__name__] = f"{type(error).__name__}: {error}"
        cp.close()
    return said


class Subclasses(unittest.TestCase):
    def test_losses_of_one_process(self) -> None:
        one, tokens = processes.run(_right, 1, seconds=200)[0]
        self.assertEqual(len(one), 5)
        for several, counted in processes.run(_right, 3, seconds=200):
            for a, b in zip(several, one, strict=True):
                self.assertLessEqual(abs(a / b - 1), 5e-7, (several, one))
            self.assertEqual(counted, 3 * tokens, "what it counts over processes it counts for each rank")

    def test_other_losses_are_refused_by_name(self) -> None:
        for said in processes.run(_refused, 2, seconds=200):
            self.assertIn(
                "Scaled.compute_loss of test_subclasses called super().compute_loss 1 times and returned another loss",
                said["Scaled"],
            )
            self.assertIn(
                "Added.compute_loss of test_subclasses called super().compute_loss 1 times and changed its loss in place",
                said["Added"],
            )
            self.assertIn("Twice.compute_loss of test_subclasses called super().compute_loss 2 times", said["Twice"])
            self.assertIn(
                "Alone.compute_loss of test_subclasses called super().compute_loss 0 times and returned its own loss",
                said["Alone"],
            )


if __name__ == "__main__":
    unittest.main()
