# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python3 -m unittest discover benches/peers`. All times in here are synthetic: they stand for no machine."""

import contextlib
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import alternatives
import cpu
import cpu_measure
import measure
import peers
import report

LINE = "synthetic-{0} kind={0} dtype=bf16 heads=2/1 dims=64/64 mask=causal lengths=8*2,3 peers={1}"


class Scripted:
    """A server whose answers are written down here."""

    def __init__(self, answers):
        self.answers, self.asked = list(answers), []

    def ask(self, line, limit_s):
        self.asked.append(line)
        return self.answers.pop(0)


def ours(seconds, **more):
    return {
        "ours_s": seconds,
        "direction": "forward",
        "dtype": "bf16",
        "tflops": 6.0 / seconds,
        "tb_per_s": None,
        "error": 0.25,
        "device": "synthetic",
    } | more


def one(line, mine, theirs, rounds, about):
    return measure.Device(mine, theirs).one(line, rounds, about)


class Rows(unittest.TestCase):
    def test_medians_of_interleaved_rounds(self):
        mine = Scripted([ours(2.0), ours(4.0), ours(3.0)])
        theirs = Scripted([{"peer_s": 6.0}, {"peer_s": 9.0}, {"peer_s": 5.0}])
        [row] = one(LINE.format("forward", "flash"), mine, theirs, 3, {"date": "never"})
        self.assertEqual((row["ours_s"], row["peer_s"], row["ratio"]), (3.0, 6.0, 2.0))
        self.assertAlmostEqual(row["tflops"], 2.0)
        self.assertEqual((row["case"], row["peer"], row["device"]), ("synthetic-forward", "flash", "synthetic"))
        self.assertEqual((row["direction"], row["dtype"], row["date"]), ("forward", "bf16", "never"))
        self.assertTrue(all(line.startswith("flash synthetic-forward ") for line in theirs.asked))

    def test_a_peer_that_refuses_is_asked_once_and_has_no_time(self):
        mine = Scripted([ours(2.0), ours(2.0)])
        theirs = Scripted([{"failed": "no"}, {"peer_s": 1.0}, {"peer_s": 1.0}])
        rows = one(LINE.format("forward", "cudnn,flash"), mine, theirs, 2, {})
        self.assertEqual([row["peer_s"] for row in rows], [None, 1.0])
        self.assertEqual((rows[0]["ratio"], rows[0]["failed"]), (None, "no"))
        self.assertEqual([line.split()[0] for line in theirs.asked], ["cudnn", "flash", "flash"])

    def test_merge_is_compared_with_our_own_first(self):
        mine = Scripted([ours(2.0), ours(1.9)])
        [row] = one(LINE.format("merge", "ours-first"), mine, None, 1, {})
        self.assertEqual((row["peer"], row["ratio"]), ("ours-first", 0.95))
        self.assertIn("kind=first", mine.asked[1])

    def test_our_other_family_is_a_peer_if_its_kernel_ran(self):
        for family, expected in (("sm_80", 4.0), ("sm_90a", None)):
            other = Scripted([ours(4.0, family=family)] * 2)
            device = measure.Device(Scripted([ours(2.0, family="sm_90a")] * 2), None, forms={"ours-sm80": other})
            [row] = device.one(LINE.format("forward", "flash,ours-sm80"), 2, {})
            self.assertEqual((row["peer"], row["peer_s"], row["family"]), ("ours-sm80", expected, "sm_90a"))
        self.assertEqual(row["failed"], "a kernel ran whose family is sm_90a, not sm_80")
        self.assertEqual(len(other.asked), 1)

    def test_clusters_are_a_peer_if_there_were_any(self):
        for clusters, expected in ((True, 4.0), (False, None)):
            other = Scripted([ours(4.0, clusters=clusters)] * 2)
            device = measure.Device(Scripted([ours(2.0, clusters=False)] * 2), None, forms={"ours-clusters": other})
            [row] = device.one(LINE.format("forward", "ours-clusters"), 2, {})
            self.assertEqual((row["peer"], row["peer_s"], row["clusters"]), ("ours-clusters", expected, False))
        self.assertEqual(row["failed"], "a kernel ran whose clusters is False, not True")

    def test_without_peers_there_is_still_a_row(self):
        [row] = one(LINE.format("forward", "flash"), Scripted([ours(2.0)]), None, 1, {})
        self.assertEqual((row["peer"], row["peer_s"], row["ratio"], row["ours_s"]), (None, None, None, 2.0))

    def test_a_wrong_result_of_ours_has_no_time_and_the_peers_have_theirs(self):
        mine, theirs = Scripted([ours(2.0), {"failed": "o is wrong"}]), Scripted([{"peer_s": 3.0}] * 3)
        [row] = one(LINE.format("backward", "flash"), mine, theirs, 3, {})
        self.assertEqual(
            (row["ours_s"], row["peer_s"], row["ratio"], row["ours_failed"]), (None, 3.0, None, "o is wrong")
        )
        self.assertEqual(
            (row["direction"], row["dtype"], len(mine.asked), len(theirs.asked)), ("backward", "bf16", 2, 3)
        )
        self.assertIn(" failed ", report.table([row]))
        self.assertIn("nothing was compared", report.plot([row], "title"))


