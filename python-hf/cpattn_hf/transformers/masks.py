# SPDX-License-Identifier: MIT OR Apache-2.0
"""Masks of Transformers, read from a model's own mask functions: windows of documents, or slices.

A mask function of `transformers.masking_utils` is an intersection or a union of others. Each of them allows a band of distances (causal,
windows), the tokens of one chunk, or those of one block, such as an image. `read` turns the function into an expression, `simplified` makes
a window of it if it is one, and `slices_of` the slices of a batch. Documents of a pack are always separate.

A rank's model has some of the tokens, so the numbers of blocks that it computes are those of other tokens. `Blocks` is the rule by which the
numbers follow from token types. `probe` finds it, and it is applied to the types of the whole batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cpattn import UNLIMITED
from cpattn.errors import InvalidArgument, Unsupported
from cpattn import Slice

# The number of keys before its own key that a query sees, and the number of keys after it (0: causal).
Window = tuple[int, int]

# Nested tuples: ("band", low, high), limits of k - q; ("chunk", size); ("blocks",); ("and", ...) and ("or", ...) of others.
Expression = tuple[Any, ...]

_FAR = 1 << 62
NOTHING: Expression = ("or",)
EVERYTHING: Expression = ("band", -_FAR, _FAR)

# The expressions of functions in transformers.masking_utils, from the variables they are bound to.
ATOMS: dict[str, Callable[[dict[str, Any]], Expression]] = {
    "causal_mask_function": lambda bound: ("band", -_FAR, 0),
    "bidirectional_mask_function": lambda bound: EVERYTHING,
    "sliding_window_overlay": lambda bound: ("band", 1 - int(bound["sliding_window"]), _FAR),
    "sliding_window_bidirectional_overlay": lambda bound: (
        "band",
        -int(bound["sliding_window"]),
        int(bound["sliding_window"]),
    ),
    "chunked_overlay": lambda bound: ("chunk", int(bound["chunk_size"])),
    "blockwise_overlay": lambda bound: ("blocks",),
}
# These say which tokens are of one document and not padding, as the batch does.
DOCUMENTS = ("packed_sequence_mask_function", "padding_mask_function")
# These give other indices to the function that they are bound to.
RENAMING = ("remap_positions_for_packed_sequence", "add_offsets_to_mask_function")
JOINS = {"and_masks": "and", "or_masks": "or"}


class Parts(NamedTuple):
    """A mask that is no window."""

    expression: Expression

    @property
    def hull(self) -> Window:
        """A window with about as many pairs: that of the mask without its blocks."""
        low, high = _hull(self.expression)
        return UNLIMITED if low <= -_FAR else -low, UNLIMITED if high >= _FAR else high


def read(function: Callable[..., Any], numbers: list[Tensor]) -> Expression:
    """The expression of a mask function. Adds the numbers of blocks that it is bound to."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    bound = {name: cell.cell_contents for name, cell in cells}
    name = function.__qualname__.split(".")[0]
    if name in JOINS:
        return JOINS[name], *(read(part, numbers) for part in bound["mask_functions"])
    if name in RENAMING:
        return read(bound["mask_function"], numbers)
    if name in DOCUMENTS:
        return EVERYTHING
    if name not in ATOMS:
        raise Unsupported(
            f"the model's mask has the part {function.__qualname__!r}, which is not supported: only {', '.join((*ATOMS, *JOINS))} are. Use "
            "cpattn.torch, whose batches take any mask as slices"
        )
    if name == "blockwise_overlay":
        numbers.append(bound["block_sequence_ids"])
    return ATOMS[name](bound)


def simplified(expression: Expression, blocks: bool, longest: int) -> Expression:
    """The expression for documents of at most `longest` tokens, with blocks or without any."""
    name, *rest = expression
    if name == "blocks":
        return expression if blocks else NOTHING
    if name == "chunk":
        return EVERYTHING if longest <= rest[0] else expression
    if name == "band":
        return expression
    parts: list[Expression] = []
    for part in (simplified(part, blocks, longest) for part in rest):
        parts += part[1:] if part[0] == name else [part]
    if name == "or":
        return parts[0] if len(parts) == 1 else ("or", *parts)
    if NOTHING in parts:
        return NOTHING
    bands = [part for part in parts if part[0] == "band"]
    band = ("band", max((b[1] for b in bands), default=-_FAR), min((b[2] for b in bands), default=_FAR))
    others = [part for part in parts if part[0] != "band"]
    if not others:
        return band
    return (
        ("and", *others, *([band] if band != EVERYTHING else []))
        if len(others) > 1 or band != EVERYTHING
        else others[0]
    )


