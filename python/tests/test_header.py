# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the package says of include/cpattn.h against the header itself: members, types and order, arguments, constants."""

from __future__ import annotations

import ast
import ctypes
import re
import unittest
from pathlib import Path
from typing import Any

from cpattn import _header, errors, plan, rank

HEADER = re.sub(r"/\*.*?\*/", "", (Path(__file__).parents[2] / "include/cpattn.h").read_text(), flags=re.S)
NAMES = {
    "cpattn_problem": _header.Problem,
    "cpattn_options": _header.Options,
    "cpattn_plan_info": _header.PlanInfo,
    "cpattn_share": _header.Share,
    "cpattn_message": _header.Message,
    "cpattn_link": _header.Link,
    "cpattn_event": _header.Event,
    "cpattn_transport_table": _header.TransportTable,
    "cpattn_engine_table": _header.EngineTable,
    "cpattn_rank_options": _header.RankOptions,
    "cpattn_forward_args": _header.ForwardArgs,
    "cpattn_backward_args": _header.BackwardArgs,
    "cpattn_tensor": _header.Tensor,
    "cpattn_dl_device": _header.DlDevice,
    "cpattn_dl_dtype": _header.DlDtype,
}
TYPES: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
    "size_t": ctypes.c_size_t,
    **{f"{u}int{n}_t": getattr(ctypes, f"c_{u}int{n}") for u in ("u", "") for n in (8, 16, 32, 64)},
    **NAMES,
}


def type_of(text: str) -> Any:
    """A C type as ctypes has it."""
    words = text.replace("*", " * ").replace("const ", " ").split()
    name, stars = words[0], words.count("*")
    if stars and name in ("void", "cpattn_plan", "cpattn_transport", "cpattn_rank"):
        kind, stars = ctypes.c_void_p, stars - 1
    elif stars and name == "char" and "const" in text:
        kind, stars = ctypes.c_char_p, stars - 1
    else:
        kind = None if name == "void" else TYPES[name]
    for _ in range(stars):
        kind = ctypes.POINTER(kind)
    return kind


def arguments(text: str) -> list[Any]:
    """Of a prototype's parameters, which all have names."""
    parts = (part.strip() for part in text.split(","))
    return [type_of(re.sub(r"\w+$", "", part)) for part in parts]


class Header(unittest.TestCase):
    def test_structs(self) -> None:
        seen = set()
        for body, name in re.findall(r"typedef struct \w+ \{(.*?)\n?\} (\w+);", HEADER, flags=re.S):
            if name not in NAMES:
                continue
            seen.add(name)
            want = []
            for member in filter(None, (m.strip() for m in re.split(r";\s*", body))):
                function = re.fullmatch(r"(\w+) \(\*(\w+)\)\((.*)\)", member, flags=re.S)
                if function:
                    result, field, parameters = function.groups()
                    want.append((field, (type_of(result), *arguments(parameters))))
                else:
                    field = re.search(r"(\w+)(?:\[(\d+)\])?$", member)
                    assert field
                    kind = type_of(member[: field.start()])
                    want.append((field[1], kind * int(field[2]) if field[2] else kind))
            got = []
            for field, kind in NAMES[name]._fields_:
                if hasattr(kind, "_argtypes_"):
                    kind = (kind._restype_, *kind._argtypes_)
                got.append((field, kind))
            self.assertEqual(got, want, name)
        self.assertEqual(seen, set(NAMES))

    def test_what_is_left_out(self) -> None:
        """The members that the INIT macros do not make 0 are the defaults."""
        numbers = {name: value.strip() for name, value in re.findall(r"#define CPATTN_(\w+) ([^\n\\]+)\n", HEADER)}
        numbers |= {"UNLIMITED": str(_header.UNLIMITED), "NULL": "0"}
        for name, macro in (("cpattn_problem", "PROBLEM"), ("cpattn_options", "OPTIONS"), ("cpattn_rank_options", "RANK_OPTIONS")):
            body = re.search(rf"#define CPATTN_{macro}_INIT \\\n\s*\{{(.*?)\}}", HEADER, flags=re.S)
            assert body
            words = [word.strip().removeprefix("CPATTN_") for word in body[1].replace("\\\n", "").split(",")]
            values = [ast.literal_eval(numbers.get(word, word)) for word in words[1:]]
            fields = [field for field, _ in NAMES[name]._fields_][1:]
            want = {field: value for field, value in zip(fields, values, strict=True) if value and field != "dtype"}
            self.assertEqual(NAMES[name].defaults, want, name)

    def test_functions(self) -> None:
        flat = re.sub(r"typedef struct \w+ \{.*?\n\} \w+;", "", HEADER, flags=re.S)
        prototypes = dict(re.findall(r"^int32_t cpattn_(\w+)\((.*?)\);", flat, flags=re.S | re.M))
        for name, declared in _header.FUNCTIONS.items():
            self.assertEqual(declared, arguments(prototypes[name]), name)

    def test_constants(self) -> None:
        defined = {name: value.strip() for name, value in re.findall(r"#define CPATTN_(\w+) ([^\n\\]+)\n", HEADER)}
        self.assertEqual(defined["UNLIMITED"], "INT64_MAX")
        for name in ("VERSION_MAJOR", "VERSION_MINOR", "OK", "BUSY", "DEVICE_CPU", "DEVICE_CUDA", "ENGINE_GROUP", "ENGINE_TEXT", "ENGINE_VALUE"):
            self.assertEqual(int(defined[name]), getattr(_header, name), name)
        for prefix, kind in (
            ("", plan.Dtype),
            ("", plan.Kind),
            ("LAYOUT_", plan.Layout),
            ("CIRCULATE_", plan.Circulate),
            ("GATHER_", plan.Gather),
            ("WIRE_", plan.Wire),
            ("", plan.Side),
            ("", plan.Direction),
            ("ISA_", rank.Isa),
        ):
            for member in kind:
                self.assertEqual(int(defined[prefix + member.name]), member, f"{kind} {member}")
        statuses = ("INVALID UNSUPPORTED DISAGREEMENT PEER SCHEDULE DEVICE INVALID_HANDLE BUSY PANIC").split()
        self.assertEqual([int(defined[name]) for name in statuses], list(range(1, len(errors.BY_STATUS) + 1)))


if __name__ == "__main__":
    unittest.main()
