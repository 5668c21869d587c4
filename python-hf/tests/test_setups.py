# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ways in which other projects train with context parallelism, and their problems: each has the loss and gradients of one process
here, or an error with a way out.

Oumi: groups of fewer ranks than there are processes, and numbers that do not fit. axolotl: 9 heads on any number of ranks; attention masks that number the documents of a pack. Arctic: 8 ranks beside one, logits in
tiles, activations on the host, labels on few ranks, shift_labels. prime-rl: one switch between ring and Ulysses, with sinks.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error, Unsupported
from cpattn_hf.transformers import ContextParallel
from torch.nn import functional as F

transformers.utils.logging.set_verbosity_error()
LENGTHS = [23, 1, 17, 9, 40]
# Of fewer tokens than the 8 ranks.
FEW = {"3 tokens": [3], "5 tokens": [5], "documents of 1 and 3": [1, 3]}


def few_labels() -> dict[str, torch.Tensor]:
    """Of a pack, with labels in three tokens only: most ranks have none."""
    pack = models.batch(LENGTHS)
    pack["labels"] = torch.where(torch.arange(sum(LENGTHS)) < sum(LENGTHS) - 3, -100, pack["input_ids"])
    return pack


def _eight(rank: int, world: int, file: str) -> dict[str, tuple[float, float]]:
    """Relative errors of loss and gradients, by case."""
    references, found = torch.load(file), {}

    def check(
        name: str, model: str, pack: dict[str, Any], reference: str, offload: bool = False, **options: Any
    ) -> None:
        built = models.build(model)
        cp = ContextParallel(built, gradients="sum", **options)
        with torch.autograd.graph.save_on_cpu() if offload else torch.enable_grad():
            loss = built(**pack).loss
        loss.backward()
        total = models.gradients(built)
        dist.all_reduce(total)
        expected, gradients = references[reference]
        found[name] = (abs(loss.item() - expected) / expected, models.apart(total, gradients))
        cp.close()

    pack = models.batch(LENGTHS)
    check("axolotl: 9 heads", "smollm2", pack, "smollm2")
    numbers = torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS))[None]
    numbered = {"input_ids": pack["input_ids"], "labels": pack["labels"], "attention_mask": numbers}
    check("axolotl: a mask that numbers documents", "smollm2", numbered, "smollm2")
    check("axolotl: the same, with positions", "smollm2", {**numbered, "position_ids": pack["position_ids"]}, "smollm2")
    check("Arctic: tiles, activations on the host", "gemma3", few_labels(), "few", True, tile=4)
    shifted = dict(few_labels())
    shifted["shift_labels"] = F.pad(shifted.pop("labels")[:, 1:], (0, 1), value=-100)
    check("Arctic: shift_labels", "gemma3", shifted, "few")
    check("prime-rl: Ulysses", "gpt-oss", pack, "gpt-oss", ulysses=world)
    check("prime-rl: ring", "gpt-oss", pack, "gpt-oss", ring=world)
    # Ranks without tokens take part.
    for number, (name, model) in enumerate((name, model) for name in FEW for model in ("smollm2", "gpt-oss")):
        more: dict[str, Any] = (
            {},
            {"tile": 1},
            {"ring": world},
            {"ulysses": world},
            {"layout": "zigzag"},
            {"layout": "contiguous"},
        )[number]
        check(f"{name}, {model} with {more}", model, models.batch(FEW[name]), f"{model}, {name}", **more)
    built = models.build("smollm2")
    cp = ContextParallel(built)
    with torch.no_grad():
        ids = torch.tensor([[5, 7, 9]])
        out = built(input_ids=ids)
        whole = cp.gather(out.logits)
        with cp.off():
            usual = built(input_ids=ids).logits
    found["fewer tokens than ranks, logits"] = (
        float(out.logits.shape[:2] != (1, len(cp.last.batch.tokens))),
        models.apart(whole, usual),
    )
    cp.close()
    return found


def _groups(rank: int, world: int, file: str) -> tuple[float, float] | None:
    """Three of four processes are a group. Then all four are refused for numbers that do not fit, at once."""
    three, built, found = dist.new_group([0, 1, 2]), models.build("smollm2"), None
    if rank == 3:
        _refused("process 3 is not a member of group", built, group=three)
    else:
        expected, gradients = torch.load(file)
        cp = ContextParallel(built, group=three, gradients="sum")
        loss = built(**models.batch(LENGTHS)).loss
        loss.backward()
        total = models.gradients(built)
        dist.all_reduce(total, group=three)
        found = (abs(loss.item() - expected) / expected, models.apart(total, gradients))
        cp.close()
    _refused("replicas is 3, which does not divide the 4 ranks", built, replicas=3)
    _refused("ulysses is 3, expected a divisor of the world of 4", built, ulysses=3)
    _refused("ulysses 1 x ring 2 uses 2 of the group's 4 ranks", built, ulysses=1, ring=2)
    _refused("mesh is ulysses 10 × ring 1", built, ulysses=10, ring=1)
    _refused("communicator is 'torch', 'own' is needed on cpu", built, communicator="torch")
    _refused("communicator is 'torch' and replicas is 2, 1 is needed", built, communicator="torch", replicas=2)
    _refused("communicator is 'nccl', 'own' or 'torch' is needed", built, communicator="nccl")
    _refused("sequence_parallel_size is no argument of ContextParallel", built, sequence_parallel_size=2)
    # On a device the context gets the process group that was given, and not its ranks.
    with mock.patch("cpattn_hf.transformers.parallel.Context", side_effect=Unsupported("as on a device")) as made:
        _refused("as on a device", built, group=dist.group.WORLD, communicator="torch")
    assert made.call_args.args == (dist.group.WORLD,) and made.call_args.kwargs["communicator"] == "torch", (
        made.call_args
    )
    ContextParallel(built, communicator="own").close()
    # Nothing is left of those: the model is as it was.
    assert (
        built.config._attn_implementation == "eager"
        and not built._forward_pre_hooks
        and getattr(built, "_cpattn", None) is None
    )
    return found


def _refused(said: str, model: Any, **options: Any) -> None:
    try:
        ContextParallel(model, **options)
    except Error as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"{options} were not refused")


class SetUps(unittest.TestCase):
    def test_groups_and_numbers_that_do_not_fit(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(models.alone("smollm2", models.batch(LENGTHS)), file)
            for found in processes.run(_groups, 4, file)[:3]:
                self.assertTrue(found[0] <= 1e-6 and found[1] <= 1e-5, found)

    def test_loss_and_gradients_of_one_process(self) -> None:
        pack = models.batch(LENGTHS)
        references = {name: models.alone(name, pack) for name in ("smollm2", "gpt-oss")}
        references |= {
            f"{model}, {name}": models.alone(model, models.batch(FEW[name]))
            for name in FEW
            for model in ("smollm2", "gpt-oss")
        }
        references["few"] = models.alone("gemma3", few_labels())
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(references, file)
            for found in processes.run(_eight, 8, file, seconds=200):
                for name, (error, distance) in found.items():
                    self.assertTrue(error <= 1e-6 and distance <= 1e-5, (name, error, distance))


if __name__ == "__main__":
    unittest.main()
