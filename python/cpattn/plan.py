# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans: what all ranks agree to compute, and who holds which tokens.

A plan is a value. It is made from the documents of a batch, the same on every rank, and runs any number of times. The words
are those of the header (`include/cpattn.h`), where each option is explained; 0 leaves a choice to the library wherever the
header says so.
"""

from __future__ import annotations

import enum
import weakref
from array import array
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

from . import _header
from ._check import c_array, flag, number, one_of, whole
from ._header import UNLIMITED
from ._library import call, status_of, text_of
from .errors import InvalidArgument
from .tensors import Array, Given

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Dtype(enum.IntEnum):
    F16, BF16, F32, F64 = range(4)


class Kind(enum.IntEnum):
    SOFTMAX, OTHER = range(2)


class Layout(enum.IntEnum):
    """How tokens are dealt to the ring ranks."""

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
    """Keywords of `Plan` that functions hand on. What is left out is as the header's INIT macros say; None where it may be given
    is the same. Members of an enum may be given by their names, as strings."""

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
    wire: Wire | str
    gather: Gather | str | bool
    reproducible: bool
    pack_inputs: bool


_ENUMS: dict[str, type[enum.IntEnum]] = {"kind": Kind, "layout": Layout, "circulate": Circulate, "wire": Wire, "gather": Gather}
_FLAGS = {"sinks", "reproducible", "pack_inputs"}
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


def at_least_1(name: str, value: Any) -> int:
    """A number of heads, dimensions or ranks."""
    return whole(name, value, 1, 2**32 - 1)


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
        dtype: Dtype | str = Dtype.F32,
        world: int = 1,
        **options: Unpack[PlanOptions],
    ) -> None:
        self.heads, self.head_dim, self.world = at_least_1("heads", heads), at_least_1("head_dim", head_dim), at_least_1("world", world)
        given = checked(options, self.heads)
        self.kv_heads, self.value_dim = given.get("kv_heads", self.heads), given.get("value_dim", self.head_dim)
        self.dtype = one_of("dtype", dtype, Dtype)
        given |= {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype, "world": self.world}
        ends = c_array("cu_seqlens", c_int32, cu_seqlens)
        given |= {"cu_seqlens_q": ends, "documents": len(ends) - 1}
        if not len(ends):
            raise InvalidArgument("cu_seqlens has 0 entries, at least 1 is needed: 0")
        if cu_seqlens_k is not None:
            given["cu_seqlens_k"] = c_array("cu_seqlens_k", c_int32, cu_seqlens_k, len(ends))
        if q_start is not None:
            given["q_start"] = c_array("q_start", c_int64, q_start, len(ends) - 1)
        problem, how = (
            struct(**{name: given[name] for name, *_ in struct._fields_ if name in given})
            for struct in (_header.Problem, _header.Options)
        )
        self.handle = c_void_p()
        call("plan_create", byref(problem), byref(how), byref(self.handle))
        weakref.finalize(self, status_of, "plan_destroy", self.handle)

    def describe(self) -> _header.PlanInfo:
        """What was decided: replicas, ring, ulysses, layout, layout_parameter, q_tokens, k_tokens, fingerprint."""
        info = _header.PlanInfo()
        call("plan_describe", self.handle, byref(info))
        return info

    @cached_property
    def fingerprint(self) -> int:
        """The number by which ranks compare their plans."""
        return int(self.describe().fingerprint)

    def share(self, rank: int) -> _header.Share:
        """A rank's place in the mesh, its tokens (q_tokens, k_tokens) and its heads between the two all-to-alls."""
        share = _header.Share()
        call("plan_share", self.handle, _rank(rank), byref(share))
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
        call("plan_workspace", self.handle, _rank(rank), one_of("direction", direction, Direction), byref(size))
        return size.value

    def tokens(self, side: Side, rank: int) -> array[int]:
        """The tokens of the batch that a rank holds, in its order."""
        return self._numbers("plan_tokens", side, rank)

    def positions(self, side: Side, rank: int) -> array[int]:
        """Their positions in their documents, for rotary embeddings and the like."""
        return self._numbers("plan_positions", side, rank)

    def shard(self, side: Side, rank: int, whole: Array, local: Array) -> None:
        """Copies a rank's rows of `whole` into `local`; of the CPU."""
        w, l = Given("whole", whole), Given("local", local)
        call("plan_shard", self.handle, one_of("side", side, Side), _rank(rank), w.pointer, l.pointer)

    def unshard(self, side: Side, rank: int, local: Array, whole: Array) -> None:
        """Copies a rank's rows back to their places in `whole`."""
        w, l = Given("whole", whole), Given("local", local)
        call("plan_unshard", self.handle, one_of("side", side, Side), _rank(rank), l.pointer, w.pointer)

    def _numbers(self, name: str, side: Side, rank: int) -> array[int]:
        share, side = self.share(rank), one_of("side", side, Side)
        numbers = array("q", bytes(8 * (share.q_tokens if side == Side.Q else share.k_tokens)))
        # A view of the array as what the library fills; there is none of an empty array.
        room = (c_int64 * len(numbers)).from_buffer(numbers) if numbers else (c_int64 * 0)()
        call(name, self.handle, side, rank, room, len(numbers))
        return numbers


def _rank(rank: int) -> int:
    return whole("rank", rank, 0, 2**32 - 1)
