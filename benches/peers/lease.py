# SPDX-License-Identifier: MIT OR Apache-2.0
"""The three stages of half an hour with a GPU; `lease` starts this and says what they are for."""

import argparse
import datetime
import glob
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

import alternatives
import brought
import machine
import peers
import steps

HERE = pathlib.Path(__file__).resolve().parent

TESTS = ("cuda_kernels", "cuda_plans", "cuda_ranks", "cuda_launches", "cuda_ring", "capi_cuda")
"""Test programs of `programs`, those that fail first of all when something is wrong with the device."""

HARDWARE_LIMIT_S, HARDWARE_S = 30, 150
"""Of each test of alternatives.FIRST, and of all: those that did not begin by then wait for what the search finds."""

LEFT_OUT = {
    "capi_cuda the_symbols_are_those_of_the_other_build": "it reads the library with nm and readelf, not with a device",
    "capi_cuda ranks_over_nccl": "it needs libnccl.so.2 on the loader's path, and tells nothing about a device",
    "capi_cuda python_over_nccl": "as ranks_over_nccl",
}
"""Tests that are not run here, and why. The record has them."""

OF_SM_90A = (
    "clusters::",
    "replaced::a_",
    "replaced::an_",
    "bench_cases::cases_that_ask_for_clusters_have_them",
    "family::a_driver_that_refuses_",
    "family::families_follow_device_and_head_dims",
    "family::the_other_forward_is_loaded_when_it_is_needed",
    "hopper_backward::a_driver_that_refuses_the_text_is_not_hidden",
    "hopper_backward::the_family_follows_device_dims_and_tensors",
    "repeated::lists_and_maps_stay",
    "slices::drawn_slices_in_clusters",
)
"""How the names of tests of cuda_kernels begin that fail where CPATTN_CUDA_FAMILY turns the kernels for sm_90a off: that is
what they are about."""

QUICK = {"cuda_plans": ("reproducible_plans_are_refused",), "cuda_launches": ("failures",)}
"""What is run with --tiny of programs whose first two tests take an emulated driver long."""

QUICK_HARDWARE = ("hopper_backward::bf16_64", "hopper::counters_come_back_to_zero")
"""What is run with --tiny of alternatives.FIRST."""

QUICK_CASES = ("tiny-forward-bf16-64-causal", "tiny-merge-bf16-64-causal", "tiny-backward-f16-64-causal")
"""Cases that are profiled with --tiny."""

COUNTED = ("cudnn", "fa3", "flash")
"""Peers that Nsight Compute looks at too."""

PROFILED = (
    "forward-bf16-128-gqa64-causal-8k",
    "forward-bf16-128-gqa64-full-8k",
    "merge-bf16-128-gqa64-causal-8k",
    "backward-bf16-128-gqa64-causal-8k",
    "backward-bf16-128-causal-8k",
    "packed-forward-bf16-128-gqa64-8k",
    "forward-bf16-64-gqa-causal-8k",
    "pack-bf16-8",
)
"""Cases that are profiled, in this order."""


