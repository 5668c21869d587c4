# SPDX-License-Identifier: MIT OR Apache-2.0
"""What can go wrong, as types: one for each status of the C interface, and one for a library that is not there.

Every message names the argument, what was found and what is needed. Nothing here is raised for a wrong result: there are
no wrong results, only refused calls.
"""

from __future__ import annotations


class Error(Exception):
    """A call that failed, in the library's own words."""


class LibraryError(Error, ImportError):
    """The shared library is not there, or is of another version."""


class InvalidArgument(Error, ValueError):
    """An argument contradicts another one, or is impossible by itself. Nothing was written."""


class Unsupported(Error, NotImplementedError):
    """Valid, but not supported by this build, device or mode."""


class Disagreement(Error):
    """Ranks of a group run different plans. In the first run of a plan and direction this is found before any data moves, and
    all of them may continue. In later runs the group has failed; on a device, what depends on the other rank is then NaN.

    `peer` is one of two ranks that run different plans; the message names both. None if it is not known.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerError(Error, ConnectionError):
    """A peer failed, left, aborted or did not answer in time. The transport stays failed: make a new one on every rank.

    `peer` is the rank at fault, as far as this rank can tell, or None.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class ScheduleError(Error):
    """The verifier found a flaw in a schedule."""


class DeviceError(Error):
    """A call into a device driver or the operating system failed."""


class InvalidHandle(Error):
    """A handle is closed, or of another kind."""


class Busy(Error):
    """A rank is inside a call of another thread."""


class LibraryDefect(Error):
    """The library panicked. Close what the call used."""


# By status, from CPATTN_INVALID (1) on.
BY_STATUS: tuple[type[Error], ...] = (
    InvalidArgument,
    Unsupported,
    Disagreement,
    PeerError,
    ScheduleError,
    DeviceError,
    InvalidHandle,
    Busy,
    LibraryDefect,
)


def of_status(status: int, message: str, peer: int | None) -> Error:
    """The error of a status, which may name a rank."""
    kind = BY_STATUS[status - 1] if 1 <= status <= len(BY_STATUS) else Error
    return kind(message, peer) if issubclass(kind, Disagreement | PeerError) else kind(message)
