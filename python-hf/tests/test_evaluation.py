# SPDX-License-Identifier: MIT OR Apache-2.0
"""Evaluation with a Trainer: which logits are gathered, what preprocess_logits_for_metrics sees, and batches that rank 0 sends."""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any

import numpy as np
import torch

try:
    import transformers
    import trl
    from transformers import Trainer, TrainingArguments
except ImportError:
    raise unittest.SkipTest("transformers or trl is not installed") from None

import models
import processes
from cpattn import Disagreement, InvalidArgument
from cpattn_hf.transformers import ContextParallel

transformers.utils.logging.set_verbosity_error()
OPTIONS: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 5, "per_device_eval_batch_size": 2, "logging_steps": 1,
    "logging_nan_inf_filter": False, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
}  # fmt: skip


def likely(logits: torch.Tensor, labels: Any) -> torch.Tensor:
    """The most likely words."""
    return logits.argmax(-1)


def several(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results, one of them with the labels."""
    return logits.topk(3).values, (logits.argmax(-1) == labels)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of each label, which is the next token's: it needs whole rows."""
    words = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=0).clamp(min=0)
    return logits.log_softmax(-1).gather(-1, words[..., None])[..., 0]


def centered(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """It looks like a function of each token alone, and is none."""
    return (logits - logits[labels != -100].mean(0)).argmax(-1)


FUNCTIONS = (likely, several, shifted, centered)


def metrics(found: Any) -> dict[str, float]:
    parts = found.predictions if isinstance(found.predictions, tuple) else (found.predictions,)
    kept = found.label_ids != -100
    return {f"part {n}": float(np.asarray(part, dtype=np.float64)[kept].sum()) for n, part in enumerate(parts)}


def torchrun(rank: int, world: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


def _evaluated(rank: int, world: int, sft: bool) -> dict[str, Any]:
    """Metrics by function; the shapes that were gathered; of rows with padding at the right."""
    torchrun(rank, world)
    model = models.build("gemma3")
    kind, cp = (trl.SFTTrainer if sft else Trainer), None
    shapes: list[Any] = []
    if world > 1:
        cp = ContextParallel(model)
        usual, kind = cp.gather, cp.trainer(kind)
        cp.gather = lambda rows, *more: shapes.append((rows.dtype, *rows.shape[2:])) or usual(rows, *more)
    draw = torch.Generator().manual_seed(3)
    # Also a batch with fewer tokens than ranks, and a last one that is smaller.
    lengths = [7, 12, 2, 1, 9]
    data = [{"input_ids": torch.randint(3, models.WORDS, (n,), generator=draw).tolist()} for n in lengths]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if sft:
            import datasets

            data = datasets.Dataset.from_list(data[:2])
            args: Any = trl.SFTConfig(folder, loss_type="nll", bf16=False, **OPTIONS)
            more = {"processing_class": models.tokenizer(), "train_dataset": data, "eval_dataset": data}
        else:
            args, more = TrainingArguments(folder, **OPTIONS), {"eval_dataset": data}
            more["data_collator"] = transformers.DataCollatorForLanguageModeling(models.tokenizer(), mlm=False)
        for function in FUNCTIONS[:1] if sft else FUNCTIONS:
            trainer = kind(
                model=model, args=args, compute_metrics=metrics, preprocess_logits_for_metrics=function, **more
            )
            shapes.clear()
            said = trainer.evaluate()
            found[function.__name__] = [said["eval_loss"], *(said[name] for name in sorted(said) if "part" in name)]
            found[f"{function.__name__}: gathered"] = list(shapes)
            assert trainer.preprocess_logits_for_metrics is function
        trainer = kind(model=model, args=args, **more)
        shapes.clear()
        found["loss"] = [trainer.evaluate()["eval_loss"]]
        found["loss: gathered"] = list(shapes)

        class Step(Trainer):
            """With a prediction step of its own, which reads the logits of all tokens."""

            def prediction_step(
                self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
            ) -> Any:
                with torch.no_grad():
                    loss, out = self.compute_loss(model, inputs, return_outputs=True)
                return loss, out["logits"].argmax(-1), inputs["labels"]

        if not sft:
            said = (cp.trainer(Step) if cp else Step)(
                model=model, args=args, compute_metrics=metrics, **more
            ).evaluate()
            found["own step"] = [said["eval_loss"], said["eval_part 0"]]
    return found


class Crops(torch.utils.data.Dataset):
    """Random crops of documents, with draws of this process alone."""

    def __init__(self, rank: int) -> None:
        self._draw = torch.Generator().manual_seed(rank)
        self._documents = torch.randint(3, models.WORDS, (12, 40), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        begin = int(torch.randint(30, (1,), generator=self._draw))
        ids = self._documents[number, begin : begin + 9]
        return {"input_ids": ids, "labels": ids}


def _sent(rank: int, world: int, replicas: int, send: bool) -> Any:
    torchrun(rank, world)
    model = models.build("llama")
    cp = ContextParallel(model, replicas=replicas) if world > 1 else None
    kind = Trainer if cp is None else cp.trainer(Trainer, send_batches=send)
    crops = Crops(0 if cp is None else rank if replicas == 1 else 0 if rank == 0 else 7)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, **OPTIONS
        )
        trainer = kind(model=model, args=args, train_dataset=crops, eval_dataset=crops)
        try:
            trainer.train()
        except Disagreement as error:
            return str(error)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, trainer.evaluate()["eval_loss"]]


def _refused(rank: int, world: int) -> str:
    cp = ContextParallel(models.build("llama"))
    try:
        cp.trainer(Trainer, send_batches="first")  # type: ignore[arg-type]
    except InvalidArgument as error:
        return str(error)
    return "not refused"


class Evaluation(unittest.TestCase):
    def same(self, several: dict[str, Any], one: dict[str, Any]) -> None:
        for name, values in one.items():
            if "gathered" in name:
                continue
            self.assertEqual(len(values), len(several[name]), name)
            for a, b in zip(several[name], values, strict=True):
                self.assertLessEqual(abs(a - b), 2e-6 * abs(b), (name, several[name], values))

    def test_what_is_gathered(self) -> None:
        one = processes.run(_evaluated, 1, False)[0]
        for found in processes.run(_evaluated, 4, False):
            self.same(found, one)
            self.assertEqual(found["loss: gathered"], [])
            self.assertEqual(set(found["likely: gathered"]), {(torch.int64,)})
            self.assertEqual(set(found["several: gathered"]), {(torch.float32, 3), (torch.bool,)})
            for name in ("shifted", "centered"):
                self.assertEqual(set(found[f"{name}: gathered"]), {(torch.float32, models.WORDS)})

    def test_sft_trainer(self) -> None:
        one = processes.run(_evaluated, 1, True)[0]
        for found in processes.run(_evaluated, 2, True):
            self.same(found, one)
            self.assertEqual(found["loss: gathered"], [])
            self.assertEqual(set(found["likely: gathered"]), {(torch.int64,)})

    def test_batches_of_one_rank(self) -> None:
        one = processes.run(_sent, 1, 1, False)[0]
        for found in processes.run(_sent, 3, 1, True):
            for a, b in zip(found, one, strict=True):
                self.assertLessEqual(abs(a - b), 2e-6 * abs(b), (found, one))
        for found in processes.run(_sent, 3, 1, False):
            self.assertIn("cp.trainer(kind, send_batches=True)", found)
        replicas = processes.run(_sent, 4, 2, True)
        self.assertTrue(all(found == replicas[0] for found in replicas), replicas)
        for said in processes.run(_refused, 2):
            self.assertIn("send_batches is 'first'", said)


if __name__ == "__main__":
    unittest.main()
