# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of other libraries, as the DLTensors that calls take. They are used where they lie, never copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, Protocol

from . import _header
from ._check import RANGES, c_array, whole
from ._header import DEVICE_CPU, DEVICE_CUDA, DlDevice, DlDtype, TensorP
from .errors import InvalidArgument


class SupportsDLPack(Protocol):
    """A tensor of NumPy, PyTorch, JAX or whoever else speaks DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class Memory:
    """Memory that no library describes, as a compact tensor: an address and a shape.

    `device` and `code` are DLPack's: (1, 0) is the CPU, (2, n) CUDA device n; code 2 is floating point, 4 is bf16. Whoever
    makes one keeps the memory alive.
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


class Given:
    """A tensor during a call: its DLTensor, and what keeps that alive."""

    def __init__(self, name: str, array: Array) -> None:
        self.kept: Any
        self.pointer: Any
        if isinstance(array, Memory):
            self.kept, self.pointer = array, ctypes.pointer(array.tensor)
            return
        # A capsule that nobody consumes frees its description when it dies. A DLTensor is the capsule's first member.
        # On CUDA, -1: whoever makes the tensor need not synchronise, the call is ordered by its stream.
        try:
            on_cuda = int(array.__dlpack_device__()[0]) == DEVICE_CUDA
            self.kept = array.__dlpack__(stream=-1) if on_cuda else array.__dlpack__()
            address = _pointer_of(self.kept, b"dltensor")
        except Exception as error:
            raise InvalidArgument(f"{name} is no tensor that can be used through DLPack: {type(array).__name__}, {error}") from error
        self.pointer = ctypes.cast(address, TensorP)