def window_of(expression: Expression) -> Window | Parts:
    """The window that a simplified expression is, or its parts."""
    parts = Parts(expression)
    return parts.hull if expression[0] == "band" else parts


def has(expression: Expression, name: str) -> bool:
    """Whether a part of the expression is one of this name."""
    return expression[0] == name or any(isinstance(part, tuple) and has(part, name) for part in expression[1:])


def _hull(expression: Expression) -> tuple[int, int]:
    name, *rest = expression
    if name == "band":
        return rest[0], rest[1]
    if name == "chunk":
        return 1 - rest[0], rest[0] - 1
    if name == "blocks":
        return -_FAR, _FAR
    limits = [_hull(part) for part in rest if name == "and" or part != ("blocks",)] or [(-_FAR, _FAR)]
    lows, highs = zip(*limits)
    return (max(lows), min(highs)) if name == "and" else (min(lows), max(highs))


# Blocks


# Token types that models know: text, image, video and audio.
TYPES = 4
# Types of a test, among them runs of one type, of several, and equal ones that are apart.
SAMPLE = (0, 1, 1, 0, 1, 2, 2, 0, 3, 3, 1, 0, 0, 2, 1, 3)
ARGUMENTS = ("token_type_ids", "mm_token_type_ids")


class Blocks(NamedTuple):
    """Which tokens of a document are a block, by their types: each run of tokens of these types, or all of them."""

    types: tuple[int, ...]
    runs: bool

    def members(self, types: Tensor) -> Tensor:
        """Which tokens are in a block."""
        return torch.isin(types, torch.tensor(self.types, dtype=types.dtype, device=types.device))

    def of(self, types: Tensor, cu_seqlens: Sequence[int]) -> list[list[list[tuple[int, int]]]]:
        """By document: its blocks, each a list of runs of tokens."""
        inside, begins = self.members(types), torch.zeros(len(types) + 1, dtype=torch.bool, device=types.device)
        begins[torch.tensor(cu_seqlens, device=types.device)] = True
        first = inside & (begins[:-1] | ~F.pad(inside, (1, 0))[:-1])
        last = inside & (begins[1:] | ~F.pad(inside, (0, 1))[1:])
        found: list[list[list[tuple[int, int]]]] = [[] for _ in cu_seqlens[1:]]
        for a, b in zip(first.nonzero().flatten().tolist(), last.nonzero().flatten().tolist(), strict=True):
            blocks = found[bisect_right(cu_seqlens, a) - 1]
            if self.runs or not blocks:
                blocks.append([])
            blocks[-1].append((a, b + 1))
        return found


def rule(numbers: Iterable[Tensor]) -> Blocks | None:
    """The rule that gives these numbers of blocks to the tokens of SAMPLE, one row each; None without numbers."""
    rows = {tuple(row) for one in numbers for row in one.tolist()}
    if not rows:
        return None
    types = torch.tensor(SAMPLE)
    for row in list(rows):
        inside = tuple(sorted({of for of, number in zip(SAMPLE, row, strict=True) if number >= 0}))
        for known in (Blocks(inside, True), Blocks(inside, False)):
            expected = [-1] * len(SAMPLE)
            for number, block in enumerate(known.of(types, (0, len(SAMPLE)))[0]):
                for a, b in block:
                    expected[a:b] = [number] * (b - a)
            if _renamed(row) == expected and len(rows) == 1:
                return known if inside else None
    raise Unsupported(
        f"the blocks of the model's mask, {sorted(rows)} for tokens of the types {SAMPLE}, are neither runs of tokens of some types nor all of "
        "them, which is not supported: leave token_type_ids out"
    )


def _renamed(row: Sequence[int]) -> list[int]:
    """The numbers of blocks in the order of their first tokens."""
    names: dict[int, int] = {}
    return [-1 if number < 0 else names.setdefault(number, len(names)) for number in row]


