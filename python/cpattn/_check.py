# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arguments of Python that the C interface has no room for, or that ctypes would refuse without their names."""

from __future__ import annotations

import enum
import math
import operator
from typing import Any, TypeVar

from .errors import InvalidArgument

E = TypeVar("E", bound=enum.IntEnum)


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number of Python, NumPy or PyTorch from `low` to `high`; no truth value."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InvalidArgument(f"{name} is {value!r}, a whole number is needed")
    if number < low:
        raise InvalidArgument(f"{name} is {number}, at least {low} is needed")
    if number > high:
        raise InvalidArgument(f"{name} is {number}, at most {high} is needed")
    return number


def number(name: str, value: Any) -> float:
    """A finite number; no truth value."""
    try:
        number = None if isinstance(value, bool) else float(operator.index(value) if hasattr(value, "__index__") else value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, str | bytes) or not math.isfinite(number):
        raise InvalidArgument(f"{name} is {value!r}, a finite number is needed")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, 1 or 0."""
    if value not in (0, 1):
        raise InvalidArgument(f"{name} is {value!r}, True or False is needed")
    return bool(value)


def one_of(name: str, value: Any, kind: type[E]) -> E:
    """A member of an enum, or its name in letters of either case."""
    try:
        return kind[value.upper()] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError):
        names = ", ".join(repr(member.name.lower()) for member in kind)
        raise InvalidArgument(f"{name} is {value!r}, one of {names} is needed, or a member of cpattn.{kind.__name__}") from None
