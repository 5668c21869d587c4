# SPDX-License-Identifier: MIT OR Apache-2.0
"""A rank that runs plans with PyTorch alone. It has the methods of `cpattn.Rank` that a context uses, on tensors of PyTorch.

A plan and a direction become a `Program` at their first run: then the ranks compare what they are about to run, over the
transport of the context, before anything moves, and one whose preparation fails tells the others. Programs are kept as long as
their plans; the workspace is one for all of them, since runs come one after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ...arguments import attempt, one_of, whole
from ..._header import UNLIMITED
from ...engine import EngineTransport
from ...errors import Busy, Disagreement, Error, InvalidArgument, InvalidHandle, PeerError, Unsupported
from ...options import AllToAll, CombineTo, Direction, Dtype, ScanForm, Side
from ...plan import Plan
from ...rank import scan_shape
from ...schedule import Lane, Schedule
from ...trace import Event
from ..agree import REFUSED, digest
from ..dtypes import DTYPES, TORCH_DTYPES
from ..kernels import Kernel, Memory, refuse
from .messages import Network
from .program import Attention, Program, Streams
from .recording import MOST, Recording, gather

# Arguments of `Rank` that no kernel of others honours.
_OF_RANK = ("lse_base", "block_table", "page_size", "page_stride")


class Executor:
    """One participant. `transport` is that of the context, over which ranks compare plans; `network` moves tensors."""

    def __init__(self, transport: EngineTransport, network: Network, kernel: Kernel) -> None:
        self.transport, self.network, self.kernel = transport, network, kernel
        self.device = network.device
        self._programs: WeakKeyDictionary[Plan, dict[Any, Program]] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[Plan, dict[Any, int]] = WeakKeyDictionary()
        self._compared: set[int] = set()
        self._streams = Streams.of(self.device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self.device)
        # What operations need besides, of each lane; all of a run is joined with the communication stream at its end.
        communication = None if self._streams is None else self._streams.communication
        self._memories = {lane: Memory(self.device, communication) for lane in Lane}
        self._sizes = [0 for _ in Lane]
        self._autocast = (
            attempt(torch.is_autocast_enabled, self.device.type) is not None
        )  # raises for a device without autocast
        self._lock, self._failed, self._closed = Lock(), "", False
        self._recording: Recording | None = None

    def forward(
        self,
        plan: Plan,
        stream: Any = None,
        *,
        max_logit: Tensor | None = None,
        dropout_seed: object = None,
        key_indices: object = None,
        **tensors: Tensor | None,
    ) -> None:
        """Writes o and lse of this rank's tokens, and max_logit if it is there. q, k, v, sinks, o, lse: as for `Rank.forward`. `stream` is a
        torch.Stream of the device, None: the current one."""
        of_plan = {"dropout": None if dropout_seed is None else plan.settings.get("dropout")}
        self._refuse(
            {
                "return_max_logit": max_logit is not None,
                "dropout_seed": dropout_seed,
                "key_indices": key_indices,
                **of_plan,
            },
            tensors,
        )
        with self._on(stream):
            program = self._program(plan, Direction.FORWARD)
            if max_logit is not None:
                max_logit.fill_(-torch.inf)
            self._run(program, tensors, max_logit=max_logit)

    def backward(
        self,
        plan: Plan,
        stream: Any = None,
        *,
        d_lse: Tensor | None = None,
        dropout_seed: object = None,
        key_indices: object = None,
        **tensors: Tensor | None,
    ) -> None:
        """Writes dq, dk, dv (and dsinks, summed over all ranks): as `Rank.backward`. Either all ranks have a d_lse, or none has one."""
        self._refuse({"dropout_seed": dropout_seed, "key_indices": key_indices}, tensors)
        with self._on(stream):
            program = self._program(plan, Direction.BACKWARD, d_lse is not None)
            self._run(program, tensors, d_lse=None if d_lse is None else of_lse(d_lse))

    def to_heads(self, plan: Plan, side: Side, source: Tensor, to: Tensor, stream: Any = None) -> None:
        """From this rank's tokens and all heads to all tokens and this rank's heads."""
        with self._on(stream):
            self._run(self._all_to_all(plan, AllToAll.TO_HEADS, side, source), {"own_tokens": source, "own_heads": to})

    def to_tokens(self, plan: Plan, side: Side, source: Tensor, to: Tensor, stream: Any = None) -> None:
        """The inverse of `to_heads`."""
        with self._on(stream):
            self._run(self._all_to_all(plan, AllToAll.TO_TOKENS, side, source), {"own_heads": source, "own_tokens": to})

    def _all_to_all(self, plan: Plan, way: AllToAll, side: Side, x: Tensor) -> Program:
        dtype = dtype_of("x", x)
        key = way, side, x.shape[2], dtype
        return self._made(
            plan, key, lambda: (plan.all_to_all_schedule(self.network.rank, way, side, key[2], dtype), None)
        )

    def combine(
        self,
        plan: Plan,
        to: CombineTo,
        stream: Any = None,
        *,
        partial_o: Tensor,
        partial_lse: Tensor,
        o: Tensor,
        lse: Tensor,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        """Merges partial results of the same queries: as `Rank.combine`."""
        self._refuse({}, more)
        tensors = {"partial_o": partial_o, "partial_lse": partial_lse, "o": o, "lse": lse, "sinks": sinks, **more}
        with self._on(stream):
            partial = dtype_of("o", partial_o)
            program = self._made(
                plan, ("combine", to, partial), lambda: (plan.combine_schedule(self.network.rank, to, partial), None)
            )
            self._run(program, tensors)

    def scan(
        self,
        plan: Plan,
        stream: Any = None,
        *,
        decay: Tensor,
        state: Tensor,
        initial_state: Tensor,
        matrix: bool = False,
        reverse: bool = False,
        form: ScanForm | str = ScanForm.AUTO,
    ) -> None:
        """Passes states on along documents: as `Rank.scan`."""
        self._check_open()
        with self._on(stream):
            shape, form = scan_shape(decay.shape, state.shape, matrix), one_of("form", form, ScanForm)
            key = ("scan", *shape, dtype_of("state", state), matrix, reverse, form)

            def make() -> tuple[Schedule, None]:
                how: dict[str, Any] = {"matrix": matrix, "reverse": reverse, "form": form, "dtype": key[4]}
                return plan.scan_schedule(self.network.rank, *shape, **how), None

            self._run(self._made(plan, key, make), {"decay": decay, "state": state, "initial_state": initial_state})

    def prepare(self, plan: Plan, direction: Direction) -> None:
        """Makes the program of a plan; ranks compare it at its first run."""
        self._program(plan, direction, compare=False)

    def exchange(self, to: Tensor, sent: Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Sends parts of a tensor, of these lengths, to each rank, and receives one from each, for `gather`."""
        self._check_call()
        try:
            self.network.all_to_all(to, sent, arriving, leaving, 1)
        except RuntimeError as error:
            raise self._fail(PeerError(f"gathering rows failed on rank {self.network.rank}: {error}")) from error
        except BaseException as error:
            self._give_up(error)
            raise

    def record(self, capacity: int = 1 << 16) -> None:
        """Starts to record this rank's operations, at most `capacity` of them until they are taken; 0 stops. On a device it waits for what
        was enqueued."""
        self._check_call()
        capacity = whole("capacity", capacity, 0, MOST)
        mark = None if self._streams is None else self._streams.mark
        self._recording = Recording(self.network.rank, capacity, mark) if capacity else None

    def gather_trace(self) -> list[Event]:
        """On rank 0: the events that all ranks recorded, on its clock, and removes them. On other ranks: an empty list. All ranks call it,
        between runs. On a device it waits for what was enqueued."""
        self._check_call()
        try:
            # The other ranks wait for this one, whose device may have failed.
            mine = [] if self._recording is None else self._recording.take()
            return gather(self.transport, self.network, mine)
        except RuntimeError as error:
            raise self._fail(PeerError(f"gathering a trace failed on rank {self.network.rank}: {error}")) from error

    def poll(self) -> None:
        """Raises if this rank has failed, or another one of the transport."""
        self._check_open()
        self.transport.poll()

    def abort(self) -> None:
        self.transport.abort()

    def close(self) -> None:
        self._closed = True
        self._programs = WeakKeyDictionary()
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self.device)
        for memory in self._memories.values():
            memory.clear()

    def _refuse(self, of_call: Mapping[str, Any], others: dict[str, Any]) -> None:
        """Refuses arguments of a call that change no message, on this rank alone. What `Rank` takes besides tensors is taken out of
        `others`."""
        self._check_open()
        settings = {name: value for name, value in of_call.items() if value is not None and value is not False}
        settings |= {name: others.pop(name) for name in _OF_RANK if name in others}
        if settings:
            refuse(self.kernel, {**settings, "device": self.device})

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream the current one."""
        if stream is None:
            return nullcontext()
        if self._streams is None:
            raise Unsupported(f"stream is {stream!r}, None is needed: {self.device} has no streams")
        if not callable(getattr(stream, "wait_event", None)):
            raise InvalidArgument(
                f"stream is {stream!r}, a torch.Stream or None is needed with kernels={self.kernel.name!r}: None is the current stream of PyTorch"
            )
        if (device := torch.device(stream.device)) != self.device:
            raise InvalidArgument(f"stream.device is {device}, {self.device} is needed, the device of the context")
        current: AbstractContextManager[Any] = stream
        return current

    def _program(self, plan: Plan, direction: Direction, lse_gradient: bool = False, compare: bool = True) -> Program:
        def make() -> tuple[Schedule, Attention]:
            dtype = TORCH_DTYPES[plan.dtype]
            backward = {"backward": True, "lse_gradient": lse_gradient} if direction == Direction.BACKWARD else {}
            refuse(self.kernel, {**settings_of(plan), **backward, "device": self.device, "dtype": dtype})
            return plan.schedule(self.network.rank, direction), Attention(
                self.kernel, dtype, slopes_of(plan), lse_gradient
            )

        # Part of the key, so that a mode which is turned on after a plan's first run is refused as before it.
        refused = (
            torch.are_deterministic_algorithms_enabled()
            and not self.kernel.of(TORCH_DTYPES[plan.dtype]).honours.deterministic
        )
        return self._made(plan, (direction, lse_gradient, refused), make, compare)

    def _made(
        self, plan: Plan, key: Any, make: Callable[[], tuple[Schedule, Attention | None]], compare: bool = True
    ) -> Program:
        """The program of a plan. Its first run compares the plans of the ranks."""
        self._check_call()
        of_plan, names = self._programs.setdefault(plan, {}), self._names.setdefault(plan, {})
        if (name := names.get(key)) is None:
            name = names[key] = name_of(plan, key)
        if (program := of_plan.get(key)) is None:
            try:
                # Tables that were made in inference mode would be of no use outside of it. On a device they are of the communication stream,
                # which every run is joined with at its beginning and its end, whatever stream its caller has.
                with (
                    torch.inference_mode(False),
                    nullcontext() if self._streams is None else self._streams.communication,
                ):
                    schedule, attention = make()
                    program = of_plan[key] = Program(schedule, self.network, name >> 8, attention, self._memories)
            except Exception:
                if compare and self.network.world > 1 and name not in self._compared:
                    with suppress(Error):  # the first error is raised
                        self.transport.agree(0, self.network.world, REFUSED)
                raise
        if compare:
            self._compare(name, plan, key)
        return program

    def _compare(self, name: int, plan: Plan, key: Any) -> None:
        """Once for each plan and direction, by value: ranks that make the same calls compare at the same calls. Each run is compared if
        TORCH_DISTRIBUTED_DEBUG is DETAIL and the backend has no tags, so that ranks with different plans would get each other's bytes."""
        if self.network.world == 1:
            return
        each = not self.network.tagged and c10d.get_debug_level() == c10d.DebugLevel.DETAIL
        if name in self._compared and not each:
            return
        own, said = self.network.rank, self.transport.agree(0, self.network.world, name)
        if refusing := [rank for rank, one in enumerate(said) if one == REFUSED]:
            raise Disagreement(
                f"ranks {refusing} of this group refused the call that rank {own} makes: see the error of these ranks",
                refusing[0],
            )
        if others := [rank for rank, one in enumerate(said) if one != said[own]]:
            raise Disagreement(
                f"rank {others[0]} runs another plan than rank {own}, or in another direction or with other results ({key[0]}, fingerprint "
                f"{plan.fingerprint:016x} on rank {own}): make the same calls on all ranks, with the same documents and options",
                others[0],
            )
        self._compared.add(name)

    def _run(
        self,
        program: Program,
        tensors: Mapping[str, Tensor | None],
        d_lse: Tensor | None = None,
        max_logit: Tensor | None = None,
    ) -> None:
        if not self._lock.acquire(blocking=False):
            raise Busy(
                f"a call of another thread uses rank {self.network.rank} of the context: make one call at a time"
            )
        buffers, begun = program.buffers, False
        try:
            self._bind(program, tensors)
            buffers.d_lse, buffers.max_logit = d_lse, max_logit
            self._room(program.schedule.workspace_bytes)
            program.place(self._workspace)
            with torch.no_grad(), self._exact():
                begun = program.sends
                program.run(self._streams, self._recording)
            self._settle()
        except PeerError as error:
            raise self._fail(error) from error.__cause__
        except BaseException as error:
            if begun:
                self._give_up(error)
            raise
        finally:
            buffers.release()
            self._lock.release()

    def _exact(self) -> AbstractContextManager[Any]:
        """Without autocast, which would round partial results."""
        kind = self.device.type
        return (
            torch.autocast(kind, enabled=False) if self._autocast and torch.is_autocast_enabled(kind) else nullcontext()
        )

    def _bind(self, program: Program, tensors: Mapping[str, Tensor | None]) -> None:
        """Gives a program the tensors of a call. They must be as the plan says, and the plan must have them."""
        known = program.tensors
        if unknown := [name for name, tensor in tensors.items() if tensor is not None and name not in known]:
            raise InvalidArgument(
                f"{min(unknown)} is set, None is needed: this plan with kernels={self.kernel.name!r} has only {', '.join(sorted(known))}. Leave it out, "
                "or see PlanOptions for what makes a plan have it"
            )
        for name, of in known.items():
            if (tensor := tensors.get(name)) is None:
                raise InvalidArgument(f"{name} is None, a tensor is needed: the plan has {name}")
            rows = of_lse(tensor) if of.is_lse else tensor.detach()
            if of.is_sinks and rows.numel() == of.shape[1] * of.shape[2]:
                rows = rows.reshape(1, of.shape[1], -1)
            if rows.shape != of.shape:
                heads, count = of.shape[1], of.shape[0]
                needed, dims = ((heads, count), "[heads, tokens]") if of.is_lse else (of.shape, "[tokens, heads, dim]")
                raise InvalidArgument(f"{of.name} has the shape {tuple(tensor.shape)}, {needed} is needed: {dims}")
            if tensor.dtype != of.dtype:
                raise InvalidArgument(
                    f"{of.name}.dtype is {tensor.dtype}, {of.dtype} is needed: convert the tensor, or make the Plan with another dtype"
                )
            if tensor.device != self.device:
                raise InvalidArgument(
                    f"{of.name}.device is {tensor.device}, {self.device} is needed, the device of the context"
                )
            program.buffers.tensors[of.number] = rows

    def _room(self, size: int) -> None:
        if self._workspace.numel() < size:
            # No views of the old one, which would hold it.
            for of_plan in self._programs.values():
                for program in of_plan.values():
                    program.displace()
            with torch.inference_mode(False):
                self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
                if self._streams is not None:
                    self._workspace.record_stream(self._streams.communication)

    def _settle(self) -> None:
        """After a run, whose streams are joined: where it needed more memory than there was, nothing holds the earlier one."""
        wanted = [memory.wanted for memory in self._memories.values()]
        if wanted == self._sizes:
            return
        self._sizes = wanted
        for memory in self._memories.values():
            memory.settle()
        for of_plan in self._programs.values():
            for program in of_plan.values():
                program.renew()

    def _give_up(self, error: BaseException) -> None:
        """After an error of this rank in a run that other ranks take part in, such as a kernel's: its messages may be under way, and
        would be taken for those of a later run. So this rank's later calls are refused, and the other ranks are told."""
        self._failed = f"{type(error).__name__}: {error}"
        with suppress(Error):
            self.transport.abort()

    def _fail(self, error: PeerError) -> PeerError:
        """The error with what the transport knows, which may be the rank at fault. This rank's later calls are refused."""
        self._failed = str(error)
        found: PeerError = error
        try:
            self.transport.poll()
        except PeerError as of_transport:
            found = PeerError(
                f"{error}. {of_transport}", of_transport.peer if of_transport.peer is not None else error.peer
            )
        except Error:
            pass
        with suppress(Error):
            self.transport.abort()
        return found

    def _check_call(self) -> None:
        self._check_open()
        if self._streams is not None and capturing(self.device):
            raise Unsupported(
                f"a graph is captured on {self.device}, which kernels={self.kernel.name!r} cannot be in: a run uses memory and compares plans that the graph "
                "would not keep. Call it outside of the capture"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidHandle("this rank is closed: make a new one")
        if self._failed:
            raise PeerError(
                f"the group has failed: make a new context on every rank. Its first error was: {self._failed}"
            )


def dtype_of(name: str, x: Tensor) -> Dtype:
    """The type of a tensor as plans have it."""
    if (known := DTYPES.get(x.dtype)) is None:
        raise InvalidArgument(f"{name}.dtype is {x.dtype}, one of {', '.join(map(str, DTYPES))} is needed")
    return known


def of_lse(lse: Tensor) -> Tensor:
    """[heads, tokens] as the rows of a schedule, [tokens, heads, 1]."""
    return lse.detach().t().unsqueeze(2)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is captured into a graph."""
    asked = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def name_of(plan: Plan, key: Any) -> int:
    """A number of what ranks are about to run, equal for equal runs."""
    return digest(hashlib.blake2b(repr((plan.fingerprint, key)).encode(), digest_size=8).digest())


def slopes_of(plan: Plan) -> Tensor | None:
    """The slopes of a plan, [heads] or [documents, heads]."""
    slopes = plan.settings.get("alibi_slopes")
    return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device="cpu")


def settings_of(plan: Plan) -> dict[str, Any]:
    """The options of a plan as `kernels.refuse` takes them: those that limit nothing are left out."""
    found: dict[str, Any] = {
        "heads": plan.heads,
        "kv_heads": plan.kv_heads,
        "head_dim": plan.head_dim,
        "value_dim": plan.value_dim,
    }
    found |= {name: plan.settings.get(name) for name in ("softcap", "dropout", "alibi_slopes", "reproducible")}
    found |= {
        name: limit
        for name in ("window_left", "window_right")
        if (limit := plan.settings.get(name)) is not None and limit < UNLIMITED
    }
    if torch.are_deterministic_algorithms_enabled():
        found["deterministic"] = True
    return found