class Context(unittest.TestCase):
    """A PyTorch whose context a kernel's fault spoils for good."""

    class Torch:
        def __init__(self, sticky):
            self.cuda, self.sticky = self, sticky

        def synchronize(self):
            if self.sticky:
                raise RuntimeError("CUDA error: unspecified launch failure")

        def empty_cache(self):
            raise RuntimeError("the case is refused")

        def zeros(self, *_, **__):
            return self

        sum = item = zeros

    def answers(self, sticky):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = peers.serve(self.Torch(sticky), 1, 1, ["flash a", "flash b"])
        return status, [json.loads(line) for line in out.getvalue().splitlines()]

    def test_a_refusal_costs_one_answer(self):
        refused = {"failed": "RuntimeError: the case is refused"}
        self.assertEqual(self.answers(False), (0, [refused, refused]))

    def test_a_lost_context_ends_the_program(self):
        self.assertEqual(self.answers(True), (1, [{"failed": "RuntimeError: the case is refused", "ended": True}]))


class Share(unittest.TestCase):
    CEILINGS = {"matmul_bf16_tflops": 800.0, "copy_tb_per_s": 4.0}

    def test_rows_are_a_part_of_the_ceiling_that_bounds_them(self):
        attention = {"tflops": 600.0, "tb_per_s": None}
        self.assertEqual(
            report.share(attention, self.CEILINGS),
            {"ceiling": "matmul_bf16_tflops", "ceiling_value": 800.0, "ceiling_share": 0.75},
        )
        self.assertEqual(report.share({"tflops": None, "tb_per_s": 1.0}, self.CEILINGS)["ceiling_share"], 0.25)

    def test_what_was_not_measured_has_no_share(self):
        for row, ceilings in (
            ({"tflops": 6.0, "tb_per_s": None}, {"failed": "no PyTorch"}),
            ({"tflops": 6.0, "tb_per_s": None}, None),
            ({"tflops": None, "tb_per_s": None}, self.CEILINGS),
        ):
            self.assertEqual(report.share(row, ceilings)["ceiling_share"], None)


