# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python3 -m unittest discover benches/peers`: steps that fail, hang, and leave processes behind; stand-ins for programs."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import lease
import measure
import peers
import steps


def program(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def runs(pid):
    """Whether a process is there, and not only waiting to be collected."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def any_runs(pids, within=10.0):
    """Whether one of these processes is there after that many seconds; a process that was killed takes a moment to end."""
    until = time.monotonic() + within
    while (left := any(map(runs, pids))) and time.monotonic() < until:
        time.sleep(0.02)
    return left


class Folder(unittest.TestCase):
    def setUp(self):
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = pathlib.Path(held.name)

    def record(self, name):
        return json.loads((self.folder / "out" / f"{name}.json").read_text())


class Steps(Folder):
    def steps(self, limit_s=60.0):
        return steps.Steps(self.folder / "out", "stage", limit_s, {"date": "never"})

    def test_a_failure_costs_itself_only(self):
        of = self.steps()
        of.run("bad", ["sh", "-c", "echo seen; exit 3"], 20)
        of.run("missing", ["/nowhere/program"], 20)
        of.run("good", ["sh", "-c", "cat"], 20, stdin="given")
        record = self.record("stage")
        self.assertEqual(
            [(s["name"], s["status"], s["ok"]) for s in record["steps"]],
            [("bad", 3, False), ("missing", None, False), ("good", 0, True)],
        )
        self.assertEqual([s["tail"] for s in record["steps"]], ["seen\n", "", "given"])
        self.assertIn("==== bad: status 3", (self.folder / "out/stage.log").read_text())
        self.assertEqual(of.failed(), ["bad", "missing"])

    def test_a_step_that_hangs_is_ended_with_what_it_started(self):
        of, pids = self.steps(), self.folder / "pids"
        began = time.monotonic()
        done = of.run(
            "hangs", ["bash", "-c", f"trap '' TERM; sleep 300 & echo $$ $! > {pids}; wait; sleep 300"], 1, least_s=0
        )
        self.assertLess(time.monotonic() - began, 30)
        self.assertTrue(done["timed_out"])
        self.assertIn("limit of 1 s", done["why"])
        self.assertFalse(any_runs(pids.read_text().split()))

    def test_nothing_is_left_running_after_a_good_step(self):
        of, pids = self.steps(), self.folder / "pids"
        self.assertTrue(of.run("leaves", ["bash", "-c", f"sleep 300 & echo $! > {pids}"], 20)["ok"])
        self.assertFalse(any_runs(pids.read_text().split()))

    def test_a_step_that_is_ended_keeps_what_it_has_told(self):
        of = self.steps()
        stage = unittest.mock.Mock(steps=of)
        lease.Stage.json_of(
            stage,
            "many rows",
            ["bash", "-c", """echo '{"rows": [1]}'; echo '{"rows": [1, 2]}'; printf '{"rows": [1, 2'; kill -9 $$"""],
            20,
        )
        self.assertEqual((of.failed(), self.record("stage")["many_rows"]), (["many rows"], {"rows": [1, 2]}))

    def test_what_has_no_time_is_named(self):
        of = self.steps(limit_s=1.0)
        self.assertIsNone(of.run("late", ["true"], 20))
        self.assertEqual(self.record("stage")["not_begun"], ["late"])
        self.assertIn("late", of.summary())

    def test_a_failure_says_why(self):
        of, panic = (
            self.steps(),
            "running 1 test\nthread 'one' (7) panicked at tests/run.rs:204:9:\ndq: RMS error 1 over 0\nnote: run with",
        )
        for name, says in ("test", panic), ("program", "first\nno driver\n\n"), ("silent", ""):
            of.run(name, ["sh", "-c", 'printf %s "$1"; exit 1', "sh", says], 20)
        of.run("good", ["echo", "panicked at x:\nnothing"], 20)
        why = [step.get("why") for step in self.record("stage")["steps"]]
        self.assertEqual(why, ["dq: RMS error 1 over 0", "no driver", "it printed nothing", None])
        of.record["not_begun"] = [f"step {i}" for i in range(7)]
        of.keep(given_up="the device is gone")
        said = of.summary()
        for line in (
            "FAILED test: status 1: dq: RMS error 1 over 0",
            "given up: the device is gone",
            "7 steps not begun: step 0, step 1",
        ):
            self.assertIn(f"\n  {line}", said)
        self.assertTrue(said.endswith(f"and 2 more, see {self.folder}/out/stage.json"), said)

    def test_a_full_disk_ends_no_steps(self):
        of = self.steps()
        of.run("before", ["true"], 20)
        full = OSError(28, "No space left on device")
        with (
            unittest.mock.patch.object(pathlib.Path, "write_text", side_effect=full),
            unittest.mock.patch.object(pathlib.Path, "open", side_effect=full),
        ):
            self.assertTrue(of.run("full", ["echo", "said"], 20)["ok"])
            self.assertIn("stage.json lacks what came after this: [Errno 28]", of.summary())
        self.assertEqual([step["name"] for step in self.record("stage")["steps"]], ["before"])
        of.run("after", ["true"], 20)
        self.assertEqual([step["name"] for step in self.record("stage")["steps"]], ["before", "full", "after"])
        self.assertNotIn("lacks", of.summary())

    def test_what_left_its_group_is_ended_too(self):
        of, pids = self.steps(), self.folder / "pids"
        pids.write_text("")
        # So many have written who they are.
        away = (
            f"(setsid bash -c 'echo $$ >> {pids}; sleep 300' &); until [ $(wc -l < {pids}) = %d ]; do sleep 0.02; done"
        )
        of.run("leaves", ["bash", "-c", away % 1], 20)
        of.run("hangs", ["bash", "-c", f"{away % 2}; sleep 300"], 2, least_s=0)
        self.assertEqual((len(pids.read_text().split()), any_runs(pids.read_text().split())), (2, False))

    def test_a_benchmark_at_its_limit_leaves_no_server_and_its_plot(self):
        pids, of = self.folder / "pids", self.steps()
        ours = program(
            self.folder / "ours",
            f"""while read -r line; do case $line in *128-full*)
            echo $$ > {pids}; trap '' TERM; while :; do sleep 1; done ;; *) echo '{json.dumps(ANSWER)}' ;; esac; done""",
        )
        command = [
            sys.executable,
            HERE / "measure.py",
            "--tiny",
            "--ours-only",
            "--ours",
            ours,
            "--json",
            self.folder / "rows.json",
        ]
        done = of.run("benchmark", command, 2, least_s=0)
        self.assertEqual((done["timed_out"], done["status"]), (True, 143))
        self.assertFalse(any_runs(pids.read_text().split()))
        self.assertEqual(
            [row["case"] for row in json.loads((self.folder / "rows.json").read_text())],
            ["tiny-forward-bf16-64-causal"],
        )
        self.assertTrue((self.folder / "rows.svg").exists())
        self.assertIn("ended by SIGTERM", done["output"])

    def test_the_log_has_an_end(self):
        of, steps.LOG_BYTES = self.steps(), 2000
        try:
            for _ in range(3):
                of.run("talks", ["sh", "-c", "head -c 5000 /dev/zero | tr '\\0' '\\377'; echo end"], 20)
        finally:
            steps.LOG_BYTES = 12 << 20
        text = (self.folder / "out/stage.log").read_bytes()
        self.assertLess(len(text), 2400)
        self.assertEqual(text.count(b"end\n"), 3)

    def test_the_end_of_much_output_is_kept(self):
        of = self.steps()
        done = of.run(
            "much",
            ["sh", "-c", "echo first; head -c 13000000 /dev/zero | tr '\\0' '\\377'; echo panicked >&2; exit 1"],
            20,
        )
        self.assertTrue(done["tail"].endswith("panicked\n"))
        self.assertTrue(done["output"].startswith("first\n") and "bytes left out" in done["output"])
        text = (self.folder / "out/stage.log").read_bytes()
        self.assertLess(len(text), 3 << 20)
        self.assertIn(b"panicked\n", text)

    def test_output_around_what_is_held_is_whole(self):
        log = self.folder / "log"
        for size in (0, 10, steps.HEAD_BYTES - 1, steps.HEAD_BYTES + 1, steps.HEAD_BYTES + steps.END_BYTES):
            log.write_bytes(b"")
            output, given = steps.Output(log), (b"0123456789abcde" * (size // 15 + 1))[:size]
            for i in range(0, size, 50_000):
                output.add(given[i : i + 50_000])
            output.close()
            self.assertTrue(output.text() == given.decode(), size)


ANSWER = {
    "ours_s": 1.0,
    "direction": "forward",
    "dtype": "bf16",
    "tflops": 1.0,
    "tb_per_s": None,
    "error": 0.1,
    "device": "none",
}


class Servers(Folder):
    """A program that ends at `dies`, hangs at `hangs`, and else answers."""

    def server(self, limit_s=20.0):
        body = f"""while read -r line; do case $line in *dies*) exit 7 ;; *hangs*) sleep 300 ;;
            *) echo '{json.dumps(ANSWER)}' ;; esac; done"""
        held = measure.Server(str(program(self.folder / "server", body)), limit_s=limit_s)
        self.addCleanup(held.stop)
        return held

    def test_a_server_that_ended_is_started_again(self):
        server = self.server()
        self.assertEqual(server.ask("a")["ours_s"], 1.0)
        self.assertEqual(server.ask("dies"), {"failed": "the program ended with status 7", "ended": True})
        self.assertEqual(server.ask("b")["ours_s"], 1.0)

    def test_a_server_that_hangs_is_ended_and_started_again(self):
        server = self.server(limit_s=1.0)
        self.assertIn("no answer within 1 s", server.ask("hangs")["failed"])
        self.assertIsNone(server.process)
        server.limit_s = 20.0
        self.assertEqual(server.ask("b")["ours_s"], 1.0)

    def measured(self, names, limit_s=20, probe="exit 0"):
        """`measure.py` over cases of these names, with stand-ins for our program and for peers.py: their rows."""
        serve = f"""while read -r line; do echo "$line" >> {self.folder}/asked; case $line in *dies*) exit 7 ;;
            *spoils*) echo '{{"failed": "a fault", "ended": true}}'; exit 1 ;; *hangs*) sleep 300 ;;
            *) echo '{json.dumps(ANSWER)}' ;; esac; done"""
        ours = program(self.folder / "ours", f"case $* in *--serve*) ;; *) {probe} ;; esac\n{serve}")
        home = self.folder / "home"
        home.mkdir()
        for name in ("measure.py", "machine.py", "report.py", "steps.py", "brought.py"):
            (home / name).write_text((HERE / name).read_text())
        # Beside the real one, so that a case is read by the same words.
        (home / "peers.py").write_text(
            (HERE / "peers.py")
            .read_text()
            .replace(
                "def main(arguments):",
                "def main(arguments):\n"
                "    for line in ['{}'] if '--probe' in arguments else sys.stdin:\n"
                "        print('{}' if line == '{}' else '{\"peer_s\": 2.0}', flush=True)\n"
                "    return 0\n",
            )
        )
        words = "kind=forward dtype=bf16 heads=1/1 dims=64/64 mask=causal lengths=8 peers=flash"
        lines = [f"{name} {words}" if " " not in name else name for name in names]
        (home / "cases.txt").write_text("".join(f"{line}\n" for line in lines))
        done = subprocess.run(
            [
                sys.executable,
                home / "measure.py",
                "--ours",
                ours,
                "--json",
                self.folder / "rows.json",
                "--case-limit-s",
                str(limit_s),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.assertNotIn("Traceback", done.stderr)
        rows = json.loads((self.folder / "rows.json").read_text())
        return done, {row["case"]: (row["ours_s"], row["peer_s"]) for row in rows}

    def test_without_pytorch_ours_are_timed_and_the_rows_say_why_alone(self):
        ours = program(self.folder / "ours", f"while read -r line; do echo '{json.dumps(ANSWER)}'; done")
        done = subprocess.run(
            [
                sys.executable,
                "-S",
                HERE / "measure.py",
                "--ours",
                ours,
                "--json",
                self.folder / "rows.json",
                "--tiny",
                "--ceilings",
                '{"matmul_bf16_tflops": 4.0}',
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        rows = json.loads((self.folder / "rows.json").read_text())
        self.assertEqual(
            (done.returncode, {row["case"] for row in rows}), (0, set(lease.lines_of("tiny.txt"))), done.stderr
        )
        self.assertEqual({(row["ours_s"], row["ceiling_share"]) for row in rows}, {(1.0, 0.25)})
        self.assertTrue(all("there is no PyTorch" in row["no_peers"] for row in rows))
        self.assertIn(
            "there is no PyTorch in this Python; nothing to compare with: our kernels alone are timed", done.stderr
        )

    def test_rows_that_cannot_be_written_end_no_measurement(self):
        ours = program(self.folder / "ours", f"while read -r line; do echo '{json.dumps(ANSWER)}'; done")

        def measured(file):
            command = [
                sys.executable,
                HERE / "measure.py",
                "--ours",
                ours,
                "--json",
                self.folder / file,
                "--tiny",
                "--ours-only",
            ]
            return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        for what in "cpu", "gpu", "conformance":
            done = subprocess.run(
                [HERE / "run", what, "--json", self.folder / "nowhere/rows.json"], stderr=subprocess.PIPE, text=True
            )
            self.assertEqual((done.returncode, "whose folder is not there" in done.stderr), (2, True), done.stderr)
        (self.folder / "rows.json").mkdir()
        done = measured("rows.json")
        self.assertEqual(
            (done.returncode, done.stderr.count("not written: ")), (1, len(lease.lines_of("tiny.txt")) + 1)
        )
        self.assertIn("tiny-unpack-bf16", done.stdout)

    def test_forms_are_forced_by_the_environment(self):
        answer = json.dumps(ANSWER | {"family": "F", "clusters": "C"}).replace(
            '"F"', "\"'${CPATTN_CUDA_FAMILY:-sm_90a}'\""
        )
        answer = answer.replace('"C"', "'$clusters'")
        asked = '[ "$CPATTN_CUDA_CLUSTER" = 1 ] && clusters=true || clusters=false'
        ours = program(self.folder / "ours", f"{asked}; while read -r line; do echo '{answer}'; done")
        subprocess.run(
            [
                sys.executable,
                HERE / "measure.py",
                "--ours",
                ours,
                "--json",
                self.folder / "rows.json",
                "--ours-only",
                "--only",
                "forward-bf16-(128-gqa64-causal-8k|96-)",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"CPATTN_CUDA_FAMILY": "", "CPATTN_CUDA_CLUSTER": ""},
            check=True,
        )
        found = [
            (row["case"].split("-")[2], row["peer"], row["peer_s"])
            for row in json.loads((self.folder / "rows.json").read_text())
        ]
        self.assertLessEqual({("128", "ours-sm80", 1.0), ("128", "ours-clusters", 1.0)}, set(found))
        self.assertLessEqual({("96", "ours-sm80", 1.0), ("96", "ours-sm90a", 1.0)}, set(found))

    def test_a_pytorch_that_hangs_is_not_waited_for(self):
        name = self.folder / "python"
        with unittest.mock.patch.object(sys, "executable", str(program(name, "exec sleep 300"))):
            self.assertEqual(measure.probed(0.5), (None, "PyTorch did not come up within 0 s"))

    def test_cases_that_end_the_program_cost_themselves_only(self):
        done, cases = self.measured(["a", "dies-1", "dies-2", "dies-3", "b"])
        self.assertEqual(done.returncode, 1)
        self.assertEqual(
            cases, {"a": (1.0, 2.0), **dict.fromkeys(["dies-1", "dies-2", "dies-3"], (None, 2.0)), "b": (1.0, 2.0)}
        )
        self.assertIn("WRONG: dies-2: the program ended with status 7", done.stderr)

    def test_a_program_whose_context_is_spoiled_is_started_anew(self):
        done, cases = self.measured(["spoils", "b"])
        self.assertEqual(cases, {"spoils": (None, 2.0), "b": (1.0, 2.0)})
        self.assertIn("WRONG: spoils: a fault", done.stderr)

    def test_other_cases_of_a_kernel_that_hung_come_last(self):
        backward = "c kind=backward dtype=bf16 heads=1/1 dims=64/64 mask=causal lengths=8 peers=flash"
        done, cases = self.measured(["hangs", "b", backward], limit_s=3)
        self.assertEqual(cases, {"hangs": (None, 2.0), "c": (1.0, 2.0), "b": (1.0, 2.0)})
        self.assertEqual(list(cases), ["hangs", "c", "b"])
        self.assertIn("WRONG: hangs: no answer within 3 s", done.stderr)

    def test_a_device_that_answers_no_more_ends_the_run(self):
        done, cases = self.measured(["a", "dies-1", "b"], probe="exit 1")
        self.assertEqual((done.returncode, cases), (1, {"a": (1.0, 2.0), "dies-1": (None, None)}))
        self.assertIn("not begun, the device does not answer any more: b", done.stdout)

    def test_flash_attention_3_has_a_process_of_its_own(self):
        asked = measure.Others("cat", limit_s=1.0)
        asked.servers = {
            name: type("Named", (), {"ask": lambda self, line, limit_s, name=name: (name, line)})()
            for name in ("", "fa3")
        }
        self.assertEqual(
            [asked.ask(f"{peer} x")[0] for peer in ("flash", "fa3", "fa3-varlen", "varlen")], ["", "fa3", "fa3", ""]
        )


class Lease(Folder):
    """The three stages over stand-ins for what cargo builds and for NVIDIA's tools."""

    def begin(self, stage, more, python=sys.executable, ours_only=True, **bodies):
        listing = 'if [ "$1" = --list ]; then printf "%s: test\\n" one two three; exit; fi'
        programs = {
            "cuda": f"case $* in *--serve*) while read -r l; do echo '{json.dumps(ANSWER)}'; done ;; "
            '*--jit*) echo \'{"device": "none", "seconds": {}}\' ;; esac',
            "conformance": 'echo "{}" > "$2"',
            **{name: listing for name in lease.TESTS},
            "c_program": "exit 0",
            "tool": 'while [ $# -gt 0 ]; do [ "$1" = --export ] && echo report > "$2.ncu-rep"; shift; done; echo "a,table"',
        } | bodies
        for name, body in programs.items():
            program(self.folder / "bin" / name, body)
        tool = str(self.folder / "bin/tool")
        self.process = subprocess.Popen(
            [
                HERE / "lease",
                stage,
                self.folder / "out",
                *["--ours-only"][: int(ours_only)],
                "--tiny",
                "--ncu",
                tool,
                "--sanitizer",
                tool,
                *more,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "CPATTN_PEERS_BIN": str(self.folder / "bin"),
                "CPATTN_PEERS_KERNELS": str(self.folder / "kernels"),
                "PYTHON": str(python),
            },
        )

    def call(self, stage, *more, **bodies):
        self.begin(stage, more, **bodies)
        out, err = self.process.communicate()
        return subprocess.CompletedProcess(stage, self.process.returncode, out, err), self.record(f"lease-{stage}")

    def test_every_test_is_a_step_of_its_own(self):
        listing = 'if [ "$1" = --list ]; then printf "%s: test\\n" one two; exit; fi'
        done, record = self.call("1", cuda_plans=listing + '\n[ "$2" = one ] && kill -SEGV $$\nexit 0')
        names = {step["name"]: step["ok"] for step in record["steps"]}
        self.assertEqual((done.returncode, names["cuda_plans one"], names["cuda_plans two"]), (1, False, True))
        self.assertTrue(names["cuda_ranks two"] and names["C c_program"] and names["conformance"])
        self.assertEqual(record["jit"]["device"], "none")
        self.assertIn("FAILED cuda_plans one", done.stdout)

    def test_a_device_that_answers_no_more_ends_the_stage(self):
        for names, begun in ("one two", True), ("hopper_walks::bf16_128 hopper_backward::bf16_64", False):
            listing = f'if [ "$1" = --list ]; then printf "%s: test\\n" {names}; exit; fi'
            _, record = self.call("1", cuda="echo no device here; exit 1", cuda_kernels=listing + "\nexit 1")
            self.assertEqual(record["given_up"], "the device does not answer: no device here")
            self.assertIn("cuda_plans one", record["not_begun"])
            steps = [step["name"] for step in record["steps"]]
            self.assertFalse(any(name.startswith("cuda_plans") for name in steps))
            self.assertEqual(("conformance" in steps, "conformance" not in record["not_begun"]), (begun, begun))

    def test_what_hardware_may_refute_comes_first(self):
        listing = 'if [ "$1" = --list ]; then printf "%s: test\\n" hopper_walks::bf16_128 runs_repeat; exit; fi'
        _, record = self.call("1", cuda_kernels=f'{listing}\necho "$2 $CPATTN_CUDA_FAMILY."')
        said = [(step["name"], step["tail"]) for step in record["steps"]]
        listed = [
            ("cuda_kernels CPATTN_CUDA_FAMILY=sm_80 runs_repeat", "runs_repeat sm_80.\n"),
            ("cuda_kernels hopper_walks::bf16_128", "hopper_walks::bf16_128 .\n"),
        ]
        self.assertEqual([said[0][0], *said[1:3], said[3][0]], ["facts", *listed, "conformance"])
        self.assertIn(("cuda_kernels runs_repeat", "runs_repeat .\n"), said[3:])
        self.assertEqual(len([name for name, _ in said if "bf16_128" in name]), 1)

    def test_the_tests_beside_one_that_hangs_come_last_and_are_short(self):
        class Stage:
            def __init__(self, steps):
                self.steps = steps

            def alive(self):
                return True

        of = steps.Steps(self.folder / "out", "stage", 60.0, {})
        tests = [lease.Test(f"hopper {i}", "hopper", ["sleep", "300"] if i < 3 else ["true"]) for i in range(4)]
        began = time.monotonic()
        with unittest.mock.patch.object(of, "run", functools.partial(of.run, least_s=0)):
            lease.run_tests(
                Stage(of), [*tests, lease.Test("other", "other", ["sh", "-c", "test $CPATTN_REQUIRE_CUDA = 1"])], 2, 0.5
            )
        found = [(step["name"], step["ok"]) for step in of.record["steps"]]
        self.assertEqual(
            found, [("hopper 0", False), ("other", True), ("hopper 1", False), ("hopper 2", False), ("hopper 3", True)]
        )
        # One whole limit and two short ones.
        self.assertLess(time.monotonic() - began, 5.0)

    def killed(self, number, also=""):
        """A stage 1 that is killed while its conformance step hangs: its record, and the hanging process."""
        pids = self.folder / "pids"
        self.begin("1", ["--limit-s", "500"], conformance=f"echo seen\n{also}\necho $$ >> {pids}; exec sleep 300")
        until = time.monotonic() + 30
        # The last line is the hanging process's, which has written "seen" by then.
        while (not pids.exists() or len(pids.read_text().split()) < 1 + bool(also)) and time.monotonic() < until:
            time.sleep(0.02)
        # The stage itself may be slower than its step.
        log = self.folder / "out/lease-1.log"
        while "seen" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        self.process.send_signal(number)
        self.process.communicate(timeout=30)
        self.assertFalse(any_runs(pids.read_text().split()))
        self.assertIn("seen", log.read_text())
        return self.record("lease-1")

    def test_a_command_that_is_asked_to_end_leaves_its_step_and_no_process(self):
        record = self.killed(signal.SIGTERM, f"setsid sleep 300 &\necho $! >> {self.folder}/pids")
        self.assertEqual((self.process.returncode, record["given_up"]), (143, "ended by SIGTERM"))
        last = record["steps"][-1]
        self.assertEqual((last["name"], last["ok"], last["tail"]), ("conformance", False, "seen\n"))
        self.assertIn("SIGTERM", last["why"])
        self.assertNotIn("running", record)

    def test_a_command_that_is_killed_leaves_the_name_of_its_step_and_no_process(self):
        record = self.killed(signal.SIGKILL)
        self.assertEqual(record["running"]["name"], "conformance")

    def test_the_benchmark_leaves_rows(self):
        done, record = self.call("2")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(set(record["machine"]), {"system", "device"})
        # Nothing was there to say which kernels are wrong.
        self.assertIn(f"there is no {self.folder}/out/lease-1.json", record["own_choice"])
        self.assertIn(f"the kernels are the library's own choice: {record['own_choice']}", done.stdout)
        self.assertEqual(record["rows"], len(json.loads((self.folder / "out/rows.json").read_text())))
        self.assertGreater(record["rows"], 5)

    def test_stages_say_which_peers_are_missing(self):
        """With PyTorch's name alone, and without anything that it does not bring."""
        (self.folder / "site/torch").mkdir(parents=True)
        (self.folder / "site/torch/__init__.py").write_text("raise ImportError('a stand-in')")
        python = program(self.folder / "python", f'PYTHONPATH={self.folder}/site exec {sys.executable} "$@"')
        for stage in "123":
            done, record = self.call(stage, python=python, ours_only=False)
            self.assertIn("not compared with fa3, fa3-varlen: CPATTN_FA3 is not there.", done.stdout)
            self.assertIn("not compared with triton: ", done.stdout)
            self.assertEqual(record["missing_peers"][0][0], ["fa3", "fa3-varlen"])
            if stage == "1":
                self.assertRegex(done.stdout, r"FAILED ceilings: status 1: .*there is no PyTorch in this Python")
                self.assertIn("FAILED kernels of others: status 1: not run: a stand-in", done.stdout)
                for communicator in "own", "torch":
                    self.assertIn(
                        f"FAILED PyTorch, communicator {communicator}: status 1: not run: a stand-in", done.stdout
                    )
        # Stage 2, whose PyTorch does not come up, times ours and has tried the ceilings.
        record = self.record("lease-2")
        self.assertEqual(record["ceilings"], {"failed": "there is no PyTorch in this Python"})
        self.assertGreater(record["rows"], 5)

    def test_without_pytorch_its_steps_are_not_begun(self):
        python = program(self.folder / "python", f'exec {sys.executable} -S "$@"')
        for stage, left in ("1", ["kernels of others", "ceilings", "PyTorch"]), ("2", ["ceilings"]):
            done, record = self.call(stage, python=python, ours_only=False)
            why = f": there is no PyTorch in {sys.executable}"
            self.assertEqual((done.returncode, record["not_begun"]), (1, [name + why for name in left]), done.stdout)

    def test_reports_are_packed(self):
        done, record = self.call("3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with tarfile.open(self.folder / "out/profile.tar.xz") as archive:
            kinds = sorted({pathlib.Path(name).suffix for name in archive.getnames()})
        self.assertEqual(kinds, [".csv", ".ncu-rep"])
        self.assertEqual(sum(step["name"].startswith("compute-sanitizer") for step in record["steps"]), 4)

    def test_a_tool_that_is_missing_costs_its_own_steps_and_one_that_is_off_the_path_is_found(self):
        with unittest.mock.patch.object(lease, "PLACES", (f"{self.folder}/cuda*/bin",)):
            stage = unittest.mock.Mock()
            stage.steps.record = {"not_begun": []}
            self.assertIsNone(lease.tool(stage, "ncu-of-nobody", "counters"))
            self.assertEqual(stage.steps.record["not_begun"], ["counters: there is no ncu-of-nobody"])
            for version in "12", "13":
                program(self.folder / f"cuda-{version}/bin/ncu-of-nobody", "exit 0")
            self.assertEqual(lease.tool(stage, "ncu-of-nobody", "counters"), f"{self.folder}/cuda-13/bin/ncu-of-nobody")
        # The stand-in is named before; the last name counts.
        done, record = self.call("3", "--ncu", "ncu-of-nobody")
        names = [step["name"] for step in record["steps"]]
        self.assertEqual(
            (done.returncode, len(names), record["not_begun"]), (1, 4, ["counters: there is no ncu-of-nobody"])
        )
        self.assertIn("no counters: there is no ncu-of-nobody on the path", done.stdout)

    def test_a_stage_leaves_at_most_eight_files(self):
        for stage in "123":
            self.call(stage)
            files = sorted(path.name for path in (self.folder / "out").iterdir())
            self.assertLessEqual(len(files), 8, files)
            self.assertFalse([name for name in files if name.endswith(".new")])
            for path in (self.folder / "out").iterdir():
                path.unlink()

    def test_every_test_program_for_devices_comes_along(self):
        tests = HERE.parents[1] / "tests-cuda"
        if not tests.is_dir():
            self.skipTest("a prepared folder has no sources")
        of_capi = {f"capi_{path.stem}": path for path in (HERE.parents[1] / "capi/tests").glob("cuda*.rs")}
        found = {path.stem for path in tests.glob("cuda_*")} | set(of_capi)
        # Over NCCL between several devices; its programs are Rust's own, but the library is not there.
        self.assertEqual(found - {"cuda_nccl"}, set(lease.TESTS))
        [built] = re.findall(r"^tests=\((.*)\)$", (HERE / "programs").read_text(), re.M)
        self.assertEqual(tuple(built.split()), lease.TESTS)
        for name in lease.LEFT_OUT:
            program, test = name.split()
            source = of_capi.get(program, tests / f"{program}.rs")
            self.assertRegex(source.read_text(), rf"fn {test}\(\)")

    def test_a_test_left_out_is_recorded_with_its_reason_and_not_run(self):
        name = "ranks_over_nccl"
        _, record = self.call(
            "1",
            capi_cuda=f'if [ "$1" = --list ]; then printf "%s: test\\n" {name} other; exit; fi\n'
            '[ -n "$CPATTN_ROOT" ] && [ -n "$CPATTN_CUDA_PREFIX" ]',
        )
        steps = {step["name"]: step["ok"] for step in record["steps"] if step["name"].startswith("capi_cuda")}
        self.assertEqual(steps, {"capi_cuda other": True})
        self.assertIn("libnccl", record["left_out"][f"capi_cuda {name}"])

    def test_profiled_cases_are_cases(self):
        lines = lease.lines_of("cases.txt")
        self.assertTrue(set(lease.PROFILED) <= set(lines))
        self.assertTrue(any("ours-clusters" in peers.Case(lines[name]).peers for name in lease.PROFILED))
        self.assertTrue(set(lease.COUNTED) <= set(peers.PEERS))


if __name__ == "__main__":
    unittest.main()
