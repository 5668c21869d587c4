# SPDX-License-Identifier: MIT OR Apache-2.0
"""Groups that change size: losses, gradients and training of one process; what cannot go together is refused on all ranks."""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any, ClassVar

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import hybrids
import models
import processes
from cpattn import Disagreement, InvalidArgument, Slice, Unsupported
from cpattn_hf.transformers import ContextParallel, encode_slices

transformers.utils.logging.set_verbosity_error()

# A long tail, fewer documents than ranks, one giant, documents of one token, equal ones.
TAIL = [3, 64, 5, 9, 2, 120, 7, 4, 11, 30, 6, 1, 8, 16]
STEPS = {"tail": TAIL, "few": [9, 40], "giant": [200], "small": [1, 3, 1], "alike": [12] * 8}


def groups_of(cp: ContextParallel) -> tuple[int, int]:
    """The size of this rank's group in the last pass, and the documents that it has."""
    assert cp.last is not None
    own = 0 if not len(cp.last.pack.kept) or cp.last.own.numel() == 0 else len(cp.last.pack.cu_seqlens) - 1
    return cp.last.batch.context.world, own


def _steps(rank: int, world: int, names: list[str], references: dict[str, Any]) -> list[str]:
    """Losses and gradients of each step, beside one process. Returns the errors."""
    wrong, sizes = [], set()
    for name in names:
        for number, (step, lengths) in enumerate(STEPS.items()):
            model = models.build(name)
            options: dict[str, Any] = {"tile": 8} if number == 0 else {}
            if step == "giant":  # its document has no room on fewer ranks
                options["group_tokens"] = 64
            cp = ContextParallel(model, gradients="sum", group_sizes=(1, 2, 4), **options)
            loss = model(**models.batch(lengths)).loss
            loss.backward()
            sizes.add(groups_of(cp)[0])
            total = models.gradients(model)
            dist.all_reduce(total)
            expected, gradients = references[name, step]
            error, distance = abs(loss.item() - expected) / expected, models.apart(total, gradients)
            if not (error <= 1e-6 and distance <= 1e-5):
                wrong.append(f"{name}, {step}: loss {error:.1e}, gradients {distance:.1e}")
            cp.close()
    return [*wrong, f"sizes {sorted(sizes)}"]


class Steps(unittest.TestCase):
    NAMES = ("llama", "gemma3", "gpt-oss")

    def test_losses_and_gradients_of_one_process(self) -> None:
        references = {
            (name, step): models.alone(name, models.batch(lengths))
            for name in self.NAMES
            for step, lengths in STEPS.items()
        }
        found = processes.run(_steps, 4, list(self.NAMES), references, seconds=300)
        sizes = {one[-1] for one in found}
        for one in found:
            self.assertEqual(one[:-1], [])
        # Some ranks worked in groups of several sizes.
        self.assertTrue(any("1" in one and "4" in one for one in sizes), sizes)


