# SPDX-License-Identifier: MIT OR Apache-2.0
"""The crate's public items, from rustdoc's JSON. For .ci/public and .ci/semver; it judges nothing."""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "cargo +nightly rustdoc -q -p cpattn --lib --features rayon,cuda,nccl --target-dir target/public -Zunstable-options --output-format json"


def document():
    """The JSON, made if it is out of date. Without a nightly toolchain, which alone writes it, the program ends."""
    if subprocess.run(["cargo", "+nightly", "--version"], capture_output=True).returncode:
        print("SKIPPED: all, since there is no nightly toolchain, which writes rustdoc's JSON")
        sys.exit()
    subprocess.run(COMMAND.split(), cwd=ROOT, check=True)
    return json.loads((ROOT / "target/public/doc/cpattn.json").read_text())


def items(document):
    """Public items that are no part of another one: id -> the paths by which a user names it, the shortest first."""
    index, found = document["index"], {}

    def walk(id, path):
        item = index.get(str(id))
        if item is None:
            return
        [(kind, inner)] = item["inner"].items()
        if kind == "use":
            add(inner["id"], path + [inner["name"]])
        elif kind != "impl":
            add(id, path + [item["name"]])

    def add(id, path):
        item = index.get(str(id))
        if item and "module" in item["inner"]:
            for child in item["inner"]["module"]["items"]:
                walk(child, path)
        elif item:
            found.setdefault(id, []).append("::".join(path))

    walk(document["root"], [])
    return {id: sorted(set(paths), key=lambda path: (path.count("::"), path)) for id, paths in found.items()}
