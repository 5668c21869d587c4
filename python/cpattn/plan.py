# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans: the computation that all ranks agree on, and which rank holds which tokens.

A plan is a value. It is made from the documents of a batch, the same on every rank, and runs any number of times. The terms
are those of the header (`include/cpattn.h`). `PlanOptions` explains each option.
"""

from __future__ import annotations

import enum
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import POINTER, byref, c_int32, c_int64, c_uint32, c_uint64, c_void_p, pointer
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypedDict

from . import _header
from ._check import attempt, c_array, flag, instance, number, one_of, refused, whole
from ._header import UNLIMITED
from ._library import call, status_of, text_of
from .errors import InvalidArgument
from .slices import Slice, c_slices
from .slices import checked as checked_slices
from .slopes import c_slopes
from .tensors import Array, Given

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .schedule import Schedule


class Dtype(enum.IntEnum):
    F16, BF16, F32, F64 = range(4)


DTYPES = dict(zip(("float16", "bfloat16", "float32", "float64"), Dtype))


def dtype_of(dtype: Any, name: str = "dtype") -> Dtype:
    """A `Dtype`, given as a member, its number or its name, or as a dtype of NumPy, PyTorch or JAX or its name."""
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


class CombineTo(enum.IntEnum):
    """The rows of a merged result that a rank gets: see `Rank.combine`."""

    ALL, HEADS, TOKENS = range(3)


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
        raise refused(name, value, "a number other than 0 is needed; None is 1/√head_dim, and with q of zeros all weights are equal")
    return scale


def _gather(name: str, value: Any) -> Gather:
    return (Gather.OTHERS if value else Gather.STEPS) if isinstance(value, bool) else one_of(name, value, Gather)


# By option: the function that checks its value. alibi_slopes depend on heads; other options are whole numbers from 0 to UNLIMITED.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "kind": partial(one_of, kind=Kind),
    "layout": partial(one_of, kind=Layout),
    "wire": partial(one_of, kind=Wire),
    "gather": _gather,
    **dict.fromkeys(("circulate", "circulate_forward"), partial(one_of, kind=Circulate)),
    "sinks": lambda name, value: int(value) if isinstance(value, bool) else whole(name, value, 0, 4096),
    **dict.fromkeys(("reproducible", "pack_inputs"), lambda name, value: int(flag(name, value))),
    **dict.fromkeys(("kv_heads", "value_dim"), at_least_1),
    "scale": _scale,
    **dict.fromkeys(("softcap", "dropout"), number),
}
RUNS = {"passes", "circulate", "circulate_forward", "wire", "gather", "reproducible", "pack_inputs", "ranks_per_node"}
# Options that decide which rank holds which tokens.
CHOSEN = ("ulysses", "ring", "layout", "layout_parameter")
_OPTIONAL = {"kv_heads", "value_dim", "scale", "softcap", "alibi_slopes"}


def checked(options: PlanOptions, heads: int) -> dict[str, Any]:
    """The given options for the C interface. Refuses unknown options, and values that are invalid for this number of heads."""
    if unknown := sorted(options.keys() - PlanOptions.__annotations__.keys()):
        known = ", ".join(sorted(PlanOptions.__annotations__))
        raise InvalidArgument(f"{unknown[0]} is not an option of a plan, one of these is needed: {known}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None or name not in _OPTIONAL}
    for name, value in list(given.items()):
        if name == "alibi_slopes":
            given |= c_slopes(name, value, heads)
        else:
            given[name] = _CHECKS[name](name, value) if name in _CHECKS else whole(name, value, 0, UNLIMITED)
    return given


def ranks_per_node(nodes: Sequence[int]) -> int:
    """The option `ranks_per_node`, from the node of each rank: any number that is equal for the ranks of one node only. A node may
    also be a rack, or any other group joined by slow links. Refused unless nodes have consecutive ranks, and all the same number."""
    given, each = c_array("nodes", c_uint64, nodes), c_uint32()
    call("ranks_per_node", given, len(given), byref(each))
    return each.value


def kinds_of(name: str, kinds: Any) -> list[tuple[int, dict[str, Any]]]:
    """Kinds of layers, each a number of layers and keywords of `Plan`."""
    pairs = attempt(lambda: [(count, {**kind}) for count, kind in kinds])
    if pairs is None or isinstance(kinds, str | Mapping):
        raise refused(name, kinds, "a sequence of pairs is needed: a number of layers and a dictionary of keywords of Plan")
    for _, kind in pairs:
        if common := [option for option in (*CHOSEN, *sorted(RUNS)) if option in kind]:
            raise InvalidArgument(f"{name}: a kind of layer has {common[0]}, which all kinds share: give it as a separate argument")
    return [(at_least_1("layers", count), kind) for count, kind in pairs]


def _documents(cu_seqlens: Any, cu_seqlens_k: Any, q_start: Any, slices: Any, world: int) -> dict[str, Any]:
    ends = c_array("cu_seqlens", c_int32, cu_seqlens)
    if not len(ends):
        raise InvalidArgument("cu_seqlens has length 0, at least 1 is needed: give [0] for no documents")
    given: dict[str, Any] = {"cu_seqlens_q": ends, "documents": len(ends) - 1, "world": at_least_1("world", world)}
    if cu_seqlens_k is not None:
        given["cu_seqlens_k"] = c_array("cu_seqlens_k", c_int32, cu_seqlens_k, len(ends))
    if q_start is not None:
        given["q_start"] = c_array("q_start", c_int64, q_start, len(ends) - 1)
    return given | _slices(slices)


def _slices(slices: Iterable[Slice] | None) -> dict[str, Any]:
    if slices is None:
        return {}
    every = checked_slices("slices", slices)
    rows = c_slices(every)
    return {"of_slices": every, "slices": rows, "slice_count": len(rows)}


class Plan:
    """One attention over one packed batch, and how `world` ranks share it.

    `cu_seqlens` has one entry more than there are documents: 0, the end of the first, ..., the number of tokens. Attention is causal
    unless `window_right` is given. A sliding window of W tokens that includes the query itself is `window_left=W - 1`.

    With `slices` (`cpattn.slices` makes those of common masks) a query attends to what these say and to nothing else, also across
    documents. Documents are then what layouts cut, what positions count in and where labels end. A window applies inside each
    slice, by its positions; without one, slices are not cut.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        heads: int,
        head_dim: int,
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> None:
        given = _documents(cu_seqlens, cu_seqlens_k, q_start, slices, world)
        call("plan_create", *self._describe(given, heads, head_dim, dtype, options), byref(self.handle))

    @classmethod
    def auto_on(
        cls,
        cu_seqlens: Sequence[int],
        heads: int,
        head_dim: int,
        machine: str,
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """A plan with the mesh and the layout that are predicted to take the least time on a machine. `machine` is the text of the
        machine's description, as in the folder machines, the same on every rank. ulysses, ring and layout are chosen, not given.
        Without `ranks_per_node`, schedules of one level and of two levels over the machine's nodes are compared; `ranks_per_node`
        equal to `world` means one level. `explain` lists the candidates. This takes longer than `Plan`: for the next batch, give
        `Plan` the mesh, the layout and the `ranks_per_node` of `describe`.
        """
        if not isinstance(machine, str):
            raise refused("machine", machine, "the text of a machine's description is needed")
        if "\0" in machine:  # a C string would end there
            raise InvalidArgument("machine has a zero byte: remove it, the text of a machine's description has none")
        plan, given = cls.__new__(cls), _documents(cu_seqlens, cu_seqlens_k, q_start, slices, world)
        described = plan._describe(given, heads, head_dim, dtype, options)
        call("plan_create_on", *described, machine.encode(), byref(plan.handle))
        plan._how["ranks_per_node"] = plan.describe().ranks_per_node
        return plan

    @classmethod
    def with_tokens_of(
        cls,
        base: Plan,
        heads: int,
        head_dim: int,
        *,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object | None = None,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """A plan for another kind of layer over the documents of `base`, with the same tokens on each rank, in the same order. Two
        plans that are made separately may give a rank different tokens, often in equal numbers, so that no shape differs.

        Mesh and layout are those of `base`. So are, unless given, dtype, gather, passes, circulate, circulate_forward, wire,
        reproducible, pack_inputs and ranks_per_node. Mask, score and dims have the defaults of `Plan`. Without `slices` the plan has
        those of `base`, if there are any; for a causal layer over such a base give `cpattn.slices.documents(cu_seqlens)`.
        """
        plan, given = cls.__new__(cls), {**instance("base", base, Plan)._how, "world": base.world}
        given |= {"of_slices": base.slices} if slices is None else _slices(slices)
        described = plan._describe(given, heads, head_dim, base.dtype if dtype is None else dtype, options)
        call("plan_with_tokens_of", base.handle, *described, byref(plan.handle))
        return plan

    @classmethod
    def auto_for(
        cls,
        cu_seqlens: Sequence[int],
        kinds: Sequence[tuple[int, Mapping[str, Any]]],
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        slices: Iterable[Slice] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> list[Plan]:
        """The plans of a model with several kinds of layers. A kind is a number of layers and its own keywords of `Plan` (heads,
        head_dim, window_left, slices, ...). `options` are common to all kinds, and `slices` to those that have none of their own. All plans have the same mesh and the same tokens on each rank,
        with the least cost of all layers together. ulysses, ring and layout are chosen, not given.
        """
        given = _documents(cu_seqlens, cu_seqlens_k, q_start, slices, world)
        plans, problems, how, counted = [], [], pointer(_header.Options()), kinds_of("kinds", kinds)
        for _, kind in counted:
            plan, own = cls.__new__(cls), {"dtype": dtype, **options, **kind}
            for name in ("heads", "head_dim"):
                if name not in own:
                    raise InvalidArgument(f"kinds: a kind of layer has no {name}: give each kind its {name}")
            problem, how = plan._describe(given | _slices(own.pop("slices", None)), own.pop("heads"), own.pop("head_dim"), own.pop("dtype"), own)  # type: ignore[arg-type]
            problems.append(problem)
            plans.append(plan)
        layers = (c_uint64 * len(plans))(*(count for count, _ in counted))
        handles = (c_void_p * len(plans))()
        call("plan_auto_for", (POINTER(_header.Problem) * len(plans))(*problems), layers, len(plans), how, handles)
        for plan, handle in zip(plans, handles):
            plan.handle.value = handle
        return plans

    def _describe(
        self, given: dict[str, Any], heads: int, head_dim: int, dtype: Any, options: PlanOptions
    ) -> list[Any]:
        """Pointers to problem and options for the library, from checked arguments. The plan keeps some of them, and gets a handle."""
        self.heads, self.head_dim, self.world = at_least_1("heads", heads), at_least_1("head_dim", head_dim), given["world"]
        given |= checked(options, self.heads)
        self.slices: tuple[Slice, ...] | None = given.get("of_slices")
        if self.slices is not None:
            given.setdefault("window_right", UNLIMITED)
        self.kv_heads, self.value_dim = given.get("kv_heads", self.heads), given.get("value_dim", self.head_dim)
        self.dtype = dtype_of(dtype)
        self._how = {name: given[name] for name in RUNS & given.keys()}
        given |= {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        self.handle = c_void_p()
        weakref.finalize(self, status_of, "plan_destroy", self.handle)
        structs = _header.Problem, _header.Options
        return [pointer(struct(**{name: given[name] for name, *_ in struct._fields_ if name in given})) for struct in structs]

    def describe(self) -> _header.PlanInfo:
        """The plan's replicas, ring, ulysses, layout, layout_parameter, ranks_per_node, q_tokens, k_tokens and fingerprint."""
        info = _header.PlanInfo()
        call("plan_describe", self.handle, byref(info))
        return info

    @cached_property
    def fingerprint(self) -> int:
        """The number by which ranks compare their plans."""
        return int(self.describe().fingerprint)

    @cached_property
    def distribution(self) -> int:
        """A hash of who holds which tokens: equal for two plans exactly if their documents are equal and each rank holds the
        same tokens in the same order. A tensor may be used with every plan of its distribution, and with no other plan."""
        name = c_uint64()
        call("plan_distribution", self.handle, byref(name))
        return name.value

    def share(self, rank: int) -> _header.Share:
        """A rank's place in the mesh, its tokens (q_tokens, k_tokens) and its heads between the two all-to-alls."""
        share = _header.Share()
        call("plan_share", self.handle, rank, byref(share))
        return share

    def explain(self) -> str:
        """A text with the reasons for this mesh, the tokens of each rank, bytes per step, imbalance and workspace."""
        return text_of("plan_explain", self.handle)

    def verify(self) -> None:
        """Verifies the schedules of all ranks. For tests: it takes time and memory."""
        call("plan_verify", self.handle)

    def workspace(self, rank: int, direction: Direction) -> int:
        """The bytes of workspace of a run on a rank."""
        size = c_uint64()
        call("plan_workspace", self.handle, rank, one_of("direction", direction, Direction), byref(size))
        return size.value

    def schedule(self, rank: int, direction: Direction | str) -> Schedule:
        """What a rank does in one direction, to be executed by your own program: see `cpattn.schedule`."""
        from .schedule import Schedule

        return Schedule.of(self, rank, direction)

    def all_to_all_schedule(self, rank: int, direction: AllToAll | str, side: Side | str, dim: int, dtype: Dtype | str | object) -> Schedule:
        """The same for the all-to-all of one tensor with the tokens and heads of a side."""
        from .schedule import Schedule

        return Schedule.of_all_to_all(self, rank, direction, side, dim, dtype)

    def combine_schedule(self, rank: int, to: CombineTo | str, partial: Dtype | str | object) -> Schedule:
        """The same for a combine (`Rank.combine`) of partial results of a type."""
        from .schedule import Schedule

        return Schedule.of_combine(self, rank, to, partial)

    def tokens(self, side: Side, rank: int) -> array[int]:
        """The indices in the batch of a rank's tokens, in the rank's order."""
        return self._numbers("plan_tokens", side, rank)

    def positions(self, side: Side, rank: int) -> array[int]:
        """The positions of a rank's tokens in their documents, for example for rotary embeddings."""
        return self._numbers("plan_positions", side, rank)

    def shard(self, side: Side, rank: int, whole: Array, local: Array) -> None:
        """Copies a rank's rows of `whole` into `local`, both on the CPU."""
        w, l = Given("whole", whole), Given("local", local, written=True)
        call("plan_shard", self.handle, one_of("side", side, Side), rank, w.pointer, l.pointer)

    def unshard(self, side: Side, rank: int, local: Array, whole: Array) -> None:
        """Copies a rank's rows in `local` to their places in `whole`, both on the CPU."""
        w, l = Given("whole", whole, written=True), Given("local", local)
        call("plan_unshard", self.handle, one_of("side", side, Side), rank, l.pointer, w.pointer)

    def _numbers(self, name: str, side: Side, rank: int) -> array[int]:
        share, side = self.share(rank), one_of("side", side, Side)
        numbers = array("q", bytes(8 * (share.q_tokens if side == Side.Q else share.k_tokens)))
        # from_buffer refuses an empty array.
        room = (c_int64 * len(numbers)).from_buffer(numbers) if numbers else (c_int64 * 0)()
        call(name, self.handle, side, rank, room, len(numbers))
        return numbers