def _wrapped(rank: int, world: int, references: dict[str, Any]) -> dict[str, float]:
    """Relative distances to one process, by case."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    packs, found = [models.batch(TAIL), models.batch([9, 40], seed=4)], {}

    def sharded(model: Any) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.full_tensor()
        return models.gradients(model)

    model = models.build("gpt-oss")
    ContextParallel(model, group_sizes=(1, 2, 4))
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        wrapped(**packs[0]).loss.backward()
    wrapped(**packs[1]).loss.backward()
    found["DDP, accumulation"] = models.apart(models.gradients(model), references["both"])

    model = models.build("gpt-oss")
    cp = ContextParallel(model, group_sizes=(1, 2, 4), tile=4)
    for part in (*model.model.layers, model.lm_head, model):
        fully_shard(part)
    model(**packs[0]).loss.backward()
    model(**packs[1]).loss.backward()
    found["FSDP2, tiles, accumulation"] = models.apart(sharded(model), references["both"])
    cp.close()

    model = models.build("gpt-oss")
    models.checkpointing(model, False)
    cp = ContextParallel(model, group_sizes=(1, 2, 4), group_tokens=40)
    for part in (*model.model.layers, model):
        fully_shard(part)
    passes = cp.passes(packs[0])
    loss = torch.zeros(())
    for one in passes:
        part_of_loss = model(**one).loss
        part_of_loss.backward()
        loss = loss + part_of_loss.detach()
    found["passes"] = models.apart(sharded(model), references["first"])
    found["passes, loss"] = abs(loss.item() / references["loss"] - 1)
    found["fewer than two passes"] = float(len(passes) < 2)
    cp.close()

    model = models.build("gpt-oss")
    cp = ContextParallel(model, gradients="sum", group_sizes=(2, 4))
    scores = cp.logprobs(packs[0], entropy=True)
    (-scores.log_probs.sum() / models.count(packs[0])).backward()
    total = models.gradients(model)
    dist.all_reduce(total)
    found["logprobs"] = models.apart(total, references["first"])
    with torch.no_grad():
        logits = cp.gather(model(**packs[0]).logits)
        with cp.off():
            alone = torch.cat([model(input_ids=ids).logits[0] for ids, _ in models.documents(packs[0])])
    found["logits"] = models.apart(logits[0], alone)
    model.zero_grad()
    model(**models.rows(packs[0])).loss.backward()
    total = models.gradients(model)
    dist.all_reduce(total)
    found["padding"] = models.apart(total, references["first"])
    cp.close()
    return found


class Wrapped(unittest.TestCase):
    def test_gradients_of_one_process(self) -> None:
        packs = [models.batch(TAIL), models.batch([9, 40], seed=4)]
        alone = [models.alone("gpt-oss", pack) for pack in packs]
        references = {"first": alone[0][1], "both": alone[0][1] + alone[1][1], "loss": alone[0][0]}
        for found in processes.run(_wrapped, 4, references, seconds=300):
            for name, distance in found.items():
                self.assertLessEqual(distance, 1e-5, (name, found))


def _hybrid(rank: int, world: int, references: dict[str, Any]) -> list[str]:
    wrong = []
    for name, (expected, gradients) in references.items():
        model = hybrids.build(name)
        cp = ContextParallel(model, gradients="sum", group_sizes=(1, 2, 4), timeout=60)
        loss = model(**models.batch(TAIL)).loss
        loss.backward()
        total = models.gradients(model)
        dist.all_reduce(total)
        cp.close()
        error, distance = abs(loss.item() - expected) / expected, models.apart(total, gradients)
        if not (error <= 1e-6 and distance <= 1e-5):
            wrong.append(f"{name}: loss {error:.1e}, gradients {distance:.1e}")
    return wrong


class Hybrids(unittest.TestCase):
    def test_losses_and_gradients_of_one_process(self) -> None:
        references = {}
        for name in ("qwen3_next", "nemotron_h", "lfm2"):
            model, pack = hybrids.build(name), models.batch(TAIL)
            loss = models.part(model, pack) / models.count(pack)
            loss.backward()
            references[name] = (loss.item(), models.gradients(model))
        for wrong in processes.run(_hybrid, 4, references, seconds=200):
            self.assertEqual(wrong, [])


def _dropout(rank: int, world: int) -> list[float]:
    """Losses with dropout of attention: of two passes from one state, and of another one; and what a seed makes of two equal groups."""
    model = models.build("llama", attention_dropout=0.5)
    cp = ContextParallel(model, gradients="sum", group_sizes=(1, 2))
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = model(**models.batch([30, 30, 30, 30])).loss
        loss.backward()
        losses.append(loss.item())
    cp.close()
    return losses


class Dropout(unittest.TestCase):
    def test_a_pass_repeats(self) -> None:
        for one, again, other in processes.run(_dropout, 2, seconds=100):
            self.assertEqual(one, again)
            self.assertNotEqual(one, other)


def _trainer(rank: int, world: int, tokens: int, folder: str) -> list[float]:
    """Losses of six steps, the last two after resuming, of an evaluation, and the norm of the parameters."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    draw = torch.Generator().manual_seed(3)
    lengths = [min(int(4 / (1.001 - torch.rand((), generator=draw).item())), 120) for _ in range(96)]
    data = [{"input_ids": torch.randint(3, models.WORDS, (n,), generator=draw).tolist()} for n in lengths]
    assert sum(lengths) > 6 * 4 * tokens  # a batch does not fit into one pass
    found: list[float] = []
    for steps, resume in ((4, False), (6, True)):
        model, kind = models.build("gemma3"), Trainer
        if world > 1:
            kind = ContextParallel(model, group_sizes=(1, 2, 4), group_tokens=tokens).trainer(Trainer)
        args = TrainingArguments(
            folder, use_cpu=True, max_steps=steps, gradient_accumulation_steps=2, per_device_train_batch_size=16, per_device_eval_batch_size=8,
            logging_steps=1, logging_nan_inf_filter=False, report_to=[], disable_tqdm=True, save_strategy="steps", save_steps=4, seed=5, bf16=False,
            fp16=False, lr_scheduler_type="constant", optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
        )  # fmt: skip
        trainer = kind(
            model=model,
            args=args,
            data_collator=DataCollatorWithFlattening(),
            train_dataset=data,
            eval_dataset=data[:16],
        )
        trainer.train(resume_from_checkpoint=resume)
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append(trainer.evaluate()["eval_loss"])
        found.append(float(sum(p.detach().double().norm() ** 2 for p in model.parameters())))
    return found


