# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context parallelism in a training job: one `Context` for the job, one `Batch` for each packing of documents.

Every rank of the group makes the same calls in the same order. A batch has the plan for its documents, and the indices and
positions of this rank's tokens. Batches are cached by their documents and slices. No rank needs more than its own tokens.
"""

from __future__ import annotations

import enum
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arguments import attempt, flag, instance, one_of, refused, whole
from .._signature import named
from ..errors import Error, InvalidArgument
from ..packing import Layer, Packed, PackedContext, Packing, kind_of, over_all, sinks_of
from ..options import CHOSEN, RUNS, Circulate, Layout, PlanOptions, Side, at_least_1, checked, kinds_of
from ..plan import Plan
from ..rank import Rank
from ..slices import Slice, checked as checked_slices
from ..slopes import refuse_per_document, slopes_of
from ..trace import Event
from . import choice, nccl, nodes, operators
from .combine import Combining
from .dropout import of_call
from .dtypes import DTYPES, holds
from .executor import Executor, Network, explain
from .gather import Talk
from .gloo import Collectives, GlooTransport, Members
from .heads import Heads
from .kernels import Kernel, find
from .lists import lists_of, of_blocks
from .scan import Scanning
from .top_keys import Choosing

if TYPE_CHECKING:
    from typing_extensions import Unpack

PlanOf = Callable[[Packing], Plan]

_numbers = itertools.count()

# By group of global ranks: the open contexts, oldest first, each with the function that makes the plans that decide the distribution.
_deciding: dict[tuple[int, ...], list[tuple[Context, PlanOf]]] = {}


@named("group, heads=8, kv_heads=2, head_dim=128", PlanOptions)
class Context(PackedContext, Combining):
    """This process as one rank of a process group (None: the default group; or a list of global ranks). Make one for the whole job, on
    all ranks.

    `timeout` is in seconds: if no message moves for that time, a call fails on this rank and then on all ranks. It must be longer
    than the slowest rank computes between two calls. `dtype` is the type of q, k, v and o. `workers` is the number of CPU threads of
    the kernels (more than 1 needs a library built with rayon). `plans` is the number of cached batches. Further keywords are those of
    `cpattn.PlanOptions`: kv_heads, windows, softcap, layout, ulysses, ring, ...

    All layers, and all contexts of one group, work on one distribution of tokens. The first open context decides it, and a context
    with another layout or mesh is refused. A context with `own_tokens=True` has its own distribution: do not use its tensors with
    those of other contexts.

    For a model with several kinds of layers, give `layers`, kinds as for `Plan.auto_for`: the automatic choice of mesh and layout then
    considers all of them. It excludes ulysses, ring and layout.

    `kernels` says what computes. "cpattn", the default on the CPU: the kernels of this library, on the CPU and on CUDA. "torch", the
    default on any other device and of a library that is the planner alone, "math", another name of `cpattn.torch.kernels`, or a `Kernel` of your own: then this library only
    plans. Attention is that kernel's, everything else is operators of PyTorch, and messages are point-to-point batches over the
    group's own backend, on any device that PyTorch has. What a kernel does not honour is refused by name.

    With kernels="cpattn" on CUDA messages go over NCCL: over a communicator of the context's own, or with `communicator="torch"` over
    that of the process group, which PyTorch owns. Then, and with kernels of others, collectives of the group and calls of the context
    are enqueued in one order, the same on all ranks, by one thread at a time; after a failure the group is not aborted; and the context
    is closed before the group is destroyed.

    Without `ranks_per_node`, nodes are those of torchrun: LOCAL_WORLD_SIZE consecutive global ranks each. A group with different
    numbers of ranks on its nodes is refused, and so are ranks with different numbers, on all ranks; `ranks_per_node=0` treats all links
    alike.

    Raises InvalidArgument or Unsupported for arguments that are refused, PeerError if another rank does not come in time.
    """

    def __init__(
        self,
        group: Members = None,
        *,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
        workers: int = 1,
        plans: int = 16,
        own_tokens: bool = False,
        layers: Sequence[tuple[int, Mapping[str, Any]]] = (),
        communicator: str | None = None,
        kernels: str | Kernel | None = None,
        **options: Unpack[PlanOptions],
    ) -> None:
        heads, head_dim = at_least_1("heads", heads), at_least_1("head_dim", head_dim)
        more = (
            "group",
            "heads",
            "head_dim",
            "dtype",
            "device",
            "timeout",
            "workers",
            "plans",
            "own_tokens",
            "layers",
            "communicator",
        )
        checked({name: value for name, value in options.items() if name != nodes.ARGUMENT}, heads, "Context", more)  # type: ignore[arg-type]
        refuse_per_document("", options)
        super().__init__(plans)
        workers = at_least_1("workers", workers)
        own_tokens, self._layers = flag("own_tokens", own_tokens), kinds_of("layers", layers)
        if any("slices" in kind for _, kind in self._layers):
            raise InvalidArgument(
                "layers: a kind of layer has slices, which belong to a batch: give them to `batch`, or to its `with_slices`"
            )
        for _, kind in self._layers:
            refuse_per_document("layers: ", kind)
        if self._layers and (chosen := [name for name in CHOSEN if options.get(name)]):
            raise InvalidArgument(
                f"layers and {chosen[0]} are both given, but layers choose {chosen[0]}: leave one of them out"
            )
        if (known := attempt(DTYPES.get, dtype)) is None:
            raise refused("dtype", dtype, f"one of {', '.join(map(str, DTYPES))} is needed")
        if isinstance(device, bool | enum.Enum) or (on := attempt(torch.device, device)) is None:
            raise refused("device", device, "a device of PyTorch is needed, such as cpu or cuda")
        self.dtype, self.device, self.workers = dtype, on, workers
        kernels = choice.checked(kernels, on, workers)
        communicator = choice.communicator(communicator, kernels, on)
        self.device = choice.numbered(on)
        self.transport, self._timeout = GlooTransport(group, timeout=timeout), timeout
        self._collectives: Collectives | None = None
        self._own_collectives = True
        self._combines: dict[tuple[Any, ...], Plan] = {}
        self.number, self.world = self.transport.rank, self.transport.world
        self._members = self.transport.members
        try:
            options["ranks_per_node"], self._from_torchrun = nodes.agreed(self.transport, self._members, options)
            self._kind: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "dtype": known, **options}
            # None: the kernels of this library.
            self.kernel = choice.agreed(self.transport, kernels, self.device)
            nodes.together(self.transport, lambda: over_all(self._first(Packing((0, 1)))))
        except BaseException:
            self.transport.release()
            raise
        self.key, self.runs = next(_numbers), 0  # forward passes of attention, also of compiled graphs
        operators.CONTEXTS[self.key] = self
        # The rank for tensors on the CPU; with a device, for `shift` only. None with another kernel.
        self._host: Rank | None = None
        self.rank: Rank | Executor
        if self.kernel is not None:
            try:
                self.rank = Executor(
                    self.transport,
                    Network(choice.process_group(group), self._members, self.device, timeout),
                    self.kernel,
                )
            except BaseException:
                self.transport.release()
                raise
        else:
            self._host = self.rank = Rank(self.transport, workers=workers)
            if self.device.type == "cuda":
                try:
                    self.rank = nccl.rank_on(self.device, communicator, self.transport, group, timeout)
                except BaseException:
                    self._host.close()
                    raise
        open_ones = _deciding.setdefault(self._members, [])
        self._decides: PlanOf | None = open_ones[0][1] if open_ones and not own_tokens else None
        if not own_tokens:
            open_ones.append((self, self._decides or self._first))

    def batch(
        self,
        cu_seqlens: Tensor | Sequence[int],
        *,
        cu_seqlens_k: Tensor | Sequence[int] | None = None,
        q_start: Tensor | Sequence[int] | None = None,
        slices: Iterable[Slice] | None = None,
    ) -> Batch:
        """The batch with these documents. cu_seqlens: 0, the end of the first document, ..., the number of tokens.

        `slices` say which queries attend to which keys (`cpattn.slices` makes those of common masks); without them each document
        attends to itself. Layers then see all of a slice, unless the context or the layer has a window.

        With `cu_seqlens_k`, k and v are other tokens than q, with as many documents: for cross-attention, or for a prefix whose k and v
        are kept. `q_start[d]` is the position of the first q token of document d among its k tokens (None: the last q token is at the
        position of the last k token). Such a batch is causal by these positions, unless the context or the layer has window_right.
        """
        return self._batch_of(Packing.of(cu_seqlens, cu_seqlens_k, q_start, slices))

    def _batch_of(self, packing: Packing) -> Batch:
        return self._cached(packing, lambda key: Batch(self, key))

    def _first(self, packing: Packing) -> Plan:
        """A plan that decides which rank holds which tokens."""
        cu_seqlens, documents = packing.cu_seqlens, packing.documents
        if not self._layers:
            try:
                return self._in_long_runs(Plan(cu_seqlens, world=self.world, **documents, **self._kind), packing)
            except Error as error:
                if not self._from_torchrun or "node" not in str(error):
                    raise
                given = f"ranks_per_node is {self._kind['ranks_per_node']} from LOCAL_WORLD_SIZE: give ranks_per_node, 0 if all links are alike"
                raise type(error)(f"{error}. {given}") from error
        how = {name: self._kind[name] for name in RUNS & self._kind.keys()}
        kinds = [(count, {"dtype": self._kind["dtype"], **kind}) for count, kind in self._layers]
        chosen = Plan.auto_for(cu_seqlens, kinds, world=self.world, **documents, **how)[0]
        return Plan.with_tokens_of(self._in_long_runs(chosen, packing), **self._kind)

    def _in_long_runs(self, plan: Plan, packing: Packing) -> Plan:
        """The plan, or one without the stripes that it chose, for a kernel that would have to gather their rows."""
        info = plan.describe()
        explicit = one_of("layout", self._kind.get("layout", Layout.AUTO), Layout) != Layout.AUTO
        if self.kernel is None or self.kernel.form != "rectangles" or explicit or info.layout != Layout.STRIPED:
            return plan
        layout = Layout.ZIGZAG if len(packing.cu_seqlens) <= 2 else Layout.ZIGZAG_PACK
        mesh: dict[str, Any] = {"ulysses": info.ulysses, "ring": info.ring, "layout": layout, "layout_parameter": 0}
        return Plan(packing.cu_seqlens, world=self.world, **packing.documents, **{**self._kind, **mesh})

    def plan(self, cu_seqlens: Sequence[int] | Packing) -> Plan:
        """A plan for these documents over the ranks of the group."""
        packing = cu_seqlens if isinstance(cu_seqlens, Packing) else Packing.of(cu_seqlens)
        if packing.tokens_of is not None:
            return Plan.with_tokens_of(self._batch_of(packing.tokens_of).plan, slices=packing.slices, **self._kind)
        if self._decides is None:
            plan = self._first(packing)
        else:
            base = self._decides(packing)
            try:
                plan = Plan.with_tokens_of(base, **self._kind)
            except Error as error:
                raise type(error)(
                    f"{error}. The first open context of this group decides which rank holds which tokens: {_tokens_of(base)}. Give this "
                    "context the same layout and mesh, close the first one, or give own_tokens=True to one of the two and keep their "
                    "tensors apart"
                ) from error
        return over_all(plan)

    def collectives(self) -> Collectives:
        """A group for rows of other ranks, made when it is first needed. All ranks call it."""
        if self._collectives is None:
            self._collectives = Collectives(self._members, self._timeout)
        return self._collectives

    def talk(self) -> Talk | None:
        """What brings rows of other ranks: nothing, if there are none. All ranks call it."""
        if isinstance(self.rank, Executor):
            return self.rank
        return self.collectives() if self.world > 1 else None

    def use_collectives(self, collectives: Collectives) -> None:
        """Takes a group that is already there for rows of other ranks, so that one group serves all contexts of a model. Whoever made it
        closes it, after this context."""
        self._collectives, self._own_collectives = instance("collectives", collectives, Collectives), False

    def record(self, capacity: int = 1 << 16) -> None:
        """Starts to record this rank's operations, at most `capacity` of them, for `trace`."""
        self.check_open()
        self.rank.record(capacity)

    def trace(self) -> list[Event]:
        """On rank 0: the events that all ranks recorded, with times on rank 0's clock. On other ranks: an empty list. All ranks
        call it. `cpattn.timeline_svg` draws the events, `cpattn.chrome_trace` makes a file for Perfetto."""
        self.check_open()
        return self.rank.gather_trace()

    def close(self) -> None:
        """Leaves the group. Peers that still need this rank get an error, so call dist.barrier on all ranks before."""
        self._closed = True
        self._batches.clear()
        if self._collectives is not None and self._own_collectives:
            self._collectives.close()
        _deciding[self._members] = [pair for pair in _deciding.get(self._members, []) if pair[0] is not self]
        self.rank.close()
        (self.transport.release if self._host is None else self._host.close)()


