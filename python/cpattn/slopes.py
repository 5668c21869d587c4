# SPDX-License-Identifier: MIT OR Apache-2.0
"""ALiBi slopes as an argument: a number for each head, or a sequence of these for each document."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_float
from typing import Any

from .arguments import attempt, c_array, listed, number
from .errors import InvalidArgument

Slopes = tuple[float, ...] | tuple[tuple[float, ...], ...]


def slopes_of(name: str, array: Any) -> Slopes | None:
    """Slopes as tuples, which are keys of a cache, from sequences or from an array or tensor of any library."""
    if array is None:
        return None
    if getattr(array, "requires_grad", False):
        raise InvalidArgument(f"{name}.requires_grad is True, but slopes have no gradient: give {name}.detach()")
    sequence: Any = attempt(array.tolist) if hasattr(array, "tolist") else array
    values = listed(name, sequence)
    if not values or isinstance(values[0], str | bytes) or attempt(iter, values[0]) is None:
        return _row(name, values)
    return tuple(_row(f"{name}[{at}]", listed(f"{name}[{at}]", row)) for at, row in enumerate(values))


def _row(name: str, values: list[Any]) -> tuple[float, ...]:
    return tuple(number(f"{name}[{at}]", value) for at, value in enumerate(values))


def c_slopes(name: str, array: Any, heads: int) -> dict[str, Any]:
    """The members of the problem for these slopes. The library compares the number of rows with that of documents."""
    slopes = slopes_of(name, array) or ()
    if not slopes or not isinstance(slopes[0], tuple):
        return {"alibi_slopes": c_array(name, c_float, slopes, heads), "alibi_rows": 0}
    rows = [list(c_array(f"{name}[{at}]", c_float, row, heads)) for at, row in enumerate(slopes)]
    # As f32, which has less range.
    flat = [number(f"{name}[{at}][{head}]", slope) for at, row in enumerate(rows) for head, slope in enumerate(row)]
    return {"alibi_slopes": c_array(name, c_float, flat), "alibi_rows": len(rows)}


def refuse_per_document(where: str, options: Mapping[str, Any]) -> None:
    """Refuses slopes of documents for layers of all batches."""
    slopes = slopes_of("alibi_slopes", options.get("alibi_slopes"))
    if slopes and isinstance(slopes[0], tuple):
        raise InvalidArgument(
            f"{where}alibi_slopes has a row for each of {len(slopes)} documents, which belong to a batch: give them to `attention`, or "
            "give one slope for each head"
        )