class Trainers(unittest.TestCase):
    def test_losses_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one = processes.run(_trainer, 1, 0, f"{folder}/one", seconds=200)[0]
            self.assertEqual(len(one), 8)
            for tokens in (0, 30):  # 30: several passes for a batch
                for several in processes.run(_trainer, 4, tokens, f"{folder}/{tokens}", seconds=300):
                    for a, b in zip(several, one, strict=True):
                        self.assertLessEqual(abs(a - b) / b, 1e-6, (tokens, several, one))


def _refused(rank: int, world: int) -> dict[str, str]:
    said: dict[str, str] = {}

    def refuse(name: str, call: Any) -> None:
        try:
            call()
            said[name] = "not refused"
        except (InvalidArgument, Unsupported, Disagreement) as error:
            said[name] = str(error)

    def make(**options: Any) -> Any:
        return lambda: ContextParallel(models.build("llama"), **options)

    for name, options in {
        "order": {"group_sizes": (2, 1)},
        "divides": {"group_sizes": (2, 3)},
        "text": {"group_sizes": "ab"},
        "none": {"group_sizes": ()},
        "world": {"group_sizes": (1, 4)},
        "replicas": {"group_sizes": (1, 2), "replicas": 2},
        "ulysses": {"group_sizes": (1, 2), "ulysses": 2},
        "layout": {"group_sizes": (1, 2), "layout": "zigzag"},
        "dropout": {"group_sizes": (1, 2), "dropout": "position"},
        "tokens": {"group_tokens": 5},
        "negative": {"group_sizes": (1, 2), "group_tokens": -1},
        "machine": {"group_sizes": (1, 2), "group_machine": "x"},
        "differ": {"group_sizes": (1, 2) if rank else (2,)},
    }.items():
        refuse(name, make(**options))
    model = models.build("llama")
    cp = ContextParallel(model, group_sizes=(1, 2), group_tokens=20)
    refuse("room", lambda: model(**models.batch([15, 15, 15])))
    refuse("long", lambda: cp.passes(models.batch([50])))
    refuse("other batches", lambda: cp.passes(models.batch([10 + rank, 9])))
    refuse("record", cp.record)
    refuse("mtp", lambda: cp.mtp(lambda hidden, ahead: hidden.sum()))
    slices = encode_slices([Slice(0, 9, 0, 9)])
    refuse("slices", lambda: model(**models.batch([9]), slices=slices))
    # After all of these the ranks go on.
    said["after"] = str(bool(torch.isfinite(model(**models.batch([15, 15])).loss)))
    cp.close()
    cp = ContextParallel(model)
    refuse("one size", lambda: cp.passes(models.batch([9])))
    cp.close()
    return said


class Refusals(unittest.TestCase):
    EXPECTED: ClassVar[dict[str, str]] = {
        "order": "group_sizes is (2, 1)",
        "divides": "group_sizes is (2, 3)",
        "text": "group_sizes is 'ab'",
        "none": "group_sizes is ()",
        "world": "4, does not divide the 2 ranks",
        "replicas": "replicas is 2 and group_sizes is (1, 2)",
        "ulysses": "ulysses is 2 and group_sizes",
        "layout": "layout is 'zigzag' and group_sizes",
        "dropout": "dropout='position'",
        "tokens": "group_tokens is 5 without group_sizes",
        "negative": "group_tokens is -1",
        "machine": "line 1 of the machine description",
        "differ": "group_sizes",
        "room": "45 tokens, and 2 ranks of group_tokens=20",
        "long": "50 tokens of document 0",
        "other batches": "differ from those of rank 0",
        "record": "record is not supported with group_sizes",
        "mtp": "mtp is not supported with group_sizes",
        "slices": "slices are given and group_sizes",
        "after": "True",
        "one size": "passes needs groups that change size",
    }

    def test_on_all_ranks(self) -> None:
        for said in processes.run(_refused, 2, seconds=200):
            self.assertEqual(said.keys(), self.EXPECTED.keys())
            for name, text in self.EXPECTED.items():
                with self.subTest(name):
                    self.assertIn(text, said[name])


if __name__ == "__main__":
    unittest.main()
