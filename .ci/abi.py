# SPDX-License-Identifier: MIT OR Apache-2.0
"""What .ci/abi reads from the header, and which changes of it break programs.

A program of the old header breaks if a function is gone or has another signature, if a constant has another value, or if a
struct changes. One change of a struct does not break it: members added behind the last of a struct that begins with
`struct_size`. A struct in an array has no such word, so it may not grow either, unless the header gives the array the size
of its elements (ELEMENTS).

    abi.py stubs HEADER            a C source with all functions and structs
    abi.py breaks OLD NEW DIR      fails if NEW breaks programs of OLD and has the same soname
    abi.py test HEADER DIR         tries `breaks` on changes of HEADER
"""

import pathlib
import re
import subprocess
import sys

# Structs in arrays whose element size the program gives: they may grow at the end.
ELEMENTS = {"cpattn_q_range"}


def plain(path):
    """The header without comments."""
    return re.sub(r"/\*.*?\*/", "", pathlib.Path(path).read_text(), flags=re.S)


def structs(text):
    """Of each struct: its members, as (name, declaration)."""
    found = {}
    for name, body in re.findall(r"typedef struct (cpattn_\w+) \{(.*?)\n\} \1;", text, flags=re.S):
        members = []
        for declaration in (" ".join(d.split()) for d in body.split(";")):
            if declaration:
                pointer = re.search(r"\(\*(\w+)\)\(", declaration)
                named = pointer or re.search(r"(\w+)(?:\[\w+\])*$", declaration)
                members.append((named.group(1), declaration))
        found[name] = members
    return found


def functions(text):
    """The signature of each function."""
    flat = re.sub(r"^#.*?(?<!\\)$", "", text, flags=re.S | re.M)
    flat = re.sub(r"typedef struct \w+ \{.*?\n\} \w+;", "", flat, flags=re.S)
    prototypes = re.findall(r"^((?:const )?\w+ \*?)(cpattn_\w+)\((.*?)\);", flat, flags=re.S | re.M)
    return {name: (result, " ".join(arguments.split())) for result, name, arguments in prototypes}


def constants(text):
    """The constants that are plain values, without those of the version."""
    values = dict(re.findall(r"^#define (CPATTN_\w+) +(\S.*?) *$", text, flags=re.M))
    return {name: value for name, value in values.items() if not name.startswith("CPATTN_VERSION") and "{" not in value and "\\" not in value}


def soname(text):
    """The part of the version that is in the soname: major, and minor while the major is 0."""
    major, minor = (re.search(rf"#define CPATTN_VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR"))
    return major if major != "0" else f"{major}.{minor}"


def layouts(path, directory):
    """Of each struct: its size, and the offset and size of each member, as the compiler lays them out."""
    lines = ['#include "cpattn.h"', "#include <stdio.h>", "int main(void) {"]
    for name, members in structs(plain(path)).items():
        lines.append(f'  printf("{name} . %zu 0\\n", sizeof({name}));')
        lines += [f'  printf("{name} {m} %zu %zu\\n", offsetof({name}, {m}), sizeof((({name} *)0)->{m}));' for m, _ in members]
    source, program = directory / "layouts.c", directory / "layouts"
    source.write_text("\n".join([*lines, "  return 0;", "}", ""]))
    include = directory / "layouts.include"
    include.mkdir(exist_ok=True)
    (include / "cpattn.h").write_text(pathlib.Path(path).read_text())
    subprocess.run(["cc", "-std=c99", f"-I{include}", str(source), "-o", str(program)], check=True)
    found = {}
    for line in subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines():
        name, member, at, size = line.split()
        found.setdefault(name, {})[member] = (int(at), int(size))
    return found


def breaking(old, new, directory):
    """The changes from one header to the other that break programs, in words."""
    before, after = plain(old), plain(new)
    said = []
    for what, of in (("function", functions), ("constant", constants)):
        now = of(after)
        for name, value in of(before).items():
            if name not in now:
                said.append(f"{what} {name} is gone")
            elif now[name] != value:
                said.append(f"{what} {name} was {value}, is {now[name]}")
    types = {name: dict(members) for name, members in structs(after).items()}
    laid = layouts(new, directory)
    for name, members in layouts(old, directory).items():
        declared = dict(structs(before)[name])
        now = laid.get(name)
        if now is None:
            said.append(f"struct {name} is gone")
            continue
        for member, place in members.items():
            if member != "." and (now.get(member) != place or types[name][member] != declared[member]):
                said.append(f"{name}.{member} was at {place[0]} of {place[1]} bytes ({declared[member]}), is at {now.get(member)}")
        size, grown = members["."][0], now["."][0]
        added = [m for m in now if m not in members]
        may_grow = "struct_size" in members or name in ELEMENTS
        if (grown != size or added) and not may_grow:
            said.append(f"{name} was {size} bytes, is {grown}, and has neither struct_size nor an element size")
        said += [f"{name}.{m} is in what was padding of {name}" for m in added if may_grow and now[m][0] < size]
    return said