# Slices

# Queries q0..q1 and keys k0..k1, tokens of the batch, with low <= k - q <= high.
Piece = tuple[int, int, int, int, int, int]


def _both(one: Piece, other: Piece) -> Piece | None:
    q0, q1, k0, k1 = max(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2]), min(one[3], other[3])
    low, high = max(one[4], other[4], k0 - q1 + 1), min(one[5], other[5], k1 - 1 - q0)
    return (q0, q1, k0, k1, low, high) if q0 < q1 and k0 < k1 and low <= high else None


def _minus(one: Piece, other: Piece) -> Iterator[Piece]:
    """The pairs of `one` that are not in `other`."""
    if (both := _both(one, other)) is None:
        yield one
        return
    (q0, q1, k0, k1, low, high), (a, b, c, d, *_) = one, both
    rest = (
        (q0, a, k0, k1, low, high), (b, q1, k0, k1, low, high), (a, b, k0, c, low, high), (a, b, d, k1, low, high),
        (a, b, c, d, low, other[4] - 1), (a, b, c, d, other[5] + 1, high),
    )  # fmt: skip
    yield from (found for piece in rest if (found := _both(piece, piece)) is not None)


def _pieces(expression: Expression, a: int, b: int, blocks: list[list[tuple[int, int]]]) -> list[Piece]:
    """The pairs of a document that an expression allows."""
    name, *rest = expression
    whole: Piece = (a, b, a, b, -_FAR, _FAR)
    if name == "band":
        return [(*whole[:4], rest[0], rest[1])]
    if name == "chunk":
        return [(at, min(at + rest[0], b)) * 2 + whole[4:] for at in range(a, b, rest[0])]
    if name == "blocks":
        return [(*q, *k, -_FAR, _FAR) for block in blocks for q in block for k in block]
    parts = [_pieces(part, a, b, blocks) for part in rest]
    if name == "and":
        found = [whole]
        for part in parts:
            found = [both for one in found for other in part if (both := _both(one, other)) is not None]
        return found
    found = []
    for part in parts:
        before = list(found)
        for piece in part:
            left = [piece]
            for other in before:
                left = [less for one in left for less in _minus(one, other)]
            found += left
    return found


def slices_of(
    expression: Expression, cu_seqlens: Sequence[int], blocks: list[list[list[tuple[int, int]]]] | None
) -> list[Slice]:
    """The slices of a mask over documents, whose blocks are given by document. No pair is in two of them."""
    slices = []
    for at, (a, b) in enumerate(pairwise(cu_seqlens)):
        for piece in _pieces(expression, a, b, [] if blocks is None else blocks[at]):
            if (found := _both(piece, piece)) is not None:
                q0, q1, k0, k1, low, high = found
                cut = low if low > k0 - q1 + 1 else None, high if high < k1 - 1 - q0 else None
                slices.append(Slice(q0, q1, k0, k1, q0 - k0, *cut))
    return slices


def chunked(slices: Iterable[Slice], size: int, positions: Sequence[int]) -> list[Slice]:
    """The pairs of slices whose tokens are in one chunk by their positions, which each slice must count as the tokens do."""
    chunks = []
    for at, one in enumerate(slices):
        q0, q1, k0, k1, start, low, high = one.complete
        if q0 >= q1 or k0 >= k1:
            continue
        first, of_k = positions[q0], positions[k0]
        if first - of_k != start or positions[q1 - 1] - first != q1 - 1 - q0 or positions[k1 - 1] - of_k != k1 - 1 - k0:
            raise InvalidArgument(
                f"slices[{at}] is {one}, and position_ids count its tokens otherwise: from {first} to {positions[q1 - 1]} and from {of_k} to "
                f"{positions[k1 - 1]}. A model with chunked attention needs the same distances in both"
            )
        for chunk in range(first // size, (positions[q1 - 1]) // size + 1):
            a, b = max(q0, q0 + chunk * size - first), min(q1, q0 + (chunk + 1) * size - first)
            c, d = max(k0, k0 + chunk * size - of_k), min(k1, k0 + (chunk + 1) * size - of_k)
            if c < d:
                chunks.append(Slice(a, b, c, d, a - q0 + start - (c - k0), low, high))
    return chunks
