# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log-probabilities of completions that share prompts, for GRPO and RLOO: each prompt is computed once, not once for each of its completions.

TRL gives the model rows: a prompt with padding at the left, then a completion with padding at the right. `packed` makes one row of them, in
which rows with the same prompt are a tree, as in collate.py: the prompt without its last token, and for each completion a copy of that token
and the completion. The copy predicts the completion's first token. The policy's passes, those before an update and those of the reference
all go this way, since TRL computes all of them by one method; what it makes of the numbers is its own.

A row whose completion is masked (`mask_truncated_completions`) has no number but its prompt counts in the loss of a router.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpattn.errors import Unsupported
from cpattn.slices import tree
from .collate import encode_slices


class Packed(NamedTuple):
    """Arguments of the model, and the places in its one row of the numbers of the completions' tokens, each with its row and its column."""

    inputs: dict[str, Tensor]
    places: Tensor
    rows: Tensor
    columns: Tensor


def packed(input_ids: Tensor, attention_mask: Tensor, completion: int) -> Packed:
    """Rows whose last `completion` columns are completions, as a pack of trees."""
    begin = input_ids.shape[1] - completion
    mask = attention_mask.bool()
    if bool((mask[:, begin:].int().diff(dim=1) > 0).any()):
        raise Unsupported(
            "share_prompts is True, and attention_mask has padding before or inside of completions: leave share_prompts out"
        )
    every, masks = input_ids.tolist(), mask.tolist()
    groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for row, (ids, present) in enumerate(zip(every, masks, strict=True)):
        prompt = tuple(token for token, one in zip(ids[:begin], present[:begin], strict=True) if one)
        groups.setdefault(prompt, []).append(
            (row, [token for token, one in zip(ids[begin:], present[begin:], strict=True) if one])
        )
    pack = _Pack()
    for prompt, members in groups.items():
        answers = [(row, answer) for row, answer in members if answer]
        empty = len(members) - len(answers)
        if len(answers) < 2 or len(prompt) < 2:  # one row, or nothing to share
            for number, (row, answer) in enumerate(answers or members[:1]):
                pack.add(None, 0, prompt, row, answer, 1 + (empty if answers else empty - 1) * (number == 0))
            continue
        root = pack.add(None, 0, prompt[:-1], -1, [], len(members))
        for number, (row, answer) in enumerate(answers):
            pack.add(root, len(prompt) - 1, prompt[-1:], row, answer, 1 + empty * (number == 0))
    return pack.packed(input_ids.device)


class _Pack:
    """The lists of a pack, and its runs of tokens with their parents."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.labels: list[int] = []
        self.counts: list[int] = []
        self.parents: list[int | None] = []
        self.lengths: list[int] = []
        self.numbers: list[tuple[int, int, int]] = []

    def add(
        self, parent: int | None, position: int, prompt: tuple[int, ...], row: int, answer: list[int], count: int
    ) -> int:
        """Adds tokens of a prompt, which count so often for a router, and an answer. Returns the number of the run."""
        begin, tokens = len(self.ids), [*prompt, *answer]
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        self.counts += [count] * len(prompt) + [1] * len(answer)
        self.labels += [-100] * len(tokens)
        for column, token in enumerate(answer):
            if (
                place := begin + len(prompt) + column - 1
            ) >= begin:  # without a prompt nothing predicts the first token
                self.labels[place] = token
                self.numbers.append((place, row, column))
        self.parents.append(parent)
        self.lengths.append(len(tokens))
        return len(self.lengths) - 1

    def packed(self, device: torch.device) -> Packed:
        def row(numbers: list[int]) -> Tensor:
            return torch.tensor([numbers], dtype=torch.int64, device=device)

        slices = [
            one for one in tree(self.parents, self.lengths) if one.q_begin < one.q_end and one.k_begin < one.k_end
        ]
        inputs = {
            "input_ids": row(self.ids), "position_ids": row(self.positions), "shift_labels": row(self.labels), "slices": encode_slices(slices).to(device),
            "router_weights": row(self.counts).float(),
        }  # fmt: skip
        places, rows, columns = torch.tensor(self.numbers, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
        return Packed(inputs, places, rows, columns)


def log_probabilities(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, entropy: bool, router: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities and entropies of the completions' tokens, `[rows, completion]`, 0 at padding, and the router's loss."""
    pack = packed(input_ids, attention_mask, completion)
    out = model(**pack.inputs, fused_lm_head=True, **({"output_router_logits": True} if router else {}))

    def rows(numbers: Tensor) -> Tensor:
        return numbers.new_zeros(len(input_ids), completion).index_put(
            (pack.rows, pack.columns), numbers[0, pack.places]
        )

    return rows(out.log_probs), rows(out.entropy) if entropy else None, out.aux_loss if router else None