class Batch(Heads, Choosing, Scanning, Packed):
    """Packed documents, sharded over the ranks of a context.

    `tokens` (int64) are the indices in the batch of this rank's tokens, in its order; `positions` (int64) are their
    positions in their documents. A data loader reads the rows `tokens`, or `shard` selects them from the whole batch. `k_tokens` and
    `k_positions` are those of k and v, the same unless the batch has `cu_seqlens_k`.
    """

    def __init__(self, context: Context, packing: Packing) -> None:
        self.context, self.packing = instance("context", context, Context), instance("packing", packing, Packing)
        self.cu_seqlens, self.cu_seqlens_k = packing.cu_seqlens, packing.cu_seqlens_k or packing.cu_seqlens
        super().__init__(context.plan(packing), context._kind)
        # A tensor, so that graphs treat its values as unknown.
        self._numbers = torch.tensor(packing.numbers(), dtype=torch.int64)
        self._alone_on_ring = self.plan.describe().ulysses == 1
        self.tokens, self.positions = self._of(Side.Q)
        self.k_tokens, self.k_positions = (
            (self.tokens, self.positions) if packing.cu_seqlens_k is None else self._of(Side.K)
        )

    def _of(self, side: Side) -> tuple[Tensor, Tensor]:
        """Tokens and positions of one side."""
        plan, number, device = self.plan, self.context.number, self.context.device
        return _tensor(plan.tokens(side, number)).to(device), _tensor(plan.positions(side, number)).to(device)

    @property
    def slices(self) -> tuple[Slice, ...] | None:
        """The slices of the batch, or None: each document attends to itself."""
        return self.packing.slices

    def with_slices(self, slices: Iterable[Slice]) -> Batch:
        """The batch with the same tokens on each rank, in which queries attend to what `slices` say: for a kind of layer with another
        mask. (Batches that are made one by one may give a rank other tokens.)"""
        every = checked_slices("slices", slices)
        first = self.packing if self.packing.tokens_of is None else self.packing.tokens_of
        return (
            self
            if every == self.slices
            else self.context._batch_of(self.packing._replace(slices=every, tokens_of=first))
        )

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        *,
        window_left: int | None = None,
        window_right: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
        dropout_p: float | None = None,
        dropout_seed: int | Tensor | None = None,
        key_indices: Tensor | None = None,
        key_blocks: Tensor | None = None,
        block_size: int | None = None,
        return_lse: bool = False,
        return_max_logit: bool = False,
    ) -> Any:
        """Attention of this rank's tokens to the whole batch, as its slices say, or in its documents; differentiable once. All ranks
        call it, in the same order.

        q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], v [tokens, kv_heads, value_dim], sinks [heads] or [heads, n] (f32); returns
        o [tokens, heads, value_dim]. Heads and dims may differ from those of the context: layers of all kinds work on the batch's
        tokens. Any strides are allowed. On a device, it runs on the current stream. The gradient of `sinks`, a sum over all ranks, is
        complete on rank 0 and zero on the others, since the training loop sums gradients of parameters over the ranks.

        Options that are not given have the values of the context. A query sees `window_left` keys before its own and `window_right`
        keys after it (cpattn.UNLIMITED: no limit), in its document or in each of its slices. Without window_right documents are causal,
        and slices have no limit. A sliding window of W tokens that includes the query itself is `window_left=W - 1`.
        `scale` multiplies q·k (default: 1/√head_dim). With `softcap` c a score s becomes c·tanh(s/c); 0 is no softcap.
        `alibi_slopes` are [heads], or [documents, heads] with a row for each document of the batch (on the CPU): a score loses the slope of
        the query's document and head times the distance of the two positions. They are read on the host and have no gradient.

        `dropout_p` is the probability with which a pair of a query and a key is dropped, as in PyTorch's scaled_dot_product_attention, also
        in models in evaluation: give 0 there. Which pairs are dropped depends on the tokens' places in the batch, the head and
        `dropout_seed`, a number from 0 to 2^64 - 1 or one of an int64 tensor, and not on the ranks: it is as on one process, and in
        `cpattn.torch.dropout_mask`. All ranks give the same seed, which is checked, and another one for each call. Without a seed it is drawn
        from PyTorch's generator for the CPU, whose state must then be equal on all ranks, as after torch.manual_seed; gradient checkpointing that does not restore that state is refused in
        the backward pass. A capture into a
        CUDA graph is refused.

        With `key_indices`, int32 or int64 [tokens, entries] or [tokens, kv_heads, entries], a query attends only to the keys that it lists:
        positions in its document, each at most once, that the mask allows; -1 is none. Kernels compute the listed pairs alone. In a ring
        the rows of k and v that a rank's tokens list go to it, or those that the mask allows, if these are fewer bytes: the context's option
        `key_rows` forces either. On the CPU only, without slices. `top_keys` makes such lists.

        With `key_blocks`, of the same shapes and types, a query lists blocks of `block_size` keys: block b has the positions from b · block_size on
        in its document, the last block of a document may be shorter, and each block is listed at most once; -1 is none. The query
        attends to those of their keys that the mask allows. A list costs 4 bytes for each key, as `key_indices` of all of them would.

        With `return_lse` it returns o and lse [heads, tokens] (f32; f64 for f64): the natural log-sum-exp of the scores and the sinks,
        -inf for a query that sees nothing. Both are differentiable, with kernels of others on all ranks or on none; the gradient of a
        -inf is not used. With `return_max_logit` the
        last result is the largest score of each head, [heads] f32 without a gradient, over the pairs that this rank computed (-inf if
        it computed none; NaN is left out): all_reduce with MAX gives that of the batch. To clip q and k, scale them where it is above the
        threshold alone: it may be negative.

        Tensors have the context's dtype, except under torch.autocast, where they and o are cast to its dtype.
        """
        context, largest = self.context, flag("return_max_logit", return_max_logit)
        wanted = (True, flag("return_lse", return_lse), largest)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            operators.on_device(context, name, tensor, ndim=3)
        if sinks is not None:
            operators.on_device(context, "sinks", sinks)
        dtype, cast = context.dtype, torch.is_autocast_enabled(context.device.type)
        if cast and not all(x.dtype == torch.float64 for x in (q, k, v)):
            dtype = torch.get_autocast_dtype(context.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dtype != dtype:
                raise InvalidArgument(
                    f"{name}.dtype is {tensor.dtype}, {dtype} is needed: convert q, k and v, use torch.autocast, or make a Context with "
                    "another dtype"
                )
        seed = of_call(dropout_p, dropout_seed, context._kind.get("dropout", 0.0))
        keys = lists_of(context, key_indices)
        if key_indices is not None and key_blocks is not None:
            raise InvalidArgument(
                "key_indices and key_blocks are both given: one of them says which keys a query attends to"
            )
        keys = of_blocks(self, key_blocks, block_size, (window_left, window_right)) if keys is None else keys
        numbers = (window_left, window_right, scale, softcap, dropout_p)
        if torch.compiler.is_compiling():
            slopes = operators.slopes_tensor(alibi_slopes)
            of_call_alone = (slopes, keys, self._numbers, context.key)
            results = operators.attention(q, k, v, sinks, largest, seed, *of_call_alone, *numbers)
        else:
            layer = Layer(*numbers, alibi_slopes=slopes_of("alibi_slopes", alibi_slopes))
            results = operators.Attention.apply(q, k, v, sinks, self, largest, seed, keys, layer)  # type: ignore[no-untyped-call]
        returned = tuple(x for x, want in zip(results, wanted) if want)
        return returned if len(returned) > 1 else returned[0]

    def explain(self, kernels: str | Kernel | None = None) -> str:
        """`Plan.explain` of the batch, and the calls of a kernel on this rank: the context's, unless another one is given."""
        context, text = self.context, self.plan.explain()
        kernel = context.kernel if kernels is None else find(kernels, context.device)
        return text if kernel is None else f"{text}\n{explain(self.plan, context.number, kernel, context.device)}"

    def _plan_for(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: Layer, *more: Tensor, listed: bool = False
    ) -> Plan:
        """The plan of a kind of layer, with this batch's tokens. It packs messages if the tensors are not contiguous."""
        for name, x, tokens in (("q", q, len(self.tokens)), ("k", k, len(self.k_tokens)), ("v", v, len(self.k_tokens))):
            if x.shape[0] != tokens == x.shape[1]:  # other wrong sizes are refused by the library
                given = f"{name} has the shape {tuple(x.shape)}, ({tokens}, heads, head_dim) is needed"
                raise InvalidArgument(f"{given}: {name} is [tokens, heads, head_dim], give {name}.transpose(0, 1)")
        kind = kind_of(q, k, v, DTYPES[q.dtype], sinks_of(sinks), layer)
        if listed and not self._common.get("reproducible"):
            kind |= {
                side: one_of(side, self._common.get(side, Circulate.AUTO), Circulate) or Circulate.KEYS
                for side in ("circulate", "circulate_forward")
            }
        if self._alone_on_ring and not all(x.is_contiguous() for x in (q, k, v, *more)):
            kind["pack_inputs"] = True
        return self._plan_of(kind)

    def shard(self, whole: Tensor, side: Side | str = Side.Q) -> Tensor:
        """This rank's rows of `whole`, which has one row for each token of the batch, with `side="k"` for each token of k and v.
        Differentiable."""
        k = one_of("side", side, Side) == Side.K
        self._check("whole", whole, (self.cu_seqlens_k if k else self.cu_seqlens)[-1])
        return whole.index_select(0, self.k_tokens if k else self.tokens)

    def labels(self, ids: Tensor, ignore: int = -100) -> Tensor:
        """The next token of each of this rank's tokens, also if another rank holds it, from `ids`, which has one for each token of
        this rank; `ignore` at the ends of documents. Of q tokens. All ranks call it."""
        return self._shift("ids", ids, 1, "ignore", ignore)

    def shift(self, rows: Tensor, by: int, fill: float) -> Tensor:
        """For each of this rank's tokens, the row that is `by` tokens later in its document (earlier, if negative), which
        another rank may hold; `fill` if the document has no such token. All ranks call it, and the backward pass of rows that need gradients
        as well."""
        by = whole("by", by, -(2**31), 2**31)
        if isinstance(rows, Tensor) and rows.requires_grad and torch.is_grad_enabled():
            shifted: Tensor = _Shifted.apply(rows, self, by, fill)  # type: ignore[no-untyped-call]
            return shifted
        return self._shift("rows", rows, by, "fill", fill)

    def _shift(self, name: str, rows: Tensor, by: int, filling: str, fill: float) -> Tensor:
        self._check(name, rows, len(self.tokens))
        if isinstance(fill, enum.Enum):
            raise refused(filling, fill, "a number is needed, not a member of an enum: are two arguments exchanged?")
        if not holds(rows.dtype, fill):
            raise refused(
                filling, fill, f"which {rows.dtype} cannot represent: convert {name}, or give another {filling}"
            )
        host = self.context._host
        if host is None:
            return self._from_others(rows, by, fill)
        mine = (
            rows.detach().cpu().resolve_conj().resolve_neg().reshape(len(rows), math.prod(rows.shape[1:])).contiguous()
        )
        out, one = torch.empty_like(mine), torch.empty(1, dtype=rows.dtype).fill_(fill)
        host.shift(self.plan, by, one, mine, out)
        return out.reshape(rows.shape).to(rows.device)

    def _check(self, name: str, tensor: Tensor, rows: int) -> None:
        operators.on_device(self.context, name, tensor)
        if tensor.ndim == 0 or len(tensor) != rows:
            raise InvalidArgument(f"{name} has the shape {tuple(tensor.shape)}, ({rows}, ...) is needed")


class _Shifted(torch.autograd.Function):
    """`Batch.shift` with gradients, which go the other way: each row is read by one row at most."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, batch: Batch, by: int, fill: float) -> Tensor:
        ctx.batch, ctx.by = batch, by
        return batch._shift("rows", rows, by, "fill", fill)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.batch._shift("rows", gradient.contiguous(), -ctx.by, "fill", 0), None, None, None


def _tokens_of(plan: Plan) -> str:
    """The distribution of tokens, in words."""
    info = plan.describe()
    parameter = f"({info.layout_parameter})" if info.layout_parameter else ""
    layout = info.layout.name.lower()
    return (
        f"layout {layout}{parameter}, ulysses {info.ulysses} x ring {info.ring}, distribution {plan.distribution:016x}"
    )


def _tensor(numbers: array[int]) -> Tensor:
    # frombuffer keeps the array alive, and refuses empty buffers.
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
