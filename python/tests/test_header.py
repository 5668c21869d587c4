# SPDX-License-Identifier: MIT OR Apache-2.0
"""How the package reads cpattn.h, compared with a C compiler; and the numbers that the package repeats."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from cpattn import _header, errors, options, rank

FOLDER = next(path for path in (_header.HERE, Path(__file__).parents[2] / "include") if (path / "cpattn.h").exists())
STRUCTS = {name: kind for name, kind in _header._TYPES.items() if isinstance(kind, type(ctypes.Structure))}
PROGRAM = """
#include <stdio.h>
#include <cpattn.h>
#define MEMBER(type, member) printf("%zu %zu\\n", offsetof(type, member), sizeof(((type *)0)->member));
static void bytes(const void *of, size_t count) {
  for (size_t i = 0; i < count; i++) printf("%02x", ((const unsigned char *)of)[i]);
  puts("");
}
static volatile long long zero;
"""
VALUES = {getattr(ctypes, f"c_{u}int{bits}"): f"({u}int{bits}_t)zero" for u in ("u", "") for bits in (32, 64)}
VALUES[ctypes.c_double] = "(double)zero"


class Header(unittest.TestCase):
    @unittest.skipUnless(shutil.which("cc"), "no C compiler here")
    def test_a_compiler_reads_the_same(self) -> None:
        """Sizes, offsets and INIT macros; and types of functions that a compiler accepts."""
        program, want, calls = PROGRAM + "int main(void) {\n", [], ""
        for name, kind in STRUCTS.items():
            program += f'printf("%zu\\n", sizeof({name}));\n'
            want.append(str(ctypes.sizeof(kind)))
            for member, of, *_ in kind._fields_:
                program += f"MEMBER({name}, {member})\n"
                want.append(f"{getattr(kind, member).offset} {ctypes.sizeof(of)}")
            if issubclass(kind, _header.Sized):
                program += f"{{ static const {name} v = {name.upper()}_INIT; bytes(&v, sizeof v); }}\n"
                want.append(bytes(kind()).hex())
        for name, parameters in _header.FUNCTIONS.items():
            # A wider integer, one of another sign, and a pointer where there is none do not convert without a warning.
            arguments = ", ".join(VALUES.get(kind, "(void *)0") for _, kind in parameters)
            calls += f"cpattn_{name}({arguments});\n"
        with tempfile.TemporaryDirectory() as folder:
            source, run = Path(folder, "layout.c"), Path(folder, "layout")
            source.write_text(
                program + "return 0; }\n__attribute__((unused)) static void never(void) {\n" + calls + "}\n"
            )
            flags = [
                "-std=c99",
                "-O1",
                "-Wall",
                "-Wextra",
                "-Wconversion",
                "-Wsign-conversion",
                "-Werror",
                f"-I{FOLDER}",
            ]
            subprocess.run(["cc", *flags, source, "-o", run], check=True, timeout=60)
            got = subprocess.run([run], check=True, capture_output=True, text=True, timeout=60).stdout.split("\n")
        self.assertEqual(got[:-1], want)
        self.assertGreater(len(_header.FUNCTIONS), 60)

    def test_runs_have_the_members_of_the_header(self) -> None:
        """What a struct of arguments has is a parameter of the call, optional where it may be NULL, and known as written."""
        text = Path(FOLDER, "cpattn.h").read_text(encoding="utf-8")
        keys = {
            "forward": {"block_table", "page_size", "page_stride", "key_indices"},
            "backward": {"key_indices"},
            "combine": set(),
        }
        for call, of_keys in keys.items():
            body = re.search(rf"typedef struct cpattn_{call}_args {{(.*?)^}}", text, flags=re.S | re.M)
            assert body
            # A comment stands behind its member, or before it on lines of its own.
            found = re.findall(
                r"(?:^  (/\*(?:(?!\*/).)*\*/)\n)?^  const cpattn_tensor \*(\w+); *(/\*(?:(?!\*/).)*\*/)?",
                body[1],
                flags=re.S | re.M,
            )
            comments = {name: (behind or before).removeprefix("/*").strip() for before, name, behind in found}
            members = {member for member, *_ in STRUCTS[f"cpattn_{call}_args"]._fields_}
            function = getattr(rank.Rank, call)
            parameters = {
                name: p for name, p in inspect.signature(function).parameters.items() if p.kind == p.KEYWORD_ONLY
            }
            self.assertEqual(set(parameters), members - {"struct_size", "reserved", "stream", "keys"} | of_keys, call)
            self.assertTrue(set(comments) <= set(parameters) and all(comments.values()), comments)
            for name, comment in comments.items():
                self.assertEqual(parameters[name].default is None, "NULL" in comment, f"{call}: {name}")
            written = re.search(r"all_given\(\{(.*?)\}", inspect.getsource(function))
            assert written
            self.assertEqual(
                set(ast.literal_eval(f"{{{written[1]}}}")),
                {name for name, comment in comments.items() if comment.startswith("written")},
            )

    def test_constants(self) -> None:
        for prefix, kind in (
            ("", options.Dtype),
            ("", options.Kind),
            ("LAYOUT_", options.Layout),
            ("CIRCULATE_", options.Circulate),
            ("GATHER_", options.Gather),
            ("KEY_ROWS_", options.KeyRows),
            ("WIRE_", options.Wire),
            ("", options.Side),
            ("", options.Direction),
            ("", options.AllToAll),
            ("COMBINE_TO_", options.CombineTo),
            ("LSE_", options.LseBase),
            ("ISA_", rank.Isa),
        ):
            for member in kind:
                self.assertEqual(_header.NUMBERS[prefix + member.name], member, f"{kind} {member}")
        statuses = ("INVALID UNSUPPORTED DISAGREEMENT PEER SCHEDULE DEVICE INVALID_HANDLE BUSY PANIC").split()
        self.assertEqual([_header.NUMBERS[name] for name in statuses], list(range(1, len(errors.BY_STATUS) + 1)))


if __name__ == "__main__":
    unittest.main()
