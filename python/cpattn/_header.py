# SPDX-License-Identifier: MIT OR Apache-2.0
"""include/cpattn.h for ctypes, line by line: the structs and functions that this package uses.

Names, order and types are the header's, and `tests/test_header.py` compares the two. Nothing is decided here.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t
from ctypes import c_float, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

from ._check import RANGES, c_value

VERSION_MAJOR, VERSION_MINOR = 0, 1
OK, BUSY = 0, 8
UNLIMITED = 2**63 - 1
DEVICE_CPU, DEVICE_CUDA = 1, 2
ENGINE_GROUP, ENGINE_TEXT, ENGINE_VALUE = 1, 512, 4096


class DlDevice(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DlDtype(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device", DlDevice),
        ("ndim", c_int32),
        ("dtype", DlDtype),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


TensorP = POINTER(Tensor)


class Sized(ctypes.Structure):
    """A struct whose first member is its size; the rest begins as the header's INIT macro says."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **members: Any) -> None:
        for name, kind, *_ in self._fields_:
            if name in members and (kind in RANGES or kind is c_double):
                members[name] = c_value(name, kind, members[name])
        super().__init__(**{"struct_size": ctypes.sizeof(self), **self.defaults, **members})


class Problem(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("cu_seqlens_q", POINTER(c_int32)),
        ("cu_seqlens_k", POINTER(c_int32)),
        ("q_start", POINTER(c_int64)),
        ("documents", c_size_t),
        ("heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("value_dim", c_uint32),
        ("dtype", c_int32),
        ("kind", c_int32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("alibi_slopes", POINTER(c_float)),
        ("sinks", c_int32),
        ("reserved", c_int32),
    ]
    defaults = {"window_left": UNLIMITED}


class Options(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("world", c_uint32),
        ("ulysses", c_uint32),
        ("ring", c_uint32),
        ("layout", c_int32),
        ("layout_parameter", c_uint32),
        ("passes", c_uint32),
        ("circulate", c_int32),
        ("wire", c_int32),
        ("gather", c_int32),
        ("reproducible", c_int32),
        ("pack_inputs", c_int32),
        ("reserved", c_int32),
    ]
    defaults = {"world": 1, "passes": 1}


class PlanInfo(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("replicas", c_uint32),
        ("ring", c_uint32),
        ("ulysses", c_uint32),
        ("layout", c_int32),
        ("layout_parameter", c_uint32),
        ("reserved", c_uint32),
        ("q_tokens", c_uint64),
        ("k_tokens", c_uint64),
        ("fingerprint", c_uint64),
    ]


class Share(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("replica", c_uint32),
        ("ring", c_uint32),
        ("ulysses", c_uint32),
        ("reserved", c_uint32),
        ("q_tokens", c_uint64),
        ("k_tokens", c_uint64),
        ("q_head_begin", c_uint32),
        ("q_head_end", c_uint32),
        ("kv_head_begin", c_uint32),
        ("kv_head_end", c_uint32),
    ]


class Message(ctypes.Structure):
    _fields_ = [("peer", c_size_t), ("data", c_void_p), ("bytes", c_size_t)]


class Link(ctypes.Structure):
    _fields_ = [("from", c_uint32), ("to", c_uint32), ("latency", c_double), ("bytes_per_second", c_double)]


class Event(ctypes.Structure):
    _fields_ = [
        ("name", c_char * 32),
        ("phase", c_char * 32),
        ("start_ns", c_uint64),
        ("end_ns", c_uint64),
        ("bytes", c_uint64),
        ("rank", c_uint32),
        ("step", c_uint32),
        ("lane", c_int32),
        ("reserved", c_uint32),
    ]


MessageP = POINTER(Message)
Blame = POINTER(c_int64)
Agree = CFUNCTYPE(c_int32, c_void_p, c_uint32, c_uint32, c_uint64, POINTER(c_uint64), Blame)
Exchange = CFUNCTYPE(
    c_int32, c_void_p, c_char_p, c_uint32, MessageP, c_size_t, MessageP, c_size_t, c_void_p, Blame
)
Poll = CFUNCTYPE(c_int32, c_void_p, Blame)
Abort = CFUNCTYPE(None, c_void_p)
Release = CFUNCTYPE(None, c_void_p)


class TransportTable(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("context", c_void_p),
        ("rank", c_uint32),
        ("world", c_uint32),
        ("agree", Agree),
        ("exchange", Exchange),
        ("poll", Poll),
        ("abort", Abort),
        ("release", Release),
    ]


TextP = POINTER(ctypes.c_char)
Open = CFUNCTYPE(c_int32, c_void_p, TextP)
Post = CFUNCTYPE(c_int32, c_void_p, c_int32, c_uint32, c_uint32, c_void_p, c_size_t, POINTER(c_uint64), TextP)
Wait = CFUNCTYPE(c_int32, c_void_p, c_uint64, c_uint64, TextP)
Put = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_void_p, POINTER(c_size_t), TextP)
Look = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, POINTER(c_size_t), TextP)
WaitFor = CFUNCTYPE(c_int32, c_void_p, c_char_p, TextP)


