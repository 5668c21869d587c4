# SPDX-License-Identifier: MIT OR Apache-2.0
"""cpattn.h for ctypes, read when the package is imported: its structs, functions and numbers under their own names.

`cpattn_plan_info` is `PlanInfo` here, CPATTN_BUSY is `BUSY`, and FUNCTIONS["plan_create"] has the parameters of cpattn_plan_create.
A new function of the header can be called without a change here. The parser understands the C of this header only: declarations
of one name each, structs that are complete before use, callbacks inside structs.
"""

from __future__ import annotations

import ast
import ctypes
import enum
import re
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_double, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from .arguments import RANGES, c_value

HERE = Path(__file__).resolve().parent
# An installed package contains the header; a checkout has it in include/.
_path = HERE / "cpattn.h"
_path = _path if _path.exists() else HERE.parents[1] / "include/cpattn.h"
_text = re.sub(r"/\*.*?\*/|\\\n", " ", _path.read_text(encoding="utf-8"), flags=re.S)

NUMBERS = {"INT64_MAX": 2**63 - 1}
for _name, _value in re.findall(r"^#define CPATTN_(\w+) (\w+) *$", _text, flags=re.M):
    NUMBERS[_name] = int(NUMBERS.get(_value, _value))

_TYPES: dict[str, Any] = {
    "void": None,
    **{name: getattr(ctypes, "c_" + name) for name in ("char", "float", "double", "size_t")},
}
_TYPES |= {f"{u}int{bits}_t": getattr(ctypes, f"c_{u}int{bits}") for u in ("u", "") for bits in (8, 16, 32, 64)}


class Sized(ctypes.Structure):
    """A struct whose first member is its size. Its initial values are those of the header's INIT macro."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **members: Any) -> None:
        for name, kind, *_ in self._fields_:
            if name in members and (kind in RANGES or kind is c_double):
                value = members[name]
                # Members of enums have been checked where they were given.
                members[name] = value.value if isinstance(value, enum.IntEnum) else c_value(name, kind, value)
        super().__init__(**self.defaults | members)


def _declared(text: str) -> tuple[str, Any]:
    """Name and type of a member or a parameter."""
    if callback := re.fullmatch(r"(\w+) \(\*(\w+)\)\((.*)\)", text, flags=re.S):
        return callback[2], CFUNCTYPE(_TYPES[callback[1]], *(kind for _, kind in _parameters(callback[3])))
    words = re.findall(r"\w+|\*", text)
    count = words.pop() if text.endswith("]") else None
    *words, name = (word for word in words if word != "const")
    base, stars = words[0], len(words) - 1
    kind: Any
    if stars and (base not in _TYPES or base == "void"):  # handles too
        kind, stars = c_void_p, stars - 1
    elif stars and base == "char" and text.startswith("const"):
        kind, stars = c_char_p, stars - 1
    else:
        kind = _TYPES[base]
    for _ in range(stars):
        kind = POINTER(kind)
    return name, kind * int(count) if count else kind


def _parameters(text: str) -> list[tuple[str, Any]]:
    return [_declared(part.strip()) for part in text.split(",") if part.strip() != "void"]


def _initial(name: str, kind: Any) -> dict[str, Any]:
    """The members of an INIT macro that are not NULL or an empty text."""
    macro = re.search(rf"^#define {name.upper()}_INIT +(.*)$", _text, flags=re.M)
    if not macro:
        return {}
    text = macro[1].replace("{", "(").replace("}", ")")
    text = re.sub(r"sizeof\((\w+)\)", lambda found: str(ctypes.sizeof({**_TYPES, name: kind}[found[1]])), text)
    text = re.sub(r"CPATTN_(\w+)", lambda found: str(NUMBERS[found[1]]), text).replace("NULL", "None")
    members = zip(kind._fields_, ast.literal_eval(text.strip()), strict=True)
    return {member: value for (member, *_), value in members if value not in (None, "")}


for _name, _body in re.findall(r"^typedef struct (\w+) \{(.*?)^\} \1;", _text, flags=re.S | re.M):
    _fields = [_declared(member.strip()) for member in _body.split(";") if member.strip()]
    _kind: Any = type(_name, (Sized if _fields[0][0] == "struct_size" else ctypes.Structure,), {"_fields_": _fields})
    if issubclass(_kind, Sized):
        _kind.defaults = _initial(_name, _kind)
    _TYPES[_name] = globals()["".join(map(str.capitalize, _name.split("_")[1:]))] = _kind

# Functions that return a status, by their names without cpattn_: the name and type of each parameter.
FUNCTIONS = {
    name: _parameters(text) for name, text in re.findall(r"^int32_t cpattn_(\w+)\(([^;]*)\);", _text, flags=re.M)
}

UNLIMITED = NUMBERS["UNLIMITED"]
OK, ENGINE_GROUP = NUMBERS["OK"], NUMBERS["ENGINE_GROUP"]
TensorP = POINTER(_TYPES["cpattn_tensor"])


def __getattr__(name: str) -> Any:
    """A constant of the header."""
    if name in NUMBERS:
        return NUMBERS[name]
    raise AttributeError(f"cpattn.h has no {name}")


def callbacks(table: Any, **functions: Any) -> dict[str, Any]:
    """Python functions as the members of a struct of callbacks."""
    kinds = dict(table._fields_)
    return {name: kinds[name](function) for name, function in functions.items()}
