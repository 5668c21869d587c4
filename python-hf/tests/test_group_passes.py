# SPDX-License-Identifier: MIT OR Apache-2.0
"""Passes of groups that change size: each has what the batch has, or the batch is refused on all ranks, and no dealing is that of another call."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import blocks
import models
import processes
from cpattn import Error, InvalidArgument, Slice
from cpattn_hf.transformers import ContextParallel, encode_slices
from test_loss_trial import _of_places, _with

transformers.utils.logging.set_verbosity_error()
SIZES = {"group_sizes": (1, 2), "timeout": 60.0}
LENGTHS = [9, 25, 3, 14, 17, 8]


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _sum(cp: ContextParallel, batch: dict[str, Any]) -> tuple[int, float, torch.Tensor]:
    """The passes of a batch, their loss and the gradients of all ranks."""
    model, total = cp.model, 0.0
    model.zero_grad()
    passes = cp.passes(batch)
    for one in passes:
        loss = model(**one).loss
        loss.backward()
        total += loss.item()
    whole = models.gradients(model)
    dist.all_reduce(whole)
    return len(passes), total, whole


def _cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Models, each with a batch."""
    pack = models.batch(LENGTHS)
    prefixes = torch.cat([torch.arange(n) < n // 2 for n in LENGTHS])[None].long()
    rows = models.rows(pack, 1)
    cases = {
        "token types": (blocks.build("hrm"), {**pack, "token_type_ids": prefixes}),
        "masked words": (models.build("modernbert"), pack),
        "masked words, rows": (models.build("roberta"), rows),
        "labels of the same place": (models.build("gemma"), models.of_next(pack)),
        "loss_weights": (models.build("llama"), {**pack, "loss_weights": torch.linspace(0.5, 2, sum(LENGTHS))[None]}),
    }
    own: Any = cases["labels of the same place"][0]
    own.__class__ = _with(type(own), _of_places)
    return cases


def _alone(name: str) -> tuple[float, torch.Tensor]:
    """Loss and gradients of one process."""
    model, batch = _cases()[name]
    pack = models.batch(LENGTHS)
    types = {"token_type_ids": batch["token_type_ids"]} if "token_type_ids" in batch else None
    masked = name.startswith("masked")
    if "loss_weights" in batch:
        total, at, weights = torch.zeros(()), 0, batch["loss_weights"][0]
        for ids, labels in models.documents(pack):
            each = torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[0, :-1], labels[0, 1:], reduction="none"
            )
            total, at = total + (each * weights[at + 1 : at + ids.shape[1]]).sum(), at + ids.shape[1]
        kept = torch.cat(
            [torch.cat([labels.new_full((1,), -100), labels[0, 1:]]) for _, labels in models.documents(pack)]
        )
        loss = total / weights[kept != -100].sum()
    else:
        loss = models.part(model, pack, masked, types) / models.count(pack, masked)
    loss.backward()
    return loss.item(), models.gradients(model)


def _passes(rank: int, world: int, references: dict[str, Any]) -> list[str]:
    wrong = []
    for name, (model, batch) in _cases().items():
        cp = ContextParallel(model, gradients="sum", group_tokens=25, **SIZES)
        number, loss, gradients = _sum(cp, batch)
        expected, reference = references[name]
        error, distance = abs(loss - expected) / expected, models.apart(gradients, reference)
        if not (number > 1 and error <= 1e-6 and distance <= 1e-5):
            wrong.append(f"{name}: {number} passes, loss {error:.1e}, gradients {distance:.1e}")
        kept = cp.passes({**batch, "use_cache": False, "attention_mask": batch.get("attention_mask")})
        wrong += [f"{name}: without use_cache" for one in kept if one.get("use_cache", True)]
        cp.close()
    return wrong


class Passes(unittest.TestCase):
    def test_losses_and_gradients_of_one_process(self) -> None:
        references = {name: _alone(name) for name in _cases()}
        for wrong in processes.run(_passes, 2, references, seconds=200):
            self.assertEqual(wrong, [])


def _dealings(rank: int, world: int) -> tuple[int, float, float, float]:
    """The number of passes, and the losses of the batch: of one pass, of the passes, and of one pass after them."""
    batch = models.batch([3000] * 3)
    losses = []
    with torch.no_grad():
        for again in (False, True):
            model = models.build("llama", num_key_value_heads=1, max_position_embeddings=4096)
            cp = ContextParallel(model, gradients="sum", tile=512, **SIZES)
            if again:
                passes = cp.passes(batch)
                losses.append(sum(model(**one).loss.item() for one in passes))
            losses.append(model(**batch).loss.item())
            cp.close()
    return len(passes), *losses


class Dealings(unittest.TestCase):
    def test_one_pass_after_several(self) -> None:
        # Room for all documents, and two passes cost less than one.
        for passes, one, several, after in processes.run(_dealings, 2, seconds=200):
            self.assertEqual(passes, 2)
            self.assertAlmostEqual(several / one, 1, delta=1e-6)
            self.assertAlmostEqual(after / one, 1, delta=1e-6)


def _refused(rank: int, world: int) -> dict[str, str]:
    said: dict[str, str] = {}
    pack, long = models.batch([9]), models.batch([15, 15, 15])
    model = models.build("llama")
    cp = ContextParallel(model, group_tokens=20, **SIZES)
    sizes: Any = cp.sizes
    said["slices"] = _said(lambda: cp.passes({**pack, "slices": encode_slices([Slice(0, 9, 0, 9)])}))
    said["argument"] = _said(lambda: cp.passes({**pack, "more": torch.zeros(3)}))
    said["argument of one rank"] = _said(lambda: cp.passes({**pack, **({"more": torch.zeros(3)} if rank else {})}))
    said["words"] = _said(lambda: cp.passes({**pack, "input_ids": pack["input_ids"] + models.WORDS}))
    said["types"] = _said(lambda: cp.passes({**pack, "token_type_ids": torch.zeros(1, 9, dtype=torch.int64)}))
    said["weights"] = _said(lambda: cp.passes({**pack, "loss_weights": torch.zeros(1, 9)}))
    said["items"] = _said(lambda: cp.passes({**pack, "num_items_in_batch": "many"}))
    known = dict(sizes._dealt)
    said["other batches"] = _said(lambda: cp.passes(models.batch([15, 15, 10 + rank])))
    said["nothing is kept of other batches"] = str(sizes._dealt == known)
    usual = sizes.deal
    if rank:
        sizes.deal = lambda *args: usual(*args)._replace(passes=())
    said["another dealing"] = _said(lambda: model(**pack))
    said["other passes"] = _said(lambda: cp.passes(long))
    vars(sizes).pop("deal", None)
    usual = sizes.at
    if rank:

        def fails(*args: Any) -> Any:
            raise InvalidArgument("the plan of the second group")

        sizes.at = fails
    with torch.no_grad():
        said["plan of one group"] = _said(lambda: model(**models.batch([9, 9])))
    vars(sizes).pop("at", None)
    said["after"] = str(bool(torch.isfinite(model(**models.batch([15, 15])).loss)))
    cp.close()

    for place, options, more in (
        ("config", {"output_router_logits": True}, {}),
        ("argument", {}, {"output_router_logits": True}),
    ):
        model = models.build("mixtral", **options)
        cp = ContextParallel(model, group_tokens=20, **SIZES)
        said[f"router, {place}"] = _said(lambda cp=cp, more=more: cp.passes({**long, **more}))  # type: ignore[misc]
        (one,) = cp.passes({**models.batch([15, 15]), **more})
        said[f"router, {place}, one pass"] = str(torch.is_tensor(model(**one).aux_loss))
        cp.close()

    model = blocks.build("llama4")
    cp = ContextParallel(model, **SIZES)
    late = {**models.batch([12, 3]), "position_ids": torch.cat([torch.arange(12), torch.arange(3) + 4])[None]}
    said["chunks"] = _said(lambda: cp.passes(late))
    said["chunks, one pass"] = _said(lambda: model(**late))
    cp.close()

    model = models.build("gemma")
    model.__class__ = _with(type(model), _of_places)
    cp = ContextParallel(model, group_tokens=20, **SIZES)
    said["labels of the same place"] = _said(lambda: cp.passes(pack))
    cp.close()
    return said


class Refusals(unittest.TestCase):
    EXPECTED: ClassVar[dict[str, str]] = {
        "slices": "slices are given and group_sizes is (1, 2)",
        "argument": "the model was given more, which is not supported",
        "argument of one rank": "",
        "words": "input_ids has numbers from",
        "types": "the model was given token_type_ids, which is not supported",
        "weights": "loss_weights of the tokens with a label sum up to 0",
        "items": "num_items_in_batch is 'many'",
        "other batches": "differ from those of rank 0",
        "nothing is kept of other batches": "True",
        "another dealing": "the inputs of ranks [1] of this group differ",
        "other passes": "the passes of ranks [1] of this group differ",
        "plan of one group": "",
        "after": "True",
        "router, config": "output_router_logits is set and the batch needs 2 passes",
        "router, config, one pass": "True",
        "router, argument": "output_router_logits is set and the batch needs 2 passes",
        "router, argument, one pass": "True",
        "chunks": "position_ids of documents begin with [0, 4]",
        "chunks, one pass": "position_ids of documents begin with [0, 4]",
        "labels of the same place": "give such labels as shift_labels",
    }
    OF_ONE_RANK: ClassVar[dict[str, tuple[str, str]]] = {
        "argument of one rank": ("ranks [1] of this group refused their inputs", "the model was given more"),
        "plan of one group": ("ranks [1] of this group refused their plan", "the plan of the second group"),
    }

    def test_on_all_ranks(self) -> None:
        for rank, said in enumerate(processes.run(_refused, 2, seconds=200)):
            self.assertEqual(said.keys(), self.EXPECTED.keys())
            for name, text in self.EXPECTED.items():
                with self.subTest(name, rank=rank):
                    self.assertIn(self.OF_ONE_RANK[name][rank] if name in self.OF_ONE_RANK else text, said[name])


def _nodes(rank: int, world: int) -> list[str]:
    """The nodes by which documents are dealt; and what a group says that has no plan, and the others."""
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    cp = ContextParallel(models.build("llama"), group_sizes=(1, 3, 6), timeout=60.0)
    assert cp.sizes is not None
    found = [str(cp.sizes.ranks_per_node)]
    cp.close()
    os.environ["LOCAL_WORLD_SIZE"] = "4"  # ranks 3, 4 and 5 are on two nodes
    found.append(_said(lambda: ContextParallel(models.build("llama"), group_sizes=(1, 3), timeout=60.0)))
    return found


class Nodes(unittest.TestCase):
    def test_those_of_the_contexts(self) -> None:
        for rank, (nodes, said) in enumerate(processes.run(_nodes, 6, seconds=200)):
            self.assertEqual(nodes, "3")
            self.assertIn("LOCAL_WORLD_SIZE is 4" if rank > 2 else "ranks [3, 4, 5] of this group refused", said)


if __name__ == "__main__":
    unittest.main()
