# SPDX-License-Identifier: MIT OR Apache-2.0
"""Heads for tokens further on than the next one (`ContextParallel.mtp`): loss and gradients of one process, document by document."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.torch_version import TorchVersion

try:
    import transformers
    from transformers.masking_utils import create_causal_mask
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import models
import processes
from cpattn import Error, Slice
from cpattn_hf.transformers import ContextParallel, SharedPrefixCollator

transformers.utils.logging.set_verbosity_error()
# Documents shorter than some heads look ahead.
LENGTHS, DEPTH = [23, 1, 17, 2, 3, 9, 4, 30], 3
FEATURES: list[dict[str, Any]] = [
    {
        "prompt": [5, 8, 13, 4, 9, 2, 11],
        "answers": [[21, 34, 2, 7], [55, 2], [21, 34, 5]],
        "weights": [1.0, 0.5, [0.25, 2, 1]],
    },
    {"prompt": [7, 6], "answers": [[40, 41, 42], [40, 3, 3, 3, 8]]},
    # A node of one token above a branching, and a chain.
    {
        "parents": [None, 0, 1, 1, 0, 4],
        "tokens": [[15, 19, 4, 4, 4], [17], [6, 21], [9, 31, 32, 33], [44, 45], [46, 47, 48]],
    },
]


class Head(nn.Module):
    """A head of one depth, as of DeepSeek V3: hidden states and embeddings of later tokens, projected, and a layer of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        size = model.config.hidden_size
        self.project = nn.Linear(2 * size, size, bias=False)
        self.layer = type(model.model.layers[0])(model.config, 0)

    def forward(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, mask: Any, positions: Any, places: torch.Tensor
    ) -> torch.Tensor:
        out = self.layer(
            self.project(torch.cat([embeddings, hidden], -1)),
            attention_mask=mask,
            position_embeddings=positions,
            position_ids=places,
        )
        return out[0] if isinstance(out, tuple) else out


def build(name: str) -> Any:
    model = models.build(name)
    model.heads = nn.ModuleList(Head(model) for _ in range(DEPTH))
    draw = torch.Generator().manual_seed(2)
    for parameter in model.heads.parameters():  # some of Transformers' are made without numbers
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1 + (parameter.ndim == 1)
    return model


def inside(model: Any, hidden: torch.Tensor, places: torch.Tensor) -> tuple[Any, Any]:
    """Masks and rotary embeddings, as the model makes them."""
    mask = create_causal_mask(
        config=model.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=places
    )
    return mask, model.model.rotary_emb(hidden, places)


def heads(model: Any, embedded: bool = False, head: Any = None) -> Any:
    """What a user writes, with `head` for the model's. `embedded`: embeddings of later tokens come as rows of other ranks, with gradients, instead of their ids."""

    def run(hidden: torch.Tensor, ahead: Any) -> torch.Tensor:
        mask, positions = inside(model, hidden, ahead.position_ids)
        total, embed = hidden.new_zeros(()), model.get_input_embeddings()
        for by, layer in enumerate(model.heads, 1):
            later = ahead.shift(embed(model.own_ids), by) if embedded else embed(ahead.ids(by))
            hidden = layer(hidden, later, mask, positions, ahead.position_ids)
            total = total + ahead.loss(head or model.lm_head, hidden, by)
        return 0.3 / DEPTH * total

    return run


def alone(
    name: str,
    documents: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    items: float | None = None,
    embedded: bool = False,
) -> tuple[float, float, torch.Tensor]:
    """Loss, that of the heads, and gradients, of one process, of rows with ids, labels and weights of their tokens. A head sees the id 0 after a document, or
    with `embedded` nothing."""
    model = build(name)
    sums, counts = [torch.zeros(()) for _ in range(DEPTH + 1)], [0.0] * (DEPTH + 1)
    for ids, labels, weights in documents:
        hidden, places = model.model(input_ids=ids[None]).last_hidden_state, torch.arange(len(ids))[None]
        mask, positions = inside(model, hidden, places)
        for by in range(DEPTH + 1):
            if by:
                later = model.get_input_embeddings()(F.pad(ids[by:], (0, min(by, len(ids)))))
                if embedded:
                    later = later * (torch.arange(len(ids)) + by < len(ids))[:, None]
                hidden = model.heads[by - 1](hidden, later[None], mask, positions, places)
            own = F.pad(labels[by + 1 :], (0, min(by + 1, len(ids))), value=-100)
            factors = F.pad(weights[by + 1 :], (0, min(by + 1, len(ids)))) * (own != -100)
            sums[by] = (
                sums[by]
                + (
                    F.cross_entropy(model.lm_head(hidden)[0].float(), own, ignore_index=-100, reduction="none")
                    * factors
                ).sum()
            )
            counts[by] += float(factors.sum())
    losses = [one / (items or count) for one, count in zip(sums, counts)]
    more = 0.3 / DEPTH * sum(losses[1:])
    (losses[0] + more).backward()
    return (losses[0] + more).item(), more.item(), models.gradients(model)


