# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps that may fail, hang or take the device's context with them, each in a process group of its own.

A step has a time limit. One that passes it is ended with everything it started, in other groups and sessions too; the
others go on. Before and after every step the record is written anew, in one piece, so that whoever ends the whole still
has all that was found before, and the name of the step in progress. The programs' output goes to one log while they run,
the end of it also into the record.
"""

import ctypes
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

TAIL = 3000
"""Characters of a step's output that the record keeps."""

LOG_BYTES = 12 << 20
"""A program that prints without end must not fill the log's place, nor take that of the steps after it."""

STEP_BYTES = 2 << 20
"""Bytes that one step may put into the log before the middle of its output is left out."""

HEAD_BYTES, END_BYTES = 8 << 20, 64 << 10
"""Bytes of a step's output that are held: its beginning and, where that is not all, its end."""

KERNELS = ("CPATTN_CUDA_FAMILY", "CPATTN_CUDA_CLUSTER", "CPATTN_CUDA_KERNELS")
"""Variables that say which kernels run: the record says for each step which it was given."""

PANIC = re.compile(r"panicked at [^\n]*:\n([^\n]+)")
"""How a test that cargo built says why it failed."""

NAMES, WORDS = 5, 300
"""Names that the summary has of steps that did not begin; characters of a reason."""

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
"""Of prctl(2)."""


class Terminated(BaseException):
    """The whole command was asked to end."""


def on_signals():
    """From here on SIGTERM, SIGHUP and Ctrl-C raise `Terminated`, once."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def ended(number, _):
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(signal.Signals(number).name)

    for number in numbers:
        signal.signal(number, ended)


# Loaded here: between fork and exec is no place for it.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def prctl(option, value):
    if LIBC:
        LIBC.prctl(option, value, 0, 0, 0)


def with_parent():
    """In a new process, before its program: it ends with the process that started it, however that ends."""
    prctl(SET_PDEATHSIG, signal.SIGKILL)


def signal_group(process, number):
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def end(process, patience_s=3.0):
    """Ends a process and everything in its group: first asked, then forced."""
    if patience_s > 0.0:
        signal_group(process, signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
    # Where the first of the group is gone, those that it started may not be.
    signal_group(process, signal.SIGKILL)
    try:
        process.wait(30.0)
    except subprocess.TimeoutExpired:
        pass


def descendants():
    """The processes that this one started and those that they started, also where one between them has ended."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def end_descendants(patience_s=10.0):
    """Ends what a step left, whatever group or session it is in."""
    until = time.monotonic() + patience_s
    while (pids := descendants()) and time.monotonic() < until:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.02)


