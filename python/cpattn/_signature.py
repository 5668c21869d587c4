# SPDX-License-Identifier: MIT OR Apache-2.0
"""Signatures of named tuples and data classes, whose annotations `from __future__ import annotations` makes texts; and constructors that
say what is to be named."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast, get_type_hints

from .errors import WrongCall

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def resolved(kind: type[T]) -> type[T]:
    """A class decorator: help() and inspect.signature show types, not ForwardRef('int')."""
    constructor: Any = kind.__new__ if issubclass(kind, tuple) else kind.__init__
    constructor.__annotations__ |= get_type_hints(kind)
    return kind


def misspelt(of: str, unknown: Iterable[str], names: Iterable[str]) -> WrongCall:
    """The error for keywords that are none of `names`, those of a function or class."""
    name, every = min(unknown), sorted(names)
    if name in ("causal", "is_causal"):
        return WrongCall(
            f"{name} is no argument of {of}: attention is causal unless window_right is given; window_right=cpattn.UNLIMITED lets a query see all "
            "later keys of its document"
        )
    meant = difflib.get_close_matches(name, every, 1)
    return WrongCall(
        f"{name} is no argument of {of}{f': is {meant[0]} meant?' if meant else ''}; its arguments are {', '.join(every)}"
    )


def keywords(function: Callable[..., Any]) -> list[str]:
    """What a function, or the constructor of an object, takes by name."""
    every = inspect.signature(function).parameters.values()
    return [
        one.name
        for one in every
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in ("self", "cls")
    ]


def spelled(options: type) -> Callable[[F], F]:
    """A decorator of a function whose further keywords are those of `options`: others are refused with the names of all of its arguments."""

    def decorator(function: F) -> F:
        names = {*keywords(function), *options.__annotations__}

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= names:
                raise misspelt(function.__qualname__, kwargs.keys() - names, names)
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorator


def named(example: str, options: type | None = None) -> Callable[[type[T]], type[T]]:
    """A class decorator: a constructor that is given more arguments by position than it takes raises an error that says which are to be
    named, with an example; other libraries take these by position. So does one that lacks an argument, and one with a keyword that the class
    does not take, unless it looks at further keywords itself: `options` are what these may be. The signature stays as it is."""

    def decorator(kind: type[T]) -> type[T]:
        constructor: Any = kind
        usual, name = constructor.__init__, kind.__name__
        every = inspect.signature(usual).parameters.values()
        places = [one.name for one in every if one.kind == one.POSITIONAL_OR_KEYWORD][1:]
        needed = [
            one.name
            for one in every
            if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ][1:]
        names = {*keywords(usual), *(options.__annotations__ if options else ())}
        others = options is None and any(one.kind == one.VAR_KEYWORD for one in every)

        @wraps(usual)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            if len(args) > len(places):
                positions = ", ".join(places)
                raise WrongCall(
                    f"{name} takes {positions} by position, and was given {len(args)} arguments so: name the others, as in {name}({example})"
                )
            if not others and not kwargs.keys() <= names:
                raise misspelt(name, kwargs.keys() - names, names)
            if missing := [one for one in needed if one not in kwargs and one not in places[: len(args)]]:
                raise WrongCall(f"{name} needs {missing[0]}, which was not given: an example is {name}({example})")
            usual(self, *args, **kwargs)

        constructor.__init__ = checked
        return kind

    return decorator