class Stage:
    """What all stages share: the programs, the steps, the interpreter with PyTorch."""

    def __init__(self, options, name):
        self.options, self.bin = options, options.bin
        about = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
            "command": " ".join(sys.argv),
            # In each record: the next stage may be another machine's.
            "machine": {"system": platform.platform(), "device": machine.query(machine.ABOUT)},
        }
        self.steps = steps.Steps(options.out, name, options.limit_s, about)
        self.tiny, self.silence = options.tiny, ""
        self.missing = [] if options.ours_only else brought.missing(peers.PEERS)
        self.steps.keep(missing_peers=self.missing)
        for names, why in self.missing:
            print(f"not compared with {', '.join(names)}: {why}", flush=True)
        # For what is about kernels that no library has.
        apart = options.kernels / alternatives.APART
        if apart.is_dir() and not os.environ.get(alternatives.VARIABLE):
            self.use({alternatives.VARIABLE: str(apart)})
        if options.stage != "1":
            variables, unknown = chosen(options.out / "lease-1.json", options.kernels)
            if unknown:
                print(f"the kernels are the library's own choice: {unknown}", flush=True)
                self.steps.keep(own_choice=unknown)
            self.use(variables)

    def use(self, variables):
        """What stage 1 has chosen, for all steps from here on."""
        if variables:
            print("from here on: " + " ".join(f"{name}={value}" for name, value in variables.items()), flush=True)
            self.steps.keep(variables=variables)
            self.steps.env = variables

    def python(self, *words):
        return [sys.executable, *(str(word) for word in words)]

    def json_of(self, name, command, limit_s, env=None):
        """Runs a step whose last line of output that begins with a brace is JSON, and keeps that under its name."""
        done = self.steps.run(name, command, limit_s, env)
        if done is None:
            return None
        for line in reversed(done["output"].splitlines()):
            if line.startswith("{"):
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                self.steps.keep(**{name.replace(" ", "_"): found})
                return found
        return None

    def has_torch(self, step):
        """Whether there is a PyTorch for a step, which else was not begun."""
        there = importlib.util.find_spec("torch") is not None
        if not there:
            self.steps.record["not_begun"].append(f"{step}: there is no PyTorch in {sys.executable}")
        return there

    def ceilings(self):
        if self.has_torch("ceilings"):
            return self.json_of("ceilings", self.python(HERE / "machine.py", "ceilings"), 60)
        return None

    def alive(self):
        """Whether the device still answers after a step that went wrong."""
        done = self.steps.run("does the device answer", [self.bin / "cuda", "--tiny", "--only", "tiny-pack-"], 30)
        self.silence = "there is no time left" if done is None else done.get("why", "")
        return done is not None and done["ok"]

    def finish(self):
        print(self.steps.summary())
        return 1 if self.steps.failed() or self.steps.record["not_begun"] or self.steps.unwritten else 0


def chosen(path, kernels):
    """The variables that stage 1 has chosen, and why it is not known whether some are needed, if so. A folder of kernels
    that is neither where it was nor in `kernels` ends the stage: it would measure the kernels that failed."""
    try:
        record = json.loads(path.read_text())
    except OSError:
        return {}, f"there is no {path}, which stage 1 leaves. Give all stages one folder, also on another machine"
    if "alternatives" not in record:
        failed = {step["name"].removeprefix("cuda_kernels ") for step in record["steps"] if not step["ok"]}
        failed = [entry.line for entry in alternatives.FIRST if entry.needed and entry.line in failed]
        return {}, f"in {path}, stage 1 ended before it looked for others, and {failed[0]} failed" if failed else ""
    variables = record["alternatives"]["variables"] or {}
    folder = variables.get(alternatives.VARIABLE)
    if folder and not pathlib.Path(folder).is_dir():
        # On another machine, the prepared folder may be elsewhere.
        here = kernels / pathlib.Path(folder).name
        if here.is_dir():
            return variables | {alternatives.VARIABLE: str(here)}, ""
        sys.exit(
            f"{path} says to use the kernels of {folder}, which is not there: bring it back, or move the record away"
        )
    nothing = record["alternatives"]["variables"] is None
    return variables, f"in {path}, {record['alternatives']['why']}" if nothing else ""


def tests_of(program):
    """The names of the tests in a program that cargo built; none when it cannot be asked."""
    try:
        done = subprocess.run([program, "--list", "--format", "terse"], stdout=subprocess.PIPE, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.removesuffix(": test") for line in done.stdout.splitlines() if line.endswith(": test")]


def first(stage):
    """What runs today, the schedules with kernels of others; then what the machine is, what it refutes of ptx/HARDWARE.md, and whether
    everything computes right on it."""
    if not stage.options.ours_only and stage.has_torch("kernels of others"):
        stage.json_of(
            "kernels of others", stage.python(HERE / "others.py", *["--tiny"][: int(stage.tiny)]), 120, package(stage)
        )
    stage.json_of("facts", stage.python(HERE / "machine.py", "facts"), 40)
    listed, others = of_hardware(tests(stage))
    hung = set()
    limit_s = 120 if stage.tiny else HARDWARE_LIMIT_S
    waiting = run_tests(stage, listed.values(), limit_s, hung=hung, within_s=HARDWARE_S)
    if waiting is None:
        names = ["conformance", "jit", *(test.name for test in others)]
        stage.steps.keep(not_begun=stage.steps.record["not_begun"] + names)
        return
    search(stage, listed, hung)
    others = without_sm_90a(stage, waiting + others)
    # The smallest kernels of the page: which instruction is not as was assumed.
    only = ["--only", "mma"] if stage.tiny else []
    stage.steps.run(
        "conformance", [stage.bin / "conformance", "--json", stage.steps.out / "conformance.json", *only], 120
    )
    if not stage.options.ours_only:
        stage.ceilings()
        if stage.has_torch("PyTorch"):
            # The second goes through what is private to PyTorch: if it hangs, the first has been there.
            for communicator, limit_s in ("own", 120), ("torch", 60):
                command = stage.python(HERE / "pytorch.py", "--communicator", communicator)
                stage.steps.run(f"PyTorch, communicator {communicator}", command, limit_s, package(stage))
    stage.json_of("jit", [stage.bin / "cuda", "--jit"], 120, {"CUDA_CACHE_DISABLE": "1"})
    run_tests(stage, others, hung=hung)


