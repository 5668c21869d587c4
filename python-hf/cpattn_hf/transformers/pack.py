# SPDX-License-Identifier: MIT OR Apache-2.0
"""The inputs of one forward call as documents.

Documents are what `attention_mask`, `cu_seqlens` or `seq_idx` say: then position_ids are only the positions of tokens. Without these
arguments a document is a run of tokens of one row whose positions grow by one, as in Transformers. Padding belongs to no document and
is left out. The label of a token is the next token, but the last token of a document has no label. Models of masked words have labels
that are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cpattn.arguments import attempt, refused
from cpattn.errors import InvalidArgument, Unsupported
from cpattn import Slice
from cpattn.slices import checked
from .masks import ARGUMENTS

# Arguments of a forward call for the ends of documents. The first three have the ends, each the same if several are given.
ENDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cu_seqlens")
TAKEN = (
    "input_ids", "inputs_embeds", "position_ids", *ARGUMENTS, "attention_mask", "labels", "shift_labels", "loss_weights", "router_weights", "slices",
    "num_items_in_batch",
    *BOUNDARIES,
)  # fmt: skip


@dataclass(eq=False)
class Pack:
    """The documents of a forward call, on every rank of the group. `kept` are the places of their tokens in the flattened rows,
    `shape` is the shape of input_ids. `labels` are the labels of the tokens, -100 for none, and `types` their token types. The first
    token of a document has the position `first`. `slices` say what attends to what, if they are given, and `weights` are the factors of the
    labels' losses, `router_weights` say how often a token counts in the loss of a router. `by_positions` if only position_ids say what documents are."""

    cu_seqlens: tuple[int, ...]
    ids: Tensor
    positions: Tensor
    labels: Tensor | None
    kept: Tensor
    shape: tuple[int, int]
    types: Tensor | None = None
    first: int = 0
    slices: tuple[Slice, ...] | None = None
    weights: Tensor | None = None
    by_positions: bool = False
    router_weights: Tensor | None = None

    @property
    def count(self) -> float:
        """The number of tokens with a label; with weights, their sum."""
        if self.labels is None:
            return 0
        some = self.labels != -100
        return int(some.sum()) if self.weights is None else float(self.weights[some].double().sum())

    @property
    def reach(self) -> int:
        """The largest position plus one, if positions began with 0."""
        return int(self.positions.max()) + 1 - self.first

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return max(b - a for a, b in pairwise(self.cu_seqlens))

    def part(self, documents: Sequence[int]) -> tuple[Pack, Tensor]:
        """Some of the documents as a pack, and the indices of their tokens in this one. Without any it is the first token of this one, without a
        label, since a model does not run without a token."""
        begins, ends = self.cu_seqlens, self.cu_seqlens[1:]
        runs = [torch.arange(begins[d], ends[d]) for d in documents]
        tokens = (torch.cat(runs) if runs else torch.zeros(1, dtype=torch.int64)).to(self.ids.device)
        lengths = [len(run) for run in runs] or [1]

        def some(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[tokens]

        labels = some(self.labels) if runs else None if self.labels is None else torch.full_like(self.labels[:1], -100)
        one = replace(
            self,
            cu_seqlens=(0, *accumulate(lengths)),
            ids=self.ids[tokens],
            positions=self.positions[tokens],
            labels=labels,
            kept=self.kept[tokens],
            types=some(self.types),
            weights=some(self.weights),
            router_weights=some(self.router_weights),
        )
        return one, tokens

    def bytes(self) -> bytes:
        """Bytes that are equal for equal packs."""
        tensors = (self.ids, self.positions, self.labels, self.kept, self.types, self.weights, self.router_weights)
        parts = (b"-" if tensor is None else tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors)
        return b"".join((repr((self.cu_seqlens, self.shape, self.slices)).encode(), *parts))


def _numbers(name: str, value: Any, *shapes: tuple[int, ...]) -> Tensor:
    """A tensor of whole numbers with one of the shapes."""
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, a tensor is needed")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise InvalidArgument(f"{name}.dtype is {value.dtype}, whole numbers are needed")
    if value.shape not in shapes:
        raise InvalidArgument(
            f"{name} has the shape {tuple(value.shape)}, {' or '.join(dict.fromkeys(map(str, shapes)))} is needed"
        )
    return value


def within(name: str, numbers: Tensor, words: int | None) -> None:
    """Refuses numbers outside the model's vocabulary: some ranks would fail, and the others would wait for them."""
    if words is not None and len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < words:
        raise InvalidArgument(
            f"{name} has numbers from {int(numbers.min())} to {int(numbers.max())}, numbers from 0 to {words - 1} are needed"
        )


def _mask(mask: Any, ids: Tensor) -> Tensor:
    """Which tokens are not padding."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        kind = f"has the shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise Unsupported(
            f"attention_mask {kind}, a tensor of the shape {tuple(ids.shape)} is needed: 1 for tokens, 0 for padding"
        )
    kept = mask.bool()
    runs = (F.pad(kept, (1, 0))[:, :-1] < kept).sum(1)
    if (runs > 1).any():
        row = int((runs > 1).nonzero()[0])
        raise Unsupported(
            f"attention_mask has {int(runs[row])} runs of tokens in row {row}, 1 is needed: put padding at the ends of the row"
        )
    return kept


def slices_argument(inputs: Mapping[str, Any], tokens: int, padded: bool) -> tuple[Slice, ...] | None:
    """The slices of a call: a list of Slice, or rows of their numbers (`Slice.complete`) in a tensor."""
    if (argument := inputs.get("slices")) is None:
        return None
    if isinstance(argument, Tensor):
        if (
            argument.ndim != 2
            or argument.shape[1] != len(Slice._fields)
            or argument.is_floating_point()
            or argument.is_complex()
            or argument.dtype == torch.bool
        ):
            raise InvalidArgument(
                f"slices has the shape {tuple(argument.shape)} and the type {argument.dtype}, whole numbers (slices, 7) are needed"
            )
        argument = [Slice(*row) for row in argument.tolist()]
    slices = checked("slices", argument)
    for at, one in enumerate(slices):
        if max(one.q_end, one.k_end) > tokens:
            raise InvalidArgument(
                f"slices[{at}] is {one}, and the row has {tokens} tokens{', padding left out' * padded}: slices count the tokens of the row from 0"
            )
    if inputs.get("position_ids") is None:
        raise InvalidArgument(
            "slices are given without position_ids, which say where a token is for the model: give both"
        )
    if any(inputs.get(name) is not None for name in ARGUMENTS):
        raise Unsupported(
            "slices and token types are both given: leave token types out, and give slices that have the model's blocks"
        )
    return slices


def shared(pack: Pack) -> bool:
    """Whether tokens of a pack are shared: two tokens that slices connect, also over others, have one position, as those of answers to one prompt."""
    slices = [one for one in pack.slices or () if one.q_begin < one.q_end and one.k_begin < one.k_end]
    ends = sorted({0, len(pack.ids), *(end for one in slices for end in one[:4])})
    at = {end: i for i, end in enumerate(ends)}
    above = list(range(len(ends)))  # of the parts between two ends: one that it is connected with, or itself
    joined = list(range(len(ends)))  # the last part of a run of parts that are connected already

    def root(of: list[int], i: int) -> int:
        while of[i] != i:
            of[i] = of[of[i]]
            i = of[i]
        return i

    for one in slices:
        for begin, end in ((at[one.q_begin], at[one.q_end] - 1), (at[one.k_begin], at[one.k_end] - 1)):
            while (i := root(joined, begin)) < end:
                above[root(above, i)] = root(above, i + 1)
                joined[i] = i + 1
        above[root(above, at[one.q_begin])] = root(above, at[one.k_begin])
    counts = [b - a for a, b in pairwise(ends)]
    group = torch.tensor([root(above, i) for i in range(len(counts))]).repeat_interleave(torch.tensor(counts))
    both = torch.stack([group, pack.positions.cpu()], 1)
    return len(torch.unique(both, dim=0)) < len(both)


def _weights(name: str, inputs: Mapping[str, Any], shape: tuple[int, int]) -> Tensor | None:
    if (given := inputs.get(name)) is None:
        return None
    if not isinstance(given, Tensor) or given.shape != shape or given.is_complex() or given.dtype == torch.bool:
        kind = (
            f"has the shape {tuple(given.shape)} and the type {given.dtype}"
            if isinstance(given, Tensor)
            else f"is a {type(given).__name__}"
        )
        raise InvalidArgument(
            f"{name} {kind}, numbers of the shape {shape} are needed, one for each token of input_ids"
        )
    if name == "loss_weights" and inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise InvalidArgument(
            "loss_weights are given without labels, whose losses they multiply: give labels, or leave loss_weights out"
        )
    if not bool(torch.isfinite(given).all()):
        raise InvalidArgument(f"{name} has numbers that are not finite, finite ones are needed")
    if name == "router_weights" and (bool((given < 0).any()) or not bool(given.any())):
        raise InvalidArgument(
            "router_weights has negative numbers or no other than 0, numbers from 0 on are needed: how often each token counts in a router's loss"
        )
    return given.float()


def _from(first: int, ids: Tensor, positions: Tensor, begins: Tensor, explicit: bool, skips: bool) -> Tensor:
    """The positions in a model that counts from `first`, the number after that of the padding. Without position_ids it may leave out
    tokens with the padding's id, which random words of a collator can have."""
    if first and not explicit:
        words = ids != first - 1 if skips else torch.ones_like(ids, dtype=torch.bool)
        total = words.cumsum(0)
        before = F.pad(total, (1, 0))[begins].repeat_interleave(F.pad(begins, (0, 1), value=len(ids)).diff())
        return (total - before) * words + first - 1
    if not first:
        return positions
    # Left-padded rows counted from 0 begin with the number of their padding tokens: the same row must not depend on the others.
    firsts = sorted(set(positions[begins].tolist()))
    if firsts not in ([0], [first]):
        raise InvalidArgument(
            f"position_ids of documents begin with {firsts[:5]}, 0 in all documents or {first} in all, with which the model's own positions "
            "begin, is needed: leave position_ids out, and give attention_mask for rows or cu_seqlens for packs"
        )
    return positions + (first if firsts == [0] else 0)


def _starts(inputs: Mapping[str, Any], ids: Tensor) -> Tensor:
    """The tokens with which documents begin, as the ends of documents and `seq_idx` say."""
    rows, length = ids.shape
    starts = torch.zeros_like(ids, dtype=torch.bool)
    before: tuple[str, list[int]] | None = None
    for name in ENDS:
        if (cu := inputs.get(name)) is None:
            continue
        ends = attempt(lambda: torch.as_tensor(cu, device=ids.device).flatten())
        if ends is None or ends.is_floating_point():
            raise refused(name, cu, "a tensor or a sequence of whole numbers is needed")
        if rows != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != length or (ends.diff() < 0).any():
            raise InvalidArgument(
                f"{name} is {ends.tolist()}, and input_ids has the shape {tuple(ids.shape)}: one row is needed, and {name} from 0 "
                f"to {length}, which never decreases"
            )
        if before and before[1] != ends.tolist():
            raise InvalidArgument(
                f"{name} is {ends.tolist()} and {before[0]} is {before[1]}: give one of them, or the same ends in both"
            )
        before = (name, ends.tolist())
        starts[0, ends[:-1][ends[:-1] < length].long()] = True
    if inputs.get("seq_idx") is not None:
        numbers = _numbers("seq_idx", inputs["seq_idx"], (rows, length), (1, length)).expand(rows, length)
        starts = starts | F.pad(numbers.diff(dim=1) != 0, (1, 0))
    return starts


def _ids(inputs: Mapping[str, Any]) -> Tensor:
    """Those of the tokens, or zeros with embeddings in their place."""
    ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if ids is None and isinstance(embeddings, Tensor) and embeddings.ndim == 3 and embeddings.is_floating_point():
        return torch.zeros(embeddings.shape[:2], dtype=torch.int64, device=embeddings.device)
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise Unsupported(
            "input_ids is needed, a tensor [rows, tokens], or inputs_embeds, [rows, tokens, hidden size]: other inputs are not supported"
        )
    if embeddings is not None:
        raise InvalidArgument("input_ids and inputs_embeds are both given: give one of them")
    return ids


def _positions(inputs: Mapping[str, Any], shape: tuple[int, int]) -> Tensor | None:
    """The position_ids that say what documents are. Those of models of images have three rows, of time, height and width, which do not say
    it, or a fourth one before them, which does."""
    positions, (rows, length) = inputs.get("position_ids"), shape
    if not isinstance(positions, Tensor) or positions.ndim != 3:
        return positions
    _numbers("position_ids", positions, *((parts, n, length) for parts in (3, 4) for n in (rows, 1)))
    return positions[0] if len(positions) == 4 else None


def pack(inputs: Mapping[str, Any], first: int = 0, shifted: bool = True, skips: bool = True) -> Pack:
    """The documents of the arguments of a forward call, for a model that counts positions from `first` and `skips` padding. Labels are `shifted` if the
    label of a token is the next one. Raises InvalidArgument and Unsupported."""
    ids = _ids(inputs)
    rows, length = _numbers("input_ids", ids, tuple(ids.shape)).shape
    if not ids.numel():
        name = "inputs_embeds" if inputs.get("input_ids") is None else "input_ids"
        raise InvalidArgument(
            f"{name} has {rows} rows of {length} tokens, at least one token is needed: leave out an empty batch, on all ranks"
        )
    kept = _mask(inputs.get("attention_mask"), ids)
    places = torch.arange(length, device=ids.device).expand(rows, length)
    starts = places == 0
    if inputs.get("attention_mask") is not None:  # it may number the documents: 1, 1, 2, 2, 2, 0
        starts = starts | F.pad((inputs["attention_mask"].diff(dim=1) != 0) & kept[:, 1:] & kept[:, :-1], (1, 0))
    starts = starts | _starts(inputs, ids)
    told = any(inputs.get(name) is not None for name in ("attention_mask", "seq_idx", *ENDS))
    positions = _positions(inputs, (rows, length))
    given = positions is not None
    if positions is None:
        positions = places - torch.where(starts, places, 0).cummax(1).values
    positions = _numbers("position_ids", positions, (rows, length), (1, length)).expand(rows, length)
    if not told:
        starts = starts | F.pad(positions.diff(dim=1) != 1, (1, 0))
    starts = starts | (kept & ~F.pad(kept, (1, 0))[:, :-1])
    places = kept.flatten().nonzero().flatten()
    if len(places) == 0:
        raise InvalidArgument("attention_mask leaves no token of input_ids, at least one is needed")
    begins = starts.flatten()[places].nonzero().flatten()
    padded = len(places) < ids.numel()
    slices = slices_argument(inputs, len(places), padded)
    if slices is not None and (rows != 1 or (padded and not kept[0, 0])):
        where = ", with padding at the left" * padded
        raise Unsupported(
            f"slices are given, and input_ids has {rows} rows{where}: one row is needed, with padding at the right"
        )
    weights, counts = (_weights(name, inputs, (rows, length)) for name in ("loss_weights", "router_weights"))
    labels = inputs.get("shift_labels")
    if labels is not None and not shifted:
        raise Unsupported("shift_labels is given to a model of masked words, whose labels are not shifted: give labels")
    if labels is not None:
        labels = _numbers("shift_labels", labels, (rows, length)).flatten()[places]
    elif inputs.get("labels") is not None:
        labels = _numbers("labels", inputs["labels"], (rows, length)).flatten()[places]
    if weights is not None:
        weights = weights.flatten()[places]
    if shifted and labels is not None and inputs.get("shift_labels") is None:
        labels = F.pad(labels[1:], (0, 1), value=-100)
        labels[torch.cat([begins[1:], begins.new_tensor([len(places)])]) - 1] = -100
        weights = None if weights is None else F.pad(weights[1:], (0, 1))
    types = None
    for name in ARGUMENTS:
        if (said := inputs.get(name)) is not None:
            types = _numbers(name, said, (rows, length)).flatten()[places]
    tokens = ids.flatten()[places]
    positions = positions.flatten()[places]
    positions = positions + first if slices is not None else _from(first, tokens, positions, begins, given, skips)
    ends = (*begins.tolist(), len(places))
    return Pack(
        ends,
        tokens,
        positions,
        labels,
        places,
        (rows, length),
        types,
        first,
        slices,
        weights,
        given and not told,
        None if counts is None else counts.flatten()[places],
    )
