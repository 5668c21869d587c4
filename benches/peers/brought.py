# SPDX-License-Identifier: MIT OR Apache-2.0
"""The files that some peers need and PyTorch does not bring: where they are, how to get them, and which peers lack theirs.

A file is taken from where its variable says, else from `brought` beside this one, where `prepare` puts it, else from where
Python has its packages. `brought.py DIR` copies what is there into DIR, also out of a wheel that a variable names.
"""

import importlib.util
import os
import pathlib
import shutil
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent

FILES = {
    "CPATTN_FA3": (
        "flash_attn_3/_C.so",
        "FlashAttention-3's library: `pip download --no-deps xformers==0.0.34`, then CPATTN_FA3=xformers-0.0.34-*.whl",
    ),
    "CPATTN_FA3_CUDART": (
        "nvidia/cuda_runtime/lib/libcudart.so.12",
        "the runtime of FlashAttention-3: `pip download --no-deps nvidia-cuda-runtime-cu12`, then CPATTN_FA3_CUDART=*.whl",
    ),
    "CPATTN_TRITON_TUTORIAL": (
        "06-fused-attention.py",
        "Triton's tutorial: python/tutorials/06-fused-attention.py of its repository, then CPATTN_TRITON_TUTORIAL=FILE",
    ),
}
"""What PyTorch does not bring: where it is in a wheel and among installed packages, and how to get it."""


def located(variable):
    """Where a file of FILES is, or None: as named, brought along, or installed."""
    named = os.environ.get(variable)
    if named:
        return pathlib.Path(named)
    inner = pathlib.PurePosixPath(FILES[variable][0])
    places = [HERE / "brought" / inner.name, *(pathlib.Path(folder) / inner for folder in sys.path)]
    return next((place for place in places if place.is_file()), None)


def bring(folder):
    """Puts the files that are here into a folder, out of a wheel where one is named. Says what came, and what did not."""
    for variable, (inner, how) in FILES.items():
        source = located(variable)
        target = pathlib.Path(folder) / pathlib.PurePosixPath(inner).name
        if source is None or not source.is_file():
            print(
                f"not taken along: {source or variable} is not there. {how} benches/peers/prepare DIR", file=sys.stderr
            )
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                if inner not in wheel.namelist():
                    print(f"not taken along: {source} has no {inner}. {how} benches/peers/prepare DIR", file=sys.stderr)
                    continue
                with wheel.open(inner) as packed, target.open("wb") as out:
                    shutil.copyfileobj(packed, out)
        else:
            shutil.copyfile(source, target)
        print(f"taken along: {target.name} of {source}", file=sys.stderr)


def missing(every):
    """The peers of `every` that cannot be timed with this interpreter: pairs of their names and a sentence."""
    if importlib.util.find_spec("torch") is None:
        return [
            (list(every), f"there is no PyTorch in {sys.executable}; PYTHON names an interpreter with 2.11 or later")
        ]
    found, fa3 = [], ["fa3", "fa3-varlen"]
    for variable, names in (("CPATTN_FA3", fa3), ("CPATTN_FA3_CUDART", fa3), ("CPATTN_TRITON_TUTORIAL", ["triton"])):
        path = located(variable)
        if path is None or not path.is_file():
            found.append(
                (names, f"{path or variable} is not there. {FILES[variable][1]}, for `prepare` or this command")
            )
        elif path.suffix == ".whl":
            found.append((names, f"{variable} names the wheel {path}: `prepare` unpacks it, this command does not"))
    if importlib.util.find_spec("triton") is None:
        found.append(
            (
                ["triton"],
                f"there is no triton in {sys.executable}: PyTorch's wheel asks for it, or `pip install triton`",
            )
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("brought.py DIR")
    bring(sys.argv[1])
