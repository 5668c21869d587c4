# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the cases of cpu_cases.txt, measures the machine's ceilings between them, and writes down what came out.

Cases run in a server (cpu.py) that holds both sides; those that are held to an instruction set in another one, whose
environment says so to both. `run` starts this; it needs nothing but the standard library.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import statistics
import sys

import cpu
import report
from measure import Server

HERE = pathlib.Path(__file__).resolve().parent
# What holds both sides to less than the machine has. oneDNN's variable reaches PyTorch's backward alone: the products of
# its forward are MKL's, which go on using AMX unless MKL's variable says otherwise. Where there is AMX, ours are held to what
# is the quickest of the rest there: multiply-adds of f32, not bf16 dot products (benches/NOTES.md). Without AMX they choose
# themselves.
ONEDNN = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CPATTN_CPU_ISA": "avx512"}
HELD = {"onednn_avx512_bf16": ONEDNN, "avx512_bf16": ONEDNN | {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E2"}}
# Which ceilings a type may use; the highest that the machine has counts. Sums are f32 in all of them.
CEILINGS = {
    "f32": ("fma_f32",),
    "f16": ("fma_f32", "amx_f16"),
    "bf16": ("fma_f32", "bf16_dot", "amx_bf16"),
}
# As (rounds at least, seconds of rounds, seconds after which a case counts as hung). PyTorch's backward in f16 takes 13 s a call
# where the CPU has no f16 products.
EFFORT, QUICK = (5, 3.0, 600.0), (2, 0.5, 120.0)


def ceiling(case, ceilings):
    names = [name for name in CEILINGS[case.dtype] if ceilings.get(name) and not (case.isa and name.startswith("amx"))]
    return max(names, key=ceilings.get)


def higher(best, now):
    """The best of each ceiling so far; a probe that this machine lacks is null."""
    return {name: max(filter(None, (best.get(name), value)), default=None) for name, value in now.items()}


def rows_of(case, answer, threads):
    """The rows of a case, forward and backward; shares are added when the last ceiling is known."""
    out = []
    for direction, lists in answer["times"].items():
        ours_s = statistics.median(lists["ours"])
        # Of several forms of one peer the fastest counts.
        peer = min((name for name in lists if name != "ours"), key=lambda name: statistics.median(lists[name]))
        peer_s = statistics.median(lists[peer])
        out.append(
            {
                "case": case.name,
                "direction": direction,
                "dtype": case.dtype,
                "ours_s": ours_s,
                "peer": peer,
                "peer_s": peer_s,
                "ratio": peer_s / ours_s,
                "gflops": case.flops(direction) / ours_s / 1e9,
                "tokens": case.tokens,
                "isa": case.isa,
                "ours_rounds_s": lists["ours"],
                "peer_rounds_s": lists[peer],
                "difference": max(answer["difference"].values()),
                "bound": answer["bound"],
            }
        )
    return out


def shares(row, case, ceilings):
    name = ceiling(case, ceilings)
    most = ceilings[name]
    return row | {
        "ceiling": name,
        "ceiling_share": row["gflops"] * 1e9 / most,
        "peer_ceiling_share": row["gflops"] * 1e9 * row["ours_s"] / row["peer_s"] / most,
    }


def table(rows):
    head = ("case", "direction", "ours ms", "GFLOP/s", "share", "of", "peer", "peer ms", "share", "ratio")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row["case"],
                row["direction"],
                report.seconds(row["ours_s"]),
                report.number(row["gflops"], 0),
                report.number(row["ceiling_share"], 3),
                row["ceiling"],
                row["peer"],
                report.seconds(row["peer_s"]),
                report.number(row["peer_ceiling_share"], 3),
                report.number(row["ratio"], 2),
            )
        )
    return report.columns(lines, left=(0, 1, 5, 6))


def machine():
    """The CPU's own name and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        name = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def has(flag, cpuinfo, otherwise):
    """Whether this machine's CPU has the flag; `otherwise` where the system does not say."""
    try:
        lines = pathlib.Path(cpuinfo).read_text().splitlines()
    except OSError:
        return otherwise
    return any(flag in line.split() for line in lines if line.startswith("flags"))


def can_be_held(case, cpuinfo="/proc/cpuinfo"):
    """Whether this machine has the instruction set that a case holds both sides to (AVX-512 for all of them)."""
    return not case.isa or has("avx512f", cpuinfo, True)


def held(isa, cpuinfo="/proc/cpuinfo"):
    """The environment of the process whose cases have this `isa`."""
    names = HELD.get(isa, {})
    if has("amx_tile", cpuinfo, True):
        return names
    return {name: value for name, value in names.items() if name != "CPATTN_CPU_ISA"}