def packed(lengths: list[int] = LENGTHS) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return [(ids[0], labels[0], torch.ones(ids.shape[1])) for ids, labels in models.documents(models.batch(lengths))]


def answers(prompt: float) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The answers of FEATURES as rows, each with all tokens before it."""
    rows = []
    for feature in FEATURES:
        if "answers" in feature:
            parents, runs = [None, *(0 for _ in feature["answers"])], [feature["prompt"], *feature["answers"]]
            factors = [prompt, *feature.get("weights", [1.0] * len(feature["answers"]))]
        else:
            parents, runs = feature["parents"], feature["tokens"]
            factors = [prompt if parent is None else 1.0 for parent in parents]
        each = [
            torch.tensor(one).expand(len(run)) if isinstance(one, float) else torch.tensor(one)
            for one, run in zip(factors, runs)
        ]
        for leaf in set(range(len(runs))) - set(parents):
            path, at = [], leaf
            while at is not None:
                path, at = [at, *path], parents[at]
            ids, weights = (
                torch.tensor(sum((runs[one] for one in path), [])),
                torch.cat([each[one].float() for one in path]),
            )
            rows.append((ids, torch.where(weights == 0, -100, ids), weights))
    return rows


# By case: the model, the reference, options of ContextParallel, and how the batch comes.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pack": ("smollm2", "pack", {"layout": "zigzag_pack"}),
    "pack in tiles": ("smollm2", "pack", {"tile": 4}),
    "items": ("smollm2", "items", {"ring": None}),
    "rows of embeddings": ("smollm2", "embedded", {"layout": "striped", "layout_parameter": 1}),
    "rows with padding": ("smollm2", "pack", {}),
    "experts": ("mixtral", "mixtral", {}),
    "answers": ("smollm2", "answers", {}),
    "answers in tiles": ("smollm2", "answers", {"tile": 5}),
    "answers, prompts counted": ("smollm2", "prompts", {}),
    "few tokens": ("smollm2", "few", {}),
}


def _right(rank: int, world: int, file: str) -> list[str]:
    references, wrong = torch.load(file), []
    for case, (name, reference, options) in CASES.items():
        model, pack = build(name), models.batch(LENGTHS)
        cp = ContextParallel(
            model,
            gradients="sum",
            timeout=100,
            **{key: world if value is None else value for key, value in options.items()},
        )
        cp.mtp(heads(model, embedded=case == "rows of embeddings"))
        if case == "rows of embeddings":
            model.model.register_forward_pre_hook(
                lambda _, args, given: setattr(model, "own_ids", given["input_ids"]), with_kwargs=True
            )
            models.checkpointing(model, False)
        if case == "items":
            pack["num_items_in_batch"] = torch.tensor(50)
        elif case == "rows with padding":
            pack = models.rows(pack)
        elif case.startswith("answers"):
            pack = SharedPrefixCollator(prompt=0.5 if "prompts" in case else 0.0, ahead=DEPTH)(FEATURES)
        elif case == "few tokens":
            pack = models.batch([2])
            pack["labels"] = pack["input_ids"]
        out = model(**pack)
        out.loss.backward()
        gradients = models.gradients(model)
        dist.all_reduce(gradients)
        loss, more, expected = references[reference]
        error = max(abs(out.loss.item() / loss - 1), abs(out.mtp_loss.item() - more))
        if not (error <= 1e-6 and (far := models.apart(gradients, expected)) <= 1e-5):
            wrong.append(f"{case} on {world}: loss {error:.1e}, gradients {far:.1e}")
        cp.close()
    return wrong


# Of each replica, in 23 and 2 tiles of 4.
REPLICAS = [LENGTHS, [5, 3]]


def _replicas(rank: int, world: int, file: str) -> dict[str, float]:
    """Errors of loss and gradients with tiles on two replicas of one rank, where tiles of a function, and of a module around one of FSDP2's, are as many on both."""
    references, found = torch.load(file), {}
    for case in ("a function", "a module around"):
        model = build("llama")
        cp = ContextParallel(model, replicas=2, tile=4, timeout=60)
        for part in (*model.model.layers, model.lm_head, model) * (case == "a module around"):
            fully_shard(part)
        head = (
            nn.Sequential(nn.Identity(), model.lm_head)
            if case == "a module around"
            else lambda rows, model=model: model.lm_head(rows)
        )
        cp.mtp(heads(model, head=head))
        out = model(**models.batch(REPLICAS[cp.replica]))
        out.loss.backward()
        for parameter in model.parameters():
            if isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.full_tensor()
            else:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        found[f"{case}: loss"] = abs(out.loss.item() / references[cp.replica][0] - 1)
        found[f"{case}: gradients"] = models.apart(models.gradients(model), (references[0][2] + references[1][2]) / 2)
        cp.close()
    return found