def reason(text):
    """A line of what a program printed that says why it failed: the last panic of a test, else the last line."""
    said = PANIC.findall(text) or [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    return said[-1].strip()[:WORDS]


def write(path, document):
    """All of it or what was there before."""
    beside = path.with_name(path.name + ".new")
    try:
        beside.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def append(log, some):
    """To the log, where there is room: a full disk is no reason to end."""
    try:
        with log.open("ab") as file:
            file.write(some)
    except OSError:
        pass


class Output:
    """What a step prints: into the log while it runs, beginning and end in memory."""

    def __init__(self, log):
        self.log, self.head, self.tail, self.total, self.logged = log, bytearray(), b"", 0, 0
        # A half for the steps to come.
        self.room = min(STEP_BYTES, max(LOG_BYTES - log.stat().st_size, 0) // 2)

    def add(self, more):
        self.total += len(more)
        self.head += more[: HEAD_BYTES - len(self.head)]
        self.tail = (self.tail + more)[-END_BYTES:]
        self.write(more[: self.room - self.logged])

    def write(self, some):
        self.logged += len(some)
        append(self.log, some)

    def close(self):
        """The end of what the log has no room for."""
        missing = self.total - self.logged
        if missing > 0:
            room = min(missing, max(LOG_BYTES - self.log.stat().st_size, 0) // 2)
            end = self.tail[max(len(self.tail) - room, 0) :]
            self.write(f"\n[{missing - len(end)} bytes left out]\n".encode() + end)

    def text(self):
        missing = self.total - len(self.head) - len(self.tail)
        if missing > 0:
            whole = bytes(self.head) + f"\n[{missing} bytes left out]\n".encode() + self.tail
        else:
            whole = bytes(self.head) + self.tail[len(self.tail) - (self.total - len(self.head)) :]
        return whole.decode(errors="replace")


class Steps:
    """The steps of one stage: `record` is what is known so far."""

    def __init__(self, out, name, limit_s, about):
        # Processes whose own parent has ended become children of this one, so that `descendants` finds them.
        prctl(SET_CHILD_SUBREAPER, 1)
        self.out = pathlib.Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.until = time.monotonic() + limit_s
        self.path = self.out / f"{name}.json"
        self.log = self.out / f"{name}.log"
        self.log.write_text("")
        self.env = {}
        """What every step has in its environment, unless its own says otherwise."""
        self.record = {"stage": name, **about, "limit_s": limit_s, "steps": [], "not_begun": []}
        self.unwritten = None
        """Why the record on disk is not all that is known."""
        write(self.path, self.record)

    def left(self):
        return self.until - time.monotonic()

    def keep(self, **more):
        """Adds to the record."""
        self.record.update(more)
        self.save()

    def save(self):
        """The record, to disk. Where that is full the steps go on, and what they find is on the output alone."""
        try:
            write(self.path, self.record)
            self.unwritten = None
        except OSError as error:
            if not self.unwritten:
                print(f"    not written: {error}. The steps go on; make room, or keep this output", flush=True)
            self.unwritten = str(error)

    def run(self, name, command, limit_s, env=None, stdin=None, least_s=5.0):
        """Runs one step; its entry of the record, with `output` beside what is written. None if there is no time."""
        limit_s = min(limit_s, self.left())
        if limit_s < least_s:
            self.record["not_begun"].append(name)
            self.save()
            return None
        print(f"[{self.left():4.0f} s left] {name}", flush=True)
        began = time.monotonic()
        env = self.env | (env or {})
        step = {"name": name, "command": [str(word) for word in command], "status": None}
        if forced := {variable: env[variable] for variable in KERNELS if variable in env}:
            step["variables"] = forced
        self.keep(running=step)
        append(self.log, f"\n==== {name}\n".encode())
        output = Output(self.log)
        try:
            with tempfile.TemporaryFile() as given:
                given.write((stdin or "").encode())
                given.seek(0)
                process = subprocess.Popen(
                    step["command"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    stdin=given,
                    env={**os.environ, **env},
                    preexec_fn=with_parent,
                )
            step |= self.wait(process, limit_s, output)
        except OSError as error:
            step |= {"why": str(error)}
        except Terminated as ended:
            step |= {"why": f"ended with the whole command, by {ended}"}
            raise
        finally:
            text = self.done(step, output, time.monotonic() - began)
        return step | {"output": text}

    def done(self, step, output, seconds):
        """Writes down how a step went; its output."""
        output.close()
        text = output.text()
        step["seconds"] = round(seconds, 3)
        step["ok"] = step["status"] == 0
        step["tail"] = text[-TAIL:]
        if not step["ok"]:
            step.setdefault("why", reason(step["tail"]))
        append(self.log, f"\n==== {step['name']}: status {step['status']}, {step['seconds']} s\n".encode())
        self.record["steps"].append(step)
        del self.record["running"]
        self.save()
        if not step["ok"]:
            print(f"    status {step['status']}: {step['why']}", flush=True)
        return text

    @staticmethod
    def wait(process, limit_s, output):
        """Until the process ends, or its time does: then it is asked to end, and forced."""
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)

        def listen(seconds):
            until, open_ = time.monotonic() + seconds, True
            while (left := until - time.monotonic()) > 0.0:
                ended = process.poll() is not None
                try:
                    if not open_:
                        process.wait(left)
                        return True
                    # What is in the pipe is read, but not what others may go on writing into it.
                    for _ in range(256):
                        more = os.read(pipe, 1 << 16)
                        output.add(more)
                        open_ = bool(more)
                        if not more:
                            break
                except BlockingIOError:
                    if not ended:
                        select.select([pipe], [], [], min(left, 0.05))
                except subprocess.TimeoutExpired:
                    pass
                if ended:
                    return True
            return False

        try:
            if listen(limit_s):
                return {"status": process.returncode}
            signal_group(process, signal.SIGTERM)
            listen(3.0)
            end(process, 0.0)
            return {"status": process.poll(), "why": f"ended after its limit of {limit_s:.0f} s", "timed_out": True}
        except Terminated:
            signal_group(process, signal.SIGTERM)
            listen(3.0)
            raise
        finally:
            # What a step leaves running would share the device with the next one.
            end(process, 0.0)
            end_descendants()
            process.stdout.close()

    def failed(self):
        return [step["name"] for step in self.record["steps"] if not step["ok"]]

    def summary(self):
        """A short table, for the end of the output."""
        good = sum(step["ok"] for step in self.record["steps"])
        lines = [f"{self.record['stage']}: {good} of {len(self.record['steps'])} steps passed"]
        for step in self.record["steps"]:
            if not step["ok"]:
                lines.append(f"  FAILED {step['name']}: status {step['status']}: {step['why']}")
        if "given_up" in self.record:
            lines.append(f"  given up: {self.record['given_up']}")
        if left := self.record["not_begun"]:
            more = f" and {len(left) - NAMES} more, see {self.path}" if len(left) > NAMES else ""
            lines.append(f"  {len(left)} steps not begun: {', '.join(left[:NAMES])}{more}")
        if self.unwritten:
            lines.append(f"  {self.path} lacks what came after this: {self.unwritten}")
        return "\n".join(lines)
