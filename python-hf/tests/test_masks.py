# SPDX-License-Identifier: MIT OR Apache-2.0
"""Masks of Transformers as slices: blocks of token types (Gemma 3 and 4), prefixes (PaliGemma, HRM), chunks (Llama 4), and packs of answers
that share a prompt. Loss, logits and gradients are those of one process that runs documents, or answers with their prompts, one by one."""

from __future__ import annotations

import os
import random
import tempfile
import unittest
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import transformers
except ImportError:
    raise unittest.SkipTest("transformers is not installed") from None

import hybrids
import models
import processes
from blocks import LENGTHS, build, one_by_one, types
from cpattn import Error, InvalidArgument, Slice, Unsupported, slices
from cpattn_hf.transformers import ContextParallel, SharedPrefixCollator, encode_slices
from cpattn_hf.transformers.masks import SAMPLE, Blocks, read, rule, simplified, slices_of
from cpattn_hf.transformers.pack import pack
from dense import allowed_by
from torch.nn import functional as F
from transformers import masking_utils as of

transformers.utils.logging.set_verbosity_error()
# By name: the model, the seed of its types, whether the documents are rows with padding, and options. Striped: each token's neighbours are on
# other ranks.
STRIPED = {"ring": 3, "layout": "striped", "layout_parameter": 1}
CASES: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "gemma3": ("gemma3", 1, False, {}),
    "gemma3, rows, striped, tiles": ("gemma3", 2, True, {**STRIPED, "tile": 5}),
    "gemma4": ("gemma4", 3, False, STRIPED),
    "gemma4, rows": ("gemma4", 4, True, {"ulysses": 3}),
    "paligemma": ("paligemma", 5, False, {"ring": 3, "layout": "zigzag"}),
    "paligemma, rows": ("paligemma", 6, True, {}),
    "hrm": ("hrm", 7, False, STRIPED),
    "llama4": ("llama4", 8, False, STRIPED),
    "llama4, rows": ("llama4", 8, True, {}),
    "git": ("git", 9, False, STRIPED),
}


