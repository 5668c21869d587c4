# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python3 -m unittest discover benches/peers`. All times in here are synthetic: they stand for no machine."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import measure
import peers
import report

LINE = (
    "synthetic-{0} kind={0} dtype=bf16 heads=2/1 dims=64/64 mask=causal lengths=8*2,3 peers={1}"
)


class Scripted:
    """A server whose answers are written down here."""

    def __init__(self, answers):
        self.answers, self.asked = list(answers), []

    def ask(self, line):
        self.asked.append(line)
        return self.answers.pop(0)


def ours(seconds, **more):
    return {"ours_s": seconds, "direction": "forward", "dtype": "bf16", "tflops": 6.0 / seconds, "tb_per_s": None,
            "error": 0.25, "device": "synthetic"} | more


class Rows(unittest.TestCase):
    def test_medians_of_interleaved_rounds(self):
        mine = Scripted([ours(2.0), ours(4.0), ours(3.0)])
        theirs = Scripted([{"peer_s": 6.0}, {"peer_s": 9.0}, {"peer_s": 5.0}])
        [row] = measure.one(LINE.format("forward", "flash"), mine, theirs, 3, {"date": "never"})
        self.assertEqual((row["ours_s"], row["peer_s"], row["ratio"]), (3.0, 6.0, 2.0))
        self.assertAlmostEqual(row["tflops"], 2.0)
        self.assertEqual((row["case"], row["peer"], row["device"]), ("synthetic-forward", "flash", "synthetic"))
        self.assertEqual((row["direction"], row["dtype"], row["date"]), ("forward", "bf16", "never"))
        self.assertTrue(all(line.startswith("flash synthetic-forward ") for line in theirs.asked))

    def test_a_peer_that_refuses_is_asked_once_and_has_no_time(self):
        mine = Scripted([ours(2.0), ours(2.0)])
        theirs = Scripted([{"failed": "no"}, {"peer_s": 1.0}, {"peer_s": 1.0}])
        rows = measure.one(LINE.format("forward", "cudnn,flash"), mine, theirs, 2, {})
        self.assertEqual([row["peer_s"] for row in rows], [None, 1.0])
        self.assertEqual((rows[0]["ratio"], rows[0]["failed"]), (None, "no"))
        self.assertEqual([line.split()[0] for line in theirs.asked], ["cudnn", "flash", "flash"])

    def test_merge_is_compared_with_our_own_first(self):
        mine = Scripted([ours(2.0), ours(1.9)])
        [row] = measure.one(LINE.format("merge", "ours-first"), mine, None, 1, {})
        self.assertEqual((row["peer"], row["ratio"]), ("ours-first", 0.95))
        self.assertIn("kind=first", mine.asked[1])

    def test_without_peers_there_is_still_a_row(self):
        [row] = measure.one(LINE.format("forward", "flash"), Scripted([ours(2.0)]), None, 1, {})
        self.assertEqual((row["peer"], row["peer_s"], row["ratio"], row["ours_s"]), (None, None, None, 2.0))

    def test_a_wrong_result_of_ours_is_no_row(self):
        with self.assertRaisesRegex(RuntimeError, "o is wrong"):
            measure.one(LINE.format("forward", "flash"), Scripted([{"failed": "o is wrong"}]), None, 1, {})


class Report(unittest.TestCase):
    def rows(self):
        return [
            report.merge("synthetic-a", [ours(0.002)], "flash", [0.003]),
            report.merge("synthetic-a", [ours(0.002)], "cudnn", [], "does not <want>"),
            report.merge("synthetic-b", [ours(0.004, tflops=None, tb_per_s=3.5)], "copy", [0.002]),
        ]

    def test_table(self):
        lines = report.table(self.rows()).splitlines()
        self.assertEqual(lines[1].split(), ["synthetic-a", "bf16", "2.0000", "3000.0", "-", "flash", "3.0000", "1.500"])
        self.assertEqual(lines[2].split()[-3:], ["cudnn", "refused", "-"])
        self.assertEqual(lines[3].split(), ["synthetic-b", "bf16", "4.0000", "-", "3.500", "copy", "2.0000", "0.500"])
        self.assertEqual(lines[-1], "synthetic-a, cudnn: does not <want>")

    def test_plot(self):
        text = report.plot(self.rows(), "synthetic <machine>")
        page = xml.dom.minidom.parseString(text)
        # The background, a bar and an entry of the legend for each row that has a ratio.
        bars = page.getElementsByTagName("rect")
        self.assertEqual(len(bars), 1 + 2 + 2)
        widths = [float(bar.getAttribute("width")) for bar in bars[1:3]]
        self.assertAlmostEqual(widths[0] / widths[1], 3.0, places=2)
        self.assertIn("synthetic &lt;machine&gt;", text)
        xml.dom.minidom.parseString(report.plot([], "nothing"))