def search(stage, listed, hung):
    """Where tests of ptx/HARDWARE.md failed: looks for other kernels with which they pass, and uses them from here on."""
    steps = {step["name"]: step["ok"] for step in stage.steps.record["steps"]}
    failed = [entry for entry, test in listed.items() if steps.get(test.name) is False]
    if not failed:
        return
    for entry in failed:
        print(f"{entry.line} is the first to need items {', '.join(map(str, entry.items))} of HARDWARE.md", flush=True)
    limit_s = 120.0 if stage.tiny else alternatives.LIMIT_S
    of = alternatives.Search(stage, stage.options.kernels, listed, limit_s)
    variables, why = of.choose(failed)
    print(f"alternatives: {why}", flush=True)
    stage.steps.keep(
        alternatives={
            "failed": [entry.line for entry in failed],
            "items": {entry.line: entry.items for entry in failed},
            "tried": of.tried(),
            "variables": variables,
            "why": why,
            "folders": [name for name in alternatives.ALL if (stage.options.kernels / name).is_dir()],
        }
    )
    stage.use(variables)
    if variables and alternatives.VARIABLE in variables:
        hung.clear()


def without_sm_90a(stage, waiting):
    """Tests without those that are about kernels which the search has turned off."""
    if stage.steps.env.get("CPATTN_CUDA_FAMILY") != "sm_80":
        return waiting
    off = [test for test in waiting if test.name.removeprefix("cuda_kernels ").startswith(OF_SM_90A)]
    why = "it is about the kernels for sm_90a, which are turned off since some of them fail"
    stage.steps.keep(left_out=stage.steps.record["left_out"] | {test.name: why for test in off})
    return [test for test in waiting if test not in off]


class Test:
    """A test as a step. Tests of one `group` fail alike: they are of one module of one program."""

    def __init__(self, name, group, command, env=None):
        self.name, self.group, self.command = name, group, command
        self.env = {"CPATTN_REQUIRE_CUDA": "1"} | (env or {})


def tests(stage):
    """All tests that came along, in the order in which they are run."""
    found = []
    stage.steps.keep(left_out=LEFT_OUT)
    # The tests of the C library, which find neither a compiler nor the sources here.
    brought = {"CPATTN_ROOT": str(stage.bin / "capi/repository"), "CPATTN_CUDA_PREFIX": str(stage.bin / "capi")}
    for program in TESTS:
        names = tests_of(stage.bin / program)
        if not names:
            stage.steps.record["not_begun"].append(f"{program}: it does not list its tests")
        names = [name for name in names if f"{program} {name}" not in LEFT_OUT]
        if stage.tiny:
            few = [name for name in names if name in QUICK.get(program, ())] or names[:2]
            names = few + [name for name in names if program == "cuda_kernels" and name in QUICK_HARDWARE]
        for name in names:
            group = (program, name.rpartition("::")[0])
            found.append(Test(f"{program} {name}", group, [stage.bin / program, "--exact", name], brought))
    for program in sorted(stage.bin.glob("c_*")):
        found.append(Test(f"C {program.name}", (program.name,), [program]))
    python = stage.bin / "capi/repository/examples/python/cuda_ranks.py"
    if python.exists():
        found.append(Test("Python cuda_ranks.py", (python.name,), stage.python(python), package(stage)))
    return found


