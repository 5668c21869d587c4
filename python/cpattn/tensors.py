# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of other libraries as DLTensors for the C interface. They are used in place, never copied."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol

from . import _header
from .arguments import RANGES, c_array, whole
from ._header import DEVICE_CPU, DEVICE_CUDA, DlDevice, DlDtype, TensorP
from .errors import InvalidArgument


class SupportsDLPack(Protocol):
    """A tensor of NumPy, PyTorch, JAX or any other library with DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class Memory:
    """A compact tensor in any memory, given by address and shape.

    `device` and `code` are DLPack's: (1, 0) is the CPU, (2, n) CUDA device n; code 2 is floating point, 4 is bf16. The caller keeps
    the memory alive.
    """

    def __init__(
        self, address: int, shape: Sequence[int], bits: int, device: tuple[int, int] = (DEVICE_CPU, 0), code: int = 2
    ) -> None:
        self._shape, place = c_array("shape", c_int64, shape), c_array("device", c_int32, device, 2)
        kind = DlDtype(whole("code", code, 0, 255), whole("bits", bits, 1, 255), 1)
        self.address = whole("address", address, *RANGES[c_size_t])
        self.tensor = _header.Tensor(self.address, DlDevice(*place), len(self._shape), kind, self._shape, None, 0)


Array = SupportsDLPack | Memory

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype, _is_capsule.argtypes = ctypes.c_int, [ctypes.py_object, c_char_p]


class Versioned(ctypes.Structure):
    """DLPack 1's DLManagedTensorVersioned."""

    _fields_ = [
        ("version", c_uint32 * 2),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _header.Tensor),
    ]


READ_ONLY = 1


class Given:
    """A tensor during a call: its DLTensor, and the object that keeps it alive. A `written` one must not be read-only."""

    def __init__(self, name: str, array: Array, *, written: bool = False) -> None:
        self.owner: Any
        self.pointer: Any
        if isinstance(array, Memory):
            self.owner, self.pointer = array, ctypes.pointer(array.tensor)
            return
        # JAX exports its arrays as writable, but programs expect that they never change.
        read_only = type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
        # A capsule that is not consumed frees its DLTensor when it is deleted.
        # Stream -1 on CUDA: the exporter need not synchronise, since the call is ordered by its own stream.
        try:
            on_cuda = int(array.__dlpack_device__()[0]) == DEVICE_CUDA
            export: Any = array.__dlpack__
            how = {"stream": -1} if on_cuda else {}
            try:
                self.owner = export(max_version=(1, 0), **how)
            except TypeError:  # the library has no versioned DLPack
                self.owner = export(**how)
            if _is_capsule(self.owner, b"dltensor_versioned"):
                versioned = Versioned.from_address(_pointer_of(self.owner, b"dltensor_versioned"))
                self.pointer, read_only = (
                    ctypes.pointer(versioned.tensor),
                    read_only or bool(versioned.flags & READ_ONLY),
                )
            else:  # a DLTensor is the capsule's first member
                self.pointer = ctypes.cast(_pointer_of(self.owner, b"dltensor"), TensorP)
        except Exception as error:
            raise InvalidArgument(f"{name} cannot be read through DLPack: {type(array).__name__}: {error}") from error
        if written and read_only:
            kind = f"{type(array).__module__}.{type(array).__name__}"
            raise InvalidArgument(f"{name} is a read-only {kind}, and the call writes it: give a writable tensor")


def all_given(written: set[str], **arrays: Array | None) -> dict[str, Given]:
    """The tensors of a call that are not None, by their names."""
    return {name: Given(name, array, written=name in written) for name, array in arrays.items() if array is not None}


def whole_numbers(name: str, tensor: Any, dims: Sequence[str], device: int = DEVICE_CPU) -> tuple[Any, ...]:
    """The address of a compact int32 array on a device of DLPack type `device`, and its size in each of `dims`."""
    shape, kind = tuple(tensor.shape[: tensor.ndim]), (tensor.dtype.code, tensor.dtype.bits, tensor.device.device_type)
    if kind != (0, 32, device):
        needed = "the CPU" if device == DEVICE_CPU else f"device type {device}, where k is,"
        raise InvalidArgument(
            f"{name} is of DLPack type {kind[0]}, {kind[1]} bits, on device type {kind[2]}, int32 on {needed} is needed"
        )
    if len(shape) != len(dims):
        raise InvalidArgument(f"{name} is of shape {shape}, [{', '.join(dims)}] is needed")
    if tensor.strides and math.prod(shape):
        strides, compact = tensor.strides[: len(shape)], [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        if any(stride != right for stride, right, size in zip(strides, compact, shape, strict=True) if size > 1):
            raise InvalidArgument(f"{name} has strides {tuple(strides)}, a contiguous one is needed")
    return ctypes.cast(
        c_void_p(tensor.data + tensor.byte_offset if tensor.data else None), ctypes.POINTER(c_int32)
    ), *shape
