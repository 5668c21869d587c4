# SPDX-License-Identifier: MIT OR Apache-2.0
"""Builds the shared library with `capi/build` and packs it with its header, so that one command installs everything.

The crate is the folder above this one, or the folder `crate` of a source distribution. The environment variable CPATTN_FEATURES has the
features (default: rayon,cuda,nccl); `planner` is a wheel without our kernels, whose version ends with +planner. CUDA and NCCL need no toolkit, and a driver or library only when a device is used.
CPATTN_TARGET, as in aarch64-unknown-linux-gnu.2.28, is the machine and the oldest glibc to build for (`python/wheels`).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
CRATE = HERE / "crate" if (HERE / "crate").exists() else HERE.parent
TARGET = os.environ.get("CPATTN_TARGET", "")
FEATURES = [name for name in os.environ.get("CPATTN_FEATURES", "rayon,cuda,nccl").split(",") if name]
PLANNER = "planner" in FEATURES
NO_CARGO = (
    "cpattn is built from Rust, and there is no cargo on the PATH: install Rust 1.89 or later (https://rustup.rs), or install "
    "a wheel that was built elsewhere for this platform (pip wheel ./python)"
)


class BuildLibrary(Command):
    """Puts the library into the wheel, or for an editable installation into target/capi of the checkout."""

    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        if sys.platform != "linux":
            raise SystemExit(f"sys.platform is {sys.platform}, linux is needed: cpattn runs on Linux only")
        if not shutil.which("cargo"):
            raise SystemExit(NO_CARGO)
        prefix = CRATE / ("target/capi" if self.editable_mode else "target/python")
        features = ",".join(name for name in FEATURES if name != "planner")
        chosen = ["--planner"] * PLANNER + ["--features", features] * bool(features)
        target = ["--target", TARGET] if TARGET else []
        subprocess.run([CRATE / "capi/build", "--shared", *chosen, *target, prefix], check=True)
        for source, target in zip(("lib/libcpattn.so", "include/cpattn.h"), self.get_outputs()):
            shutil.copy(prefix / source, target)

    def get_outputs(self):
        names = () if self.editable_mode else ("libcpattn.so", "cpattn.h")
        return [str(Path(self.build_lib, "cpattn", name)) for name in names]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []


class Wheel(bdist_wheel):
    """A wheel for any Python 3 on one platform, since the library is called through ctypes."""

    def get_tag(self):
        if not TARGET:
            return "py3", "none", super().get_tag()[2]
        parts = re.fullmatch(r"(x86_64|aarch64)-unknown-linux-gnu\.(\d+)\.(\d+)", TARGET)
        if parts is None:
            raise SystemExit(
                f"CPATTN_TARGET is {TARGET}, x86_64 or aarch64 with the oldest glibc is needed, as in aarch64-unknown-linux-gnu.2.28"
            )
        machine, major, minor = parts.groups()
        return "py3", "none", f"manylinux_{major}_{minor}_{machine}"


class Source(sdist):
    """Adds the files of the crate and of the C library's crate, as in a registry of crates."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        target = Path(base_dir, "crate")
        for package, folder in ("cpattn", "."), ("cpattn-capi", "capi"):
            command = ["cargo", "package", "--list", "--allow-dirty", "--package", package]
            listed = subprocess.run(command, cwd=CRATE, check=True, stdout=subprocess.PIPE, text=True).stdout
            for name in map(Path(folder).joinpath, listed.splitlines()):
                # Files that a registry would add are not in the checkout.
                if (CRATE / name).is_file():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(CRATE / name, target / name)
        # The source distribution has no other members.
        manifest = target / "Cargo.toml"
        text, changed = re.subn(r"(?m)^((?:default-)?members) = .*$", r'\1 = [".", "capi"]', manifest.read_text())
        assert changed == 2, (
            "the workspace has a list of members, and one of those that a command at its root chooses from"
        )
        manifest.write_text(text)


class Platform(Distribution):
    def has_ext_modules(self):
        return True

    def parse_config_files(self, *arguments, **named):
        super().parse_config_files(*arguments, **named)
        # One project, so that what needs one version of cpattn takes either wheel, and only one of them is installed.
        if PLANNER and "+" not in self.metadata.version:
            self.metadata.version += "+planner"


# Files of an earlier build would be packed too.
shutil.rmtree(HERE / "build", ignore_errors=True)
build.sub_commands.append(("build_library", None))
setup(distclass=Platform, cmdclass={"build_library": BuildLibrary, "bdist_wheel": Wheel, "sdist": Source})
