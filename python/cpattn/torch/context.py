# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context parallelism in a training job: one `Context` for the job, one `Batch` for each packing of documents.

Every rank of the group makes the same calls in the same order. A batch holds what its documents fix: the plan, which tokens
are this rank's, their positions, and where the next token of each of them lies. All of it follows from `cu_seqlens`, so that
batches are cached by that, and no rank needs more than its own tokens.
"""

from __future__ import annotations

import hashlib
import json
import operator
from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .._check import whole
from ..errors import Disagreement, InvalidArgument, InvalidHandle, Unsupported
from ..plan import Plan, PlanOptions, Side, at_least_1, checked
from ..rank import Rank, nccl_group, nccl_unique_id
from ..trace import Event, clock
from ..transport import Message
from .attention import DTYPES, attention, dense
from .gloo import GlooTransport

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _holds(dtype: torch.dtype, number: object) -> bool:
    """Whether a tensor of this type can be filled with it; PyTorch alone would round it to an integer."""
    try:
        held = torch.empty(2, dtype=dtype).fill_(number)[0].item()  # type: ignore[call-overload]
        return dtype.is_floating_point or dtype.is_complex or bool(held == number)
    except (TypeError, RuntimeError, OverflowError):
        return False


class Context:
    """This process as one rank of a group that shares attention.

    `timeout` is in seconds: how long a call waits without a message moving before it fails on this rank, and thereby on all.
    It has to exceed what the slowest rank does between two calls. `plans` is how many batches are cached. Further keywords
    are those of `cpattn.Plan`: kv_heads, windows, softcap, layout, ulysses, ring, ...
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
        workers: int = 1,
        plans: int = 16,
        **options: Unpack[PlanOptions],
    ) -> None:
        checked(options)
        heads, head_dim = at_least_1("heads", heads), at_least_1("head_dim", head_dim)
        workers, self._limit = at_least_1("workers", workers), at_least_1("plans", plans)
        if dtype not in DTYPES:
            raise InvalidArgument(f"dtype is {dtype!r}, one of {', '.join(map(str, DTYPES))} is needed")
        self.dtype = dtype
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidArgument(f"device is {device!r}, cpu or cuda is needed ({error})") from None
        if self.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"device is {self.device}, cpu or cuda is needed")
        if self.device.type == "cuda" and workers != 1:
            raise InvalidArgument(f"workers is {workers}, which are threads of the CPU: 1 is needed on {self.device}")
        self.transport = GlooTransport(group, timeout=timeout)
        self.number, self.world = self.transport.rank, self.transport.world
        self._plan = partial(
            Plan, heads=heads, head_dim=head_dim, dtype=DTYPES[dtype], world=self.world, **options
        )
        self._batches: dict[tuple[int, ...], Batch] = {}  # least recently used first
        self._closed = False
        if self.device.type == "cpu":
            self.rank = Rank(self.transport, workers=workers)
            return
        try:
            self.rank = self._over_nccl(timeout)
        except BaseException:
            # No abort: where NCCL is missing everywhere, each rank shall say so, and others may still wait for the id.
            self.transport.release()
            raise

    def _over_nccl(self, timeout: float) -> Rank:
        """A rank of a communicator of its own. Its id, and what `shift` moves, travel over gloo."""
        if self.device.index is None:
            current = torch.cuda.current_device() if torch.cuda.is_available() else 0
            self.device = torch.device("cuda", current)
        unique_id, failure = torch.zeros(128, dtype=torch.uint8), None
        if self.number == 0:
            try:
                unique_id = torch.frombuffer(bytearray(nccl_unique_id()), dtype=torch.uint8)
            except Unsupported as error:
                failure = error  # raised below: the others wait for 128 bytes
        sends = dict.fromkeys(range(1, self.world), unique_id) if self.number == 0 else {}
        recvs = {} if self.number == 0 else {0: unique_id}
        self.transport.exchange("unique id", 0, _messages(sends), _messages(recvs))
        if failure is not None:
            raise failure
        if not unique_id.any():
            raise Unsupported(f"rank {self.number}: cpattn_nccl_unique_id failed on rank 0, whose error says why")
        return nccl_group(
            bytes(unique_id.tolist()),
            rank=self.number,
            world=self.world,
            device=self.device.index,
            deadline_ms=max(1, int(timeout * 1000)),
        )

    def batch(self, cu_seqlens: Tensor | Sequence[int]) -> Batch:
        """The batch with these documents: 0, the end of the first one, ..., the number of tokens."""
        self.check_open()
        try:
            key = tuple(map(operator.index, cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))
        except (TypeError, RuntimeError):
            raise InvalidArgument(f"cu_seqlens is {cu_seqlens}, a sequence of whole numbers is needed") from None
        batch = self._batches.pop(key, None) or Batch(self, key)
        self._batches[key] = batch
        if len(self._batches) > self._limit:
            del self._batches[next(iter(self._batches))]
        return batch

    def plan(self, cu_seqlens: Sequence[int]) -> Plan:
        """A plan for these documents over the ranks of the group."""
        plan = self._plan(cu_seqlens)
        info = plan.describe()
        if info.replicas != 1:
            raise InvalidArgument(
                f"ulysses {info.ulysses} x ring {info.ring} are {info.ulysses * info.ring} ranks, the group has "
                f"{self.world}: give each replica a process group of its own"
            )
        return plan

    def record(self, capacity: int = 1 << 16) -> None:
        """Records what this rank does from now on, for `trace`."""
        self.check_open()
        self.rank.record(capacity)

    def trace(self) -> list[Event]:
        """What all ranks recorded, on rank 0's clock, on rank 0; nothing on others. All ranks call it.

        Clocks are compared over the group: off by at most half of the quickest of 16 round trips.
        """
        self.check_open()
        mine, offset = self.rank.trace(), 0
        if self.number:
            for _ in range(16):
                self._numbers(0, receive=1)
                self._numbers(0, send=[clock()])
            offset = self._numbers(0, receive=1)[0]
            own = json.dumps([e._replace(start_ns=e.start_ns + offset, end_ns=e.end_ns + offset) for e in mine])
            data = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
            self._numbers(0, send=[len(data)])
            self.transport.exchange("trace", 0, _messages({0: data}), [])
            return []
        for peer in range(1, self.world):
            trips = []
            for _ in range(16):
                sent = clock()
                self._numbers(peer, send=[0])
                there = self._numbers(peer, receive=1)[0]
                back = clock()
                trips.append((back - sent, (sent + back) // 2 - there))
            self._numbers(peer, send=[min(trips)[1]])
            data = torch.empty(self._numbers(peer, receive=1)[0], dtype=torch.uint8)
            self.transport.exchange("trace", 0, [], _messages({peer: data}))
            mine += [Event(*event) for event in json.loads(bytes(data.tolist()))]
        return sorted(mine, key=lambda e: e.start_ns)

    def _numbers(self, peer: int, send: Sequence[int] = (), receive: int = 0) -> list[int]:
        numbers = torch.tensor(send or [0] * receive)
        messages = _messages({peer: numbers})
        self.transport.exchange("clock", 0, messages if send else [], [] if send else messages)
        return [int(n) for n in numbers]

    def check_open(self) -> None:
        """Raises after `close`."""
        if self._closed:
            raise InvalidHandle("the context was closed, which no call is for: make a new one, on all ranks")

    def close(self) -> None:
        """Leaves the group. Peers that still need this rank get an error: meet (dist.barrier) before."""
        self._closed = True
        self._batches.clear()
        self.rank.close()
        if self.device.type == "cuda":
            self.transport.release()


class Batch:
    """Packed documents, shared by the ranks of a context.

    `tokens` says which tokens of the batch this rank holds, in its order (int64), `positions` where those lie in their
    documents. Whoever loads data reads the rows `tokens`, or lets `shard` pick them from the whole batch.
    """

    def __init__(self, context: Context, cu_seqlens: tuple[int, ...]) -> None:
        self.context, self.cu_seqlens = context, cu_seqlens
        self.plan = context.plan(cu_seqlens)
        self._held = [_tensor(self.plan.tokens(Side.Q, rank)) for rank in range(context.world)]
        self.tokens = self._held[context.number].to(context.device)
        self.positions = _tensor(self.plan.positions(Side.Q, context.number)).to(context.device)
        self._routes: dict[int, _Route] = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Differentiable. q [tokens, heads, head_dim], k and v with kv heads, of this rank's tokens; o like q."""
        context = self.context
        context.check_open()
        return attention(
            q, k, v, rank=context.rank, number=context.number, plan=self.plan, device=context.device, sinks=sinks
        )

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that has a row for each token of the batch. Differentiable."""
        self._check("whole", whole, self.cu_seqlens[-1])
        return whole.index_select(0, self.tokens)

    def labels(self, ids: Tensor, ignore: int = -100) -> Tensor:
        """The next token of each of this rank's tokens, wherever that lies; `ignore` at the ends of documents."""
        return self.shift(ids, 1, ignore)

    def shift(self, rows: Tensor, by: int, fill: float) -> Tensor:
        """For each of this rank's tokens the row that lies `by` tokens on in its document, which another rank may hold;
        `fill` where the document has none. All ranks call it. Not differentiable."""
        self._check("rows", rows, len(self.tokens))
        by = whole("by", by, -(2**31), 2**31)
        device, rows = rows.device, rows.detach().cpu()
        if not _holds(rows.dtype, fill):
            raise InvalidArgument(f"fill is {fill!r}, which {rows.dtype} does not hold: convert rows, or give another fill")
        route = self._routes.get(by) or self._routes.setdefault(by, _Route(self, by))
        out = torch.full_like(rows, fill, memory_format=torch.contiguous_format)
        out[route.to] = rows[route.source]
        sends = {peer: rows[at] for peer, at in route.sends.items()}
        recvs = {peer: rows.new_empty((len(at), *rows.shape[1:])) for peer, at in route.recvs.items()}
        self._exchange(f"shift by {by}", rows, sends, recvs)
        for peer, at in route.recvs.items():
            out[at] = recvs[peer]
        return out.to(device)

    def _check(self, name: str, tensor: Tensor, rows: int) -> None:
        self.context.check_open()
        dense(name, tensor)
        if tensor.ndim == 0 or len(tensor) != rows:
            raise InvalidArgument(f"{name} has the shape {tuple(tensor.shape)}, {rows} rows are needed")
        if tensor.device.type != self.context.device.type:
            raise InvalidArgument(f"{name}.device is {tensor.device}, the context is on {self.context.device}")

    def _exchange(self, what: str, rows: Tensor, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> None:
        transport = self.context.transport
        # Ranks that mean different things must find out before anything moves: sizes would not meet.
        asked = f"{what}, {rows.dtype}, {tuple(rows.shape[1:])}, plan {self.plan.describe().fingerprint:x}"
        number = int.from_bytes(hashlib.blake2b(asked.encode(), digest_size=8).digest(), "little")
        for peer, theirs in enumerate(transport.agree(0, transport.world, number)):
            if theirs != number:
                raise Disagreement(f"rank {transport.rank}: rank {peer} is not asking for the same: {asked}")
        transport.exchange(what, 0, _messages(sends), _messages(recvs))


class _Route:
    """Which rows go where for a shift: for each peer the rows of ours that it needs, and ours that it fills, both in the
    order of the receiver's rows."""

    def __init__(self, batch: Batch, by: int) -> None:
        held, me = batch._held, batch.context.number
        bounds = torch.tensor(batch.cu_seqlens)
        lengths = bounds.diff()
        begin, end = bounds[:-1].repeat_interleave(lengths), bounds[1:].repeat_interleave(lengths)
        owner, row = torch.empty_like(begin), torch.empty_like(begin)
        for rank, tokens in enumerate(held):
            owner[tokens], row[tokens] = rank, torch.arange(len(tokens))

        def wanted(tokens: Tensor) -> tuple[Tensor, Tensor]:
            """Rows that have such a token, and those tokens."""
            target = tokens + by
            rows = ((target >= begin[tokens]) & (target < end[tokens])).nonzero()[:, 0]
            return rows, target[rows]

        rows, targets = wanted(held[me])
        self.to, self.source = rows[owner[targets] == me], row[targets[owner[targets] == me]]
        self.recvs = {peer: rows[owner[targets] == peer] for peer in range(len(held)) if peer != me}
        self.sends = {}
        for peer in self.recvs:
            theirs = wanted(held[peer])[1]
            self.sends[peer] = row[theirs[owner[theirs] == me]]


def _tensor(numbers: array[int]) -> Tensor:
    # frombuffer, which refuses empty buffers, keeps the array.
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def _messages(tensors: dict[int, Tensor]) -> list[Message]:
    return [Message(peer, t.data_ptr(), t.nbytes) for peer, t in tensors.items() if t.numel()]
