# SPDX-License-Identifier: MIT OR Apache-2.0
"""Has our bench and its peers take turns on one device, case by case, and writes down what came out.

Both run as servers that answer one line at a time, so that only one of them works at any moment, and clocks and heat are
alike for both: each round of a case times ours, then every peer. The medians of the rounds are compared. `run` starts
this; it needs nothing but the standard library.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import select
import subprocess
import sys
import time

import machine
import peers
import report
import steps

HERE = pathlib.Path(__file__).resolve().parent


class Server:
    """A program that answers every line with one JSON object. One that ends, or does not answer within `limit_s`, costs
    that line only: the next line starts it anew."""

    def __init__(self, *command, env=None, limit_s=120.0):
        self.command, self.env, self.limit_s, self.process, self.rest = command, env, limit_s, None, b""

    def start(self):
        self.rest = b""
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env, process_group=0
        )

    def line(self):
        """The next line of the program's output: None when it ended, "" when it says nothing."""
        until = time.monotonic() + self.limit_s
        while b"\n" not in self.rest:
            if not select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
                return ""
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return None
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()

    def ask(self, line):
        if self.process is None:
            self.start()
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
            answer = self.line()
        except BrokenPipeError:
            answer = None
        if answer:
            try:
                return json.loads(answer)
            except ValueError:
                self.stop()
                return {"failed": f"the program answered {answer!r}", "ended": True}
        hung, process = answer == "", self.process
        self.stop()
        why = f"no answer within {self.limit_s:.0f} s" if hung else f"the program ended with status {process.returncode}"
        return {"failed": why, "ended": True}

    def stop(self):
        if self.process is not None:
            steps.end(self.process)
            for pipe in (self.process.stdin, self.process.stdout):
                try:
                    pipe.close()
                except OSError:
                    pass
            self.process = None

    def close(self):
        """Lets the program end by itself."""
        if self.process is not None:
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            self.stop()


class Others:
    """The peers' programs: one for those that replace what another has in its process."""

    def __init__(self, *command, limit_s):
        self.servers = {name: Server(*command, limit_s=limit_s) for name in ("", "fa3")}

    def ask(self, line):
        return self.servers["fa3" if line.startswith("fa3") else ""].ask(line)

    def close(self):
        for server in self.servers.values():
            server.close()


def one(line, ours, others, rounds, about):
    """The rows of a case; an answer of ours that is wrong or missing is an error. Of a peer that ended in a case nothing
    more is asked in it."""
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
    parser.add_argument("--case-limit-s", type=float, default=120.0, help="wait so long for one answer")
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
    limit_s = options.case_limit_s
    ours = Server(options.ours, "--serve", "--warmup", counts[0], "--repeats", counts[1], limit_s=limit_s)
    others = None if options.ours_only else Others(sys.executable, str(HERE / "peers.py"), *counts, limit_s=limit_s)
    lines = (HERE / ("tiny.txt" if options.tiny else "cases.txt")).read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#") and re.search(options.only, line.split()[0])]
    rows, wrong, left, lost = [], [], [], 0
    with machine.Gauge() as gauge:
        for i, line in enumerate(lines):
            # Twice in a row is no longer the fault of a case.
            if time.monotonic() - start > options.limit_s or lost == 2:
                left = [line.split()[0] for line in lines[i:]]
                break
            print(f"[{i + 1}/{len(lines)}] {line.split()[0]}", file=sys.stderr)
            mark = gauge.mark()
            try:
                new = one(line, ours, others, options.rounds, about)
                rows += [row | {"clocks": gauge.medians(mark)} for row in new]
                lost = 0
            except RuntimeError as error:
                wrong.append(str(error))
                lost = lost + 1 if ours.process is None else 0
            # Whatever happens later, what was measured is on disk.
            steps.write(pathlib.Path(options.json), rows)
    ours.close()
    if others:
        others.close()
    device = rows[0]["device"] if rows else "no device"
    steps.write(pathlib.Path(options.json), rows)
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
        why = "two cases in a row ended our program" if lost == 2 else "for lack of time"
        print(f"\nnot begun, {why}: {' '.join(left)}")
    for error in wrong:
        print(f"WRONG: {error}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
