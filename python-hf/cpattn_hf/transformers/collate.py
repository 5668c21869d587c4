# SPDX-License-Identifier: MIT OR Apache-2.0
"""Packs of answers that share a prompt, and of trees of turns: each token is computed once, and the loss is that of the answers one by one.

The first token of an answer is predicted from the last token of the prompt, by each answer its own. A token of a pack has one label, so
the last token before a branching is not in the shared part: each branch begins with a copy of it, at the same position. The copies see
the same tokens and have the same hidden state as the token would have.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cpattn.arguments import attempt, listed, refused
from cpattn.errors import InvalidArgument
from cpattn import Slice
from cpattn.slices import checked, moved, tree


def encode_slices(slices: Iterable[Slice]) -> Tensor:
    """Slices as a tensor [slices, 7] for the argument `slices` of a model: data loaders and trainers keep tensors, and take lists apart."""
    return torch.tensor(checked("slices", slices), dtype=torch.int64).reshape(-1, len(Slice._fields))


class SharedPrefixCollator:
    """Makes a pack of one row from groups, `{"prompt": ids, "answers": [ids, ...]}`, and trees, `{"parents": [None, 0, 0, ...],
    "tokens": [ids, ...]}`, in which node i has the parent parents[i], a node before it. Each node sees its ancestors and itself.

    All tokens of answers have labels, and tokens of prompts (of nodes without a parent) count with the factor `prompt` in the loss; 0 leaves
    them out. A group or a tree may have `weights`: a factor for each answer or node, or a list with one for each of its tokens. With
    `shared="each"` a token of several answers counts once for each, as if every answer were a row with a copy of all tokens before it;
    with "once" it counts once.

    The result has `input_ids`, `position_ids`, `labels`, `slices` and, unless all factors are 1, `loss_weights`; and `router_weights`, unless all are 1: how
    often a token counts in the loss of a router of experts, which is for each answer or once too, whatever its factor.
    """

    def __init__(self, *, prompt: float = 0.0, shared: str = "each") -> None:
        if shared not in ("each", "once"):
            raise refused("shared", shared, "'each' or 'once' is needed")
        if isinstance(prompt, bool) or (factor := attempt(float, prompt)) is None:
            raise refused("prompt", prompt, "a number is needed")
        self.prompt, self.shared = factor, shared

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        pack, slices = _Pack(), list[Slice]()
        for at, feature in enumerate(features):
            begin = len(pack.ids)
            parents, lengths = self._add(f"features[{at}]", feature, pack)
            slices += moved((one for one in tree(parents, lengths) if one.q_begin < one.q_end and one.k_begin < one.k_end), begin)
        if not pack.ids:
            raise InvalidArgument("features is empty, at least one group or tree is needed")
        made = {"input_ids": pack.ids, "position_ids": pack.positions, "labels": pack.labels}
        out = {name: torch.tensor([row], dtype=torch.int64) for name, row in made.items()}
        if any(weight != 1 for weight, label in zip(pack.weights, pack.labels) if label != -100):
            out["loss_weights"] = torch.tensor([pack.weights], dtype=torch.float32)
        if any(count != 1 for count in pack.counts):
            out["router_weights"] = torch.tensor([pack.counts], dtype=torch.float32)
        return out | {"slices": encode_slices(slices)}

    def _add(self, name: str, feature: Mapping[str, Any], pack: _Pack) -> tuple[list[int | None], list[int]]:
        """Adds the tokens of a group or tree. Returns parents and lengths of its runs in the pack, in their order."""
        parents, tokens, weights = self._tree(name, feature)
        children: list[list[int]] = [[] for _ in parents]
        for i, parent in enumerate(parents):
            if parent is not None:
                children[parent].append(i)
        leaves = [0] * len(parents)
        for i in reversed(range(len(parents))):
            leaves[i] = sum(leaves[child] for child in children[i]) or 1
        starts, runs, lengths, above = [0] * len(parents), dict[int, int](), list[int](), list[int | None]()
        # A node, then all below its first child, ...: so a token that is predicted follows the one that predicts it.
        left = [i for i, parent in reversed(list(enumerate(parents))) if parent is None]
        while left:
            i = left.pop()
            left += reversed(children[i])
            parent, before = parents[i], len(pack.ids)
            times = leaves[i] if self.shared == "each" else 1
            own = [(token, weight * times) for token, weight in zip(tokens[i], weights[i])]
            if parent is not None:
                starts[i] = starts[parent] + len(tokens[parent])
                if len(children[parent]) > 1:
                    last = pack.held[parent] if i == children[parent][0] else (pack.held[parent][0], 0.0)
                    first = i == children[parent][0]
                    pack.add(starts[i] - 1, [last], -1, leaves[i] if self.shared == "each" else int(first))
            if len(children[i]) > 1:
                pack.held[i] = (own[-1][0], own[-1][1] if starts[i] + len(own) > 1 else 0.0)
                own = own[:-1]
            pack.add(starts[i], own, 0 if parent is None else -1, times)
            runs[i] = len(lengths)
            lengths.append(len(pack.ids) - before)
            above.append(None if parent is None else runs[parent])
        pack.held.clear()
        return above, lengths

    def _tree(self, name: str, feature: Mapping[str, Any]) -> tuple[list[int | None], list[list[int]], list[list[float]]]:
        """Parents, tokens and factors of the nodes of a group or tree."""
        told, has = feature.get("weights"), {key for key, value in feature.items() if value is not None}
        if feature.get("answers") is not None:  # a data set of both kinds has None in the columns of the other
            answers = listed(f"{name}['answers']", feature["answers"])
            parents: list[int | None] = [None, *(0 for _ in answers)]
            given = [feature.get("prompt"), *answers]
            factors = [self.prompt, *([1.0] * len(answers) if told is None else listed(f"{name}['weights']", told))]
        elif feature.get("tokens") is not None:
            given, parents = listed(f"{name}['tokens']", feature["tokens"]), listed(f"{name}['parents']", feature.get("parents", ()))
            factors = [self.prompt if parent is None else 1.0 for parent in parents] if told is None else listed(f"{name}['weights']", told)
        else:
            raise InvalidArgument(f"{name} has {sorted(has)}, 'prompt' and 'answers', or 'parents' and 'tokens', are needed")
        read = ("prompt", "answers", "weights") if "answers" in has else ("parents", "tokens", "weights")
        if others := sorted(has.difference(read)):
            raise InvalidArgument(f"{name} has {others} beside {', '.join(map(repr, read))}, which nothing reads: remove these columns from the data set")
        if not len(parents) == len(given) == len(factors):
            raise InvalidArgument(f"{name} has {len(given)} runs of tokens, {len(parents)} parents and {len(factors)} weights: equally many are needed")
        for i, parent in enumerate(parents):
            if parent is not None:
                above = attempt(operator.index, parent)
                if above is None or not 0 <= above < i:
                    raise refused(f"{name}['parents'][{i}]", parent, f"a node before {i}, or None, is needed")
                parents[i] = above
        tokens, weights = [], []
        for i, (run, factor) in enumerate(zip(given, factors)):
            ids = attempt(lambda run=run: [operator.index(token) for token in run])
            if not ids:
                raise refused(f"the run {i} of tokens of {name}", run, "at least one token id is needed")
            said = factor.tolist() if hasattr(factor, "tolist") else factor
            each = attempt(lambda said=said: list(map(float, said)) if isinstance(said, Sequence) else [float(said)] * len(ids))
            if each is None or len(each) != len(ids):
                raise refused(f"{name}['weights'] of the run {i}", factor, f"a number, or {len(ids)} numbers, one for each token, are needed")
            tokens.append(ids)
            weights.append(each)
        return parents, tokens, weights


class _Pack:
    """The lists of a pack. `held` are the last tokens of nodes with several children, with their factors."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.labels: list[int] = []
        self.weights: list[float] = []
        self.counts: list[int] = []
        self.held: dict[int, tuple[int, float]] = {}

    def add(self, position: int, tokens: list[tuple[int, float]], first: int, count: int) -> None:
        """Tokens with their factors, which count so often for a router. Without a factor, and at the place `first`, a token has no label."""
        for at, (token, weight) in enumerate(tokens):
            labeled = weight != 0 and at != first
            self.ids.append(token)
            self.positions.append(position + at)
            self.labels.append(token if labeled else -100)
            self.weights.append(weight if labeled else 0.0)
            self.counts.append(count)
