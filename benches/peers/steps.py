# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps that may fail, hang or take the device's context with them, each in a process group of its own.

A step has a time limit. One that passes it is ended with everything it started; the others go on. After every step the
record is written anew, in one piece, so that whoever ends the whole still has all that was found before. The programs'
output goes to one log, the end of it also into the record.
"""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

TAIL = 3000
"""Characters of a step's output that the record keeps; the log has all of it."""

LOG_BYTES = 12 << 20
"""A program that prints without end must not fill the log's place."""


def end(process, patience_s=3.0):
    """Ends a process and everything in its group: first asked, then forced."""
    for number, wait in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 30.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM:
            # The first of the group is gone; those that it started may not be.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        break


def write(path, document):
    """All of it or what was there before."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(beside, path)


class Steps:
    """The steps of one stage: `record` is what is known so far."""

    def __init__(self, out, name, limit_s, about):
        self.out = pathlib.Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.until = time.monotonic() + limit_s
        self.path = self.out / f"{name}.json"
        self.log = self.out / f"{name}.log"
        self.log.write_text("")
        self.record = {"stage": name, **about, "limit_s": limit_s, "steps": [], "not_begun": []}
        write(self.path, self.record)

    def left(self):
        return self.until - time.monotonic()

    def keep(self, **more):
        """Adds to the record."""
        self.record.update(more)
        write(self.path, self.record)

    def run(self, name, command, limit_s, env=None, stdin=None, least_s=5.0):
        """Runs one step; its entry of the record, with `output` beside what is written. None if there is no time."""
        limit_s = min(limit_s, self.left())
        if limit_s < least_s:
            self.record["not_begun"].append(name)
            write(self.path, self.record)
            return None
        print(f"[{self.left():4.0f} s left] {name}", flush=True)
        began = time.monotonic()
        step = {"name": name, "command": [str(word) for word in command]}
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    step["command"], stdout=output, stderr=subprocess.STDOUT, process_group=0,
                    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, env={**os.environ, **(env or {})},
                )
            except OSError as error:
                step |= {"status": None, "why": str(error)}
            else:
                step |= self.wait(process, limit_s, stdin)
            output.seek(0)
            text = output.read(LOG_BYTES).decode(errors="replace")
        step["seconds"] = round(time.monotonic() - began, 3)
        step["ok"] = step["status"] == 0
        step["tail"] = text[-TAIL:]
        self.note(name, step, text)
        self.record["steps"].append(step)
        write(self.path, self.record)
        if not step["ok"]:
            print(f"    status {step['status']}: {step.get('why', 'see the log')}", flush=True)
        return step | {"output": text}

    @staticmethod
    def wait(process, limit_s, stdin):
        try:
            process.communicate(stdin.encode() if stdin else None, timeout=limit_s)
        except subprocess.TimeoutExpired:
            end(process)
            return {"status": process.poll(), "why": f"ended after its limit of {limit_s:.0f} s", "timed_out": True}
        # What a step leaves running would share the device with the next one.
        end(process, patience_s=0.0)
        return {"status": process.returncode}

    def note(self, name, step, text):
        room = LOG_BYTES - self.log.stat().st_size
        with self.log.open("a") as log:
            log.write(f"\n==== {name}: status {step['status']}, {step['seconds']} s\n{text[:max(room, 0)]}\n")

    def failed(self):
        return [step["name"] for step in self.record["steps"] if not step["ok"]]

    def summary(self):
        """A short table, for the end of the output."""
        good = sum(step["ok"] for step in self.record["steps"])
        lines = [f"{self.record['stage']}: {good} of {len(self.record['steps'])} steps passed"]
        for step in self.record["steps"]:
            if not step["ok"]:
                lines.append(f"  FAILED {step['name']}: status {step['status']} {step.get('why', '')}".rstrip())
        if self.record["not_begun"]:
            lines.append(f"  not begun, for lack of time: {' '.join(self.record['not_begun'])}")
        return "\n".join(lines)
