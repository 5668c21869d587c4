# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds the shared library, loads it once, and turns statuses into exceptions.

Its path is the environment variable CPATTN_LIBRARY, if set; else the library that `pip install` built into this package; else, in
a checkout, target/capi/lib, where `capi/build` and an editable installation put it.

Calls go through ctypes.CDLL, which releases Python's lock: the ranks of one process are ordinary threads. Numbers are checked
against the types of the header's parameters, and errors name the parameter.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32
from typing import Any

from . import _header, errors
from .arguments import RANGES, c_value

_OWN, _BUILT = _header.HERE / "libcpattn.so", _header.HERE.parents[1] / "target/capi/lib/libcpattn.so"


def _load() -> ctypes.CDLL:
    place = os.environ.get("CPATTN_LIBRARY") or str(_OWN if _OWN.exists() else _BUILT)
    try:
        library = ctypes.CDLL(place)
        library.cpattn_version.restype = c_uint32
    except (OSError, AttributeError) as error:
        raise errors.LibraryError(
            f"no cpattn library was found: {error}\nRun `pip install ./python` or capi/build in a checkout of cpattn, or set CPATTN_LIBRARY "
            "to the path of libcpattn.so"
        ) from error
    version, (major, minor) = library.cpattn_version(), (_header.VERSION_MAJOR, _header.VERSION_MINOR)
    if version // 100 != major * 100 + minor:
        raise errors.LibraryError(
            f"{place} is cpattn {version // 10000}.{version // 100 % 100}.{version % 100}; this package needs "
            f"{major}.{minor}: build the library and the package from one checkout"
        )
    library.cpattn_last_error.restype = c_char_p
    library.cpattn_last_error_peer.restype = c_int64
    library.cpattn_status_name.restype = c_char_p
    for name, parameters in _header.FUNCTIONS.items():
        # A library of an earlier patch version may lack some functions.
        if function := getattr(library, "cpattn_" + name, None):
            function.argtypes, function.restype = [kind for _, kind in parameters], c_int32
    return library


_library = _load()


def library_version() -> str:
    """The version of the shared library."""
    version = _library.cpattn_version()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def library_features() -> frozenset[str]:
    """What the shared library was built with: "kernels", "rayon", "cuda", "nccl", "mpi". Without "kernels" it is the planner alone, whose
    attention is that of another kernel: `cpattn.torch` with kernels="torch" and others."""
    if (of_library := getattr(_library, "cpattn_features", None)) is None:
        return frozenset(["kernels"])  # an earlier patch version, which always had them
    of_library.restype = c_uint32
    features = of_library()
    names = ("kernels", "rayon", "cuda", "nccl", "mpi")
    return frozenset(name for name in names if features & _header.NUMBERS["FEATURE_" + name.upper()])


def status_of(name: str, *arguments: Any) -> int:
    """Calls cpattn_`name`."""
    declared = zip(_header.FUNCTIONS[name], arguments, strict=True)
    values = (c_value(at, kind, value) if kind in RANGES else value for (at, kind), value in declared)
    if (function := getattr(_library, "cpattn_" + name, None)) is None:
        raise errors.LibraryError(
            f"{_library._name} has no cpattn_{name} and is older than this package: build the library and the package from one checkout"
        )
    status: int = function(*values)
    return status


def call(name: str, *arguments: Any) -> None:
    """Calls cpattn_`name` and raises an error unless it succeeds."""
    if status := status_of(name, *arguments):
        kind, text = _library.cpattn_status_name(c_int32(status)), _library.cpattn_last_error()
        peer = _library.cpattn_last_error_peer()
        raise errors.of_status(status, f"cpattn_{name}: {kind.decode()}: {text.decode()}", None if peer < 0 else peer)


def text_of(name: str, *arguments: Any) -> str:
    """The text that cpattn_`name` writes into a buffer, whose size it returns first."""
    needed = c_size_t()
    call(name, *arguments, None, 0, byref(needed))
    room = ctypes.create_string_buffer(needed.value)
    call(name, *arguments, room, needed.value, byref(needed))
    return room.value.decode()
