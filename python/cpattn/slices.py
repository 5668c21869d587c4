# SPDX-License-Identifier: MIT OR Apache-2.0
"""Slices: which queries of a batch attend to which keys. Makers of the slices of masks that people train.

The names are those of the Rust module `cpattn::slices`. In the pictures a row is a query, a column a key, and `#` a pair that is
allowed. A maker counts tokens from 0; `moved` shifts its slices to another place of a pack.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from ctypes import Array, c_int32, c_int64
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from . import _header
from .arguments import RANGES, attempt, c_structs, instances, listed, refused, whole
from ._header import UNLIMITED
from ._signature import resolved
from .errors import InvalidArgument

__all__ = [
    "block_causal",
    "block_diffusion",
    "checked",
    "chunks",
    "documents",
    "from_dense",
    "moved",
    "pairs",
    "picture",
    "prefix_lm",
    "shared_prefix",
    "spans",
    "tree",
]

# No lower limit.
_LEAST = RANGES[c_int64][0]
_TOKENS = RANGES[c_int32][1]

# The most tokens of one side that `from_dense` takes.
DENSE = 4096


@resolved
class Slice(NamedTuple):
    """Queries `q_begin`..`q_end` and keys `k_begin`..`k_end`, tokens of the whole batch, the ends excluded, and a band.

    In the slice the first key is at position 0 and the first query at `q_start`; without it, the last query is at the position of
    the last key. A query attends to a key if `low` <= k_pos - q_pos <= `high` (None: no limit; `high=0` is causal), and if the window
    of the layer allows the distance too.

    A token may be in several slices, a pair of tokens in one at most. A query that attends to nothing has o 0 and lse -inf.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    q_start: int | None = None
    low: int | None = None
    high: int | None = None

    @property
    def complete(self) -> Slice:
        """The same slice with a number in each field: that of the C interface for no limit."""
        start, low, high = self.q_start, self.low, self.high
        if start is None:
            start = self.k_end - self.k_begin - (self.q_end - self.q_begin)
        return Slice(*self[:4], start, _LEAST if low is None else low, UNLIMITED if high is None else high)

    def allows(self, q: int, k: int) -> bool:
        """Whether token `q` attends to token `k`, by this slice alone."""
        q, k = whole("q", q, 0, _TOKENS), whole("k", k, 0, _TOKENS)
        if not (self.q_begin <= q < self.q_end and self.k_begin <= k < self.k_end):
            return False
        *_, start, low, high = self.complete
        distance = (k - self.k_begin) - (q - self.q_begin + start)  # type: ignore[operator]
        return low <= distance <= high  # type: ignore[operator]


