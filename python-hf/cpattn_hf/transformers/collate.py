# SPDX-License-Identifier: MIT OR Apache-2.0
"""Packs of answers that share a prompt, and of trees of turns: each token is computed once, and the loss is that of the answers one by one.

The first token of an answer is predicted from the last token of the prompt, by each answer its own. A token of a pack has one label, so
the last token before a branching is not in the shared part: each branch begins with a copy of it, at the same position. The copies see
the same tokens and have the same hidden state as the token would have. Heads that predict further tokens need more of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpattn.arguments import attempt, listed, refused, whole
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
    with "once" it counts once. With heads that predict up to `ahead` tokens further on than the next one (`ContextParallel.mtp`), the
    last `ahead + 1` tokens before a branching are copies.

    The result has `input_ids`, `position_ids`, `labels`, `slices` and, unless all factors are 1, `loss_weights`; and `router_weights`, unless all are 1: how
    often a token counts in the loss of a router of experts, which is for each answer or once too, whatever its factor.
    """

    def __init__(self, *, prompt: float = 0.0, shared: str = "each", ahead: int = 0) -> None:
        if shared not in ("each", "once"):
            raise refused("shared", shared, "'each' or 'once' is needed")
        if isinstance(prompt, bool) or (factor := attempt(float, prompt)) is None:
            raise refused("prompt", prompt, "a number is needed")
        self.prompt, self.shared, self.ahead = factor, shared, whole("ahead", ahead, 0, 2**31)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        pack, slices = _Pack(), list[Slice]()
        for at, feature in enumerate(features):
            begin = len(pack.ids)
            parents, lengths = self._add(f"features[{at}]", feature, pack)
            slices += moved(
                (one for one in tree(parents, lengths) if one.q_begin < one.q_end and one.k_begin < one.k_end), begin
            )
        if not pack.ids:
            raise InvalidArgument("features is empty, at least one group or tree is needed")
        columns = {"input_ids": pack.ids, "position_ids": pack.positions, "labels": pack.labels}
        out = {name: torch.tensor([row], dtype=torch.int64) for name, row in columns.items()}
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
        tails: dict[int, list[_Token]] = {}  # the last tokens of nodes, which each child begins with
        # A node, then all below its first child, ...: so a token that is predicted follows the one that predicts it.
        left = [i for i, parent in reversed(list(enumerate(parents))) if parent is None]
        while left:
            i = left.pop()
            left += reversed(children[i])
            parent, run = parents[i], list[_Token]()
            times = leaves[i] if self.shared == "each" else 1
            if parent is not None:
                starts[i] = starts[parent] + len(tokens[parent])
                first = i == children[parent][0]
                for one in tails.get(parent, ()):
                    count = leaves[i] if self.shared == "each" else one.times * first
                    run.append(_Token(one.token, one.weight * first, count))
            begin = starts[i] - len(run)
            run += [_Token(token, weight * times, times) for token, weight in zip(tokens[i], weights[i])]
            if parent is None:
                run[0] = run[0]._replace(weight=0.0)  # nothing predicts it
            # Only a branching needs copies; what is further above one may be among the last tokens before it.
            if len(children[i]) > 1 or (children[i] and self.ahead):
                tail_begin = max(len(run) - 1 - self.ahead, 0)
                tails[i], run = run[tail_begin:], run[:tail_begin]
            pack.add(begin, run)
            runs[i] = len(lengths)
            lengths.append(len(run))
            above.append(None if parent is None else runs[parent])
        return above, lengths

    def _tree(
        self, name: str, feature: Mapping[str, Any]
    ) -> tuple[list[int | None], list[list[int]], list[list[float]]]:
        """Parents, tokens and factors of the nodes of a group or tree."""
        column, has = feature.get("weights"), {key for key, value in feature.items() if value is not None}
        if feature.get("answers") is not None:  # a data set of both kinds has None in the columns of the other
            answers = listed(f"{name}['answers']", feature["answers"])
            parents: list[int | None] = [None, *(0 for _ in answers)]
            runs = [feature.get("prompt"), *answers]
            factors = [self.prompt, *([1.0] * len(answers) if column is None else listed(f"{name}['weights']", column))]
        elif feature.get("tokens") is not None:
            runs, parents = (
                listed(f"{name}['tokens']", feature["tokens"]),
                listed(f"{name}['parents']", feature.get("parents", ())),
            )
            factors = (
                [self.prompt if parent is None else 1.0 for parent in parents]
                if column is None
                else listed(f"{name}['weights']", column)
            )
        else:
            raise InvalidArgument(
                f"{name} has {sorted(has)}, 'prompt' and 'answers', or 'parents' and 'tokens', are needed"
            )
        read = ("prompt", "answers", "weights") if "answers" in has else ("parents", "tokens", "weights")
        if others := sorted(has.difference(read)):
            raise InvalidArgument(
                f"{name} has {others} beside {', '.join(map(repr, read))}, which nothing reads: remove these columns from the data set"
            )
        if not len(parents) == len(runs) == len(factors):
            raise InvalidArgument(
                f"{name} has {len(runs)} runs of tokens, {len(parents)} parents and {len(factors)} weights: equally many are needed"
            )
        for i, parent in enumerate(parents):
            if parent is not None:
                above = attempt(operator.index, parent)
                if above is None or not 0 <= above < i:
                    raise refused(f"{name}['parents'][{i}]", parent, f"a node before {i}, or None, is needed")
                parents[i] = above
        tokens, weights = [], []
        for i, (run, factor) in enumerate(zip(runs, factors)):
            ids = attempt(lambda run=run: [operator.index(token) for token in run])
            if not ids:
                raise refused(f"the run {i} of tokens of {name}", run, "at least one token id is needed")
            values = factor.tolist() if hasattr(factor, "tolist") else factor
            each = attempt(
                lambda values=values: (
                    list(map(float, values)) if isinstance(values, Sequence) else [float(values)] * len(ids)
                )
            )
            if each is None or len(each) != len(ids):
                raise refused(
                    f"{name}['weights'] of the run {i}",
                    factor,
                    f"a number, or {len(ids)} numbers, one for each token, are needed",
                )
            tokens.append(ids)
            weights.append(each)
        return parents, tokens, weights


class _Token(NamedTuple):
    """A token of a pack, with its factor in the loss, and how often it counts for a router."""

    token: int
    weight: float
    times: int


class _Pack:
    """The lists of a pack."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.labels: list[int] = []
        self.weights: list[float] = []
        self.counts: list[int] = []

    def add(self, position: int, tokens: list[_Token]) -> None:
        """Tokens at these positions. Without a factor a token has no label."""
        for at, one in enumerate(tokens):
            self.ids.append(one.token)
            self.positions.append(position + at)
            self.labels.append(one.token if one.weight else -100)
            self.weights.append(one.weight)
            self.counts.append(one.times)
