# SPDX-License-Identifier: MIT OR Apache-2.0
"""Options of plans and their values: the enums of the header (`include/cpattn.h`), and the check of each option."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import byref, c_uint32, c_uint64
from functools import partial
from typing import Any, TypedDict

from .arguments import attempt, c_array, flag, number, one_of, refused, whole
from ._header import UNLIMITED
from ._library import call
from ._signature import misspelt
from .errors import InvalidArgument
from .slopes import c_slopes


class Dtype(enum.IntEnum):
    F16, BF16, F32, F64 = range(4)


DTYPES = dict(zip(("float16", "bfloat16", "float32", "float64"), Dtype))


def dtype_of(dtype: Any, name: str = "dtype") -> Dtype:
    """A `Dtype`, given as a member or its name, or as a dtype of NumPy, PyTorch or JAX or its name."""
    known = attempt(lambda: DTYPES.get((getattr(dtype, "__name__", None) or str(dtype)).rpartition(".")[2]))
    return one_of(name, dtype, Dtype) if known is None else known


class Kind(enum.IntEnum):
    SOFTMAX, OTHER = range(2)


class Layout(enum.IntEnum):
    """Which tokens each of the R ring ranks holds.

    AUTO: the layout that balances the work best. CONTIGUOUS: consecutive tokens of the batch. ZIGZAG: each document is cut
    into 2R chunks, and rank r has chunk r and chunk 2R-1-r; slow for packs of short documents, since each is cut for every rank.
    ZIGZAG_PACK: the same with the whole batch cut into 2R chunks. STRIPED: token t goes to rank (t / layout_parameter) mod R.
    BALANCED: layout_parameter chunks for each rank, assigned by mask area.
    """

    AUTO, CONTIGUOUS, ZIGZAG, ZIGZAG_PACK, STRIPED, BALANCED = range(6)


class Circulate(enum.IntEnum):
    """Which side is sent around the ring."""

    AUTO, KEYS, QUERIES = range(3)


class Gather(enum.IntEnum):
    """Whether k and v arrive step by step or at once."""

    AUTO, OTHERS, STEPS, TOGETHER = range(4)


class KeyRows(enum.IntEnum):
    """Which rows of k and v move in runs with `key_indices`.

    AUTO: those of the two that are fewer bytes over all ranks, counted in each run; ALLOWED on a rank with a lent workspace, or whose k
    and v are not contiguous. LISTED: those that lists name, each once to each ring rank whose tokens list it. They may need more
    workspace than the plan names: if a lent one is too small, all ranks refuse the run, and the error names the bytes. ALLOWED: those
    that the mask allows, as without lists.
    """

    AUTO, LISTED, ALLOWED = range(3)


class Wire(enum.IntEnum):
    """The type in which partial gradients are sent."""

    FULL, BF16 = range(2)


class Side(enum.IntEnum):
    """Q: q, o, lse and their gradients. K: k, v and their gradients."""

    Q, K = range(2)


class Direction(enum.IntEnum):
    FORWARD, BACKWARD = range(2)


class AllToAll(enum.IntEnum):
    """From own tokens and all heads to all tokens of the ring share and own heads, or back."""

    TO_HEADS, TO_TOKENS = 2, 3


class LseBase(enum.IntEnum):
    """The base of an lse that a run reads or writes: natural logarithms, or logarithms to base 2, as FlashInfer returns them."""

    NATURAL, BASE_2 = range(2)


class CombineTo(enum.IntEnum):
    """The rows of a merged result that a rank gets: see `Rank.combine`."""

    ALL, HEADS, TOKENS = range(3)


class ScanForm(enum.IntEnum):
    """How states travel along a document: from segment to segment; in log2(segments) exchanges of states and decays; all at once. AUTO
    takes the least time by counts of bytes and products over the link of one node."""

    AUTO, CHAIN, TREE, DIRECT = range(4)


class PlanOptions(TypedDict, total=False):
    """Options of a plan, with their defaults in parentheses. None, where it is allowed, is the default. Members of an enum may be
    given by their names, as strings.

    The computation:

    - kv_heads: heads of k and v, of which `heads` is a multiple (`heads`). value_dim: the head dim of v and o (`head_dim`).
    - kind: SOFTMAX, or OTHER for your own kernel between two all-to-alls, which needs ring 1 (SOFTMAX).
    - window_left, window_right: how many keys before and after its own position a query sees, in its document or in each of its
      slices (UNLIMITED, 0: causal; with slices UNLIMITED, UNLIMITED).
    - scale: the factor of q·k, not 0 (1/√head_dim). softcap c: a score s becomes c·tanh(s/c) (0: none).
    - dropout: the probability, below 1, with which a pair of a query and a key is dropped; the others are multiplied by 1/(1 - dropout).
      Which are dropped depends on the tokens' places in the batch, the q head and the seed of a run, on no mesh: see
      `cpattn.dropout_mask`. Runs that are captured into a graph refuse it (0: none).
    - alibi_slopes: one for each q head, [heads], or for each document and q head, [documents, heads] (on the CPU): a pair has the slope of
      the query's document. A score loses slope·|distance| (none).
    - sinks: how many learnable logits each q head has in the softmax, without value vectors; True is one (False: none). A sink is finite, or -inf for
      none. With +inf, o of its head is 0, lse +inf, dq 0, dk and dv get nothing, and its own gradient is NaN; NaN makes all results
      of its head NaN.

    The ranks:

    - ulysses: ranks that exchange tokens for heads, at most `heads`; ring: ranks that send each other k and v. If both are 0, both
      are chosen; if one is 0, it becomes the number of ranks divided by the other (0, 0).
    - layout: which tokens a rank of the ring holds (AUTO); see `Layout`. layout_parameter: the tokens of a stripe in STRIPED, or
      the chunks of a rank in BALANCED; otherwise 0 (0).

    The execution:

    - gather: STEPS, one ring step after another; OTHERS, k and v of all other ranks at once, while the kernel computes with the
      rank's own; TOGETHER, all at once, then one call of the kernel, for many short documents; AUTO chooses STEPS or TOGETHER. True is
      OTHERS, False is STEPS (AUTO).
    - passes: the number of groups of kv heads, 1 to kv_heads, that run one after another; divides the workspace for k and v (1).
    - circulate: the side that is sent around the ring in the backward: KEYS (k, v), QUERIES (q and its gradients), or the side with
      fewer bytes (AUTO).
    - circulate_forward: the side that is sent around the ring in the forward: KEYS; QUERIES, for few q rows over many keys, as in
      generation with a cache that is spread over ranks: q is sent, partial results are returned, and k and v stay; or the side with
      fewer bytes, KEYS if q and k are the same tokens (AUTO).
    - key_rows: which rows of k and v move in runs with `key_indices`: LISTED, ALLOWED (by the mask), or those that are fewer bytes
      (AUTO); see `KeyRows`.
    - wire: the type in which partial gradients are sent: f32 (FULL), or BF16: half the bytes, each rounded once to 8 bits (FULL).
    - reproducible: bit-equal results for any number of ranks; on the CPU; not with gather STEPS (False).
    - pack_inputs: tensors that are sent may have any strides, and are packed first; without it they must be compact (False).
    - ranks_per_node: rank r is in node r // ranks_per_node. A row is sent to each node that needs it once, and is passed on inside
      the node; gradients are summed inside a node before they are sent back. 0: all links are alike (0; `cpattn.torch.Context` uses
      torchrun's LOCAL_WORLD_SIZE). `cpattn.ranks_per_node` computes it from the node of each rank.
    """

    kv_heads: int | None
    value_dim: int | None
    kind: Kind | str
    window_left: int
    window_right: int
    scale: float | None
    softcap: float | None
    dropout: float
    alibi_slopes: Sequence[float] | Sequence[Sequence[float]] | None
    sinks: bool | int
    ulysses: int
    ring: int
    layout: Layout | str
    layout_parameter: int
    passes: int
    circulate: Circulate | str
    circulate_forward: Circulate | str
    key_rows: KeyRows | str
    wire: Wire | str
    gather: Gather | str | bool
    reproducible: bool
    pack_inputs: bool
    ranks_per_node: int


def at_least_1(name: str, value: Any) -> int:
    """A number of heads, dimensions, ranks or layers."""
    return whole(name, value, 1, 2**32 - 1)


def _scale(name: str, value: Any) -> float:
    # In C 0 is the default.
    if not (scale := number(name, value)):
        raise refused(
            name,
            value,
            "a number other than 0 is needed; None is 1/√head_dim, and with q of zeros all weights are equal",
        )
    return scale


def _gather(name: str, value: Any) -> Gather:
    return (Gather.OTHERS if value else Gather.STEPS) if isinstance(value, bool) else one_of(name, value, Gather)


def window(name: str, value: Any) -> int:
    """A number of keys on one side. Other libraries have -1 or None for no limit."""
    if value is None or (not isinstance(value, bool | enum.Enum) and attempt(lambda: -(2**63) <= value < 0)):
        raise refused(name, value, "at least 0 is needed; for no limit give cpattn.UNLIMITED")
    return whole(name, value, 0, UNLIMITED)


# By option: the function that checks its value. alibi_slopes depend on heads; other options are whole numbers from 0 to UNLIMITED.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "kind": partial(one_of, kind=Kind),
    "layout": partial(one_of, kind=Layout),
    "wire": partial(one_of, kind=Wire),
    "key_rows": partial(one_of, kind=KeyRows),
    "gather": _gather,
    **dict.fromkeys(("circulate", "circulate_forward"), partial(one_of, kind=Circulate)),
    "sinks": lambda name, value: int(value) if isinstance(value, bool) else whole(name, value, 0, 4096),
    **dict.fromkeys(("reproducible", "pack_inputs"), lambda name, value: int(flag(name, value))),
    **dict.fromkeys(("kv_heads", "value_dim"), at_least_1),
    "scale": _scale,
    **dict.fromkeys(("window_left", "window_right"), window),
    **dict.fromkeys(("softcap", "dropout"), number),
}
RUNS = {
    "passes", "circulate", "circulate_forward", "key_rows", "wire", "gather", "reproducible", "pack_inputs", "ranks_per_node",
}  # fmt: skip
# Options that decide which rank holds which tokens.
CHOSEN = ("ulysses", "ring", "layout", "layout_parameter")
_OPTIONAL = {"kv_heads", "value_dim", "scale", "softcap", "alibi_slopes"}


def checked(options: PlanOptions, heads: int, of: str = "a plan", more: Iterable[str] = ()) -> dict[str, Any]:
    """The given options for the C interface. Refuses unknown options, and values that are invalid for this number of heads. `of` says whose options they are,
    and `more` are the names of its other ones."""
    if unknown := sorted(options.keys() - PlanOptions.__annotations__.keys()):
        raise misspelt(of, unknown, {*PlanOptions.__annotations__, *more})
    values: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None or name not in _OPTIONAL
    }
    for name, value in list(values.items()):
        if name == "alibi_slopes":
            values |= c_slopes(name, value, heads)
        else:
            values[name] = _CHECKS[name](name, value) if name in _CHECKS else whole(name, value, 0, UNLIMITED)
    return values


def ranks_per_node(nodes: Sequence[int]) -> int:
    """The option `ranks_per_node`, from the node of each rank: any number that is equal for the ranks of one node only. A node may
    also be a rack, or any other group joined by slow links. Refused unless nodes have consecutive ranks, and all the same number."""
    values, each = c_array("nodes", c_uint64, nodes), c_uint32()
    call("ranks_per_node", values, len(values), byref(each))
    return each.value


def kinds_of(name: str, kinds: Any) -> list[tuple[int, dict[str, Any]]]:
    """Kinds of layers, each a number of layers and keywords of `Plan`."""
    pairs = attempt(lambda: [(count, {**kind}) for count, kind in kinds])
    if pairs is None or isinstance(kinds, str | Mapping):
        raise refused(
            name, kinds, "a sequence of pairs is needed: a number of layers and a dictionary of keywords of Plan"
        )
    for _, kind in pairs:
        if common := [option for option in (*CHOSEN, *sorted(RUNS)) if option in kind]:
            raise InvalidArgument(
                f"{name}: a kind of layer has {common[0]}, which all kinds share: give it as a separate argument"
            )
        names = {"heads", "head_dim", "slices", "dtype"} | PlanOptions.__annotations__.keys() - {*CHOSEN, *RUNS}
        if unknown := kind.keys() - names:
            raise misspelt(f"a kind of layer in {name}", map(str, unknown), names)
    return [(at_least_1("layers", count), kind) for count, kind in pairs]