def refuse(old, new, directory):
    """Fails if `new` breaks programs of `old` under the same soname."""
    said = breaking(old, new, directory)
    same = soname(plain(old)) == soname(plain(new))
    if said and same:
        listed = "\n".join(f"  {text}" for text in said)
        sys.exit(
            f"these changes break programs of the committed header:\n{listed}\n"
            f"The soname is still that of version {soname(plain(old))}: raise the version in Cargo.toml and in the header "
            "(the minor version while the major is 0), or keep the layout: add members behind the last of a struct with struct_size."
        )


def stubs(path):
    text = plain(path)
    handles = re.findall(r"typedef struct (cpattn_\w+) \1;", text)
    print('#include "cpattn.h"')
    for h in handles:
        print(f"struct {h} {{ char opaque; }};")
    flat = re.sub(r"^#.*?(?<!\\)$", "", text, flags=re.S | re.M)
    flat = re.sub(r"typedef struct \w+ \{.*?\n\} \w+;", "", flat, flags=re.S)
    for result, name, arguments in re.findall(r"^((?:const )?\w+ \*?)(cpattn_\w+)\((.*?)\);", flat, flags=re.S | re.M):
        print(f"{result}{name}({arguments}) {{ return 0; }}")
    for s in structs(text):
        print(f"{s} *keep_{s}(void) {{ return 0; }}")


def test(path, directory):
    """A change that breaks programs is found, and one that does not is accepted."""
    text, changed = pathlib.Path(path).read_text(), directory / "changed.h"

    def after(old, new, breaks, version=None):
        assert old in text, f"the header has no {old!r}"
        result = text.replace(old, new, 1)
        if version:
            result = result.replace("#define CPATTN_VERSION_MINOR", "#define CPATTN_VERSION_MINOR 99\n#define EARLIER", 1)
        changed.write_text(result)
        said = breaking(path, changed, directory)
        assert bool(said) == breaks, f"{old!r} to {new!r}: {said}"
        try:
            refuse(path, changed, directory)
            assert not breaks or version, f"{old!r} to {new!r} was accepted: {said}"
        except SystemExit:
            assert breaks and not version, f"{old!r} to {new!r} was refused: {said}"

    for version in (None, 99):
        # A struct in an array grows, a function goes or changes, members change places, a constant changes.
        after("} cpattn_message;", "  uint64_t more;\n} cpattn_message;", True, version)
        after("} cpattn_link;", "  uint64_t more;\n} cpattn_link;", True, version)
        after("int32_t cpattn_scratch_set_isa(cpattn_scratch *scratch, int32_t isa);", "", True, version)
        after("cpattn_scratch_set_isa(cpattn_scratch *scratch, int32_t isa)", "cpattn_scratch_set_isa(cpattn_scratch *scratch, int64_t isa)", True, version)
        after("  uint32_t keys_begin;\n  uint32_t keys_end;\n", "  uint32_t keys_end;\n  uint32_t keys_begin;\n", True, version)
        after("#define CPATTN_MERGE 1", "#define CPATTN_MERGE 7", True, version)
        # Padding is used.
        after("  uint8_t reserved[7];\n} cpattn_q_range;", "  uint8_t a;\n  uint8_t reserved[6];\n} cpattn_q_range;", True, version)
    # A struct with its size, or in an array with an element size, grows; a function is new.
    after("} cpattn_plan_info;", "  uint64_t more;\n} cpattn_plan_info;", False)
    after("} cpattn_q_range;", "  uint64_t more;\n} cpattn_q_range;", False)
    after("uint32_t cpattn_version(void);", "uint32_t cpattn_version(void);\nint32_t cpattn_new(int32_t x);", False)


if __name__ == "__main__":
    command, header, *rest = sys.argv[1:]
    if command == "stubs":
        stubs(header)
    elif command == "breaks":
        refuse(header, rest[0], pathlib.Path(rest[1]))
    elif command == "test":
        test(header, pathlib.Path(rest[0]))
