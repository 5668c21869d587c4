# SPDX-License-Identifier: MIT OR Apache-2.0
"""The types of errors: one for each status of the C interface, and one for a missing library.

A message names the argument, the value that was found and the value that is needed.
"""

from __future__ import annotations

import re


class Error(Exception):
    """A call that failed. The base of all errors of this package."""


class LibraryError(Error, ImportError):
    """The shared library is missing, or has another version."""


class InvalidArgument(Error, ValueError):
    """An argument is invalid, or contradicts another one. Nothing was written."""


class WrongCall(InvalidArgument, TypeError):
    """An argument that a function does not take, too many by position, or a missing one: as Python's TypeError, and one of this package."""


class Unsupported(Error, NotImplementedError):
    """Valid, but not supported by this build, device or mode."""


class _WithPeer(Error):
    """An error that may name a rank."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Disagreement(_WithPeer):
    """Ranks of a group run different plans. If the plan and direction are new to all ranks, this is found before any data moves,
    and all may continue. Otherwise the group has failed; on a device, results that depend on the other rank are then NaN.

    Or they make their calls and PyTorch's collectives in different orders over its communicator (communicator="torch" with
    TORCH_DISTRIBUTED_DEBUG=DETAIL), which is found before the call sends anything.

    `peer` is one of two ranks that differ, or None if it is not known. The message names both.
    """


class PeerError(_WithPeer, ConnectionError):
    """A peer failed, left, aborted or did not answer in time. The transport stays failed: make a new one on every rank.

    `peer` is the rank at fault, or None if this rank cannot tell.
    """


class ScheduleError(Error):
    """The verifier found a flaw in a schedule."""


class DeviceError(Error):
    """A call into a device driver or the operating system failed."""


class InvalidHandle(Error):
    """A handle is closed, or has another kind."""


class Busy(Error):
    """A call of another thread uses the rank."""


class LibraryDefect(Error):
    """The library panicked. Close the objects that the call used."""


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
    """The error of a status. `peer` is a rank that the library named."""
    kind = BY_STATUS[status - 1] if 1 <= status <= len(BY_STATUS) else Error
    if kind is PeerError and re.search(r"rank \d+ (left|gives no answer)", message):
        message += ". If that rank had finished: call a barrier (dist.barrier()) on all ranks before one leaves"
    return kind(message, peer) if issubclass(kind, _WithPeer) else kind(message)
