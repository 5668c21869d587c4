# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context parallelism in a JAX program: one `Context` for the job, whose ranks are the devices of a mesh axis, and one `Batch` for
each packing of documents.

Shapes are static in JAX and ranks hold different numbers of tokens. So each rank has at least as many rows as the longest share: its
tokens, then padding rows. `Batch.shard` fills the padding rows. Attention does not read them, and their results and gradients are 0.
The documents are data, and so are slices: a function that gets `Batch.packing` as an argument is not compiled again for other
documents or slices.
"""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments import attempt, flag, instance, refused, whole
from .._signature import named
from ..engine import checked_timeout
from ..errors import InvalidArgument, Unsupported
from ..packing import Layer, Packed, PackedContext, Packing, kind_of, numbers_of, over_all, sinks_of
from ..options import DTYPES, PlanOptions, Side, at_least_1, checked
from ..plan import Plan
from ..rank import Rank, local_group, on_all
from ..slices import Slice
from ..slices import checked as checked_slices
from ..slopes import refuse_per_document, slopes_of
from . import calls

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
_inside = threading.local()


def _finish() -> None:
    """Waits for calls in flight: JAX returns before compiled functions have run. JAX gives their failures to whoever reads the
    results, and here once more."""
    try:
        jax.effects_barrier()  # type: ignore[no-untyped-call, unused-ignore]
    except Exception as error:  # noqa: BLE001 (as JAX does when a program ends)
        warnings.warn(f"a call of a compiled function failed: {error}", RuntimeWarning, stacklevel=3)


# When a program ends with calls in flight, which JAX runs to their end, Python refuses new threads once it has ended those of its pools. This
# comes before: functions that are registered here run in reverse order, and `cpattn.rank` has imported the pools.
threading._register_atexit(_finish)  # type: ignore[attr-defined]


@named("heads=8, kv_heads=2, head_dim=128", PlanOptions)
class Context(PackedContext):
    """The devices of the axis `axis` of `mesh` as ranks, all of them CPU devices of this process; without a mesh, one rank.

    `attention` is called inside `jax.shard_map` over that axis, on each rank's own tokens. Other axes of the mesh are replicas.
    `timeout` is in seconds: a rank that waits longer for a message of another rank fails. `workers` is the number of threads of each
    rank's kernels. `plans` is the number of cached batches. Further keywords are those of `cpattn.PlanOptions`, without dropout. Mesh and
    layout are chosen for `heads` and `head_dim`: give those of most layers. Layers of all kinds work on the same distribution of tokens.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh | None = None,
        axis: str | None = None,
        *,
        heads: int,
        head_dim: int,
        timeout: float = 300.0,
        workers: int = 1,
        plans: int = 16,
        **options: Unpack[PlanOptions],
    ) -> None:
        super().__init__(plans)
        self.world, self.axis = 1, axis
        if (mesh is None) != (axis is None):
            raise InvalidArgument(f"mesh is {mesh} and axis is {axis!r}: give both, or neither for one rank")
        if mesh is not None:
            devices = instance("mesh", mesh, jax.sharding.Mesh, "a jax.sharding.Mesh is needed").devices.flat
            if axis not in mesh.axis_names:
                raise refused(
                    "axis", axis, f"one of the mesh's axes is needed: {', '.join(map(repr, mesh.axis_names))}"
                )
            for device in devices:
                if device.platform != "cpu" or device.process_index != jax.process_index():
                    raise Unsupported(
                        f"mesh has the device {device} of process {device.process_index}, a CPU device of this process, {jax.process_index()}, is "
                        "needed; for several processes use cpattn.torch.Context, or cpattn.Rank over your own transport"
                    )
            self.world = mesh.shape[axis]
        self._kind: dict[str, Any] = {
            "heads": at_least_1("heads", heads),
            "head_dim": at_least_1("head_dim", head_dim),
            **options,
        }
        refuse_per_document("", options)
        if checked(options, heads).get("dropout"):
            raise Unsupported(
                f"dropout is {options['dropout']}, which is not supported here: leave it out, or use cpattn.torch or cpattn.Rank"
            )
        over_all(Plan([0, 1], world=self.world, **self._kind))
        self._deadline = max(1, round(1000 * checked_timeout(timeout)))
        self._workers = whole("workers", workers, 1, 1024)
        self._lock = threading.RLock()
        self._groups: list[list[Rank]] = []  # idle

    def batch(self, cu_seqlens: Any, rows: int | None = None, *, slices: Iterable[Slice] | None = None) -> Batch:
        """The batch with these documents. cu_seqlens: 0, the end of the first document, ..., the number of tokens. `rows` is the number
        of rows per rank, by default the number of tokens of the longest share. `slices` say which queries attend to which keys
        (`cpattn.slices` makes those of common masks); without them each document attends to itself."""
        packing = Packing.of(cu_seqlens, slices=slices)
        batch = self._batch_of(packing)
        if rows is None:
            return batch
        batch.check_rows(at_least_1("rows", rows))
        return Batch(self, packing, batch.plan, rows)

    def _batch_of(self, packing: Packing) -> Batch:
        with self._lock:
            return self._cached(packing, lambda key: Batch(self, key))

    def attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cu_seqlens: Any,
        sinks: jax.Array | None = None,
        *,
        window_left: int | None = None,
        window_right: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Sequence[float] | Sequence[Sequence[float]] | None = None,
        slices: Iterable[Slice] | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of this rank's tokens to the whole batch, differentiable once, in reverse mode. All devices of the axis make the
        same calls, as for `jax.lax.psum`.

        q [rows, heads, head_dim], k [rows, kv_heads, head_dim], v [rows, kv_heads, value_dim], sinks [heads] or [heads, n] (f32); returns
        o [rows, heads, value_dim]. Rows are those of `Batch.shard`. cu_seqlens is that of the batch: numbers, or an array of int32, which
        jax.jit may trace. Of a batch with slices give `Batch.packing` instead, an array of int32 with documents and slices, or give
        `cu_seqlens` and the slices themselves as `slices`, which are compiled into a function. The gradient of `sinks` is complete on
        rank 0 and zero on the others. Sum it over the ranks; jax.shard_map does that for sinks that are equal on all ranks. The other options are those of `cpattn.torch.Batch.attention`. `alibi_slopes` are
        numbers that are compiled into a function, not a traced array.

        With `return_lse` it returns o and lse [heads, rows] (f32; f64 for f64): the natural log-sum-exp of the scores and the sinks, -inf
        for a query that sees nothing, 0 in padding rows. Both are differentiable; the gradient of a -inf and of padding is not used.
        jax.shard_map puts lse together with `out_specs` P(None, axis).
        """
        with_lse = flag("return_lse", return_lse)
        layer = Layer(window_left, window_right, scale, softcap, None, slopes_of("alibi_slopes", alibi_slopes))
        inputs = {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}
        for name, x in inputs.items():
            instance(name, x, jax.Array | np.ndarray, "an array of JAX or NumPy is needed")
            dtype = "float32" if name == "sinks" else str(q.dtype)
            if str(x.dtype) != dtype or dtype not in DTYPES:
                raise InvalidArgument(
                    f"{name}.dtype is {x.dtype}, {dtype if dtype in DTYPES else ' or '.join(DTYPES)} is needed"
                )
            if name != "sinks" and (x.ndim != 3 or len(x) != len(q)):
                alike = "" if name == "q" else f", with the number of rows of q, {len(q)}"
                raise InvalidArgument(f"{name} has the shape {x.shape}, [rows, heads, dim] is needed{alike}")
        if self.axis is not None:
            self._check_axis()
        every = None if slices is None else checked_slices("slices", slices)
        # Errors are better raised now than while the program runs.
        kind_of(q, k, v, DTYPES[str(q.dtype)], sinks_of(sinks), layer)
        if not isinstance(cu_seqlens, jax.core.Tracer):
            batch = self._batch_of(calls.packing_of(numbers_of("cu_seqlens", cu_seqlens), every))
            batch.check_rows(len(q))
            plan = batch.layer(q, k, v, sinks_of(sinks), layer)
            if sinks is not None and (sinks.ndim not in (1, 2) or len(sinks) != plan.heads):
                raise InvalidArgument(
                    f"sinks has the shape {sinks.shape}, ({plan.heads},) or ({plan.heads}, n) is needed"
                )
        elif cu_seqlens.ndim != 1 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
            raise InvalidArgument(
                f"cu_seqlens is an array of {cu_seqlens.dtype} of the shape {cu_seqlens.shape}, a sequence of whole numbers is needed"
            )
        ends = jnp.asarray(cu_seqlens)
        over = frozenset() if self.axis is None else _axes(jax.lax.axis_index(self.axis))
        q, k, v, ends, *more = _varying_alike(over, q, k, v, ends, *(() if sinks is None else (sinks,)))
        return calls.attention(self, layer, every, with_lse, q, k, v, ends, more[0] if more else None)

    def _check_axis(self) -> None:
        try:
            size = jax.lax.axis_size(self.axis)
        except NameError as error:
            raise InvalidArgument(
                f"attention over the {self.world} ranks of the axis {self.axis!r} was called outside of that axis: call it inside "
                "jax.shard_map over the axis"
            ) from error
        if size != self.world:
            raise InvalidArgument(
                f"axis {self.axis!r} has {size} devices here, the context's mesh has {self.world}: use the same mesh"
            )
        mesh = jax.sharding.get_abstract_mesh()
        if left := [name for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes]:
            raise Unsupported(
                f"attention was called where the compiler divides arrays over {', '.join(map(repr, left))}, but it cannot divide "
                "attention: give jax.shard_map all axes of the mesh, without axis_names"
            )

    def on_ranks(self, job: Callable[[int, Rank], T]) -> list[T]:
        """Runs job(number, rank) on a thread for each rank. Independent calls may run at the same time, each with its own group."""
        with self._lock:
            group = self._groups.pop() if self._groups else local_group(self.world, self._deadline, self._workers)

        def inside(number: int, rank: Rank) -> T:
            _inside.on = True
            try:
                return job(number, rank)
            finally:
                _inside.on = False

        try:
            results = on_all(group, inside)
        except BaseException as error:
            # All ranks of the group have been aborted.
            for rank in group:
                rank.close()
            if isinstance(error, RuntimeError) and "interpreter shutdown" in str(error):  # Python 3.12
                raise Unsupported(
                    "the program ends while calls of cpattn.jax are under way, and this Python starts no threads then: close the context "
                    "before the end, or read all results"
                ) from error
            raise
        with self._lock:
            self._groups.append(group)
            if self._closed:
                self._end_groups()
        return results

    def close(self) -> None:
        """Waits for calls in flight and frees the ranks. Further calls are refused. A program that ends waits for its calls too; on Python
        3.12, which then starts no threads, close the context before the end, or read all results. A callback of JAX must not call it, since it would wait for itself. JAX keeps the
        context alive with the functions that were compiled with it."""
        if not getattr(_inside, "on", False):
            _finish()
        with self._lock:
            self._closed = True
            self._batches.clear()
            self._end_groups()

    def _end_groups(self) -> None:
        for rank in sum(self._groups, []):
            rank.close()
        self._groups.clear()


class Batch(Packed):
    """Packed documents, sharded over the ranks of a context. Its methods run outside of `jax.shard_map`.

    Arrays of all ranks are [ranks x rows, ...], in rank order, as `jax.sharding.PartitionSpec(axis)` distributes them.
    """

    def __init__(self, context: Context, packing: Packing, plan: Plan | None = None, rows: int | None = None) -> None:
        self.context = instance("context", context, Context)
        cu_seqlens, slices = packing.cu_seqlens, packing.slices
        super().__init__(
            plan or over_all(Plan(cu_seqlens, slices=slices, world=context.world, **context._kind)), context._kind
        )
        self.cu_seqlens, self.slices = np.array(cu_seqlens, np.int32), slices
        # For `Context.attention`, in place of cu_seqlens: documents and slices.
        self.packing = self.cu_seqlens if slices is None else calls.array_of(packing)
        shares = [self.plan.share(rank).q_tokens for rank in range(context.world)]
        self.longest = max(shares)
        self.rows = self.longest if rows is None else rows

    def layer(self, q: Any, k: Any, v: Any, sinks: int, layer: Layer) -> Plan:
        """The plan of a kind of layer, with this batch's tokens."""
        with self.context._lock:
            return self._plan_of(kind_of(q, k, v, DTYPES[str(q.dtype)], sinks, layer))

    def check_rows(self, rows: int) -> None:
        """Refuses fewer rows than the longest share."""
        if rows < self.longest:
            raise InvalidArgument(
                f"the number of rows per rank is {rows}, at least {self.longest} is needed, the most tokens on one rank"
            )

    @cached_property
    def tokens(self) -> Any:
        """The indices in the batch of all ranks' tokens; -1 in padding rows."""
        return self._numbers(self.plan.tokens, -1)

    @cached_property
    def positions(self) -> Any:
        """The positions of the tokens in their documents; 0 in padding rows."""
        return self._numbers(self.plan.positions, 0)

    def _numbers(self, of: Callable[[Side, int], Sequence[int]], fill: int) -> Any:
        numbers = np.full((self.context.world, self.rows), fill, np.int32)
        for rank, row in enumerate(numbers):
            mine = of(Side.Q, rank)
            row[: len(mine)] = mine
        return numbers.reshape(-1)

    def shard(self, whole: Any, fill: Any = 0) -> jax.Array:
        """The rows of all ranks, from `whole`, which has one row for each token of the batch; `fill` in padding rows.
        Differentiable."""
        whole = self._check("whole", whole, int(self.cu_seqlens[-1]), "fill", fill)
        with_tokens = np.flatnonzero(self.tokens >= 0)
        empty = jnp.full((len(self.tokens), *whole.shape[1:]), fill, whole.dtype)
        sharded: jax.Array = empty.at[with_tokens].set(whole[self.tokens[with_tokens]])
        return sharded

    def unshard(self, sharded: Any) -> jax.Array:
        """The inverse of `shard`: one row for each token of the batch, in its order. Differentiable."""
        sharded = self._check("sharded", sharded, len(self.tokens))
        place = np.empty(int(self.cu_seqlens[-1]), np.int32)
        with_tokens = np.flatnonzero(self.tokens >= 0)
        place[self.tokens[with_tokens]] = with_tokens
        rows: jax.Array = sharded[place]
        return rows

    def labels(self, ids: Any, ignore: int = -100) -> jax.Array:
        """The next token of each token of all ranks, from `ids`, which has one for each token of the batch; `ignore` at the ends of
        documents and in padding rows."""
        ids = self._check("ids", ids, int(self.cu_seqlens[-1]), "ignore", ignore)
        ends = self.cu_seqlens[1:][np.diff(self.cu_seqlens) > 0] - 1
        return self.shard(jnp.roll(ids, -1).at[ends].set(ignore) if len(ids) else ids, ignore)

    def _check(self, name: str, x: Any, rows: int, filling: str = "", fill: Any = 0) -> Any:
        array = jnp.asarray(x)
        if array.ndim == 0 or len(array) != rows:
            raise InvalidArgument(f"{name} has the shape {array.shape}, ({rows}, ...) is needed")
        if isinstance(fill, enum.Enum):
            raise refused(filling, fill, "a number is needed, not a member of an enum: are two arguments exchanged?")
        if not _holds(array.dtype, fill):
            raise refused(
                filling, fill, f"which {array.dtype} cannot represent: convert {name}, or give another {filling}"
            )
        return array


def _holds(dtype: Any, number: Any) -> bool:
    """Whether the type can represent the number, rounded if it is a float type. JAX would wrap or truncate it silently."""
    if isinstance(number, jax.core.Tracer) or jnp.issubdtype(dtype, jnp.inexact):
        return True
    with np.errstate(invalid="ignore"):
        value = attempt(lambda: np.asarray(number).astype(dtype))
    return value is not None and bool(value == number)


def _varying_alike(over: frozenset[str], *arrays: jax.Array) -> list[jax.Array]:
    """Makes arrays vary over the same axes of the mesh inside `jax.shard_map`, and over the axes in `over`. shard_map sums gradients
    over the added axes."""
    axes = [_axes(x) for x in arrays]
    every = over.union(*axes)
    lacking = [tuple(sorted(every - mine)) for mine in axes]
    return [jax.lax.pcast(x, more, to="varying") if more else x for x, more in zip(arrays, lacking)]


def _axes(x: jax.Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    axes: frozenset[str] = kind.vma if hasattr(kind, "vma") else kind.mat.varying
    return axes
