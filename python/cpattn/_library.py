# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds the shared library, loads it once, and turns statuses into exceptions.

Where it is looked for, the first that is there:

1. the environment variable CPATTN_LIBRARY, a path. If it is set, nothing else is tried;
2. target/capi/lib of the checkout that this package lies in (not after a plain `pip install`, which copies it);
3. lib of this Python's prefix: `capi/build PREFIX` with the prefix of a virtual environment puts it there;
4. wherever the system's loader looks for libcpattn.so.0.1.

Calls go through ctypes.CDLL, which lets go of Python's lock: the ranks of one process are ordinary threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32
from pathlib import Path
from typing import Any

from . import _header, errors

SONAME = "libcpattn.so.0.1"


def _places() -> Iterator[str]:
    named = os.environ.get("CPATTN_LIBRARY")
    if named:
        yield named
        return
    checkout = Path(__file__).resolve().parents[2]
    # An installed package lies somewhere else, and only a checkout has the header there.
    if (checkout / "include/cpattn.h").exists():
        yield str(checkout / "target/capi/lib" / SONAME)
    yield str(Path(sys.prefix) / "lib" / SONAME)
    yield SONAME


def _load() -> ctypes.CDLL:
    tried = []
    for place in _places():
        try:
            library = ctypes.CDLL(place)
            library.cpattn_version.restype = c_uint32
            break
        except (OSError, AttributeError) as error:
            tried.append(f"  {place}: {error}")
    else:
        raise errors.LibraryError(
            "no cpattn library was found:\n" + "\n".join(tried) + "\nBuild it with capi/build of the cpattn checkout; "
            "then set CPATTN_LIBRARY to the libcpattn.so that it names, or give capi/build this prefix: " + sys.prefix
        )
    version = library.cpattn_version()
    if version // 100 != _header.VERSION_MAJOR * 100 + _header.VERSION_MINOR:
        raise errors.LibraryError(
            f"{place} is cpattn {version // 10000}.{version // 100 % 100}.{version % 100}; this package needs "
            f"{_header.VERSION_MAJOR}.{_header.VERSION_MINOR}: build library and package from one checkout"
        )
    library.cpattn_last_error.restype = c_char_p
    library.cpattn_last_error_peer.restype = c_int64
    library.cpattn_status_name.restype = c_char_p
    for name, arguments in _header.FUNCTIONS.items():
        function = getattr(library, "cpattn_" + name)
        function.argtypes, function.restype = arguments, c_int32
    return library


_library = _load()


def library_version() -> str:
    """Of the shared library."""
    version = _library.cpattn_version()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def status_of(name: str, *arguments: Any) -> int:
    """Calls cpattn_`name`."""
    status: int = getattr(_library, "cpattn_" + name)(*arguments)
    return status


def error_of(name: str, status: int) -> errors.Error:
    """What the call on this thread that returned `status` has to say. Ask before another call."""
    kind, text = _library.cpattn_status_name(c_int32(status)), _library.cpattn_last_error()
    peer = _library.cpattn_last_error_peer()
    return errors.of_status(status, f"cpattn_{name}: {kind.decode()}: {text.decode()}", None if peer < 0 else peer)


def call(name: str, *arguments: Any) -> None:
    """Calls cpattn_`name` and raises what it refuses."""
    status = status_of(name, *arguments)
    if status:
        raise error_of(name, status)


def text_of(name: str, *arguments: Any) -> str:
    """The text that cpattn_`name` writes, into as much room as it says it needs."""
    needed = c_size_t()
    call(name, *arguments, None, 0, byref(needed))
    room = ctypes.create_string_buffer(needed.value)
    call(name, *arguments, room, needed, byref(needed))
    return room.value.decode()