class Cases(unittest.TestCase):
    def test_every_line_is_a_case_with_known_peers(self):
        for name in ("cases.txt", "tiny.txt"):
            lines = [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]
            cases = [peers.Case(line) for line in lines]
            self.assertEqual(len({case.name for case in cases}), len(cases))
            for case in cases:
                self.assertTrue(set(case.peers) <= {*peers.PEERS, "ours-first"}, case.name)
                self.assertEqual(case.heads % case.kv_heads, 0)
                self.assertTrue(re.fullmatch("forward|backward|merge|pack|unpack", case.kind))
                if len(set(case.lengths)) > 1:
                    self.assertTrue(all(peer.startswith("varlen") for peer in case.peers), case.name)

    def test_packs_are_long_tailed(self):
        packs = [peers.Case(line) for line in (HERE / "cases.txt").read_text().splitlines() if line.startswith("packed")]
        self.assertTrue(packs)
        for case in packs:
            lengths = sorted(case.lengths)
            self.assertGreater(lengths[-1], 6 * lengths[len(lengths) // 2])

    def test_words(self):
        case = peers.Case(LINE.format("backward", "flash,cudnn"))
        self.assertEqual((case.lengths, case.tokens, case.causal), ([8, 8, 3], 19, True))
        self.assertEqual((case.heads, case.kv_heads, case.peers), (2, 1, ["flash", "cudnn"]))


class Profile(unittest.TestCase):
    """The script with stand-ins for the bench and the tools, which write down what they were called with."""

    def call(self, *words):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for name, body in {
                "bin/cuda": "exit 0",
                "tool": f'echo "$*" >> {folder}/calls; if [[ "$*" == *--serve ]]; then cat >> {folder}/calls; fi; '
                f'[[ "$*" != *"$FAIL"* ]]',
            }.items():
                path = folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(f"#!/usr/bin/env bash\n{body}\n")
                path.chmod(0o755)
            words = [word.replace("OUT", str(folder / "out")).replace("BIN", str(folder / "bin")) for word in words]
            tool = str(folder / "tool")
            done = subprocess.run(
                [HERE / "profile", *words], stderr=subprocess.PIPE, text=True,
                env={"FAIL": "never", **os.environ, "NCU": tool, "SANITIZER": tool},
            )
            calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
            made = sorted(path.name for path in (folder / "out").iterdir()) if (folder / "out").exists() else []
            return done.returncode, calls, made, done.stderr

    def test_counters_of_named_cases(self):
        status, calls, made, _ = self.call("counters", "merge-bf16-128-causal|tiny-pack-", "OUT", "BIN")
        self.assertEqual(status, 0)
        self.assertEqual(made, [f"{n}.{e}" for n in ("merge-bf16-128-causal-8k", "tiny-pack-bf16") for e in ("csv", "log")])
        self.assertEqual(len([call for call in calls if "--export" in call and "--clock-control none" in call]), 2)

    def test_a_name_nobody_has(self):
        status, calls, _, text = self.call("counters", "no-such-case", "OUT", "BIN")
        self.assertEqual((status, calls), (2, []))
        self.assertIn("no-such-case", text)

    def test_sanitizers_all_run_and_failures_show(self):
        os.environ["FAIL"] = "racecheck"
        try:
            status, calls, made, text = self.call("sanitize", "OUT", "BIN")
        finally:
            del os.environ["FAIL"]
        self.assertEqual((status, len(calls)), (1, 4))
        self.assertIn("racecheck: status", text)
        self.assertEqual(len(made), 4)


if __name__ == "__main__":
    unittest.main()
