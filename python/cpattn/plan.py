# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans: what all ranks agree to compute, and who holds which tokens.

A plan is a value. It is made from the documents of a batch, the same on every rank, and runs any number of times. The words
are those of the header (`include/cpattn.h`), where each option is explained; 0 leaves a choice to the library wherever the
header says so.
"""

from __future__ import annotations

import ctypes
import enum
import weakref
from array import array
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cached_property
from typing import Any, TypedDict

from . import _header
from ._header import UNLIMITED
from ._library import call, status_of
from .errors import InvalidArgument
from .tensors import Array, Given


class Dtype(enum.IntEnum):
    F16, BF16, F32, F64 = range(4)


class Kind(enum.IntEnum):
    SOFTMAX, OTHER = range(2)


class Layout(enum.IntEnum):
    """How tokens are dealt to the ring ranks."""

    AUTO, CONTIGUOUS, ZIGZAG, ZIGZAG_PACK, STRIPED, BALANCED = range(6)


class Circulate(enum.IntEnum):
    """Which side travels round the ring in the backward."""

    AUTO, KEYS, QUERIES = range(3)


class Wire(enum.IntEnum):
    """In which type partial gradients travel."""

    FULL, BF16 = range(2)


class Side(enum.IntEnum):
    """Of q, o, lse and their gradients, or of k and v and theirs."""

    Q, K = range(2)


class Direction(enum.IntEnum):
    FORWARD, BACKWARD = range(2)


class PlanOptions(TypedDict, total=False):
    """Keywords of `Plan` that functions hand on: all but documents, heads, head_dim, dtype and world."""

    kv_heads: int
    value_dim: int
    kind: Kind
    window_left: int
    window_right: int
    scale: float
    softcap: float
    alibi_slopes: Sequence[float] | None
    sinks: bool
    ulysses: int
    ring: int
    layout: Layout
    layout_parameter: int
    passes: int
    circulate: Circulate
    wire: Wire
    gather: bool
    reproducible: bool
    pack_inputs: bool


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
        kv_heads: int = 0,
        value_dim: int = 0,
        dtype: Dtype = Dtype.F32,
        kind: Kind = Kind.SOFTMAX,
        window_left: int = UNLIMITED,
        window_right: int = 0,
        scale: float = 0.0,
        softcap: float = 0.0,
        alibi_slopes: Sequence[float] | None = None,
        sinks: bool = False,
        world: int = 1,
        ulysses: int = 0,
        ring: int = 0,
        layout: Layout = Layout.AUTO,
        layout_parameter: int = 0,
        passes: int = 1,
        circulate: Circulate = Circulate.AUTO,
        wire: Wire = Wire.FULL,
        gather: bool = False,
        reproducible: bool = False,
        pack_inputs: bool = False,
    ) -> None:
        documents = len(cu_seqlens) - 1
        for name, values, count in (
            ("cu_seqlens_k", cu_seqlens_k, documents + 1),
            ("q_start", q_start, documents),
            ("alibi_slopes", alibi_slopes, heads),
        ):
            # The library reads as many as it needs; it cannot see how many there are.
            if values is not None and len(values) != count:
                raise InvalidArgument(f"{name} has {len(values)} entries, {count} are needed")
        if documents < 0:
            raise InvalidArgument("cu_seqlens has 0 entries, at least 1 is needed: 0")
        problem = _header.Problem(
            cu_seqlens_q=_array("cu_seqlens", c_int32, cu_seqlens),
            cu_seqlens_k=_array("cu_seqlens_k", c_int32, cu_seqlens_k),
            q_start=_array("q_start", c_int64, q_start),
            documents=documents,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
            kind=kind,
            window_left=window_left,
            window_right=window_right,
            scale=scale,
            softcap=softcap,
            alibi_slopes=_array("alibi_slopes", c_float, alibi_slopes),
            sinks=sinks,
        )
        options = _header.Options(
            world=world,
            ulysses=ulysses,
            ring=ring,
            layout=layout,
            layout_parameter=layout_parameter,
            passes=passes,
            circulate=circulate,
            wire=wire,
            gather=gather,
            reproducible=reproducible,
            pack_inputs=pack_inputs,
        )
        handle = c_void_p()
        call("plan_create", byref(problem), byref(options), byref(handle))
        self.handle, self.world, self.dtype = handle, world, Dtype(dtype)
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim, self.value_dim = head_dim, value_dim or head_dim
        weakref.finalize(self, status_of, "plan_destroy", handle)

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
        call("plan_share", self.handle, rank, byref(share))
        return share

    def explain(self) -> str:
        """Why this mesh, what each rank holds, bytes per step, imbalance, workspace."""
        needed = c_size_t()
        call("plan_explain", self.handle, None, 0, byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        call("plan_explain", self.handle, text, needed, byref(needed))
        return text.value.decode()

    def verify(self) -> None:
        """Proves the schedules of all ranks. For tests: takes time and memory."""
        call("plan_verify", self.handle)

    def workspace(self, rank: int, direction: Direction) -> int:
        """Bytes that a run takes on a rank."""
        size = c_uint64()
        call("plan_workspace", self.handle, rank, direction, byref(size))
        return size.value

    def tokens(self, side: Side, rank: int) -> array[int]:
        """The tokens of the batch that a rank holds, in its order."""
        return self._numbers("plan_tokens", side, rank)

    def positions(self, side: Side, rank: int) -> array[int]:
        """Their positions in their documents, for rotary embeddings and the like."""
        return self._numbers("plan_positions", side, rank)

    def shard(self, side: Side, rank: int, whole: Array, local: Array) -> None:
        """Copies a rank's rows of `whole` into `local`; of the CPU."""
        w, l = Given(whole), Given(local)
        call("plan_shard", self.handle, side, rank, w.pointer, l.pointer)

    def unshard(self, side: Side, rank: int, local: Array, whole: Array) -> None:
        """Copies a rank's rows back to their places in `whole`."""
        w, l = Given(whole), Given(local)
        call("plan_unshard", self.handle, side, rank, l.pointer, w.pointer)

    def _numbers(self, name: str, side: Side, rank: int) -> array[int]:
        share = self.share(rank)
        numbers = array("q", bytes(8 * (share.q_tokens if side == Side.Q else share.k_tokens)))
        # A view of the array as what the library fills; there is none of an empty array.
        room = (c_int64 * len(numbers)).from_buffer(numbers) if numbers else (c_int64 * 0)()
        call(name, self.handle, side, rank, room, len(numbers))
        return numbers


def _array(name: str, kind: Any, values: Sequence[float] | None) -> Any:
    """As a C array. ctypes keeps the low bits of an integer that is too large: that is refused."""
    if values is None:
        return None
    numbers = (kind * len(values))(*values)
    if kind is not c_float:
        for at, (kept, value) in enumerate(zip(numbers, values, strict=True)):
            if kept != value:
                raise InvalidArgument(f"{name}[{at}] is {value}, which the C interface has no room for")
    return numbers