def _refused(rank: int, world: int) -> dict[str, str]:
    said: dict[str, str] = {}
    model, pack = build("smollm2"), models.batch(LENGTHS)
    plain = models.build("smollm2")
    cp = ContextParallel(model, gradients="sum", timeout=100)

    def refuse(name: str, call: Any) -> None:
        try:
            call()
            said[name] = "not refused"
        except Error as error:
            said[name] = f"{type(error).__name__}: {error}"

    refuse("no function", lambda: cp.mtp(5))
    cp.mtp(heads(model))
    refuse("log-probabilities", lambda: cp.logprobs(pack))
    embeddings = model.get_input_embeddings()(pack["input_ids"]).detach()
    refuse(
        "embeddings",
        lambda: model(**{name: one for name, one in pack.items() if name != "input_ids"}, inputs_embeds=embeddings),
    )
    refuse("shared", lambda: model(**SharedPrefixCollator(ahead=DEPTH - 1)(FEATURES)))
    refuse("shared, no copies", lambda: model(**SharedPrefixCollator(prompt=1.0)(FEATURES[1:2])))
    # A prompt and answers of 5 and 3 tokens, which one slice gives the prompt.
    slices = [Slice(0, 4, 0, 4, high=0), Slice(4, 12, 0, 4), Slice(4, 9, 4, 9, high=0), Slice(9, 12, 9, 12, high=0)]
    ids = torch.tensor([[5, 8, 13, 4, 21, 34, 2, 7, 3, 55, 34, 2]])
    by_hand = {
        "input_ids": ids,
        "labels": torch.where(torch.arange(12) < 4, -100, ids),
        "position_ids": torch.tensor([[*range(9), *range(4, 7)]]),
        "slices": slices,
    }
    refuse("shared, by hand", lambda: model(**by_hand))
    refuse("shared, by hand, one document", lambda: model(**by_hand, cu_seqlens=torch.tensor([0, 12])))
    cp.mtp(lambda hidden, ahead: 3.0)
    refuse("no loss", lambda: model(**pack))
    cp.mtp(lambda hidden, ahead: ahead.loss(model.lm_head, hidden[0], 1))
    refuse("hidden", lambda: model(**pack))
    cp.mtp(lambda hidden, ahead: ahead.shift(hidden[:, 1:], 1).sum())
    refuse("rows", lambda: model(**pack))
    cp.mtp(lambda hidden, ahead: ahead.ids(0).sum())
    refuse("by", lambda: model(**pack))
    # Outside of training, off and without heads the loss is the model's own.
    cp.mtp(heads(model))
    model.eval()
    losses = [model(**pack).loss.item()]
    model.train()
    with cp.off():
        cp.mtp(None)
    losses.append(model(**pack).loss.item())
    cp.close()
    refuse("closed", lambda: cp.mtp(None))
    expected = (models.part(plain, pack) / models.count(pack)).item()
    assert all(abs(one / expected - 1) < 1e-6 for one in losses), (losses, expected)
    return said


class Heads(unittest.TestCase):
    def test_loss_and_gradients_of_one_process(self) -> None:
        short = torch.tensor(models.batch([2])["input_ids"][0].tolist())
        references = {
            "pack": alone("smollm2", packed()), "items": alone("smollm2", packed(), 50.0), "embedded": alone("smollm2", packed(), embedded=True),
            "mixtral": alone("mixtral", packed()), "answers": alone("smollm2", answers(0.0)), "prompts": alone("smollm2", answers(0.5)),
            "few": alone("smollm2", [(short, short, torch.ones(2))], 1.0),
        }  # fmt: skip
        self.assertGreater(abs(references["pack"][1]), 0.1)
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(references, file)
            for world in (1, 2, 3):
                with self.subTest(world=world):
                    for wrong in processes.run(_right, world, file, seconds=200):
                        self.assertEqual(wrong, [])

    @unittest.skipIf(
        TorchVersion(torch.__version__) < "2.11", "PyTorch does not gather a head's parameters again for each tile"
    )
    def test_tiles_of_replicas(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save([alone("llama", packed(lengths)) for lengths in REPLICAS], file)
            for found in processes.run(_replicas, 2, file, seconds=200):
                self.assertEqual(
                    {
                        case: error
                        for case, error in found.items()
                        if not error <= (1e-5 if "gradients" in case else 1e-6)
                    },
                    {},
                )

    def test_refusals(self) -> None:
        for said in processes.run(_refused, 2):
            for name, word in (
                ("no function", "heads is 5, a function"), ("log-probabilities", "take the heads out with cp.mtp(None)"), ("shared", f"SharedPrefixCollator(ahead={DEPTH})"),
                ("shared, by hand", "is shared by several answers"), ("shared, by hand, one document", "is shared by several answers"),
                ("embeddings", "inputs_embeds is given to a model with heads of cp.mtp, which read ids of tokens"), ("shared, no copies", "SharedPrefixCollator(ahead=1)"), ("no loss", "the result of the heads is 3.0, a loss"), ("hidden", "hidden is ("), ("rows", "rows is ("),
                ("by", "by is 0"), ("closed", "this ContextParallel is closed"),
            ):  # fmt: skip
                self.assertIn(word, said[name])


if __name__ == "__main__":
    unittest.main()