def checked(name: str, slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Slices with a number in each field, of the C interface's ranges: equal if they mean the same."""
    items = instances(name, slices, Slice)
    for at, item in enumerate(items):
        for field, value in zip(item._fields, item):
            if value is not None or field not in Slice._field_defaults:
                whole(
                    f"{name}[{at}].{field}",
                    value,
                    *(RANGES[c_int64] if field in Slice._field_defaults else (0, _TOKENS)),
                )
    return tuple(Slice(*map(operator.index, item.complete)) for item in items)  # type: ignore[arg-type]


def c_slices(slices: Sequence[Slice]) -> Array[Any]:
    """Checked slices for the C interface, which takes at least one: no slice is one that allows nothing."""
    rows: Array[Any] = c_structs("slices", _header.Slice, slices or [Slice(0, 0, 0, 0, 0, 0, 0)], Slice)
    return rows


def picture(slices: Iterable[Slice], q_tokens: int, k_tokens: int | None = None) -> str:
    """The mask as text, a line for each query.

    >>> print(picture([Slice(0, 3, 0, 3, high=0)], 3))
    #..
    ##.
    ###
    """
    q_tokens = whole("q_tokens", q_tokens, 0, DENSE)
    k_tokens = q_tokens if k_tokens is None else whole("k_tokens", k_tokens, 0, DENSE)
    every = checked("slices", slices)
    rows = [bytearray(b"." * k_tokens) for _ in range(q_tokens)]
    for q_begin, q_end, k_begin, k_end, start, low, high in every:
        for q in range(max(q_begin, 0), min(q_end, q_tokens)):
            here = k_begin + q - q_begin + start  # type: ignore[operator]
            begin, end = max(k_begin, here + low, 0), min(k_end, here + high + 1, k_tokens)  # type: ignore[operator]
            if begin < end:
                rows[q][begin:end] = b"#" * (end - begin)
    return "\n".join(row.decode() for row in rows)


def moved(slices: Iterable[Slice], by: int, by_k: int | None = None) -> list[Slice]:
    """The slices with all q tokens `by` later, and all k tokens `by_k` later (`by`): for packs of several groups.

    >>> print(picture(documents([0, 2]) + moved(shared_prefix(1, [1, 1]), 2), 5))
    #....
    ##...
    ..#..
    ..##.
    ..#.#
    """
    by = whole("by", by, -_TOKENS, _TOKENS)
    by_k = by if by_k is None else whole("by_k", by_k, -_TOKENS, _TOKENS)
    every = instances("slices", slices, Slice)
    return [Slice(s.q_begin + by, s.q_end + by, s.k_begin + by_k, s.k_end + by_k, *s[4:]) for s in every]


def _numbers(name: str, values: Any, most: int = _TOKENS) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    return [whole(f"{name}[{at}]", value, 0, most) for at, value in enumerate(listed(name, values))]


def _documents(cu_seqlens: Any) -> list[tuple[int, int]]:
    """First token and end of each document."""
    ends = _numbers("cu_seqlens", cu_seqlens)
    if not ends or ends[0] or sorted(ends) != ends:
        raise refused("cu_seqlens", ends, "0 and then the end of each document is needed")
    return list(pairwise(ends))


def _one_each(name: str, values: list[Any], of: str, count: int) -> None:
    if len(values) != count:
        raise InvalidArgument(f"{name} has length {len(values)}, {count} is needed: one for each {of}")


def documents(cu_seqlens: Iterable[int]) -> list[Slice]:
    """Causal documents: the mask of a batch without slices.

    >>> print(picture(documents([0, 2, 5]), 5))
    #....
    ##...
    ..#..
    ..##.
    ..###
    """
    return [Slice(a, b, a, b, high=0) for a, b in _documents(cu_seqlens)]


def shared_prefix(prefix: int, branches: Iterable[int]) -> list[Slice]:
    """A prompt of `prefix` tokens and several answers to it, of these lengths: each answer sees the prompt and itself, and its
    positions follow the prompt's.

    >>> print(picture(shared_prefix(2, [2, 1]), 5))
    #....
    ##...
    ###..
    ####.
    ##..#
    """
    lengths = _numbers("branches", branches)
    return tree([None, *(0 for _ in lengths)], [whole("prefix", prefix, 0, _TOKENS), *lengths])


def tree(parents: Iterable[int | None], lengths: Iterable[int]) -> list[Slice]:
    """A tree of turns, packed in the order of its nodes: node i has lengths[i] tokens and the parent parents[i], a node before it, or
    None. Each node sees its ancestors and itself, causally, and its positions follow its parent's.

    >>> print(picture(tree([None, 0, 0, 1], [2, 1, 1, 2]), 6))
    #.....
    ##....
    ###...
    ##.#..
    ###.#.
    ###.##
    """
    above, sizes = listed("parents", parents), _numbers("lengths", lengths)
    _one_each("parents", above, "entry of lengths", len(sizes))
    for i, parent in enumerate(above):
        if parent is not None and not 0 <= (attempt(operator.index, parent) or 0) < i:
            raise refused(f"parents[{i}]", parent, f"a node before {i}, or None, is needed")
        above[i] = parent if parent is None else whole(f"parents[{i}]", parent, 0, i)
    nodes, slices = list(pairwise(accumulate(sizes, initial=0))), []
    for i, (begin, end) in enumerate(nodes):
        # From the node to the root. Runs of tokens that touch are one slice.
        path, at = [list(nodes[i])], above[i]
        while at is not None:
            first, last = nodes[at]
            if last == path[-1][0]:
                path[-1][0] = first
            else:
                path.append([first, last])
            at = above[at]
        position = sum(b - a for a, b in path) - (end - begin)  # of the node's first token
        for a, b in reversed(path):
            slices.append(Slice(begin, end, a, b, position, high=0))
            position -= b - a
    return slices


def prefix_lm(cu_seqlens: Iterable[int], prefixes: Iterable[int]) -> list[Slice]:
    """Causal documents whose first tokens, prefixes[d] of document d, see each other in both directions.

    >>> print(picture(prefix_lm([0, 5], [3]), 5))
    ###..
    ###..
    ###..
    ####.
    #####
    """
    runs, lengths, slices = _documents(cu_seqlens), _numbers("prefixes", prefixes), []
    _one_each("prefixes", lengths, "document", len(runs))
    for d, ((a, b), prefix) in enumerate(zip(runs, lengths)):
        end = a + whole(f"prefixes[{d}]", prefix, 0, b - a)
        slices += [Slice(a, end, a, end), Slice(end, b, a, b, high=0)]
    return slices


def _blocks(name: str, cu_seqlens: Any, size: int) -> Iterator[tuple[int, int, int]]:
    """First token and end of each block of a document, after the first token of the document."""
    size = whole(name, size, 1, _TOKENS)
    return ((a, at, min(at + size, b)) for a, b in _documents(cu_seqlens) for at in range(a, b, size))


def chunks(cu_seqlens: Iterable[int], chunk: int) -> list[Slice]:
    """Documents in chunks of `chunk` tokens: a query sees its own chunk, causally.

    >>> print(picture(chunks([0, 5], 2), 5))
    #....
    ##...
    ..#..
    ..##.
    ....#
    """
    return [Slice(a, b, a, b, high=0) for _, a, b in _blocks("chunk", cu_seqlens, chunk)]


def block_causal(cu_seqlens: Iterable[int], block: int) -> list[Slice]:
    """Documents in blocks of `block` tokens, which see each other and all blocks before.

    >>> print(picture(block_causal([0, 5], 2), 5))
    ##...
    ##...
    ####.
    ####.
    #####
    """
    return [Slice(a, b, first, b) for first, a, b in _blocks("block", cu_seqlens, block)]


def spans(cu_seqlens: Iterable[int], spans: Iterable[tuple[int, int]]) -> list[Slice]:
    """Causal documents in which the tokens of each span [begin, end), such as those of an image, see each other in both directions.
    Spans do not overlap, and each lies in one document.

    >>> print(picture(spans([0, 5], [(1, 4)]), 5))
    #....
    ####.
    ####.
    ####.
    #####
    """
    runs = _documents(cu_seqlens)
    slices = [Slice(a, b, a, b, high=0) for a, b in runs]
    for at, span in enumerate(listed("spans", spans, "pairs of tokens")):
        ends = attempt(lambda span=span: tuple(map(operator.index, span)))
        if ends is None or len(ends) != 2 or not any(a <= ends[0] <= ends[1] <= b for a, b in runs):
            raise refused(f"spans[{at}]", span, "(begin, end) inside of one document is needed")
        slices.append(Slice(*ends, *ends, low=1))
    return slices


def block_diffusion(tokens: int, block: int) -> list[Slice]:
    """Block diffusion over one sequence of `tokens` tokens: its noisy copy, then its clean copy. A noisy block sees itself and the clean
    blocks before it; a clean block sees itself and the clean blocks before it. In the slices the positions of both copies are those
    of the sequence; give a model's rotary embedding the positions of the sequence twice.

    >>> print(picture(block_diffusion(4, 2), 8))
    ##......
    ##......
    ..####..
    ..####..
    ....##..
    ....##..
    ....####
    ....####
    """
    tokens, slices = whole("tokens", tokens, 0, _TOKENS // 2), []
    for _, a, b in _blocks("block", [0, tokens], block):
        slices.append(Slice(a, b, a, b))
        if a:
            slices.append(Slice(a, b, tokens, tokens + a, a))
        slices.append(Slice(tokens + a, tokens + b, tokens, tokens + b))
    return slices


def pairs(pairs: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> list[Slice]:
    """Runs of queries [begin, end), each with the run of keys to which all of them attend: cross-attention, or joint attention of
    images and their texts.

    >>> print(picture(pairs([((0, 2), (0, 3)), ((2, 4), (3, 5))]), 4, 5))
    ###..
    ###..
    ...##
    ...##
    """
    slices = []
    for at, pair in enumerate(listed("pairs", pairs, "pairs of runs")):
        ends = attempt(lambda pair=pair: [operator.index(token) for run in pair for token in run])
        if ends is None or len(ends) != 4:
            raise refused(f"pairs[{at}]", pair, "((q_begin, q_end), (k_begin, k_end)) is needed")
        slices.append(Slice(*ends))
    return slices


def _runs(row: bytes) -> Iterator[tuple[int, int]]:
    """The runs of ones."""
    end = 0
    while (begin := row.find(1, end)) >= 0:
        end = row.find(0, begin)
        end = len(row) if end < 0 else end
        yield begin, end


class _Growing:
    """A slice of consecutive queries while queries are added. The ends of its keys stay or move by one key a query, in the order
    that a band has: the first key stays, then moves; the last one moves, then stays."""

    def __init__(self, q: int, begin: int, end: int) -> None:
        self.q, self.first, self.last = q, (begin, end), (begin, end)
        self.moved = self.stayed = False

    def grow(self, begin: int, end: int) -> bool:
        """Adds a query with these keys, if a band allows them."""
        steps = begin - self.last[0], end - self.last[1]
        if steps[0] not in ((1,) if self.moved else (0, 1)) or steps[1] not in ((0,) if self.stayed else (0, 1)):
            return False
        self.moved, self.stayed, self.last = steps[0] == 1, steps[1] == 0, (begin, end)
        return True

    def slice(self, q_end: int) -> Slice:
        """The slice, with positions that are the tokens' places in the batch."""
        keys = self.first[0], self.last[1]
        low = self.last[0] - (q_end - 1) if self.moved else None
        high = self.first[1] - 1 - self.q if self.first[1] < keys[1] else None
        return Slice(self.q, q_end, *keys, self.q - keys[0], low, high)


def _sweep(rows: Iterable[bytes]) -> list[Slice]:
    """Slices row by row: each run goes on with that of the row before if a band allows it."""
    done: list[Slice] = []
    before: dict[int, _Growing] = {}  # by the first key of the row before
    q = -1
    for q, row in enumerate(rows):
        now: dict[int, _Growing] = {}
        for begin, end in _runs(row):
            found = next((x for x in (begin, begin - 1) if x in before and before[x].grow(begin, end)), None)
            now[begin] = _Growing(q, begin, end) if found is None else before.pop(found)
        done += [grown.slice(q) for grown in before.values()]
        before = now
    return done + [grown.slice(q + 1) for grown in before.values()]


def from_dense(mask: Any) -> list[Slice]:
    """The slices of a dense mask [q tokens, k tokens], rows of booleans or an array, for tests and small masks: at most 4,096 tokens
    a side. True or 1 is a pair that is allowed, False or 0 one that is not; numbers that are added to scores are refused. The mask is
    read along queries and along keys, and the shorter list is returned. Positions are places in the batch.

    >>> from_dense([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    [Slice(q_begin=0, q_end=3, k_begin=0, k_end=3, q_start=0, low=None, high=0)]
    """
    shape = tuple(getattr(mask, "shape", ()))
    if not shape:
        rows = listed("mask", mask, "rows")
        lengths = sorted({attempt(len, row) or 0 for row in rows})
        if len(lengths) > 1:
            raise InvalidArgument(
                f"mask has rows of {lengths[0]} and of {lengths[1]} k tokens, rows of one length are needed"
            )
        shape = (len(rows), *lengths) if rows else (0, 0)
    if len(shape) != 2:
        raise InvalidArgument(f"mask has the shape {shape}, [q tokens, k tokens] is needed")
    for side, n in zip("qk", shape):
        if n > DENSE:
            raise InvalidArgument(
                f"mask has {n} {side} tokens, at most {DENSE} are possible: make the slices themselves"
            )
    values = attempt(lambda: list(map(list, mask.tolist() if hasattr(mask, "tolist") else mask)))
    packed = None if values is None else attempt(lambda: [bytes(map(bool, row)) for row in values])
    if values is None or packed is None or isinstance(mask, str):
        raise refused("mask", mask, "rows of booleans are needed")
    for q, row in enumerate(values):
        if attempt(lambda: set(row) <= {0, 1}) is not True:
            raise refused(
                f"mask[{q}]",
                row,
                "True (allowed) or False is needed for each pair: compare numbers that are added to scores with 0",
            )
    by_query, every = _sweep(packed), b"".join(packed)
    by_key = _sweep(every[k :: shape[1]] for k in range(shape[1]))
    if len(by_query) <= len(by_key):
        return sorted(by_query, key=lambda s: s[:4])
    return sorted(map(_transposed, by_key), key=lambda s: s[:4])


def _transposed(s: Slice) -> Slice:
    """The slice with queries and keys exchanged, of one whose positions are places in the batch."""
    low, high = (None if limit is None else -limit for limit in (s.high, s.low))
    return Slice(s.k_begin, s.k_end, s.q_begin, s.q_end, s.k_begin - s.q_begin, low, high)
