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


FORMS = {
    "ours-sm80": ("CPATTN_CUDA_FAMILY", "sm_80", {"family": "sm_80"}),
    "ours-sm90a": ("CPATTN_CUDA_FAMILY", "sm_90a", {"family": "sm_90a"}),
    "ours-clusters": ("CPATTN_CUDA_CLUSTER", "1", {"clusters": True}),
}
"""Peers that are another form of our own kernel, in a program of its own: the variable that forces it, its value, and what
the program then says of what ran."""


class Server:
    """A program that answers every line with one JSON object. One that ends, says that it does, or does not answer within
    its limit, costs that line only: the next line starts it anew."""

    def __init__(self, *command, env=None, limit_s=120.0):
        self.command, self.env, self.limit_s, self.process, self.rest = command, env, limit_s, None, b""

    def start(self):
        self.rest = b""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.env,
            process_group=0,
            preexec_fn=steps.with_parent,
        )

    def line(self, limit_s):
        """The next line of the program's output: None when it ended, "" when it says nothing."""
        until = time.monotonic() + limit_s
        while b"\n" not in self.rest:
            if not select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
                return ""
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return None
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()

    def ask(self, line, limit_s=None):
        limit_s = limit_s or self.limit_s
        if self.process is None:
            self.start()
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
            answer = self.line(limit_s)
        except BrokenPipeError:
            answer = None
        if answer:
            try:
                answer = json.loads(answer)
            except ValueError:
                answer = {"failed": f"the program answered {answer!r}", "ended": True}
            if answer.get("ended"):
                self.stop()
            return answer
        hung, process = answer == "", self.process
        self.stop()
        if hung:
            return {"failed": f"no answer within {limit_s:.0f} s", "ended": True, "hung": True}
        return {"failed": f"the program ended with status {process.returncode}", "ended": True}

    def stop(self, patience_s=3.0):
        if self.process is not None:
            steps.end(self.process, patience_s)
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

    def ask(self, line, limit_s=None):
        return self.servers["fa3" if line.startswith("fa3") else ""].ask(line, limit_s)

    def stop(self, patience_s=3.0):
        for server in self.servers.values():
            server.stop(patience_s)

    def close(self):
        for server in self.servers.values():
            server.close()


def kernel_of(case):
    """Cases that share this share a kernel of ours, as far as can be told from outside."""
    return case.kind, case.dtype, case.head_dim, case.value_dim


class Device:
    """Ours and the peers on one device, and what is known about both: which of them hung, whether the device answers."""

    def __init__(self, ours, others, answers=lambda: True, limit_s=60.0, forms=None):
        self.ours, self.others, self.answers, self.limit_s = ours, others, answers, limit_s
        self.forms = forms or {}
        self.hung, self.given_up = set(), False

    def stop(self, patience_s=3.0):
        for server in (self.ours, self.others, *self.forms.values()):
            if server:
                server.stop(patience_s)

    def close(self):
        for server in (self.ours, self.others, *self.forms.values()):
            if server:
                server.close()

    def ask(self, who, line, about):
        """What has hung before is waited for less long."""
        answer = who.ask(line, self.limit_s / 3 if about in self.hung else self.limit_s)
        if answer.get("hung"):
            self.hung.add(about)
        if answer.get("ended") and not self.answers():
            # A kernel that spins in the other program holds the device as well.
            self.stop()
            self.given_up = not self.answers()
        return answer

    @staticmethod
    def of_form(answer, form):
        """As a peer's answer, if it was that form of our kernel that ran."""
        if "ours_s" not in answer:
            return answer
        for what, expected in form.items():
            if answer.get(what) != expected:
                return {"failed": f"a kernel ran whose {what} is {answer.get(what)}, not {expected}"}
        return answer | {"peer_s": answer["ours_s"]}

    def one(self, line, rounds, about):
        """The rows of a case. Of whoever fails in it nothing more is asked; the others are timed nevertheless."""
        case = peers.Case(line)
        names = [peer for peer in case.peers if self.others or peer == "ours-first" or peer in self.forms]
        answers, times, failed, wrong = [], {peer: [] for peer in names}, {}, None
        for _ in range(rounds):
            if wrong is None:
                answer = self.ask(self.ours, line, kernel_of(case))
                if "failed" in answer:
                    wrong, answers = answer["failed"], []
                else:
                    answers.append(answer)
            for peer in names:
                if self.given_up:
                    failed.setdefault(peer, "the device does not answer any more")
                if peer in failed:
                    continue
                if peer == "ours-first":
                    answer = self.ask(self.ours, line.replace("kind=merge", "kind=first"), peer)
                    answer = answer | {"peer_s": answer["ours_s"]} if "ours_s" in answer else answer
                elif peer in self.forms:
                    answer = self.ask(self.forms[peer], line, (peer, kernel_of(case)))
                    answer = self.of_form(answer, FORMS[peer][2])
                else:
                    answer = self.ask(self.others, f"{peer} {line}", peer)
                if "failed" in answer:
                    failed[peer], times[peer] = answer["failed"], []
                else:
                    times[peer].append(answer["peer_s"])
        more = about | (
            {"device": answers[0]["device"]}
            if answers
            else {
                "direction": "backward" if case.kind == "backward" else "forward",
                "dtype": case.dtype,
                "device": None,
                "ours_failed": wrong,
            }
        )
        return [
            report.merge(case.name, answers, peer, times.get(peer, []), failed.get(peer), more)
            for peer in names or [None]
        ]


