# SPDX-License-Identifier: MIT OR Apache-2.0
"""cpattn through ctypes: include/cpattn.h, line by line, and nothing else to install.

Tensors of any library that speaks DLPack (NumPy, PyTorch, JAX, ...) are taken where they lie, never copied. Calls let go
of Python's lock, so the ranks of one process are ordinary threads.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

F16, BF16, F32, F64 = range(4)
Q, K = 0, 1
FORWARD, BACKWARD = 0, 1
UNLIMITED = 2**63 - 1


class Error(Exception):
    """A refused call, with the library's own words."""


class Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    class Device(ctypes.Structure):
        _fields_ = [("device_type", c_int32), ("device_id", c_int32)]

    class DType(ctypes.Structure):
        _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]

    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


TensorP = POINTER(Tensor)


class Sized(ctypes.Structure):
    """A struct whose first member is its size; the rest begins as the header's INIT macro says."""

    _defaults = {}

    def __init__(self, **members):
        unknown = set(members) - {name for name, *_ in self._fields_}
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        super().__init__(**{"struct_size": ctypes.sizeof(self), **self._defaults, **members})


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
        ("alibi_slopes", POINTER(ctypes.c_float)),
        ("sinks", c_int32),
        ("reserved", c_int32),
    ]
    _defaults = {"dtype": F32, "window_left": UNLIMITED}


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
    _defaults = {"world": 1, "passes": 1}


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


class ForwardArgs(Sized):
    _fields_ = [("struct_size", c_size_t)] + [(name, TensorP) for name in ("q", "k", "v", "sinks", "o", "lse")]
    _fields_ += [("stream", c_void_p)]


class BackwardArgs(Sized):
    _fields_ = [("struct_size", c_size_t)]
    _fields_ += [(name, TensorP) for name in "q k v sinks o lse d_o dq dk dv dsinks".split()]
    _fields_ += [("stream", c_void_p)]


def _load():
    path = os.environ.get("CPATTN_LIBRARY", "libcpattn.so.0")
    lib = ctypes.CDLL(path)
    lib.cpattn_version.restype = c_uint32
    lib.cpattn_last_error.restype = c_char_p
    lib.cpattn_status_name.restype = c_char_p
    handle, i32, u32 = c_void_p, c_int32, c_uint32
    signatures = {
        "plan_create": [POINTER(Problem), POINTER(Options), POINTER(handle)],
        "plan_destroy": [handle],
        "plan_share": [handle, u32, POINTER(Share)],
        "plan_explain": [handle, c_char_p, c_size_t, POINTER(c_size_t)],
        "plan_verify": [handle],
        "plan_workspace": [handle, u32, i32, POINTER(c_uint64)],
        "plan_tokens": [handle, i32, u32, POINTER(c_int64), c_size_t],
        "plan_positions": [handle, i32, u32, POINTER(c_int64), c_size_t],
        "plan_shard": [handle, i32, u32, TensorP, TensorP],
        "plan_unshard": [handle, i32, u32, TensorP, TensorP],
        "plan_shift": [handle, u32, c_int64, c_void_p, TensorP, TensorP],
        "local_group": [u32, c_uint64, POINTER(handle)],
        "peer_group": [u32, POINTER(c_int32), c_uint64, POINTER(handle)],
        "transport_destroy": [handle],
        "rank_create": [handle, c_void_p, POINTER(handle)],
        "rank_destroy": [handle],
        "rank_prepare": [handle, handle, i32],
        "forward": [handle, handle, POINTER(ForwardArgs)],
        "backward": [handle, handle, POINTER(BackwardArgs)],
        "rank_poll": [handle],
        "rank_abort": [handle],
    }
    for name, arguments in signatures.items():
        function = getattr(lib, "cpattn_" + name)
        function.argtypes, function.restype = arguments, i32
    return lib


_lib = _load()
assert _lib.cpattn_version() // 100 == 1, "this file is written for cpattn 0.1"


def _call(name, *arguments):
    status = getattr(_lib, "cpattn_" + name)(*arguments)
    if status:
        kind = _lib.cpattn_status_name(status).decode()
        raise Error(f"cpattn_{name}: {kind}: {_lib.cpattn_last_error().decode()}")


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = c_void_p, [ctypes.py_object, c_char_p]


class Memory:
    """Memory that no library describes: an address and a shape, as a compact tensor. `device` is DLPack's pair."""

    def __init__(self, address, shape, bits, device=(1, 0), code=2):
        self._shape = (c_int64 * len(shape))(*shape)
        kind = Tensor.DType(code, bits, 1)
        self.tensor = Tensor(address, Tensor.Device(*device), len(shape), kind, self._shape, None, 0)