def package(stage):
    """The variables with which Python finds the package and its library."""
    path = os.pathsep.join(filter(None, (str(stage.bin / "capi/repository/python"), os.environ.get("PYTHONPATH"))))
    return {"CPATTN_LIBRARY": str(stage.bin / "capi/lib/libcpattn.so"), "PYTHONPATH": path}


def of_hardware(found):
    """The tests of alternatives.FIRST among those that came along, by their entry there, and the others. What is listed
    with variables is run without, too."""
    named, listed = {test.name: test for test in found}, {}
    for entry in alternatives.FIRST:
        *variables, name = entry.line.split()
        if test := named.get(f"cuda_kernels {name}"):
            env = test.env | dict(variable.split("=", 1) for variable in variables)
            listed[entry] = Test(f"cuda_kernels {entry.line}", test.group, test.command, env)
    names = {test.name for test in listed.values()}
    return listed, [test for test in found if test.name not in names]


def run_tests(stage, waiting, limit_s=90, late_s=15, hung=None, within_s=float("inf")):
    """One after the other. A test that hangs takes the rest of its group to the end of the queue, where each has
    `late_s`: a kernel that hangs does so in many of them, and what has nothing to do with it is not to pay for that.
    Such groups are added to `hung`. Returns what did not begin within `within_s`, and None if the device answers no
    more."""
    hung, late, lost, until = set() if hung is None else hung, [], 0, time.monotonic() + within_s
    waiting = list(waiting)
    while (waiting or late) and time.monotonic() < until:
        last = not waiting
        test = (late if last else waiting).pop(0)
        if not last and test.group in hung:
            late.append(test)
            continue
        done = stage.steps.run(test.name, test.command, late_s if last else limit_s, test.env)
        if not done or done["ok"]:
            continue
        if done.get("timed_out"):
            hung.add(test.group)
        if not stage.alive():
            lost += 1
            if lost == 2:
                stage.steps.record["not_begun"] += [test.name for test in waiting + late]
                stage.steps.keep(given_up=f"the device does not answer: {stage.silence}")
                return None
    return waiting + late


def second(stage):
    """The benchmark. It restarts its own servers; what it has measured is on disk after each case."""
    # Measured here too: clocks and heat of another time, or another machine, are not those of these rows.
    ceilings = None if stage.options.ours_only else stage.ceilings()
    rows = stage.steps.out / "rows.json"
    more = [word for word, wanted in (("--tiny", stage.tiny), ("--ours-only", stage.options.ours_only)) if wanted]
    more += ["--ceilings", json.dumps(ceilings)] if ceilings else []
    limit_s = max(stage.steps.left() - 25, 5)
    stage.steps.run(
        "benchmark",
        stage.python(
            HERE / "measure.py",
            "--ours",
            stage.bin / "cuda",
            "--json",
            rows,
            "--limit-s",
            int(limit_s - 20),
            "--case-limit-s",
            60,
            *more,
        ),
        limit_s,
    )
    if rows.exists():
        stage.steps.keep(rows=len(json.loads(rows.read_text())))


def lines_of(name):
    return {
        line.split()[0]: line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")
    }


PLACES = (
    "/usr/local/cuda*/bin",
    "/opt/nvidia/nsight-compute/*",
    "/usr/local/cuda*/compute-sanitizer",
    "/usr/local/NVIDIA-Nsight-Compute*",
)
"""Where NVIDIA's tools are when they are not on the path."""


def tool(stage, name, what):
    """The program `name`: as it was given, else where it usually is. None if it is not there, which is said: its steps are
    then no failures, but were not begun."""
    found = shutil.which(name) or next(
        (str(path) for place in PLACES for path in sorted(glob.glob(f"{place}/{name}"), reverse=True)), None
    )
    if found is None:
        print(
            f"no {what}: there is no {name} on the path nor in {', '.join(PLACES)}; --ncu and --sanitizer name one",
            flush=True,
        )
        stage.steps.record["not_begun"].append(f"{what}: there is no {name}")
    return found