def arguments():
    parser = argparse.ArgumentParser(prog="benches/peers/run cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--ceilings", required=True, help="the program of benches/ceilings (given by `run`)")
    parser.add_argument("--json", required=True, help="where the results go")
    parser.add_argument("--svg", help="where the plot goes; beside the results when not given")
    parser.add_argument("--only", default="", help="a regular expression that names of cases contain")
    parser.add_argument("--quick", action="store_true", help="shorter documents and fewer rounds, under two minutes")
    parser.add_argument("--threads", type=int, default=1, help="of both sides")
    parser.add_argument("--keep", help="a folder that gets a copy under the name of machine and date")
    return parser.parse_args()


def main():
    options = arguments()
    about = {
        "machine": machine(),
        "system": f"{platform.system()} {platform.release()}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "command": shlex.join(
            [
                "benches/peers/run",
                "cpu",
                "--json",
                pathlib.Path(options.json).name,
                *(["--quick"] if options.quick else []),
                *(["--only", options.only] if options.only else []),
                "--threads",
                str(options.threads),
            ]
        ),
        "threads": options.threads,
        "quick": options.quick,
    }
    lines = [line for line in (HERE / "cpu_cases.txt").read_text().splitlines() if line and not line.startswith("#")]
    cases = [cpu.Case(line, options.quick) for line in lines if re.search(options.only, line.split()[0])]
    if not cases:
        print(f"--only {options.only} is in no name of cpu_cases.txt", file=sys.stderr)
        return 2
    about["left_out"] = [case.name for case in cases if not can_be_held(case)]
    cases = [case for case in cases if case.name not in about["left_out"]]
    if about["left_out"]:
        print(f"left out, as this machine has no AVX-512: {', '.join(about['left_out'])}", file=sys.stderr)
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    # One NUMA node, one thread pool: what the environment says counts for both sides, and what it says about
    # instruction sets for neither.
    free = {name: value for name, value in os.environ.items() if name not in {n for h in HELD.values() for n in h}}
    rounds, seconds, limit_s = QUICK if options.quick else EFFORT
    servers = {
        isa: Server(sys.executable, str(HERE / "cpu.py"), env=free | threads | held(isa), limit_s=limit_s)
        for isa in {case.isa for case in cases}
    }
    probe = Server(options.ceilings, "--serve")
    [*_, software] = [server.ask(json.dumps({"about": True})) for server in servers.values()]
    if "failed" in software:
        print(f"neither side can be loaded: {software['failed']}", file=sys.stderr)
        return 3
    ceilings, rows, wrong = {}, [], []
    document = lambda: (
        about
        | {
            "software": software,
            "ceilings": ceilings,
            "rows": [shares(row, next(case for case in cases if case.name == row["case"]), ceilings) for row in rows],
        }
    )
    for i, case in enumerate(cases):
        print(f"[{i + 1}/{len(cases)}] {case.name}", file=sys.stderr)
        ceilings = higher(ceilings, probe.ask(str(options.threads)))
        question = {"case": case.line, "threads": options.threads, "rounds": rounds, "seconds": seconds}
        answer = servers[case.isa].ask(json.dumps(question))
        ceilings = higher(ceilings, probe.ask(str(options.threads)))
        if "failed" in answer:
            wrong.append(f"{case.name}: {answer['failed']}")
            continue
        rows += rows_of(case, answer, options.threads)
        # Whatever happens later, what was measured is on disk.
        pathlib.Path(options.json).write_text(json.dumps(document(), indent=1) + "\n")
    for server in (*servers.values(), probe):
        server.close()
    whole = document()
    text = json.dumps(whole, indent=1) + "\n"
    pathlib.Path(options.json).write_text(text)
    bars = [row | {"case": f"{row['case']} {row['direction']}"} for row in whole["rows"]]
    picture = report.plot(bars, f"{about['machine']}, {options.threads} threads, {about['date']}")
    (pathlib.Path(options.svg) if options.svg else pathlib.Path(options.json).with_suffix(".svg")).write_text(picture)
    print(table(whole["rows"]))
    print(
        "\nceilings: "
        + ", ".join(
            f"{name} {value / 1e9:.0f} {'GB/s' if name == 'copy' else 'GFLOP/s'}"
            for name, value in ceilings.items()
            if value
        )
    )
    for error in wrong:
        print(f"WRONG: {error}", file=sys.stderr)
    if options.keep and not wrong:
        name = (
            re.sub(r"[^a-z0-9]+", "-", f"cpu {about['machine']}".lower()).strip("-")
            + "-"
            + about["date"].replace(":", "")
        )
        folder = pathlib.Path(options.keep)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(text)
        (folder / f"{name}.svg").write_text(picture)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