class EngineTable(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("context", c_void_p),
        ("rank", c_uint32),
        ("world", c_uint32),
        ("open", Open),
        ("connect", Open),
        ("post", Post),
        ("wait", Wait),
        ("close", Abort),
        ("put", Put),
        ("look", Look),
        ("wait_for", WaitFor),
        ("release", Release),
    ]


class RankOptions(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("workers", c_uint32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("sm_margin", c_uint32),
        ("isa", c_int32),
        ("reserved", c_int32),
    ]
    defaults = {"workers": 1, "device_type": DEVICE_CPU}


class ForwardArgs(Sized):
    _fields_ = [("struct_size", c_size_t)]
    _fields_ += [(name, TensorP) for name in "q k v sinks o lse".split()]
    _fields_ += [("stream", c_void_p)]


class BackwardArgs(Sized):
    _fields_ = [("struct_size", c_size_t)]
    _fields_ += [(name, TensorP) for name in "q k v sinks o lse d_o dq dk dv dsinks".split()]
    _fields_ += [("stream", c_void_p)]


Handle = c_void_p
HandleP = POINTER(Handle)

# Without the prefix cpattn_; all of them return a status.
FUNCTIONS: dict[str, list[Any]] = {
    "plan_create": [POINTER(Problem), POINTER(Options), HandleP],
    "plan_destroy": [Handle],
    "plan_describe": [Handle, POINTER(PlanInfo)],
    "plan_share": [Handle, c_uint32, POINTER(Share)],
    "plan_explain": [Handle, TextP, c_size_t, POINTER(c_size_t)],
    "plan_verify": [Handle],
    "plan_workspace": [Handle, c_uint32, c_int32, POINTER(c_uint64)],
    "plan_tokens": [Handle, c_int32, c_uint32, POINTER(c_int64), c_size_t],
    "plan_positions": [Handle, c_int32, c_uint32, POINTER(c_int64), c_size_t],
    "plan_shard": [Handle, c_int32, c_uint32, TensorP, TensorP],
    "plan_unshard": [Handle, c_int32, c_uint32, TensorP, TensorP],
    "plan_shift": [Handle, c_uint32, c_int64, c_void_p, TensorP, TensorP],
    "local_group": [c_uint32, c_uint64, HandleP],
    "peer_group": [c_uint32, POINTER(c_int32), c_uint64, HandleP],
    "mpi_group": [c_void_p, c_uint64, HandleP],
    "nccl_unique_id": [POINTER(c_uint8)],
    "nccl_group": [POINTER(c_uint8), c_void_p, c_int32, c_uint32, c_uint32, c_int32, c_uint64, HandleP],
    "transport_create": [POINTER(TransportTable), HandleP],
    "transport_destroy": [Handle],
    "engine_group": [POINTER(EngineTable), c_uint64, HandleP],
    "engine_connect": [Handle],
    "engine_share": [Handle, HandleP],
    "engine_agree": [Handle, c_uint32, c_uint32, c_uint64, POINTER(c_uint64)],
    "engine_exchange": [Handle, c_uint32, MessageP, c_size_t, MessageP, c_size_t],
    "engine_poll": [Handle],
    "engine_abort": [Handle],
    "rank_create": [Handle, POINTER(RankOptions), HandleP],
    "rank_destroy": [Handle],
    "rank_prepare": [Handle, Handle, c_int32],
    "forward": [Handle, Handle, POINTER(ForwardArgs)],
    "backward": [Handle, Handle, POINTER(BackwardArgs)],
    "rank_ring_check": [Handle, c_size_t, POINTER(Link), c_size_t, POINTER(c_size_t)],
    "rank_shift": [Handle, Handle, c_int64, c_void_p, TensorP, TensorP],
    "rank_record": [Handle, c_uint64],
    "rank_trace": [Handle, POINTER(Event), c_size_t, POINTER(c_size_t)],
    "rank_gather_trace": [Handle],
    "timeline_svg": [POINTER(Event), c_size_t, TextP, c_size_t, POINTER(c_size_t)],
    "chrome_trace": [POINTER(Event), c_size_t, TextP, c_size_t, POINTER(c_size_t)],
    "clock": [POINTER(c_uint64)],
    "rank_poll": [Handle],
    "rank_abort": [Handle],
}
