# SPDX-License-Identifier: MIT OR Apache-2.0
"""Has our bench and its peers take turns on one device, case by case, and writes down what came out.

Both run as servers that answer one line at a time, so that only one of them works at any moment, and clocks and heat are
alike for both: each round of a case times ours, then every peer. The medians of the rounds are compared. `run` starts
this; it needs nothing but the standard library.
"""

import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys
import time

import peers
import report

HERE = pathlib.Path(__file__).resolve().parent


class Server:
    """A program that answers every line with one JSON object."""

    def __init__(self, *command, env=None):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, line):
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            return {"failed": f"the program ended with status {self.process.wait()}"}
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def one(line, ours, others, rounds, about):
    """The rows of a case; an answer of ours that is wrong or missing is an error."""
    case = peers.Case(line)
    names = [peer for peer in case.peers if peer == "ours-first" or others]
    answers, times, failed = [], {peer: [] for peer in names}, {}
    for _ in range(rounds):
        answer = ours.ask(line)
        if "failed" in answer:
            raise RuntimeError(f"{case.name}: {answer['failed']}")
        answers.append(answer)
        for peer in names:
            if peer in failed:
                continue
            if peer == "ours-first":
                answer = ours.ask(line.replace("kind=merge", "kind=first"))
                answer = {"peer_s": answer["ours_s"]} if "ours_s" in answer else answer
            else:
                answer = others.ask(f"{peer} {line}")
            if "failed" in answer:
                failed[peer], times[peer] = answer["failed"], []
            else:
                times[peer].append(answer["peer_s"])
    about = about | {"device": answers[0]["device"]}
    return [
        report.merge(case.name, answers, peer, times.get(peer, []), failed.get(peer), about) for peer in names or [None]
    ]


def arguments():
    parser = argparse.ArgumentParser(prog="benches/peers/run gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--ours", required=True, help="our bench (given by `run`)")
    parser.add_argument("--json", required=True, help="where the rows go")
    parser.add_argument("--svg", help="where the plot goes; beside the rows when not given")
    parser.add_argument("--only", default="", help="a regular expression that names of cases contain")
    parser.add_argument("--tiny", action="store_true", help="the tiny cases, for an emulated driver")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no case after so many seconds")
    parser.add_argument("--ours-only", action="store_true", help="do without PyTorch")
    parser.add_argument("--keep", help="a folder that gets a copy under the name of machine and date")
    return parser.parse_args()


def main():
    options = arguments()
    start = time.monotonic()
    about = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")}
    if not options.ours_only:
        probe = subprocess.run([sys.executable, str(HERE / "peers.py"), "--probe"], stdout=subprocess.PIPE, text=True)
        if probe.returncode != 0:
            print("use --ours-only to time our kernels alone", file=sys.stderr)
            return 3
        about["software"] = json.loads(probe.stdout)
    counts = ["1", "2"] if options.tiny else ["5", "30"]
    ours = Server(options.ours, "--serve", "--warmup", counts[0], "--repeats", counts[1])
    others = None if options.ours_only else Server(sys.executable, str(HERE / "peers.py"), *counts)
    lines = (HERE / ("tiny.txt" if options.tiny else "cases.txt")).read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#") and re.search(options.only, line.split()[0])]
    rows, wrong, left = [], [], []
    for i, line in enumerate(lines):
        if time.monotonic() - start > options.limit_s:
            left = [line.split()[0] for line in lines[i:]]
            break
        print(f"[{i + 1}/{len(lines)}] {line.split()[0]}", file=sys.stderr)
        try:
            rows += one(line, ours, others, options.rounds, about)
        except RuntimeError as error:
            wrong.append(str(error))
            if ours.process.poll() is not None:
                break
        # Whatever happens later, what was measured is on disk.
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    ours.close()
    if others:
        others.close()
    device = rows[0]["device"] if rows else "no device"
    pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    picture = report.plot(rows, f"{device}, {about['date']}")
    svg = pathlib.Path(options.svg) if options.svg else pathlib.Path(options.json).with_suffix(".svg")
    svg.write_text(picture)
    if options.keep and rows and not wrong:
        if options.tiny or "emulator" in device:
            print("an emulated or tiny run says nothing about speed: not kept", file=sys.stderr)
        else:
            name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + "-" + about["date"].replace(":", "")
            folder = pathlib.Path(options.keep)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
            (folder / f"{name}.svg").write_text(picture)
    print(report.table(rows))
    if left:
        print(f"\nnot begun, for lack of time: {' '.join(left)}")
    for error in wrong:
        print(f"WRONG: {error}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
