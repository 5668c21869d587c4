# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every public function and class refuses arguments of another type, by the name of the argument.

The test finds the public callables. Each one with arguments has a row here: good arguments, and the wrong ones below that are legal
there. A public function without a row fails the test, and so does an argument that Python, ctypes or PyTorch refuses with their own
message.
"""

from __future__ import annotations

import enum
import inspect
import re
import subprocess
import sys
import time
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from processes import run

import cpattn
import cpattn.ring
import cpattn.torch
from cpattn.options import RUNS, PlanOptions
from cpattn.torch import gloo


class Unknown:
    """An object whose methods all raise."""

    def refuse(self, *_: Any) -> Any:
        raise KeyError("unknown")

    __repr__ = __eq__ = __hash__ = __iter__ = __len__ = __index__ = __float__ = refuse


class Other(enum.IntEnum):
    """An argument of another kind, as a rank is for a side."""

    ONE = 1


# Arguments that are members of an enum or their names: a bare number may be another argument.
CHOICES = (
    "side",
    "direction",
    "to",
    "dtype",
    "partial",
    "isa",
    "kind",
    "layout",
    "circulate",
    "circulate_forward",
    "wire",
    "gather",
    "lse_base",
    "form",
)

WRONG: dict[str, Any] = {
    "none": None,
    "text": "x",
    "list": [1.5],
    "float": 1.5,
    "nan": float("nan"),
    "array": np.array([1.5, 2.5]),
    "tensor": torch.tensor([1.5, 2.5]),
    "negative": -1,
    "huge": 2**80,
    "endless": 10**5000,
    "truth": True,
    "member": Other.ONE,
    "unknown": Unknown(),
}

# Their errors are Python's, or they are for annotations.
NOT_CALLED = (enum.Enum, BaseException, dict)


def public() -> Iterator[tuple[str, list[str]]]:
    """Callables, by their names, and the names of their arguments."""
    for module, names in (
        (cpattn, cpattn.__all__),
        (cpattn.torch, cpattn.torch.__all__),
        (cpattn.ring, ["table"]),
        (cpattn.slices, cpattn.slices.__all__),
    ):
        for name in names:
            found = getattr(module, name)
            at = f"{module.__name__.removeprefix('cpattn').removeprefix('.')}.{name}".removeprefix(".")
            if inspect.isfunction(found):
                yield at, arguments(found)
            elif (
                inspect.isclass(found)
                and not issubclass(found, NOT_CALLED)
                and not getattr(found, "_is_protocol", False)
            ):
                # What a tuple has is looked at where it is used.
                yield at, list(found._fields) if issubclass(found, tuple) else arguments(found)
                # Those of its bases too that are no classes of their own for users.
                methods = {
                    name: one
                    for base in reversed(found.__mro__)
                    if base is found or hidden(base)
                    for name, one in vars(base).items()
                }
                for method, function in methods.items():
                    function = function.__func__ if isinstance(function, classmethod) else function
                    if (
                        inspect.isfunction(function)
                        and not method.startswith("_")
                        and method not in getattr(found, "__abstractmethods__", ())
                    ):
                        yield f"{at}.{method}", arguments(function)[1:]


def hidden(base: type) -> bool:
    return base.__module__.startswith("cpattn.") and base.__name__ not in (*cpattn.__all__, *cpattn.torch.__all__)


def arguments(function: Callable[..., Any]) -> list[str]:
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        found += PlanOptions.__annotations__ if parameter.kind == parameter.VAR_KEYWORD else [name]
    return found


def rows() -> dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str]]]:
    """By the names of callables: a function, its good arguments by name, and the wrong ones that are legal."""
    context = cpattn.torch.Context(heads=3, head_dim=4, timeout=5.0)
    batch, transport, rank = context.batch([0, 5]), cpattn.torch.GlooTransport(timeout=5.0), cpattn.local_group(1)[0]
    plan = cpattn.Plan([0, 5], 3, 4)
    machine = (Path(__file__).parents[2] / "machines/cpu_host.machine").read_text()
    q, lse, ids, address = (
        torch.zeros(5, 3, 4),
        torch.zeros(3, 5),
        torch.zeros(5, dtype=torch.int64),
        batch.tokens.data_ptr(),
    )
    forward = {
        "plan": plan,
        "stream": None,
        **{name: q.clone() for name in "qkvo"},
        "lse": lse,
        "sinks": None,
        "lse_base": "natural",
    }
    inputs, local = dict.fromkeys("qkv", q), {"rank": 0, "side": "q", "whole": q, "local": q.clone()}
    message, event = {"peer": 0, "address": address, "bytes": 8}, cpattn.Event(0, 0, "attend", "forward", 0, 0, 1, 8)
    exchange = {"operation": "ring", "step": 0, "sends": [], "recvs": [], "stream": None}
    optional = dict.fromkeys(("scale", "softcap"), "none float negative huge") | dict.fromkeys(
        ("kv_heads", "value_dim", "alibi_slopes"), "none"
    )
    optional |= dict.fromkeys(("sinks", "reproducible", "pack_inputs", "gather"), "truth")
    options = {name: None for name in PlanOptions.__annotations__}
    group, deadline = {"world": 1, "deadline_ms": 1000, "workers": 1, "isa": "auto"}, {"deadline_ms": 1000}
    nccl = {"unique_id": bytes(128), "comm": None, "may_abort": False, "rank": 0, "world": 1, "device": 0, **deadline}
    shape, told = (
        {"heads": 3, "head_dim": 4},
        ("sinks", "window_left", "window_right", "scale", "softcap", "alibi_slopes"),
    )
    called_from = {"source": "array tensor"}  # refused by the name that C has, and Python cannot have: from
    of, exchanged = (
        {"heads": None, "kv_heads": None},
        {"plan": plan, "side": "q", "source": q, "to": q.clone(), "stream": None},
    )
    window = {"window_left": 3, "window_right": 0}
    made, numbers = [cpattn.Slice(0, 5, 0, 5)], dict.fromkeys(("q_start", "low", "high"), "none negative")
    many, no_slices = (
        {"cu_seqlens_k": None, "q_start": None, "slices": None},
        dict.fromkeys(("cu_seqlens_k", "q_start", "slices"), "none"),
    )
    s = cpattn.slices
    return {
        "EngineTransport": (cpattn.EngineTransport, {"engine": transport.engine, "timeout": 5.0}, {"timeout": "float"}),
        "EngineTransport.agree": (transport.agree, {"first": 0, "end": 1, "number": 5}, {}),
        "EngineTransport.exchange": (transport.exchange, exchange, {"operation": "text", "stream": "none"}),
        "Event": (lambda **fields: cpattn.chrome_trace([cpattn.Event(**fields)]), event._asdict(), {"name": "text", "phase": "text"}),
        "Link": (lambda **fields: cpattn.ring.table([cpattn.Link(**fields)]), cpattn.Link(0, 1, 0.1, 1e9)._asdict(), {
            **dict.fromkeys(("latency", "bytes_per_second"), "float negative huge")}),
        "Memory": (cpattn.Memory, {"address": address, "shape": [5], "bits": 64, "device": (1, 0), "code": 0}, {}),
        "Message": (lambda **fields: transport.exchange("ring", 0, [cpattn.Message(**fields)], []), message, {}),
        "Plan": (cpattn.Plan, {"cu_seqlens": [0, 5], **shape, **many, "dtype": "f32", "world": 1} | options,
                 optional | no_slices),
        "Plan.auto_for": (cpattn.Plan.auto_for, {"cu_seqlens": [0, 5], "kinds": [(1, shape)], **many,
                                                 "dtype": "f32", "world": 1} | options,
                          optional | no_slices),
        "Plan.auto_on": (cpattn.Plan.auto_on, {"cu_seqlens": [0, 5], **shape, "machine": machine, **many,
                                               "dtype": "f32", "world": 1} | options,
                         optional | no_slices),
        "Plan.with_tokens_of": (cpattn.Plan.with_tokens_of, {"base": plan, **shape, "slices": None, "dtype": None} | options, optional | {"slices": "none", "dtype": "none"}),
        "Plan.schedule": (plan.schedule, {"rank": 0, "direction": "forward"}, {}),
        "Plan.all_to_all_schedule": (plan.all_to_all_schedule, {"rank": 0, "direction": "to_heads", "side": "q", "dim": 4, "dtype": "f32"}, {}),
        "Plan.combine_schedule": (plan.combine_schedule, {"rank": 0, "to": "all", "partial": "f32"}, {}),
        "Plan.scan_schedule": (plan.scan_schedule, {"rank": 0, "heads": 3, "key_dim": 2, "value_dim": 4, "matrix": False, "reverse": False, "form": "auto", "dtype": "f32"},
                               {"matrix": "truth", "reverse": "truth"}),
        "Plan.segments": (plan.segments, {"rank": 0}, {}),
        "Plan.share": (plan.share, {"rank": 0}, {}),
        "Plan.workspace": (plan.workspace, {"rank": 0, "direction": "forward"}, {}),
        "Plan.tokens": (plan.tokens, {"side": "q", "rank": 0}, {}),
        "Plan.positions": (plan.positions, {"side": "q", "rank": 0}, {}),
        "Plan.shard": (plan.shard, local, {}),
        "Plan.unshard": (plan.unshard, local, {}),
        "Rank": (cpattn.Rank, {"transport": transport, "workers": 1, "isa": "auto"}, {}),
        "Rank.prepare": (rank.prepare, {"plan": plan, "direction": "forward"}, {}),
        "Rank.forward": (rank.forward, forward | {"max_logit": None, "dropout_seed": None, "block_table": torch.zeros(1, 5, dtype=torch.int32), "page_size": 1, "page_stride": 1, "key_indices": None},
                         {"stream": "none", "sinks": "none", "max_logit": "none", "dropout_seed": "none", "page_stride": "none", "key_indices": "none"}),
        "Rank.backward": (rank.backward, forward | {name: q.clone() for name in ("d_o", "dq", "dk", "dv")} | {"dsinks": None, "d_lse": None, "dropout_seed": None, "key_indices": None},
                          {"stream": "none", "sinks": "none", "dsinks": "none", "d_lse": "none", "dropout_seed": "none", "key_indices": "none"}),
        "Rank.to_heads": (rank.to_heads, exchanged, {"stream": "none", **called_from}),
        "Rank.to_tokens": (rank.to_tokens, exchanged, {"stream": "none", **called_from}),
        "Rank.combine": (rank.combine, {"plan": plan, "to": "all", "stream": None, "partial_o": q, "partial_lse": lse, "o": q.clone(), "lse": lse.clone(), "sinks": None, "lse_base": "natural"},
                         {"stream": "none", "sinks": "none"}),
        "Rank.scan": (rank.scan, {"plan": plan, "decay": q[:1], "state": q[:1], "initial_state": q[:1].clone(), "matrix": False, "reverse": False, "form": "auto"},
                      {"matrix": "truth", "reverse": "truth"}),
        "Rank.check_ring": (rank.check_ring, {"bytes": 8}, {}),
        "Rank.record": (rank.record, {"capacity": 8}, {}),
        "Rank.shift": (rank.shift, {"plan": plan, "by": 1, "fill": ids[:1], "rows": ids, "out": ids.clone()}, {"by": "negative"}),
        "Slice": (lambda **fields: cpattn.Plan([0, 5], 3, 4, slices=[cpattn.Slice(**fields)]), made[0]._asdict(), numbers),
        "Slice.allows": (made[0].allows, {"q": 1, "k": 1}, {}),
        "check_ring": (cpattn.check_ring, {"transport": transport, "bytes": 8}, {}),
        "chrome_trace": (cpattn.chrome_trace, {"events": [event]}, {}),
        "dropout_mask": (cpattn.dropout_mask, {"probability": 0.5, "seed": 1, "head": 0, "q_tokens": 5, "k_tokens": 5, "q_first": 0, "k_first": 0}, {}),
        "local_group": (cpattn.local_group, group, {}),
        "nccl_group": (cpattn.nccl_group, nccl, {"unique_id": "none", "comm": "none", "may_abort": "truth"}),
        "on_all": (cpattn.on_all, {"ranks": [rank], "job": print}, {}),
        "peer_group": (cpattn.peer_group, {"devices": [0], **deadline}, {}),
        "plan_groups": (cpattn.plan_groups, {"cu_seqlens": [0, 5], "heads": 3, "head_dim": 4, "sizes": [1], "room": 9, "world": 1, "machine": None, "most_passes": 0, "token_flops": 0, "dtype": "f32"} | options,
                        {name: how for name, how in optional.items() if name not in RUNS} | {"machine": "none"}),
        "ranks_per_node": (cpattn.ranks_per_node, {"nodes": [0, 0]}, {}),
        "ring.table": (cpattn.ring.table, {"links": [], "slow": 3.0}, {"slow": "float negative huge"}),
        "slices.checked": (s.checked, {"name": "slices", "slices": made}, {"name": " ".join(WRONG)}),  # a name is for the error alone
        "slices.block_causal": (s.block_causal, {"cu_seqlens": [0, 5], "block": 2}, {}),
        "slices.block_diffusion": (s.block_diffusion, {"tokens": 5, "block": 2}, {}),
        "slices.chunks": (s.chunks, {"cu_seqlens": [0, 5], "chunk": 2}, {}),
        "slices.documents": (s.documents, {"cu_seqlens": [0, 5]}, {}),
        "slices.from_dense": (s.from_dense, {"mask": [[1, 0]]}, {}),
        "slices.moved": (s.moved, {"slices": made, "by": 1, "by_k": 1}, {"by": "negative", "by_k": "negative none"}),
        "slices.pairs": (s.pairs, {"pairs": [((0, 1), (0, 1))]}, {}),
        "slices.picture": (s.picture, {"slices": made, "q_tokens": 5, "k_tokens": 5}, {"k_tokens": "none"}),
        "slices.prefix_lm": (s.prefix_lm, {"cu_seqlens": [0, 5], "prefixes": [2]}, {}),
        "slices.shared_prefix": (s.shared_prefix, {"prefix": 2, "branches": [3]}, {}),
        "slices.spans": (s.spans, {"cu_seqlens": [0, 5], "spans": [(1, 2)]}, {}),
        "slices.tree": (s.tree, {"parents": [None, 0], "lengths": [2, 3]}, {}),
        "timeline_svg": (cpattn.timeline_svg, {"events": [event]}, {}),
        "torch.Batch": (cpattn.torch.Batch, {"context": context, "packing": batch.packing}, {}),
        "torch.Batch.attention": (batch.attention, {**inputs, **dict.fromkeys(told), "dropout_p": None, "dropout_seed": None, "key_indices": None, "key_blocks": None, "block_size": None, "return_lse": False, "return_max_logit": False}, {
            **optional, "dropout_p": "none", "dropout_seed": "none", "key_indices": "none", "key_blocks": "none", "block_size": "none", **dict.fromkeys(told[:3], "none"), "return_lse": "truth", "return_max_logit": "truth"}),
        "torch.Batch.gather": (batch.gather, {"x": q, "side": "k", **window}, dict.fromkeys(window, "none")),
        "torch.Batch.halo": (batch.halo, {"x": q, "taps": 2}, {}),
        "torch.Batch.explain": (batch.explain, {"kernels": "math"}, {"kernels": "none"}),
        "torch.Batch.halo_reads": (batch.halo_reads, {"taps": 2}, {}),
        "torch.Batch.reads": (batch.reads, {"side": "k", **window}, dict.fromkeys(window, "none")),
        "torch.Batch.labels": (batch.labels, {"ids": ids, "ignore": -100}, {"ignore": "negative truth"}),
        "torch.Batch.top_keys": (batch.top_keys, {"q": q, "k": q[:, 0], "weights": q[:, :, 0], "top": 2, "scale": 1.0, "relu": True, "tile_bytes": 1 << 20, **window}, {
            **dict.fromkeys(window, "none"), "weights": "none", "scale": "float negative huge", "relu": "truth", "tile_bytes": "huge", "top": "huge"}),
        "torch.Batch.own_heads": (batch.own_heads, {"side": "q", **of}, dict.fromkeys(of, "none")),
        "torch.Batch.scan": (batch.scan, {"decay": q[:1], "state": q[:1], "matrix": False, "form": "auto"}, {"matrix": "truth"}),
        "torch.Batch.shard": (batch.shard, {"whole": ids, "side": "q"}, {}),
        "torch.Batch.shift": (batch.shift, {"rows": ids, "by": 1, "fill": 0}, {"by": "negative", "fill": "negative truth"}),
        "torch.Batch.to_heads": (batch.to_heads, {"x": q, "side": "q", **of}, dict.fromkeys(of, "none")),
        "torch.Batch.to_tokens": (batch.to_tokens, {"x": q, "side": "q", **of}, dict.fromkeys(of, "none")),
        "torch.Batch.with_slices": (batch.with_slices, {"slices": made}, {}),
        "torch.Context": (cpattn.torch.Context, {"group": None, **shape, "dtype": torch.float32, "device": "cpu", "timeout": 5.0, "workers": 1,
                                                 "plans": 1, "own_tokens": True, "layers": (), "communicator": None, "kernels": None} | options,
                          optional | {"group": "none", "timeout": "float", "own_tokens": "truth", "communicator": "none", "kernels": "none"}),
        "torch.Context.batch": (context.batch, {"cu_seqlens": [0, 5], **many}, no_slices),
        "torch.Context.combine": (context.combine, {"o": q, "lse": lse, "to": "all", "sinks": None, "dtype": None}, {"sinks": "none", "dtype": "none"}),
        "torch.Context.plan": (context.plan, {"cu_seqlens": [0, 5]}, {}),
        "torch.Context.use_collectives": (context.use_collectives, {"collectives": context.collectives()}, {}),
        "torch.Context.record": (context.record, {"capacity": 8}, {}),
        "torch.GlooTransport": (cpattn.torch.GlooTransport, {"group": None, "timeout": 5.0}, {"group": "none", "timeout": "float"}),
        "torch.dropout_mask": (cpattn.torch.dropout_mask, {"p": 0.5, "seed": 1, "heads": 2, "q_tokens": 5, "k_tokens": 5}, {"k_tokens": "none"}),
        "torch.check_ring": (cpattn.torch.check_ring, {"group": None, "timeout": 5.0, "bytes": 8}, {"group": "none", "timeout": "float"}),
    }  # fmt: skip


def walk(rank: int, world: int) -> list[str]:
    """The wrong arguments that were not refused by name."""
    table, wrong = rows(), []
    for at, names in public():
        if not names:
            continue
        function, good, legal = table.pop(at)
        if missing := set(names) ^ set(good):
            wrong.append(f"{at}: in one of arguments and row only: {missing}")
        for name in names:
            tried = WRONG | ({"number": 1} if name in CHOICES else {})
            for kind in tried.keys() - legal.get(name, "").split():
                given = {
                    key: value
                    for key, value in good.items()
                    if key not in PlanOptions.__annotations__ or value is not None
                }
                try:
                    function(**{**given, name: tried[kind]})
                except cpattn.Error as error:
                    # A message of this package: for an argument, or for one of its items or members.
                    if not re.search(
                        rf"(^|: |\W){name}\b.* (is|are|has|cannot|expected)\b|that of {name},", str(error), re.DOTALL
                    ):
                        wrong.append(f"{at}, {name}: {kind}: {type(error).__name__}: {error}")
                except BaseException as error:  # noqa: BLE001 (told)
                    wrong.append(f"{at}, {name}: {kind}: {type(error).__name__}: {error}")
                else:
                    wrong.append(f"{at}, {name}: {kind}: not refused")
    return wrong + [f"{at} is no longer there" for at in table]


def way_out(rank: int, world: int) -> list[str]:
    """The messages for habits of other libraries, which must say what to give instead, and those that do not."""
    context = cpattn.torch.Context(heads=4, head_dim=4, kv_heads=2, timeout=5.0)
    batch, half = context.batch([0, 5]), cpattn.Plan([0, 5], 2, 4, dtype="float16")
    q, k, array, lse = (
        torch.zeros(5, 4, 4),
        torch.zeros(5, 2, 4),
        np.zeros((5, 2, 4), np.float32),
        np.zeros((2, 5), np.float32),
    )
    of_sdpa = [x.transpose(0, 1) for x in (q, k, k)]
    habits: list[tuple[Callable[[], Any], str]] = [
        (lambda: cpattn.Plan([0, 5], 2, 4, window_left=-1), "window_left is -1, .*cpattn.UNLIMITED"),
        (lambda: cpattn.Plan([0, 5], 2, 4, window_right=None), "window_right is None, .*cpattn.UNLIMITED"),  # type: ignore[arg-type]
        (lambda: batch.attention(q, k, k, window_left=-1), "window_left is -1, .*cpattn.UNLIMITED"),
        (lambda: batch.reads(window_right=-1), "window_right is -1, .*cpattn.UNLIMITED"),
        (
            lambda: cpattn.Plan([0, 5], 2, 4, causal=False),
            "causal is no argument of Plan: .*window_right=cpattn.UNLIMITED",
        ),  # type: ignore[call-arg]
        (
            lambda: cpattn.local_group(1)[0].forward(half, q=array, k=array, v=array, o=array, lse=lse),
            "q.dtype is f32.*convert.*another dtype",
        ),
        (lambda: batch.attention(k, q, q), r"q is of shape \(5, 2, 4\) and k of \(5, 4, 4\).*exchanged"),
        (lambda: batch.attention(*of_sdpa), r"q has the shape \(4, 5, 4\).*q is \[tokens, heads, head_dim\]"),
        (lambda: cpattn.Plan([3, 2], 2, 4), r"cu_seqlens\[0\] is 3, 0 is needed: .*offsets.*not lengths"),
        (lambda: cpattn.Plan([0, 5], 2, 4, cu_seqlens_k=[3, 2]), r"cu_seqlens_k\[0\] is 3, 0 is needed"),
        (lambda: context.batch([3, 2]), r"cu_seqlens\[0\] is 3, .*not lengths"),
        (lambda: half.tokens(0, cpattn.Side.Q), "rank is <Side.Q: 0>.*exchanged|side is 0, one of 'q', 'k' is needed"),  # type: ignore[arg-type]
        (lambda: half.tokens("q", cpattn.Side.K), "rank is <Side.K: 1>.*exchanged"),
    ]
    said = []
    for call, needed in habits:
        try:
            call()
            said.append(f"not refused: {needed}")
        except cpattn.InvalidArgument as error:
            if not re.search(needed, str(error)):
                said.append(f"{needed}: {error}")
    return said


class Refusals(unittest.TestCase):
    def test_the_way_out(self) -> None:
        self.assertEqual(run(way_out, 1)[0], [])

    def test_a_rank_that_left(self) -> None:
        for said in ("rank 1 left", "rank 1 gives no answer: it was killed, is stopped, or is cut off"):
            self.assertIn("dist.barrier()", str(cpattn.errors.of_status(4, f"cpattn_forward: CPATTN_PEER: {said}", 1)))
        self.assertNotIn("barrier", str(cpattn.errors.of_status(4, "rank 1 aborted the run", 1)))

    def test_calls_that_no_signature_takes(self) -> None:
        """By position, without an argument, and with keywords that are misspelt: refused with the names of that function."""
        plan = cpattn.Plan([0, 4], 2, 8)
        calls: list[tuple[Any, str]] = [
            (lambda: cpattn.Plan([0, 4], 4, 2, 8), "Plan takes cu_seqlens, heads, head_dim by position, and was given 4 arguments so: name the others"),  # type: ignore[misc]
            (lambda: cpattn.torch.Context(None, 8, 64), "Context takes group by position, and was given 3 arguments so: name the others, as in Context(group, heads=8"),  # type: ignore[misc]
            (lambda: cpattn.Plan([0, 4], heads=2), "Plan needs head_dim, which was not given: an example is Plan(cu_seqlens, heads=8"),  # type: ignore[call-arg]
            (lambda: cpattn.Plan([0, 4], head=2, head_dim=8), "head is no argument of Plan: is heads meant?; its arguments are alibi_slopes"),  # type: ignore[call-arg]
            (lambda: cpattn.torch.Context(heads=2, head_dim=8, time_out=3), "time_out is no argument of Context: is timeout meant?"),  # type: ignore[call-arg]
            (lambda: cpattn.Plan.with_tokens_of(plan, 2, 8, ulyses=2), "ulyses is no argument of Plan.with_tokens_of: is ulysses meant?; its arguments are alibi_slopes, base"),  # type: ignore[call-arg]
            (lambda: cpattn.Plan.auto_on([0, 4], 2, 8, "x", wurld=2), "wurld is no argument of Plan.auto_on: is world meant?"),  # type: ignore[call-arg]
            (lambda: cpattn.Plan.auto_for([0, 4], [(1, {"heads": 2, "head_dim": 8})], wrld=2), "wrld is no argument of Plan.auto_for: is world meant?"),  # type: ignore[call-arg]
            (lambda: cpattn.Plan.auto_for([0, 4], [(1, {"head": 2, "head_dim": 8})]), "head is no argument of a kind of layer in kinds: is heads meant?; its arguments are "),
        ]  # fmt: skip
        for job, words in calls:
            for kind in (TypeError, cpattn.InvalidArgument):
                with self.assertRaises(kind) as caught:
                    job()
                self.assertIn(words, str(caught.exception))
        self.assertEqual(
            list(inspect.signature(cpattn.Plan).parameters)[:4], ["cu_seqlens", "heads", "head_dim", "cu_seqlens_k"]
        )

    def test_the_version(self) -> None:
        project = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
        self.assertIn(f'version = "{cpattn.__version__}"', project)
        self.assertEqual(cpattn.__version__, cpattn.library_version())

    def test_a_silent_name_server(self) -> None:
        """A connection to the store that takes long is said while it does; others are not."""

        class Store:
            def clone(self) -> str:
                time.sleep(self.seconds)
                return "clone"

        store = Store()
        for store.seconds, slow, said in ((0.0, 60.0, 0), (3.0, 0.3, 1)):  # type: ignore[attr-defined]
            with mock.patch.object(gloo, "SLOW", slow), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.assertEqual(gloo.another(store), "clone")
            self.assertEqual(len(caught), said)
            self.assertTrue(all("RES_OPTIONS" in str(one.message) for one in caught))

    def test_an_old_pytorch(self) -> None:
        """PyTorch 2.9 has no such module."""
        program = "import sys, torch; sys.modules['torch._library.effects'] = None; import cpattn.torch"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
        self.assertIn(
            f"ImportError: torch.__version__ is {torch.__version__}, 2.10 or later is needed for cpattn.torch",
            done.stderr,
        )

    def test_every_argument_of_every_callable(self) -> None:
        wrong = run(walk, 1)[0]
        self.assertEqual(wrong, [], "\n" + "\n".join(wrong))


if __name__ == "__main__":
    unittest.main()
