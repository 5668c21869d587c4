# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of arguments that do not fit into the C interface, or that ctypes would refuse without their names.

An argument may be any object, also one whose methods raise.
"""

from __future__ import annotations

import enum
import math
import operator
import reprlib
from collections.abc import Callable, Iterable
from ctypes import c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any, TypeVar

from ._signature import keywords, misspelt, named
from .errors import InvalidArgument

__all__ = [
    "attempt",
    "flag",
    "instance",
    "instances",
    "keywords",
    "listed",
    "misspelt",
    "named",
    "number",
    "one_of",
    "refused",
    "whole",
]

E = TypeVar("E", bound=enum.IntEnum)
T = TypeVar("T")


# The ranges of C's integers: ctypes truncates a number that is too large, and refuses other objects without a name.
RANGES: dict[Any, tuple[int, int]] = {kind: (0, 256 ** sizeof(kind) - 1) for kind in (c_size_t, c_uint32, c_uint64)}
RANGES |= {kind: (-(256 ** sizeof(kind)) // 2, 256 ** sizeof(kind) // 2 - 1) for kind in (c_int32, c_int64)}


def attempt(job: Callable[..., T], *arguments: Any) -> T | None:
    """The result of a call, or None if it raises."""
    try:
        return job(*arguments)
    except Exception:  # noqa: BLE001 (an object may raise anything)
        return None


def refused(name: str, value: Any, needed: str) -> InvalidArgument:
    """The error for an argument that is not as `needed` says."""
    shown = attempt(reprlib.repr, value) or f"of type {type(value).__name__}"
    return InvalidArgument(f"{name} is {shown}, {needed}")


def instance(name: str, value: T, kind: Any, needed: str = "") -> T:
    """An object of a class."""
    if not isinstance(value, kind):
        raise refused(name, value, needed or f"a {kind.__name__} is needed")
    return value


def _another(value: Any) -> str:
    """Where a member of an enum stands for a number."""
    return (
        f", not a member of {type(value).__name__}: are two arguments exchanged?"
        if isinstance(value, enum.Enum)
        else ""
    )


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number of Python, NumPy or PyTorch from `low` to `high`; not a bool, and no member of an enum, which is another argument."""
    number = None if isinstance(value, bool | enum.Enum) else attempt(operator.index, value)
    if number is None:
        raise refused(name, value, f"a whole number is needed{_another(value)}")
    if not low <= number <= high:
        raise refused(name, number, f"at {f'least {low}' if number < low else f'most {high}'} is needed")
    return number


def number(name: str, value: Any) -> float:
    """A finite number; not a bool."""
    number = None
    if not isinstance(value, bool | str | bytes | enum.Enum):
        number = attempt(float, attempt(operator.index, value) if hasattr(value, "__index__") else value)
    if number is None or not math.isfinite(number):
        raise refused(name, value, f"a finite number is needed{_another(value)}")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, 1 or 0."""
    if isinstance(value, enum.Enum) or not attempt(lambda: value in (0, 1)):
        raise refused(name, value, "True or False is needed")
    return bool(value)


def one_of(name: str, value: Any, kind: type[E]) -> E:
    """A member of an enum, given as a member or by its name in upper or lower case. A bare number may be another argument."""
    if isinstance(value, kind):
        return value
    member = attempt(lambda: kind[value.upper()]) if isinstance(value, str) else None
    if member is None:
        names = ", ".join(repr(member.name.lower()) for member in kind)
        raise refused(name, value, f"one of {names} is needed, or a member of cpattn.{kind.__name__}{_another(value)}")
    return member


def listed(name: str, values: Iterable[T], what: str = "numbers") -> list[T]:
    """The items of a sequence."""
    if attempt(iter, values) is None:
        raise refused(name, values, f"a sequence of {what} is needed")
    return list(values)


def instances(name: str, values: Iterable[T], kind: Any) -> list[T]:
    """Objects of one class."""
    items = listed(name, values, f"{kind.__name__}s")
    return [instance(f"{name}[{at}]", item, kind) for at, item in enumerate(items)]


def c_value(name: str, kind: Any, value: Any) -> Any:
    """A number, an address or a text for C. A text is truncated to fit with its terminating 0."""
    if kind in (c_double, c_float):
        return number(name, value)
    if kind in RANGES or kind is c_void_p:
        return whole(name, value, *RANGES[c_size_t if kind is c_void_p else kind])
    return instance(name, value, str, "a string is needed").encode(errors="replace")[: sizeof(kind) - 1]


def c_array(name: str, kind: Any, values: Iterable[Any], count: int | None = None) -> Any:
    """Numbers as a C array of length `count`, if given."""
    items = listed(name, values)
    # A fast path for long lists of plain numbers in range.
    if (
        kind not in RANGES
        or set(map(type, items)) != {int}
        or not RANGES[kind][0] <= min(items) <= max(items) <= RANGES[kind][1]
    ):
        items = [c_value(f"{name}[{at}]", kind, item) for at, item in enumerate(items)]
    if count is not None and len(items) != count:
        raise InvalidArgument(f"{name} has length {len(items)}, {count} is needed")
    return (kind * len(items))(*items)


def c_structs(name: str, struct: Any, values: Iterable[Any], of: Any, **named: str) -> Any:
    """Named tuples as an array of C structs. A member has the name of its field, or the name in `named`."""
    items, kinds = instances(name, values, of), {member: kind for member, kind, *_ in struct._fields_}
    rows = (struct * len(items))()
    for at, (row, item) in enumerate(zip(rows, items)):
        for field, value in zip(of._fields, item):
            member = named.get(field, field)
            setattr(row, member, c_value(f"{name}[{at}].{field}", kinds[member], value))
    return rows
