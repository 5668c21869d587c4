# SPDX-License-Identifier: MIT OR Apache-2.0
"""Context parallelism in a training job: one `Context` for the job, one `Batch` for each packing of documents.

Every rank of the group makes the same calls in the same order. A batch holds what its documents determine: the plan, which
tokens are this rank's, and their positions. Batches are cached by `cu_seqlens`. No rank needs more than its own tokens.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .._check import attempt, instance, refused, whole
from ..errors import InvalidArgument, InvalidHandle, Unsupported
from ..plan import Plan, PlanOptions, Side, at_least_1, checked
from ..rank import Rank, nccl_group, nccl_unique_id
from ..trace import Event
from .attention import DTYPES, attention, dense
from .gloo import GlooTransport

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The number of contexts on devices that each group of global ranks has made.
_made: Counter[tuple[int, ...]] = Counter()


def _holds(dtype: torch.dtype, number: object) -> bool:
    """Whether this type can represent the number; PyTorch would silently round it to an integer."""
    held = attempt(lambda: torch.empty(2, dtype=dtype).fill_(number)[0].item())  # type: ignore[call-overload]
    return held is not None and (dtype.is_floating_point or dtype.is_complex or bool(held == number))


class Context:
    """This process as one rank of a process group (None: the default group). Make one for the whole job, on all ranks.

    `timeout` is in seconds: if a call waits so long while no message moves, it fails on this rank and then on all. It must
    be longer than what the slowest rank computes between two calls. `dtype` is that of q, k, v and o. `workers` is the
    number of CPU threads of the kernels (more than 1 needs a library built with rayon). `plans` is the number of cached
    batches. Further keywords are those of `cpattn.Plan`: kv_heads, windows, softcap, layout, ulysses, ring, ...

    Raises InvalidArgument or Unsupported for arguments that are refused, PeerError if another rank does not come in time.
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
        heads, head_dim = at_least_1("heads", heads), at_least_1("head_dim", head_dim)
        checked(options, heads)
        workers, self._limit = at_least_1("workers", workers), at_least_1("plans", plans)
        if (known := attempt(DTYPES.get, dtype)) is None:
            raise refused("dtype", dtype, f"one of {', '.join(map(str, DTYPES))} is needed")
        if isinstance(device, bool) or (on := attempt(torch.device, device)) is None:
            raise refused("device", device, "cpu or cuda is needed")
        self.dtype, self.device = dtype, on
        if self.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"device is {self.device}, cpu or cuda is needed")
        if self.device.type == "cuda" and workers != 1:
            raise InvalidArgument(f"workers is {workers}, which are threads of the CPU: 1 is needed on {self.device}")
        self.transport = GlooTransport(group, timeout=timeout)
        self.number, self.world = self.transport.rank, self.transport.world
        self._plan = partial(
            Plan, heads=heads, head_dim=head_dim, dtype=known, world=self.world, **options
        )
        self._batches: dict[tuple[int, ...], Batch] = {}  # least recently used first
        self._closed = False
        # Moves tensors on the CPU; with a device, only those of `shift`.
        self._host = self.rank = Rank(self.transport, workers=workers)
        if self.device.type == "cuda":
            try:
                self.rank = self._over_nccl(group, timeout)
            except BaseException:
                self._host.close()
                raise

    def _over_nccl(self, group: dist.ProcessGroup | None, timeout: float) -> Rank:
        """A rank over its own NCCL communicator, whose id is sent through the store of the process group."""
        if self.device.index is None:
            current = torch.cuda.current_device() if torch.cuda.is_available() else 0
            self.device = torch.device("cuda", current)
        members = tuple(dist.get_process_group_ranks(group))
        _made[members] += 1
        # Members make their contexts in the same order, so all of them compute the same key.
        store: Any = c10d._get_default_store()
        key = f"cpattn/nccl/{','.join(map(str, members))}/{_made[members]}"
        if self.number == 0:
            unique_id = ""  # stays empty if it cannot be made: the others wait for the key
            try:
                unique_id = nccl_unique_id().hex()
            finally:
                store.set(key, unique_id)
        else:
            store.wait([key], timedelta(seconds=timeout))
            unique_id = store.get(key).decode()
        if not unique_id:
            raise Unsupported(f"rank {self.number}: cpattn_nccl_unique_id failed on rank 0, whose error says why")
        return nccl_group(
            bytes.fromhex(unique_id),
            rank=self.number,
            world=self.world,
            device=self.device.index,
            deadline_ms=max(1, int(timeout * 1000)),
        )

    def batch(self, cu_seqlens: Tensor | Sequence[int]) -> Batch:
        """The batch with these documents. cu_seqlens: 0, the end of the first document, ..., the number of tokens."""
        self.check_open()
        key = attempt(lambda: tuple(map(operator.index, cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)))
        if key is None:
            raise refused("cu_seqlens", cu_seqlens, "a sequence of whole numbers is needed")
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
        """Starts to record this rank's operations, at most `capacity` of them, for `trace`."""
        self.check_open()
        self.rank.record(capacity)

    def trace(self) -> list[Event]:
        """On rank 0: the events that all ranks recorded, with times on rank 0's clock. On other ranks: an empty list. All ranks
        call it. `cpattn.timeline_svg` draws the events, `cpattn.chrome_trace` makes a file for Perfetto."""
        self.check_open()
        return self.rank.gather_trace()

    def check_open(self) -> None:
        """Raises InvalidHandle after `close`."""
        if self._closed:
            raise InvalidHandle("the context was closed, which no call is for: make a new one, on all ranks")

    def close(self) -> None:
        """Leaves the group. Peers that still need this rank get an error, so call dist.barrier on all ranks before."""
        self._closed = True
        self._batches.clear()
        self.rank.close()
        self._host.close()