def third(stage):
    """Counters of our kernels and the peers', then the sanitizer. Reports of Nsight Compute are large: their tables are
    kept as text, the reports packed as far as there is room."""
    ncu = tool(stage, stage.options.ncu, "counters")
    sanitizer = tool(stage, stage.options.sanitizer, "compute-sanitizer")
    cases = (
        [(name, line) for name, line in lines_of("tiny.txt").items() if name in QUICK_CASES]
        if stage.tiny
        else [(name, line) for name, line in lines_of("cases.txt").items() if name in PROFILED]
    )
    cases.sort(key=lambda case: PROFILED.index(case[0]) if case[0] in PROFILED else 0)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        ours = [stage.bin / "cuda", "--serve", "--warmup", "0", "--repeats", "1"]
        for name, line in cases if ncu else ():
            counters(stage, ncu, folder, name, "ours", ours, line)
        # The clustered form shows by its traffic from L2, not by its time alone.
        for name, line in cases if ncu else ():
            if "ours-clusters" in peers.Case(line).peers:
                counters(stage, ncu, folder, name, "ours-clusters", ours, line, {"CPATTN_CUDA_CLUSTER": "1"})
        for name, line in cases[:2] if ncu else ():
            lacking = {peer for names, _ in stage.missing for peer in names}
            here = [] if stage.options.ours_only else [peer for peer in peers.Case(line).peers if peer in COUNTED]
            for peer in [peer for peer in here if peer not in lacking]:
                command = stage.python(HERE / "peers.py", 1, 1)
                counters(stage, ncu, folder, name, peer, command, f"{peer} {line}")
        for check in ("memcheck", "racecheck", "synccheck", "initcheck") if sanitizer else ():
            command = [sanitizer, "--tool", check, "--error-exitcode", 9, stage.bin / "cuda", "--tiny"]
            stage.steps.run(f"compute-sanitizer {check}", command, 90)
            pack(folder, stage.steps.out / "profile.tar.xz")
        pack(folder, stage.steps.out / "profile.tar.xz")


def kernels_of(case):
    """Which of our kernels are looked at: a backward's case launches a forward for each of its sets before."""
    return "cpattn_(delta|transform|.*backward)" if case.kind == "backward" else "cpattn"


def counters(stage, ncu, folder, name, whose, command, line, env=None):
    """One case of one library under Nsight Compute."""
    report = folder / f"{name}.{whose}"
    kernels = kernels_of(peers.Case(line)) if whose.startswith("ours") else "fmha|flash|attention|cudnn|device_kernel"
    done = stage.steps.run(
        f"counters {name} {whose}",
        [
            ncu,
            "--clock-control",
            "none",
            "--set",
            "full",
            "--import-source",
            "no",
            "--kernel-name",
            f"regex:{kernels}",
            "--launch-count",
            "4",
            "--force-overwrite",
            "--export",
            report,
            *command,
        ],
        90,
        env,
        line + "\n",
    )
    if done and done["ok"]:
        table = stage.steps.run(
            f"table {name} {whose}", [ncu, "--import", f"{report}.ncu-rep", "--page", "details", "--csv"], 30
        )
        if table and table["ok"]:
            report.with_name(report.name + ".csv").write_text(table["output"])


def pack(folder, path, room=15 << 20):
    """Tables first, then reports, while they fit."""
    beside = path.with_name(path.name + ".new")
    files = sorted(folder.iterdir(), key=lambda f: (f.suffix != ".csv", f.stat().st_size))
    total = 0
    with tarfile.open(beside, "w:xz") as archive:
        for file in files:
            total += file.stat().st_size // (8 if file.suffix == ".csv" else 1)
            if total < room:
                archive.add(file, file.name)
    beside.replace(path)


def main():
    parser = argparse.ArgumentParser(prog="benches/peers/lease", description=__doc__)
    parser.add_argument("stage", choices=["1", "2", "3"])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--kernels", type=pathlib.Path, required=True, help="the folders of alternatives.py")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--tiny", action="store_true", help="little of everything, for an emulated driver")
    parser.add_argument("--ours-only", action="store_true", help="do without PyTorch")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    options = parser.parse_args()
    options.bin, options.kernels = options.bin.resolve(), options.kernels.resolve()
    steps.on_signals()
    stage = Stage(options, f"lease-{options.stage}")
    try:
        {"1": first, "2": second, "3": third}[options.stage](stage)
    except steps.Terminated as ended:
        stage.steps.keep(given_up=f"ended by {ended}")
        stage.finish()
        return 143
    return stage.finish()


if __name__ == "__main__":
    sys.exit(main())
