# SPDX-License-Identifier: MIT OR Apache-2.0
"""Signatures of named tuples and data classes, whose annotations `from __future__ import annotations` makes texts; and constructors that
say what is to be named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def resolved(kind: type[T]) -> type[T]:
    """A class decorator: help() and inspect.signature show types, not ForwardRef('int')."""
    made: Any = kind.__new__ if issubclass(kind, tuple) else kind.__init__
    made.__annotations__ |= get_type_hints(kind)
    return kind


def named(example: str) -> Callable[[type[T]], type[T]]:
    """A class decorator: a constructor that is given more arguments by position than it takes raises a TypeError that says which are to be
    named, with an example. Other libraries take these by position. The signature stays as it is."""

    def decorator(kind: type[T]) -> type[T]:
        made: Any = kind
        usual = made.__init__
        every = inspect.signature(usual).parameters.values()
        places = [one.name for one in every if one.kind == one.POSITIONAL_OR_KEYWORD][1:]

        @wraps(usual)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            if len(args) > len(places):
                name, taken = kind.__name__, ", ".join(places)
                raise TypeError(f"{name} takes {taken} by position, and was given {len(args)} arguments so: name the others, as in {name}({example})")
            usual(self, *args, **kwargs)

        made.__init__ = checked
        return kind

    return decorator