def _rows(pack: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = models.rows(pack)
    for name, every in more.items():
        made[name] = torch.full_like(made["input_ids"], 1)
        made[name][made["attention_mask"].bool()] = every[0]
    return made


# Groups and trees: some runs of one token, a tree whose branching follows a branching at once, and two roots.
def _drawn(draw: random.Random, *lengths: int) -> list[list[int]]:
    return [[draw.randrange(3, models.WORDS) for _ in range(n)] for n in lengths]


def features() -> list[dict[str, Any]]:
    draw = random.Random(7)
    tree = {"parents": [None, 0, 0, 1, 1, 3, 3, None, 7, 7], "tokens": _drawn(draw, 7, 1, 4, 3, 2, 6, 1, 1, 2, 3)}
    weighted = {"prompt": _drawn(draw, 4)[0], "answers": _drawn(draw, 3, 2, 2), "weights": [0.5, [2.0, -0.25], 0]}
    return [
        {"prompt": _drawn(draw, 13)[0], "answers": _drawn(draw, 5, 9, 1)},
        tree,
        weighted,
        {"prompt": _drawn(draw, 3)[0], "answers": _drawn(draw, 4)},
    ]


def paths(feature: dict[str, Any], prompt: float, shared: str) -> Iterator[list[tuple[int, float]]]:
    """Each answer with all tokens before it, and their factors."""
    group = "answers" in feature
    parents = [None, *(0 for _ in feature["answers"])] if group else feature["parents"]
    tokens = [feature["prompt"], *feature["answers"]] if group else feature["tokens"]
    told = feature.get("weights")
    factors = [prompt if parent is None else 1.0 if told is None else told[i - 1] for i, parent in enumerate(parents)]
    ways = []
    for leaf in set(range(len(parents))) - set(parents):
        ways.append(way := [leaf])
        while (parent := parents[way[0]]) is not None:
            way.insert(0, parent)
    times = {node: sum(node in way for way in ways) if shared == "once" else 1 for node in range(len(parents))}
    for way in ways:
        of_each = {
            node: factors[node] if isinstance(factors[node], list) else [factors[node]] * len(tokens[node])
            for node in way
        }
        yield [
            (token, factor / times[node])
            for node in way
            for token, factor in zip(tokens[node], of_each[node], strict=True)
        ]


def answers(model: Any, prompt: float, shared: str, given: list[dict[str, Any]]) -> torch.Tensor:
    """The loss of the answers one by one, each with a copy of the prompt."""
    total, count = torch.zeros(()), 0.0
    for path in (path for feature in given for path in paths(feature, prompt, shared)):
        ids, factors = torch.tensor([[token for token, _ in path]]), torch.tensor([factor for _, factor in path])
        losses = F.cross_entropy(
            model(input_ids=ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:], reduction="none"
        )
        total, count = total + (losses * factors[1:]).sum(), count + float(factors[1:].sum())
    return total / count


PREFIXES: dict[str, tuple[str, float, str, dict[str, Any]]] = {
    "gemma2": ("gemma2", 0.0, "each", {}),
    "gpt-oss, prompts": ("gpt-oss", 0.5, "each", {**STRIPED, "tile": 4}),
    "mistral, once": ("mistral", 1.0, "once", {"ulysses": 3}),
    "llama4, answers": ("llama4", 1.0, "each", STRIPED),
    "bloom": ("bloom", 0.0, "once", STRIPED),
}


def _references() -> dict[str, tuple[float, torch.Tensor, torch.Tensor | None, float]]:
    """By case: loss, gradients and logits of one process, and how far its loss is from that without the mask."""
    found: dict[str, tuple[float, torch.Tensor, torch.Tensor | None, float]] = {}
    for case, (name, seed, *_) in CASES.items():
        model, pack = build(name), models.batch(LENGTHS, seed)
        loss, logits = one_by_one(model, pack, types(name, seed))
        loss.backward()
        with torch.no_grad():
            other = one_by_one(build(name, attention_chunk_size=64) if name == "llama4" else model, pack, {})[0]
        found[case] = (loss.item(), models.gradients(model), logits, abs(other.item() - loss.item()) / loss.item())
    for case, (name, prompt, shared, _) in PREFIXES.items():
        model = build(name)
        loss = answers(model, prompt, shared, features())
        loss.backward()
        found[case] = (loss.item(), models.gradients(model), None, 0.0)
    return found


def _right(rank: int, world: int, file: str) -> list[str]:
    references, wrong = torch.load(file), []

    def check(case: str, cp: Any, out: Any) -> None:
        loss, gradients, logits, without = references[case]
        out.loss.backward()
        total = models.gradients(cp.model)
        dist.all_reduce(total)
        errors = [abs(out.loss.item() - loss) / loss, models.apart(total, gradients)]
        if logits is not None and out.logits is not None:
            errors.append(float((cp.gather(out.logits).flatten(0, 1)[cp.last.pack.kept] - logits).abs().max()))
        if not (errors[0] <= 1e-6 and max(errors[1:]) <= 1e-5 and (without > 1e-4 or case in ("git", *PREFIXES))):
            wrong.append(f"{case}: loss, gradients, logits {errors}; without the mask the loss differs by {without}")

    for case, (name, seed, padded, options) in CASES.items():
        model, pack, more = build(name), models.batch(LENGTHS, seed), types(name, seed)
        if case == "gemma3":
            models.checkpointing(model, False)
        cp = ContextParallel(model, gradients="sum", timeout=60, **options)
        if case == "gemma3":  # another batch in flight, whose slices are others
            model(**pack, **types(name, seed + 1))
        check(case, cp, model(**(_rows(pack, more) if padded else {**pack, **more})))
        cp.close()
    for case, (name, prompt, shared, options) in PREFIXES.items():
        model, pack = build(name), SharedPrefixCollator(prompt=prompt, shared=shared)(features())
        cp = ContextParallel(model, gradients="sum", timeout=60, **options)
        if name == "gemma2":  # with padding
            padded = {key: F.pad(value, (0, 4)) for key, value in pack.items() if key not in ("slices", "labels")}
            padded |= {"slices": pack["slices"], "labels": F.pad(pack["labels"], (0, 4), value=-100)}
            check(case, cp, model(**padded, attention_mask=F.pad(torch.ones_like(pack["labels"]), (0, 4))))
            model.zero_grad()
        check(case, cp, model(**pack))
        if name != "llama4":  # which refuses documents that begin elsewhere
            with torch.no_grad():
                without = model(**{key: value for key, value in pack.items() if key != "slices"}).loss.item()
            if abs(without - references[case][0]) < 1e-4:
                wrong.append(f"{case}: slices change nothing")
        cp.close()
    return wrong


def _trained(rank: int, world: int, folder: str) -> tuple[float, list[float]]:
    """Loss and parameters after a step of Trainer over groups."""
    from transformers import Trainer, TrainingArguments

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    model = build("smollm2")
    cp = ContextParallel(model)
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], remove_unused_columns=False, save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = cp.trainer(Trainer)(
        model=model, args=args, train_dataset=features(), data_collator=SharedPrefixCollator(prompt=0.5)
    )
    loss = trainer.train().training_loss
    return loss, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def _refused(rank: int, world: int) -> list[tuple[str, str]]:
    """What is refused, each with what the message must have."""
    said: list[tuple[str, str]] = []

    def refuse(part: str, model: Any, given: dict[str, Any]) -> None:
        try:
            model(**given)
            said.append((part, "not refused"))
        except Error as error:
            said.append((part, f"{type(error).__name__}: {error}"))

    pack = SharedPrefixCollator()(features())
    llama, llama4, gemma3, pali = (build(name) for name in ("smollm2", "llama4", "gemma3", "paligemma"))
    hybrid = hybrids.build("lfm2")
    for model in (llama, llama4, gemma3, pali, hybrid):
        ContextParallel(model, timeout=60)
    n = pack["input_ids"].shape[1]
    short = {"input_ids": pack["input_ids"], "position_ids": torch.arange(n)[None]}
    far = {**short, "slices": [Slice(0, n + 1, 0, n, high=0)]}
    refuse(f"slices[0] is Slice(q_begin=0, q_end={n + 1}", llama, far)
    refuse(
        "slices are given without position_ids",
        llama,
        {key: value for key, value in pack.items() if key != "position_ids"},
    )
    refuse(
        "input_ids has 2 rows",
        llama,
        {key: value if key == "slices" else value.repeat(2, 1) for key, value in pack.items()},
    )
    refuse("whole numbers (slices, 7) are needed", llama, {**pack, "slices": torch.zeros(3, 6, dtype=torch.int64)})
    refuse(
        "a pair may be in one slice only",
        llama,
        {**short, "slices": encode_slices([Slice(0, 9, 0, 9, high=0), Slice(8, 12, 8, 12, high=0)])},
    )
    refuse("loss_weights has the shape (3,)", llama, {**pack, "loss_weights": torch.ones(3)})
    refuse("not finite", llama, {**pack, "loss_weights": torch.full((1, n), torch.nan)})
    refuse("loss_weights are given without labels", llama, {**short, "loss_weights": torch.ones(1, n)})
    refuse(
        "the model was given token_type_ids, which is not supported",
        llama,
        {**short, "token_type_ids": torch.ones(1, n, dtype=torch.int64)},
    )
    refuse("token_type_ids has numbers from 7 to 7", gemma3, {**short, "token_type_ids": torch.full((1, n), 7)})
    refuse(
        "slices and token types are both given", gemma3, {**pack, "token_type_ids": torch.ones(1, n, dtype=torch.int64)}
    )
    refuse("give token types, which decide its mask", pali, short)
    refuse("position_ids of documents begin with [5]", llama4, {**short, "position_ids": torch.arange(n)[None] + 5})
    refuse("needs the same distances in both", llama4, {**short, "slices": [Slice(0, n, 0, n, 3, high=0)]})
    refuse("layers that mix whole documents", hybrid, pack)
    return said