class Batch:
    """Packed documents, sharded over the ranks of a context.

    `tokens` (int64) are the indices in the batch of this rank's tokens, in its order; `positions` (int64) are their
    positions in their documents. A data loader reads the rows `tokens`, or `shard` selects them from the whole batch.
    """

    def __init__(self, context: Context, cu_seqlens: tuple[int, ...]) -> None:
        self.context, self.cu_seqlens = instance("context", context, Context), cu_seqlens
        self.plan = context.plan(cu_seqlens)
        self.tokens = _tensor(self.plan.tokens(Side.Q, context.number)).to(context.device)
        self.positions = _tensor(self.plan.positions(Side.Q, context.number)).to(context.device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attention of this rank's tokens, differentiable once. q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim],
        v [tokens, kv_heads, value_dim], sinks [heads] (f32); returns o [tokens, heads, value_dim]. All ranks call it."""
        context = self.context
        context.check_open()
        return attention(
            q, k, v, rank=context.rank, number=context.number, plan=self.plan, device=context.device, sinks=sinks
        )

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's rows of `whole`, which has one row for each token of the batch. Differentiable."""
        self._check("whole", whole, self.cu_seqlens[-1])
        return whole.index_select(0, self.tokens)

    def labels(self, ids: Tensor, ignore: int = -100) -> Tensor:
        """The next token of each of this rank's tokens, also if another rank holds it; `ignore` at the ends of documents. All
        ranks call it."""
        return self._shift("ids", ids, 1, "ignore", ignore)

    def shift(self, rows: Tensor, by: int, fill: float) -> Tensor:
        """For each of this rank's tokens, the row that is `by` tokens later in its document (earlier, if negative), which
        another rank may hold; `fill` if the document has no such token. All ranks call it. Not differentiable."""
        return self._shift("rows", rows, whole("by", by, -(2**31), 2**31), "fill", fill)

    def _shift(self, name: str, rows: Tensor, by: int, filling: str, fill: float) -> Tensor:
        self._check(name, rows, len(self.tokens))
        if not _holds(rows.dtype, fill):
            raise refused(filling, fill, f"which {rows.dtype} does not hold: convert {name}, or give another {filling}")
        mine = rows.detach().cpu().resolve_conj().resolve_neg().reshape(len(rows), math.prod(rows.shape[1:])).contiguous()
        out, one = torch.empty_like(mine), torch.empty(1, dtype=rows.dtype).fill_(fill)
        self.context._host.shift(self.plan, by, one, mine, out)
        return out.reshape(rows.shape).to(rows.device)

    def _check(self, name: str, tensor: Tensor, rows: int) -> None:
        self.context.check_open()
        dense(name, tensor)
        if tensor.ndim == 0 or len(tensor) != rows:
            raise InvalidArgument(f"{name} has the shape {tuple(tensor.shape)}, {rows} rows are needed")
        if tensor.device.type != self.context.device.type:
            raise InvalidArgument(f"{name}.device is {tensor.device}, the context is on {self.context.device}")


def _tensor(numbers: array[int]) -> Tensor:
    # frombuffer, which refuses empty buffers, keeps the array.
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