class Given:
    """A tensor given to a call: its DLTensor, and what keeps it alive."""

    def __init__(self, array):
        if isinstance(array, Memory):
            self.capsule, self.pointer = array, ctypes.pointer(array.tensor)
            return
        # A capsule that nobody consumes frees its description when it dies. A DLTensor is the capsule's first member.
        # On CUDA, -1: whoever makes the tensor need not synchronise, the call is ordered by its stream.
        on_device = array.__dlpack_device__()[0] == 2
        self.capsule = array.__dlpack__(stream=-1) if on_device else array.__dlpack__()
        self.pointer = ctypes.cast(_pointer_of(self.capsule, b"dltensor"), TensorP)


def _args(kind, arrays, stream):
    given = {name: Given(array) for name, array in arrays.items() if array is not None}
    return kind(stream=stream, **{name: g.pointer for name, g in given.items()}), given


class Plan:
    """What all ranks agree to compute. `options` and `problem` are the header's members."""

    def __init__(self, cu_seqlens, heads, head_dim, *, options=None, **problem):
        cu = (c_int32 * len(cu_seqlens))(*cu_seqlens)
        p = Problem(cu_seqlens_q=cu, documents=len(cu_seqlens) - 1, heads=heads, head_dim=head_dim, **problem)
        self._handle = c_void_p()
        _call("plan_create", byref(p), byref(Options(**(options or {}))), byref(self._handle))

    def __del__(self):
        if getattr(self, "_handle", None):
            _lib.cpattn_plan_destroy(self._handle)

    def share(self, rank):
        share = Share()
        _call("plan_share", self._handle, rank, byref(share))
        return share

    def explain(self):
        needed = c_size_t()
        _call("plan_explain", self._handle, None, 0, byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        _call("plan_explain", self._handle, text, needed, byref(needed))
        return text.value.decode()

    def verify(self):
        _call("plan_verify", self._handle)

    def tokens(self, side, rank):
        """The tokens of the batch that a rank holds, in its order."""
        share = self.share(rank)
        count = share.q_tokens if side == Q else share.k_tokens
        tokens = (c_int64 * count)()
        _call("plan_tokens", self._handle, side, rank, tokens, count)
        return list(tokens)

    def shard(self, side, rank, whole, local):
        """Copies a rank's rows of `whole` into `local`."""
        w, l = Given(whole), Given(local)
        _call("plan_shard", self._handle, side, rank, w.pointer, l.pointer)

    def unshard(self, side, rank, local, whole):
        """Copies a rank's rows back to their places in `whole`."""
        w, l = Given(whole), Given(local)
        _call("plan_unshard", self._handle, side, rank, l.pointer, w.pointer)


class Rank:
    """One participant; used by one thread at a time. `abort` is for the others."""

    def __init__(self, transport):
        self._handle = c_void_p()
        _call("rank_create", transport, None, byref(self._handle))

    def __del__(self):
        if getattr(self, "_handle", None):
            _lib.cpattn_rank_destroy(self._handle)

    def prepare(self, plan, direction):
        """Does all that may allocate or wait; the first run does it otherwise."""
        _call("rank_prepare", self._handle, plan._handle, direction)

    def forward(self, plan, stream=None, **tensors):
        """On a device: returns when it is enqueued on `stream` (a cudaStream_t; None is the default stream)."""
        args, given = _args(ForwardArgs, tensors, stream)
        _call("forward", self._handle, plan._handle, byref(args))

    def backward(self, plan, stream=None, **tensors):
        args, given = _args(BackwardArgs, tensors, stream)
        _call("backward", self._handle, plan._handle, byref(args))

    def poll(self):
        _call("rank_poll", self._handle)

    def abort(self):
        _call("rank_abort", self._handle)


def local_group(world, deadline_ms=60_000):
    """Ranks that are threads of this process."""
    transports = (c_void_p * world)()
    _call("local_group", world, deadline_ms, transports)
    return [Rank(c_void_p(t)) for t in transports]


def peer_group(devices, deadline_ms=60_000):
    """Ranks that are threads of this process, rank r with tensors on CUDA device devices[r]."""
    transports = (c_void_p * len(devices))()
    _call("peer_group", len(devices), (c_int32 * len(devices))(*devices), deadline_ms, transports)
    return [Rank(c_void_p(t)) for t in transports]


def on_all(ranks, job):
    """Runs job(number, rank) on a thread of each rank; raises what the first that failed raised."""
    from concurrent.futures import ThreadPoolExecutor

    def guarded(number, rank):
        try:
            return job(number, rank)
        except BaseException:
            rank.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(guarded, number, rank) for number, rank in enumerate(ranks)]
    failed = [f.exception() for f in futures if f.exception()]
    # What the others raise only says that this one aborted.
    failed.sort(key=lambda e: "CPATTN_PEER" in str(e))
    if failed:
        raise failed[0]
    return [f.result() for f in futures]