class Expressions(unittest.TestCase):
    """Mask functions of Transformers against their slices, without ranks."""

    def test_slices_are_what_mask_functions_allow(self) -> None:
        draw, left = random.Random(3), torch.zeros(1, dtype=torch.int64)
        atoms = (
            lambda: of.causal_mask_function, lambda: of.bidirectional_mask_function, lambda: of.sliding_window_overlay(draw.randint(1, 9)),
            lambda: of.sliding_window_bidirectional_overlay(draw.randint(0, 6)), lambda: of.chunked_overlay(draw.randint(1, 9), left),
            lambda: of.blockwise_overlay(numbers),
        )  # fmt: skip

        def drawn(depth: int) -> Any:
            if depth == 0 or draw.random() < 0.3:
                return draw.choice(atoms)()
            return draw.choice((of.and_masks, of.or_masks))(*(drawn(depth - 1) for _ in range(draw.randint(1, 3))))

        for _ in range(300):
            lengths = [draw.randint(0, 13) for _ in range(3)]
            ends, n = [0, *accumulate(lengths)], sum(lengths)
            given = torch.tensor([draw.choice([0, 0, 1, 2]) for _ in range(n)], dtype=torch.int64)
            known = Blocks(draw.choice([(1,), (1, 2), (0,)]), draw.random() < 0.5)
            by_document, expected = known.of(given, ends), torch.zeros(n, n, dtype=torch.bool)
            numbers = torch.full((1, 14), -1)
            function = drawn(3)
            found: list[torch.Tensor] = []
            expression = simplified(read(function, found), True, max(lengths))
            for (a, b), blocks in zip(pairwise(ends), by_document):
                numbers.fill_(-1)
                for number, block in enumerate(blocks):
                    for begin, end in block:
                        numbers[0, begin - a : end - a] = number
                q, k = torch.meshgrid(torch.arange(b - a), torch.arange(b - a), indexing="ij")
                expected[a:b, a:b] = function(torch.tensor(0), torch.tensor(0), q, k).expand(b - a, b - a)
            made = slices_of(expression, ends, by_document)
            self.assertTrue(torch.equal(allowed_by(made, n, n), expected), (expression, ends, made))
            self.assertTrue(all(one.q_begin < one.q_end for one in made))

    def test_rules_of_blocks(self) -> None:
        for known in (
            Blocks((1,), True),
            Blocks((1, 2), True),
            Blocks((0,), False),
            Blocks((0, 3), True),
            Blocks((2,), False),
        ):
            numbers = torch.full((1, len(SAMPLE)), -1)
            for at, block in enumerate(known.of(torch.tensor(SAMPLE), [0, len(SAMPLE)])[0]):
                for a, b in block:
                    numbers[0, a:b] = 5 - at  # any number for each
            numbers[numbers != -1] += 9
            self.assertEqual(rule([numbers, numbers]), known)
        self.assertIsNone(rule([]))
        self.assertIsNone(rule([torch.full((1, len(SAMPLE)), -1)]))
        with self.assertRaisesRegex(Unsupported, "neither runs of tokens"):
            rule([torch.arange(len(SAMPLE))[None]])

    def test_other_mask_functions_are_refused_by_name(self) -> None:
        with self.assertRaisesRegex(Unsupported, "lambda.*not supported.*cpattn.torch"):
            read(of.or_masks(of.causal_mask_function, lambda batch, head, q, k: q == k), [])

    def test_a_pack_of_a_group(self) -> None:
        made = SharedPrefixCollator(prompt=1)([{"prompt": [10, 11, 12], "answers": [[20, 21], [30]]}])
        self.assertEqual(made["input_ids"].tolist(), [[10, 11, 12, 20, 21, 12, 30]])
        self.assertEqual(made["position_ids"].tolist(), [[0, 1, 2, 3, 4, 2, 3]])
        self.assertEqual(made["labels"].tolist(), [[-100, 11, 12, 20, 21, -100, 30]])
        self.assertEqual(made["loss_weights"].tolist(), [[0, 2, 2, 1, 1, 0, 1]])
        expected = [one.complete for one in slices.shared_prefix(2, [3, 2])]
        self.assertEqual([Slice(*row) for row in made["slices"].tolist()], expected)
        # A row of a data set of both kinds.
        tree = {
            "prompt": None,
            "answers": None,
            "weights": None,
            "parents": [None, 0, 0],
            "tokens": [[10, 11, 12], [20, 21], [30]],
        }
        self.assertEqual(SharedPrefixCollator(prompt=1)([tree])["labels"].tolist(), made["labels"].tolist())
        for part, feature in (
            ("at least one token id", {"prompt": [1], "answers": [[]]}), ("'prompt' and 'answers'", {"text": 1}),
            ("\\['weight'\\] beside 'prompt'", {"prompt": [1], "answers": [[2]], "weight": [0.5]}),
            ("\\['parents', 'tokens'\\] beside", {"prompt": [1], "answers": [[2]], "parents": [None], "tokens": [[1]]}),
            ("2 numbers", {"prompt": [1], "answers": [[1, 2]], "weights": [[1.0]]}),
            ("\\['weights'\\] is 3", {"prompt": [1], "answers": [[1]], "weights": 3}), ("token id", {"prompt": [1.5], "answers": [[1]]}),
            ("a node before 1", {"parents": [None, 1], "tokens": [[1], [2]]}), ("2 parents", {"parents": [None, 0], "tokens": [[1]]}),
        ):  # fmt: skip
            with self.assertRaisesRegex(InvalidArgument, part):
                SharedPrefixCollator()([feature])
        with self.assertRaisesRegex(InvalidArgument, "shared is 'twice'"):
            SharedPrefixCollator(shared="twice")

    def test_weights_go_with_labels(self) -> None:
        ids, mask, weights = (
            torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0]]),
            torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]),
            torch.arange(8.0).view(2, 4),
        )
        given = {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.where(mask == 1, ids, -100),
            "loss_weights": weights,
        }
        found = pack(given)
        self.assertEqual(
            (found.labels.tolist(), found.weights.tolist(), found.count), ([6, 7, -100, 9, -100], [2, 3, 4, 5, 0], 10.0)
        )
        found = pack(given, shifted=False)
        self.assertEqual(
            (found.labels.tolist(), found.weights.tolist(), found.count), ([5, 6, 7, 8, 9], [1, 2, 3, 4, 5], 15.0)
        )
        found = pack({**given, "shift_labels": given["labels"]})
        self.assertEqual(found.weights.tolist(), [1, 2, 3, 4, 5])


class Ranks(unittest.TestCase):
    def test_loss_logits_and_gradients_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "alone")
            torch.save(_references(), file)
            for wrong in processes.run(_right, 3, file, seconds=300):
                self.assertEqual(wrong, [])

    def test_trainer_and_refusals(self) -> None:
        model = build("smollm2")
        loss = answers(model, 0.5, "each", features())
        loss.backward()
        expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in model.parameters()])
        with tempfile.TemporaryDirectory() as folder:
            for trained, parameters, said in processes.run(_second, 2, folder, seconds=300):
                self.assertLess(abs(trained - loss.item()) / loss.item(), 1e-6)
                self.assertLess(models.apart(torch.tensor(parameters), expected), 1e-6)
                for part, message in said:
                    self.assertIn(part, message)


def _second(rank: int, world: int, folder: str) -> tuple[float, list[float], list[tuple[str, str]]]:
    return *_trained(rank, world, folder), _refused(rank, world)


if __name__ == "__main__":
    unittest.main()
