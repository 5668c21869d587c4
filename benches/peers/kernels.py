# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes the folders of kernels that `lease 1` tries (alternatives.py): kernels.py [FOLDER]

Each is compiled by ptx/compile, below target/kernels, where `lease` of the repository looks for them, and copied into FOLDER;
one that the sources have not changed since is not compiled again. It takes the compiler of ptx/requirements.txt and a C++
compiler: here, since the machine with a GPU may have neither.
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys

import alternatives

ROOT = pathlib.Path(__file__).resolve().parents[2]


def digest():
    """Of all that the compiler reads."""
    files = [
        path
        for path in (ROOT / "ptx").rglob("*")
        if path.suffix in (".cu", ".cuh", ".ptx") or path.name in ("compile", "requirements.txt")
    ]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def make(name, switches, of):
    """Compiles one folder: where it is, none if it was not made, and what the compiler said if it found a flaw."""
    made, stamp = ROOT / "target/kernels" / name, ROOT / "target/kernels" / f"{name}.of"
    if made.is_dir() and stamp.exists() and stamp.read_text().splitlines()[:1] == [of]:
        return made, stamp.read_text().partition("\n")[2]
    how = ["--with", ",".join(dict.fromkeys((*switches, *alternatives.APART_SETS)))] if switches else ["--cubin"]
    stamp.unlink(missing_ok=True)
    done = subprocess.run(
        [ROOT / "ptx/compile", *how, made], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not made.is_dir() or not any(path.suffix in (".ptx", ".cubin") for path in made.iterdir()):
        return None, done.stdout
    # A spill costs time and no result: ptx/compile has written the texts.
    said = done.stdout if done.returncode else ""
    stamp.write_text(f"{of}\n{said}")
    return made, said


def main(to=None):
    if to and to.exists() and (not to.is_dir() or any(to.iterdir())):
        sys.exit(f"{to} is not an empty folder")
    of = digest()
    (ROOT / "target/kernels").mkdir(parents=True, exist_ok=True)
    for name, switches in {alternatives.APART: alternatives.APART_SETS, **alternatives.ALL}.items():
        made, said = make(name, switches, of)
        if made is None:
            print(
                f"not taken along: kernels of {name}, which ptx/compile does not make here:\n{said}",
                file=sys.stderr,
                flush=True,
            )
            continue
        if to:
            shutil.copytree(made, to / name)
        print(
            f"{name}: {len(list(made.glob('*.*')))} kernels",
            *([f"with flaws:\n{said}"] if said else []),
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:] and sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    main(*map(pathlib.Path, sys.argv[1:]))