def answers(ours):
    """Whether a fresh program of ours computes right on the device, in a case that needs no attention kernel."""
    process = subprocess.Popen(
        [ours, "--tiny", "--only", "tiny-pack-"],
        stdout=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=steps.with_parent,
    )
    try:
        return process.wait(30) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        steps.end(process)


def measured(lines, device, options, about):
    """The rows of one case after the other, and with the last of them what was not begun and why. The cases of a kernel
    that hung come last: each may cost as long a wait, of which the other kernels' cases would pay."""
    start, first, last, begun = time.monotonic(), list(lines), [], 0
    while first or last:
        late = not first
        line = (last if late else first).pop(0)
        case = peers.Case(line)
        if not late and kernel_of(case) in device.hung:
            last.append(line)
            continue
        out_of_time = time.monotonic() - start > options.limit_s
        if out_of_time or device.given_up:
            why = "for lack of time" if out_of_time else "the device does not answer any more"
            yield [], (why, [rest.split()[0] for rest in (line, *first, *last)])
            return
        begun += 1
        print(f"[{begun}/{len(lines)}] {case.name}", file=sys.stderr)
        yield device.one(line, options.rounds, about), None


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
    parser.add_argument("--ceilings", help="what `machine.py ceilings` printed: rows get their share of it")
    parser.add_argument("--ours-only", action="store_true", help="do without PyTorch")
    parser.add_argument("--keep", help="a folder that gets a copy under the name of machine and date")
    return parser.parse_args()


def probed(limit_s=60.0):
    """The versions of what is compared with, or a sentence that says why there is nothing."""
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "peers.py"), "--probe"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            preexec_fn=steps.with_parent,
        )
    except subprocess.TimeoutExpired:
        return None, f"PyTorch did not come up within {limit_s:.0f} s"
    if done.returncode != 0:
        return None, (done.stderr.splitlines() or [f"peers.py --probe ended with status {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), None


def kept(options, rows, picture=None):
    """Writes the rows, and their plot. A full disk ends no measurement: the table is on the output too."""
    path = pathlib.Path(options.json)
    try:
        steps.write(path, rows)
        if picture is not None:
            (pathlib.Path(options.svg) if options.svg else path.with_suffix(".svg")).write_text(picture)
    except OSError as error:
        print(f"not written: {error}", file=sys.stderr)
        return False
    return True


def main():
    options = arguments()
    about = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")}
    if not options.ours_only:
        about["software"], missing = probed()
        if missing:
            print(f"{missing}: our kernels alone are timed, as with --ours-only", file=sys.stderr)
            about["no_peers"], options.ours_only = missing, True
    if kernels := os.environ.get("CPATTN_CUDA_KERNELS"):
        about["kernels"] = pathlib.Path(kernels).name
    best = json.loads(options.ceilings) if options.ceilings else None
    counts = ["1", "2"] if options.tiny else ["5", "30"]
    limit_s = options.case_limit_s
    command = (options.ours, "--serve", "--warmup", counts[0], "--repeats", counts[1])
    ours = Server(*command, limit_s=limit_s)
    forms = {
        name: Server(*command, env={**os.environ, variable: value}, limit_s=limit_s)
        for name, (variable, value, _) in FORMS.items()
        # Where the kernels for sm_90a are turned off, as by a device that refutes them, they are not measured either.
        if os.environ.get("CPATTN_CUDA_FAMILY") != "sm_80" or name == "ours-sm80"
    }
    others = None if options.ours_only else Others(sys.executable, str(HERE / "peers.py"), *counts, limit_s=limit_s)
    device = Device(ours, others, lambda: answers(options.ours), limit_s, forms)
    lines = (HERE / ("tiny.txt" if options.tiny else "cases.txt")).read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#") and re.search(options.only, line.split()[0])]
    rows, left, status = [], None, 0
    steps.on_signals()
    try:
        with machine.Gauge() as gauge:
            mark = gauge.mark()
            for new, left in measured(lines, device, options, about):
                rows += [row | report.share(row, best) | {"clocks": gauge.medians(mark)} for row in new]
                mark = gauge.mark()
                # Whatever happens later, what was measured is on disk.
                kept(options, rows)
        device.close()
    except steps.Terminated as ended:
        # What was measured still gets its table and its plot; the programs are not waited for.
        print(f"ended by {ended}: the case in progress and those behind it have no rows", file=sys.stderr)
        status = 143
    finally:
        device.stop(0.0)
    wrong = list(dict.fromkeys(f"{row['case']}: {row['ours_failed']}" for row in rows if "ours_failed" in row))
    name = next((row["device"] for row in rows if row["device"]), "no device")
    picture = report.plot(rows, f"{name}, {about['date']}")
    if not kept(options, rows, picture):
        status = status or 1
    if options.keep and rows and not wrong and not status:
        if options.tiny or "emulator" in name:
            print("an emulated or tiny run says nothing about speed: not kept", file=sys.stderr)
        else:
            name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + "-" + about["date"].replace(":", "")
            folder = pathlib.Path(options.keep)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
            (folder / f"{name}.svg").write_text(picture)
    print(report.table(rows))
    if left:
        print(f"\nnot begun, {left[0]}: {' '.join(left[1])}")
    for error in wrong:
        print(f"WRONG: {error}", file=sys.stderr)
    return status or (1 if wrong else 0)


if __name__ == "__main__":
    sys.exit(main())