class Brought(unittest.TestCase):
    """The files that PyTorch does not bring."""

    def setUp(self):
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = pathlib.Path(held.name)
        for name in ("brought.py",):
            (self.folder / name).write_text((HERE / name).read_text())

    def bring(self, **variables):
        done = subprocess.run(
            [sys.executable, self.folder / "brought.py", self.folder / "out"],
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"]} | variables,
            text=True,
        )
        out = self.folder / "out"
        made = {path.name: path.read_text() for path in out.iterdir()} if out.exists() else {}
        return done, made

    def test_a_wheel_is_unpacked_and_a_file_copied(self):
        wheel, tutorial = self.folder / "xformers.whl", self.folder / "tutorial.py"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("flash_attn_3/_C.so", "library")
            archive.writestr("xformers/_C.so", "another")
        tutorial.write_text("kernel")
        done, made = self.bring(CPATTN_FA3=str(wheel), CPATTN_TRITON_TUTORIAL=str(tutorial))
        self.assertEqual((done.returncode, made), (0, {"_C.so": "library", "06-fused-attention.py": "kernel"}))
        self.assertRegex(done.stderr, "not taken along: CPATTN_FA3_CUDART is not there.*nvidia-cuda-runtime-cu12")

    def test_a_wheel_without_the_file_is_said(self):
        wheel = self.folder / "xformers.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("xformers/_C.so", "another")
        done, made = self.bring(CPATTN_FA3=str(wheel), CPATTN_FA3_CUDART="/no/such/file")
        self.assertEqual((done.returncode, made), (0, {}))
        self.assertIn("xformers.whl has no flash_attn_3/_C.so", done.stderr)
        self.assertIn("/no/such/file is not there", done.stderr)

    def test_prepare_takes_them_along_and_unpack_puts_them_where_they_are_found(self):
        home, to = self.folder / "benches/peers", self.folder / "prepared"
        home.mkdir(parents=True)
        (self.folder / "ptx").mkdir()
        shutil.copy(HERE.parents[1] / "ptx/HARDWARE.md", self.folder / "ptx")
        for path in HERE.iterdir():
            if path.is_file() and path.name != "programs":
                shutil.copy(path, home)
        (home / "programs").write_text('#!/usr/bin/env bash\nmkdir -p "$1"; cp "$(type -P true)" "$1/cuda"\n')
        (home / "programs").chmod(0o755)
        # Of the compiler, which cannot make one of the folders.
        (self.folder / "ptx/compile").write_text(
            '#!/usr/bin/env bash\n[ "${2%%,*}" != PAUSE ] || { echo no; exit 1; }\n'
            'to=${!#}; mkdir -p "$to"; echo "$2" > "$to/one.ptx"; [ "${2%%,*}" != RED_V4 ] || exit 1\n'
        )
        (self.folder / "ptx/compile").chmod(0o755)
        tutorial = self.folder / "tutorial.py"
        tutorial.write_text("kernel")
        environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
        done = subprocess.run(
            [home / "prepare", to],
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"CPATTN_TRITON_TUTORIAL": str(tutorial)},
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("not taken along: CPATTN_FA3 is not there", done.stderr)
        for _ in range(2):
            subprocess.run([to / "unpack"], check=True, env=environment)
        subprocess.run([to / "bin/cuda"], check=True)
        self.assertEqual((to / "brought/06-fused-attention.py").read_text(), "kernel")
        self.assertTrue((to / "HARDWARE.md").exists())
        made = {path.parent.name: path.read_text().strip() for path in to.glob("kernels/*/one.ptx")}
        sets = alternatives.APART_SETS
        self.assertEqual(
            made,
            {
                name: ",".join(dict.fromkeys((*of, *sets))) if of else str(self.folder / "target/kernels/cubins")
                for name, of in {alternatives.APART: sets, **alternatives.ALL}.items()
                if name != "PAUSE"
            },
        )
        self.assertIn("not taken along: kernels of PAUSE, which ptx/compile does not make here:\nno", done.stderr)
        self.assertEqual([path.name for path in to.glob("unpacked")], [])
        # Every file of ours that is imported over there has come along.
        names = {path.name for path in to.iterdir()}
        for name in ("lease.py", "measure.py", "peers.py"):
            for module in re.findall(r"^(?:import|from) (\w+)", (to / name).read_text(), re.M):
                self.assertTrue(not (HERE / f"{module}.py").exists() or f"{module}.py" in names, module)

    def missing(self, **variables):
        """What an interpreter lacks that has packages named torch and triton."""
        for name in ("torch", "triton"):
            (self.folder / name).mkdir(exist_ok=True)
        code = "import brought, json; print(json.dumps(brought.missing(['cudnn', 'fa3'])))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"]} | variables,
        )
        return json.loads(done.stdout)

    def test_what_is_missing_and_how_to_get_it(self):
        wheel = self.folder / "a.whl"
        wheel.write_text("")
        found = self.missing(CPATTN_FA3_CUDART=str(wheel))
        self.assertEqual([names for names, _ in found], [["fa3", "fa3-varlen"]] * 2 + [["triton"]])
        for (_, why), words in zip(found, ("xformers==0.0.34", "`prepare` unpacks it", "06-fused-attention.py")):
            self.assertIn(words, why)

    def test_what_was_brought_along_is_found(self):
        (self.folder / "brought").mkdir()
        for name in ("_C.so", "libcudart.so.12", "06-fused-attention.py"):
            (self.folder / "brought" / name).write_text("here")
        self.assertEqual(self.missing(), [])

    def test_without_pytorch_every_peer_is_missing(self):
        code = "import brought; print(brought.missing(['cudnn', 'fa3']))"
        done = subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, cwd=self.folder)
        self.assertIn("(['cudnn', 'fa3'], 'there is no PyTorch in", done.stdout)


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
                self.assertTrue(set(case.peers) <= {*peers.PEERS, "ours-first", *measure.FORMS}, case.name)
                self.assertEqual(case.heads % case.kv_heads, 0)
                self.assertTrue(re.fullmatch("forward|backward|merge|pack|unpack", case.kind))
                if len(set(case.lengths)) > 1:
                    self.assertTrue(all("varlen" in peer or peer in measure.FORMS for peer in case.peers), case.name)

    def test_packs_are_long_tailed(self):
        packs = [
            peers.Case(line) for line in (HERE / "cases.txt").read_text().splitlines() if line.startswith("packed")
        ]
        self.assertTrue(packs)
        for case in packs:
            lengths = sorted(case.lengths)
            self.assertGreater(lengths[-1], 6 * lengths[len(lengths) // 2])

    def test_words(self):
        case = peers.Case(LINE.format("backward", "flash,cudnn"))
        self.assertEqual((case.lengths, case.tokens, case.causal), ([8, 8, 3], 19, True))
        self.assertEqual((case.heads, case.kv_heads, case.peers), (2, 1, ["flash", "cudnn"]))


class Cpu(unittest.TestCase):
    LINE = "synthetic dtype=bf16 heads=4/2 dims=192/128 mask=causal lengths=3,10 layout=packed peers=torch-loop,torch-masked"

    def rows(self, line=LINE, **lists):
        times = {"forward": lists, "backward": lists}
        answer = {"times": times, "difference": {"o": 1e-3, "dq": 2e-3}, "bound": 0.03}
        return cpu_measure.rows_of(cpu.Case(line), answer, 1)

    def test_the_fastest_form_of_the_peer_counts(self):
        forward, backward = self.rows(**{"ours": [3.0, 1.0, 2.0], "torch-loop": [5.0, 6.0, 4.0], "torch-masked": [9.0]})
        self.assertEqual(
            (forward["ours_s"], forward["peer"], forward["peer_s"], forward["ratio"]), (2.0, "torch-loop", 5.0, 2.5)
        )
        self.assertEqual((forward["difference"], forward["bound"], backward["direction"]), (2e-3, 0.03, "backward"))

    def test_work_is_the_pairs_that_the_mask_leaves(self):
        case = cpu.Case(self.LINE)
        self.assertEqual((case.pairs, case.flops("forward")), (6 + 55, 2 * 61 * 4 * 320))
        self.assertEqual(case.flops("backward"), 2 * 61 * 4 * (3 * 192 + 2 * 128))
        self.assertEqual(cpu.Case(self.LINE.replace("causal", "full")).pairs, 9 + 100)
        self.assertEqual(cpu.Case(self.LINE + " window=4").pairs, 6 + 10 + 6 * 4)

    def test_shares_are_of_the_highest_ceiling_that_the_case_may_use(self):
        best = cpu_measure.higher(
            {}, {"fma_f32": 100e9, "bf16_dot": 80e9, "amx_bf16": None, "amx_f16": None, "copy": 1e9}
        )
        best = cpu_measure.higher(
            best, {"fma_f32": 90e9, "bf16_dot": 120e9, "amx_bf16": 900e9, "amx_f16": None, "copy": 2e9}
        )
        self.assertEqual(list(best.values()), [100e9, 120e9, 900e9, None, 2e9])
        row = self.rows(ours=[1e-9], torch=[2e-9])[0]
        share = cpu_measure.shares(row, cpu.Case(self.LINE), best)
        self.assertEqual((share["ceiling"], share["peer_ceiling_share"]), ("amx_bf16", share["ceiling_share"] / 2))
        self.assertAlmostEqual(share["ceiling_share"], row["gflops"] / 900)
        names = [
            cpu_measure.ceiling(cpu.Case(self.LINE.replace("bf16", dtype) + isa), best)
            for dtype, isa in (("f32", ""), ("f16", ""), ("bf16", " isa=avx512_bf16"))
        ]
        self.assertEqual(names, ["fma_f32", "fma_f32", "bf16_dot"])

    def test_cases_held_to_what_the_machine_lacks_are_left_out(self):
        free, held = cpu.Case(self.LINE), cpu.Case(self.LINE + " isa=avx512_bf16")
        with tempfile.TemporaryDirectory() as folder:
            for flags, has in (("fma avx2", False), ("avx2 avx512f avx512bw", True)):
                cpuinfo = pathlib.Path(folder, "cpuinfo")
                cpuinfo.write_text(f"model name\t: a CPU\nflags\t\t: {flags}\n")
                self.assertEqual([cpu_measure.can_be_held(case, cpuinfo) for case in (free, held)], [True, has])

    def test_ours_are_held_where_there_is_amx(self):
        with tempfile.TemporaryDirectory() as folder:
            for flags, ours in (("avx512f amx_tile", "avx512"), ("avx512f avx512_bf16", None)):
                cpuinfo = pathlib.Path(folder, "cpuinfo")
                cpuinfo.write_text(f"flags\t\t: {flags}\n")
                for isa in cpu_measure.HELD:
                    names = cpu_measure.held(isa, cpuinfo)
                    self.assertEqual(names.get("CPATTN_CPU_ISA"), ours)
                    self.assertEqual(names["ONEDNN_MAX_CPU_ISA"], "AVX512_CORE_BF16")
                self.assertEqual(cpu_measure.held(None, cpuinfo), {})
        self.assertEqual(cpu_measure.held("avx512_bf16", "/no/such/file")["CPATTN_CPU_ISA"], "avx512")

    def test_every_line_is_a_case(self):
        lines = [x for x in (HERE / "cpu_cases.txt").read_text().splitlines() if x and not x.startswith("#")]
        cases = [cpu.Case(line) for line in lines]
        self.assertEqual(len({case.name for case in cases}), len(cases))
        for case in cases:
            self.assertTrue(set(case.peers) <= set(cpu.PEERS), case.name)
            self.assertIn(case.dtype, cpu.BOUNDS)
            self.assertIn(case.layout, ("bhsd", "packed"))
            self.assertIn(case.isa, (None, *cpu_measure.HELD))
            self.assertTrue(len(case.lengths) == 1 or (case.tokens, len(case.lengths)) == (8192, 64), case.name)
            self.assertLessEqual(cpu.Case(case.line, quick=True).tokens, 8192)


class Kept(unittest.TestCase):
    """What `--keep` left under benches/results is whole: nobody reads a figure there that does not say where it is from."""

    NUMBER = (int, float)
    ROW = {
        "case": str,
        "direction": str,
        "dtype": str,
        "ours_s": NUMBER,
        "peer": str,
        "peer_s": NUMBER,
        "ratio": NUMBER,
        "ceiling": str,
        "ceiling_share": NUMBER,
        "peer_ceiling_share": NUMBER,
        "gflops": NUMBER,
        "tokens": int,
        "ours_rounds_s": list,
        "peer_rounds_s": list,
        "difference": NUMBER,
        "bound": NUMBER,
    }
    WHOLE = {
        "machine": str,
        "system": str,
        "date": str,
        "command": str,
        "threads": int,
        "quick": bool,
        "software": dict,
        "ceilings": dict,
        "rows": list,
    }

    def members(self, thing, schema, where):
        for name, kind in schema.items():
            self.assertIsInstance(thing.get(name), kind, f"{where}: {name}")

    def check(self, document, where):
        self.members(document, self.WHOLE, where)
        self.assertRegex(document["date"], r"^\d{4}-\d\d-\d\dT\d\d:\d\dZ$", where)
        self.assertTrue({"torch", "cpattn", "python"} <= set(document["software"]), where)
        self.assertTrue({"fma_f32", "bf16_dot", "amx_bf16", "amx_f16", "copy"} <= set(document["ceilings"]), where)
        self.assertTrue(document["rows"], where)
        for row in document["rows"]:
            here = f"{where}, {row.get('case')}"
            self.members(row, self.ROW, here)
            self.assertIn(row["direction"], ("forward", "backward"), here)
            self.assertTrue(math.isclose(row["ratio"], row["peer_s"] / row["ours_s"]), here)
            self.assertLessEqual(row["difference"], row["bound"], here)
            share = row["gflops"] * 1e9 / document["ceilings"][row["ceiling"]]
            self.assertTrue(math.isclose(row["ceiling_share"], share), here)

    def test_results_of_the_cpu(self):
        for path in sorted((HERE.parent / "results").glob("cpu-*.json")):
            self.check(json.loads(path.read_text()), path.name)
            self.assertTrue(path.with_suffix(".svg").exists(), path.name)

    def test_a_document_that_lacks_something_is_found(self):
        row = dict.fromkeys(self.ROW, 1.0) | {
            "case": "a",
            "direction": "forward",
            "dtype": "f32",
            "peer": "torch",
            "tokens": 1,
            "ceiling": "fma_f32",
            "ours_rounds_s": [1.0],
            "peer_rounds_s": [1.0],
            "ceiling_share": 1.0,
            "gflops": 1.0,
        }
        ceilings = {"fma_f32": 1e9, "bf16_dot": None, "amx_bf16": None, "amx_f16": None, "copy": 1e9}
        whole = {
            "machine": "synthetic",
            "system": "none",
            "date": "2000-01-01T00:00Z",
            "command": "none",
            "threads": 1,
            "quick": False,
            "software": {"torch": "0", "cpattn": "0", "python": "0"},
            "ceilings": ceilings,
            "rows": [row],
        }
        self.check(whole, "synthetic")
        for broken in (
            whole | {"machine": None},
            whole | {"date": "today"},
            whole | {"rows": [row | {"ratio": 2.0}]},
            whole | {"rows": [row | {"difference": 2.0}]},
            whole | {"rows": [row | {"ceiling_share": 0.5}]},
        ):
            with self.assertRaises(AssertionError):
                self.check(broken, "synthetic")


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
                [HERE / "profile", *words],
                stderr=subprocess.PIPE,
                text=True,
                env={"FAIL": "never", **os.environ, "NCU": tool, "SANITIZER": tool},
            )
            calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
            made = sorted(path.name for path in (folder / "out").iterdir()) if (folder / "out").exists() else []
            return done.returncode, calls, made, done.stderr

    def test_counters_of_named_cases(self):
        status, calls, made, _ = self.call("counters", "merge-bf16-128-causal|tiny-pack-", "OUT", "BIN")
        self.assertEqual(status, 0)
        self.assertEqual(
            made, [f"{n}.{e}" for n in ("merge-bf16-128-causal-8k", "tiny-pack-bf16") for e in ("csv", "log")]
        )
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
