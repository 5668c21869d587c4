# SPDX-License-Identifier: MIT OR Apache-2.0
"""Signatures of named tuples and data classes, whose annotations `from __future__ import annotations` makes texts."""

from __future__ import annotations

from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def resolved(kind: type[T]) -> type[T]:
    """A class decorator: help() and inspect.signature show types, not ForwardRef('int')."""
    made: Any = kind.__new__ if issubclass(kind, tuple) else kind.__init__
    made.__annotations__ |= get_type_hints(kind)
    return kind
