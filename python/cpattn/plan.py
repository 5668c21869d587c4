# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans: what all ranks agree to compute, and who holds which tokens.

A plan is a value. It is made from the documents of a batch, the same on every rank, and runs any number of times. The words
are those of the header (`include/cpattn.h`); `PlanOptions` explains each option.
"""

from __future__ import annotations

import enum
import weakref
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p, pointer
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

from . import _header
from ._check import attempt, c_array, flag, instance, number, one_of, refused, whole
from ._header import UNLIMITED
from ._library import call, status_of, text_of
from .errors import InvalidArgument
from .tensors import Array, Given

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Dtype(enum.IntEnum):
    F16, BF16, F32, F64 = range(4)


_NAMES = dict(zip(("float16", "bfloat16", "float32", "float64"), Dtype))


def dtype_of(dtype: Any) -> Dtype:
    """A member, its number or its name, or the type of an array of NumPy, PyTorch or JAX, or its name."""
    known = attempt(lambda: _NAMES.get((getattr(dtype, "__name__", None) or str(dtype)).rpartition(".")[2]))
    return one_of("dtype", dtype, Dtype) if known is None else known


class Kind(enum.IntEnum):
    SOFTMAX, OTHER = range(2)


class Layout(enum.IntEnum):
    """Which tokens each of the R ring ranks holds.

    AUTO: whichever balances the work best. CONTIGUOUS: consecutive tokens of the batch. ZIGZAG: each document in 2R chunks, of
    which rank r has chunk r and chunk 2R-1-r; slow for packs of short documents, which are cut for every rank. ZIGZAG_PACK: the same
    with the whole batch in 2R chunks. STRIPED: token t goes to rank (t / layout_parameter) mod R. BALANCED: layout_parameter chunks
    for each rank, assigned by mask area.
    """

    AUTO, CONTIGUOUS, ZIGZAG, ZIGZAG_PACK, STRIPED, BALANCED = range(6)


class Circulate(enum.IntEnum):
    """Which side is sent round the ring in the backward."""

    AUTO, KEYS, QUERIES = range(3)


class Gather(enum.IntEnum):
    """Whether k and v arrive step by step or at once."""

    AUTO, OTHERS, STEPS, TOGETHER = range(4)


class Wire(enum.IntEnum):
    """In which type partial gradients are sent."""

    FULL, BF16 = range(2)


class Side(enum.IntEnum):
    """Of q, o, lse and their gradients, or of k and v and theirs."""

    Q, K = range(2)


class Direction(enum.IntEnum):
    FORWARD, BACKWARD = range(2)


class PlanOptions(TypedDict, total=False):
    """Options of a plan. What is left out has the default named here; None, where it may be given, is the same. Members of an enum
    may be given by their names, as strings.

    What is computed:

    - kv_heads: heads of k and v, of which `heads` is a multiple (`heads`). value_dim: the head dim of v and o (`head_dim`).
    - kind: SOFTMAX, or OTHER for a kernel of your own between two all-to-alls, which needs ring 1 (SOFTMAX).
    - window_left, window_right: how many keys before and after its own position a query sees (UNLIMITED, 0: causal).
    - scale: the factor of q·k (1/√head_dim). softcap c: a score s becomes c·tanh(s/c) (0: none).
    - alibi_slopes: one for each q head; a score loses slope·|distance| (none).
    - sinks: whether each q head has a learnable logit that takes part in the softmax and has no value (False).

    Over which ranks:

    - ulysses: ranks that exchange tokens for heads, at most `heads`; ring: ranks that send each other k and v. Of two zeros both are
      chosen; one zero becomes the number of ranks divided by the other (0, 0).
    - layout: which tokens a rank of the ring holds (AUTO); see `Layout`. layout_parameter: the tokens of a stripe, or the chunks
      that a rank gets in BALANCED; otherwise 0 (0).

    How it runs:

    - gather: STEPS, one ring step after another; OTHERS, k and v of all other ranks at once, while the kernel computes with the
      rank's own; TOGETHER, all at once, then one call of the kernel, for many short documents; AUTO chooses between the first and the
      last. True is OTHERS, False is STEPS (AUTO).
    - passes: over groups of kv heads, 1 to kv_heads, which divide the workspace for k and v in flight (1).
    - circulate: what is sent round the ring in the backward: KEYS (k, v), QUERIES (q and its gradients), or what takes fewer bytes (AUTO).
    - circulate_forward: what is sent round the ring in the forward: KEYS, or QUERIES, for few q rows over many keys, as where tokens
      are generated from a cache that is spread over ranks: q is sent, partial results come back, and k and v stay; or what takes
      fewer bytes, KEYS where q and k are the same tokens (AUTO).
    - wire: partial gradients are sent in f32 (FULL), or in BF16: half the bytes, each rounded once to 8 bits (FULL).
    - reproducible: bit-equal results for any number of ranks; on the CPU; not with gather STEPS (False).
    - pack_inputs: tensors that are sent may have any strides, and are packed first; without it they must be compact (False).
    - ranks_per_node: rank r is in node r // ranks_per_node. A row that a node needs of another one crosses to it once, and is passed
      on inside; gradients are summed in a node before they cross back. 0: all links are alike (0; `cpattn.torch.Context` takes
      torchrun's LOCAL_WORLD_SIZE). `cpattn.ranks_per_node` makes it of a list.
    """

    kv_heads: int | None
    value_dim: int | None
    kind: Kind | str
    window_left: int
    window_right: int
    scale: float | None
    softcap: float | None
    alibi_slopes: Sequence[float] | None
    sinks: bool
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


_ENUMS: dict[str, type[enum.IntEnum]] = {
    "kind": Kind,
    "layout": Layout,
    "circulate": Circulate,
    "circulate_forward": Circulate,
    "wire": Wire,
    "gather": Gather,
}
_FLAGS = {"sinks", "reproducible", "pack_inputs"}
RUNS = {"passes", "circulate", "circulate_forward", "wire", "gather", "reproducible", "pack_inputs", "ranks_per_node"}
# Options that say who holds which tokens.
CHOSEN = ("ulysses", "ring", "layout", "layout_parameter")
_OPTIONAL = {"kv_heads", "value_dim", "scale", "softcap", "alibi_slopes"}


def checked(options: PlanOptions, heads: int) -> dict[str, Any]:
    """The options that are given, as the C interface has them; refuses by name what is no option, and values that no plan of so
    many heads has."""
    if unknown := sorted(options.keys() - PlanOptions.__annotations__.keys()):
        known = ", ".join(sorted(PlanOptions.__annotations__))
        raise InvalidArgument(f"{unknown[0]} is no option of a plan, these are: {known}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None or name not in _OPTIONAL}
    for name, value in given.items():
        if name == "gather" and isinstance(value, bool):
            given[name] = Gather.OTHERS if value else Gather.STEPS
        elif name in _ENUMS:
            given[name] = one_of(name, value, _ENUMS[name])
        elif name in _FLAGS:
            given[name] = int(flag(name, value))
        elif name in ("kv_heads", "value_dim"):
            given[name] = at_least_1(name, value)
        elif name in ("scale", "softcap"):
            given[name] = number(name, value)
        elif name == "alibi_slopes":
            # The library reads as many as it needs; it cannot see how many there are.
            given[name] = c_array(name, c_float, value, heads)
        else:
            given[name] = whole(name, value, 0, UNLIMITED)
    return given


def ranks_per_node(nodes: Sequence[int]) -> int:
    """The option `ranks_per_node`, from the node of each rank: any number that the ranks of a node have in common, and no others (a
    rack, or whatever else a slow link joins, is a node too). Refused unless ranks are numbered node by node, as many in each."""
    given, each = c_array("nodes", c_uint64, nodes), c_uint32()
    call("ranks_per_node", given, len(given), byref(each))
    return each.value


def at_least_1(name: str, value: Any) -> int:
    """A number of heads, dimensions or ranks."""
    return whole(name, value, 1, 2**32 - 1)


def kinds_of(name: str, kinds: Any) -> list[tuple[int, dict[str, Any]]]:
    """Kinds of layers: a number of layers, and keywords of `Plan`, each."""
    pairs = attempt(lambda: [(count, {**kind}) for count, kind in kinds])
    if pairs is None or isinstance(kinds, str | Mapping):
        raise refused(name, kinds, "pairs are needed: a number of layers, and a dictionary of keywords of Plan")
    for _, kind in pairs:
        if common := [option for option in (*CHOSEN, *sorted(RUNS)) if option in kind]:
            raise InvalidArgument(f"{name}: a kind of layer has {common[0]}, which is the same for all kinds: give it beside {name}")
    return [(whole("layers", count, 1, 2**32 - 1), kind) for count, kind in pairs]


def _documents(
    cu_seqlens: Sequence[int], cu_seqlens_k: Sequence[int] | None, q_start: Sequence[int] | None
) -> dict[str, Any]:
    ends = c_array("cu_seqlens", c_int32, cu_seqlens)
    if not len(ends):
        raise InvalidArgument("cu_seqlens has 0 entries, at least 1 is needed: 0")
    given: dict[str, Any] = {"cu_seqlens_q": ends, "documents": len(ends) - 1}
    if cu_seqlens_k is not None:
        given["cu_seqlens_k"] = c_array("cu_seqlens_k", c_int32, cu_seqlens_k, len(ends))
    if q_start is not None:
        given["q_start"] = c_array("q_start", c_int64, q_start, len(ends) - 1)
    return given


class Plan:
    """One attention over one packed batch, and how `world` ranks share it.

    `cu_seqlens` has an entry more than there are documents: 0, the end of the first, ..., the number of tokens. Causal
    unless `window_right` says otherwise; a sliding window of W tokens that counts the query itself is `window_left=W - 1`.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        heads: int,
        head_dim: int,
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> None:
        given = _documents(cu_seqlens, cu_seqlens_k, q_start) | {"world": at_least_1("world", world)}
        problem, how = self._describe(given, heads, head_dim, dtype, options)
        call("plan_create", byref(problem), byref(how), byref(self.handle))
        weakref.finalize(self, status_of, "plan_destroy", self.handle)

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
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """As `Plan`, with the mesh and the layout that are predicted to take the least time on a machine: `machine` is the text
        of its description, as in the folder machines, the same on every rank. ulysses, ring and layout are chosen, not given.
        Without `ranks_per_node` schedules of one level and of two over the machine's nodes are rated; `ranks_per_node` equal to
        `world` means one level. `explain` lists the candidates. It takes longer than `Plan`: for the next batch give that the
        mesh, the layout and the `ranks_per_node` that `describe` says were chosen.
        """
        if not isinstance(machine, str):
            raise refused("machine", machine, "the text of a machine's description is needed")
        if "\0" in machine:  # where a text of C ends
            raise InvalidArgument("machine has a zero byte, the text of a machine's description has none")
        plan, given = cls.__new__(cls), _documents(cu_seqlens, cu_seqlens_k, q_start) | {"world": at_least_1("world", world)}
        problem, how = plan._describe(given, heads, head_dim, dtype, options)
        call("plan_create_on", byref(problem), byref(how), machine.encode(), byref(plan.handle))
        weakref.finalize(plan, status_of, "plan_destroy", plan.handle)
        plan._how["ranks_per_node"] = plan.describe().ranks_per_node
        return plan

    @classmethod
    def with_tokens_of(
        cls, base: Plan, heads: int, head_dim: int, *, dtype: Dtype | str | object | None = None, **options: Unpack[PlanOptions]
    ) -> Plan:
        """A plan for another kind of layer over the documents of `base`, with its tokens: each rank holds the same ones in the
        same order. Two plans made one by one may give ranks other tokens, often in equal numbers, which no shape tells.

        Mesh and layout are those of `base`, and so are, unless given, dtype and how it runs (gather, passes, circulate,
        circulate_forward, wire, reproducible, pack_inputs, ranks_per_node). Mask, score and dims are as `Plan` has them: causal, without a window, unless given.
        """
        plan, given = cls.__new__(cls), {**instance("base", base, Plan)._how, "world": base.world}
        problem, how = plan._describe(given, heads, head_dim, base.dtype if dtype is None else dtype, options)
        call("plan_with_tokens_of", base.handle, byref(problem), byref(how), byref(plan.handle))
        weakref.finalize(plan, status_of, "plan_destroy", plan.handle)
        return plan

    @classmethod
    def auto_for(
        cls,
        cu_seqlens: Sequence[int],
        kinds: Sequence[tuple[int, Mapping[str, Any]]],
        *,
        cu_seqlens_k: Sequence[int] | None = None,
        q_start: Sequence[int] | None = None,
        dtype: Dtype | str | object = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> list[Plan]:
        """The plans of a model whose layers are of several kinds. A kind is its number of layers and the keywords of `Plan` that it
        has for itself (heads, head_dim, window_left, ...); `options` are those of all kinds. All plans have the mesh and the
        tokens that cost all layers together the least; ulysses, ring and layout are chosen, not given.
        """
        given = _documents(cu_seqlens, cu_seqlens_k, q_start) | {"world": at_least_1("world", world)}
        plans, layers, problems, how = [], [], [], _header.Options()
        for count, kind in kinds_of("kinds", kinds):
            plan, own = cls.__new__(cls), {"dtype": dtype, **options, **kind}
            for name in ("heads", "head_dim"):
                if name not in own:
                    raise InvalidArgument(f"a kind of layer has no {name}: give it to each kind")
            problem, how = plan._describe(dict(given), own.pop("heads"), own.pop("head_dim"), own.pop("dtype"), own)  # type: ignore[arg-type]
            layers.append(count)
            problems.append(problem)
            plans.append(plan)
        pointers = (POINTER(_header.Problem) * len(plans))(*map(pointer, problems))
        handles = (c_void_p * len(plans))()
        call("plan_auto_for", pointers, (c_uint64 * len(plans))(*layers), len(plans), byref(how), handles)
        for plan, handle in zip(plans, handles):
            plan.handle = c_void_p(handle)
            weakref.finalize(plan, status_of, "plan_destroy", plan.handle)
        return plans

    def _describe(
        self, given: dict[str, Any], heads: int, head_dim: int, dtype: Any, options: PlanOptions
    ) -> tuple[_header.Problem, _header.Options]:
        """Problem and options for the library; the plan keeps what it is asked for later."""
        self.heads, self.head_dim, self.world = at_least_1("heads", heads), at_least_1("head_dim", head_dim), given["world"]
        given |= checked(options, self.heads)
        self.kv_heads, self.value_dim = given.get("kv_heads", self.heads), given.get("value_dim", self.head_dim)
        self.dtype = dtype_of(dtype)
        self._how = {name: given[name] for name in RUNS & given.keys()}
        given |= {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        problem, how = (
            struct(**{name: given[name] for name, *_ in struct._fields_ if name in given})
            for struct in (_header.Problem, _header.Options)
        )
        self.handle = c_void_p()
        return problem, how

    def describe(self) -> _header.PlanInfo:
        """What was decided: replicas, ring, ulysses, layout, layout_parameter, ranks_per_node, q_tokens, k_tokens, fingerprint."""
        info = _header.PlanInfo()
        call("plan_describe", self.handle, byref(info))
        return info

    @cached_property
    def fingerprint(self) -> int:
        """The number by which ranks compare their plans."""
        return int(self.describe().fingerprint)

    @cached_property
    def distribution(self) -> int:
        """A number that names who holds which tokens: equal for two plans exactly if their documents are equal and each rank
        holds the same tokens in the same order. A tensor may be used with every plan of its distribution, and with no
        other plan."""
        name = c_uint64()
        call("plan_distribution", self.handle, byref(name))
        return name.value

    def share(self, rank: int) -> _header.Share:
        """A rank's place in the mesh, its tokens (q_tokens, k_tokens) and its heads between the two all-to-alls."""
        share = _header.Share()
        call("plan_share", self.handle, rank, byref(share))
        return share

    def explain(self) -> str:
        """Why this mesh, what each rank holds, bytes per step, imbalance, workspace."""
        return text_of("plan_explain", self.handle)

    def verify(self) -> None:
        """Proves the schedules of all ranks. For tests: takes time and memory."""
        call("plan_verify", self.handle)

    def workspace(self, rank: int, direction: Direction) -> int:
        """Bytes that a run takes on a rank."""
        size = c_uint64()
        call("plan_workspace", self.handle, rank, one_of("direction", direction, Direction), byref(size))
        return size.value

    def tokens(self, side: Side, rank: int) -> array[int]:
        """The tokens of the batch that a rank holds, in its order."""
        return self._numbers("plan_tokens", side, rank)

    def positions(self, side: Side, rank: int) -> array[int]:
        """Their positions in their documents, for rotary embeddings and the like."""
        return self._numbers("plan_positions", side, rank)

    def shard(self, side: Side, rank: int, whole: Array, local: Array) -> None:
        """Copies a rank's rows of `whole` into `local`; of the CPU."""
        w, l = Given("whole", whole), Given("local", local, written=True)
        call("plan_shard", self.handle, one_of("side", side, Side), rank, w.pointer, l.pointer)

    def unshard(self, side: Side, rank: int, local: Array, whole: Array) -> None:
        """Copies a rank's rows back to their places in `whole`."""
        w, l = Given("whole", whole, written=True), Given("local", local)
        call("plan_unshard", self.handle, one_of("side", side, Side), rank, l.pointer, w.pointer)

    def _numbers(self, name: str, side: Side, rank: int) -> array[int]:
        share, side = self.share(rank), one_of("side", side, Side)
        numbers = array("q", bytes(8 * (share.q_tokens if side == Side.Q else share.k_tokens)))
        # A view of the array as what the library fills; there is none of an empty array.
        room = (c_int64 * len(numbers)).from_buffer(numbers) if numbers else (c_int64 * 0)()
        call(name, self.handle, side, rank, room, len(numbers))
        return numbers
