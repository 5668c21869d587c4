# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python3 -m unittest discover benches/peers`: what alternatives.py says beside ptx/HARDWARE.md and the sources, and the
search of `lease 1` for kernels that pass, with stand-ins for the tests."""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import alternatives
import kernels
import lease
import steps
import test_lease

PAGE = HERE.parents[1] / "ptx/HARDWARE.md"
BACKWARD = "hopper_backward::bf16_64"
CLUSTERS = "clusters::bf16_128"
OWN = "CPATTN_CUDA_FAMILY=sm_80 runs_repeat"
KERNEL = "hopper_backward_bf16_64.ptx"


@unittest.skipUnless(PAGE.exists(), "a prepared folder has no sources")
class Page(unittest.TestCase):
    def setUp(self):
        self.page = PAGE.read_text()
        table = re.search(r"## The first two minutes\n(.*?)\n## ", self.page, re.S)[1]
        self.rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]

    def test_the_list_is_the_page_s(self):
        names = [name for tests, _ in self.rows for name in re.findall(r"`([^`]+)`", tests) if "=" not in name]
        self.assertEqual(names, [listed.line.split()[-1] for listed in alternatives.FIRST])
        # All tests that the page names are there.
        for test in {*names, *re.findall(r"`([a-z_]+::\w+)`", self.page)}:
            module, _, name = test.rpartition("::")
            source = (PAGE.parents[1] / f"tests-cuda/cuda_kernels/{module or 'main'}.rs").read_text()
            self.assertRegex(source, rf"#\[test\]\nfn {name}\(\)")

    def test_what_the_page_names_is_where_it_says(self):
        root, found = PAGE.parents[1], re.findall(r"((?:`[^`]+`(?:,| and)?\s+)+)\(`([\w/]+\.(?:cuh|rs))`\)", self.page)
        self.assertGreater(len(found), 5)
        for names, file in found:
            path = root / file if "/" in file else next((root / "ptx").glob(f"*/{file}"))
            for name in re.findall(r"`([^`]+)`", names):
                self.assertTrue(re.search(rf"\b{name.rpartition('::')[2]}\b", path.read_text()), f"{name} in {file}")
        table = "".join(
            path.read_text() for path in (root / "tools/cuda-emulator/tests/instructions/table").glob("*.rs")
        )
        for group in re.findall(r"conformance ((?:`[^`]+`(?: and\s+)?)+)", self.page):
            for name in re.findall(r"`([a-z ]+)`", group):
                self.assertIn(name, table)

    def test_tests_of_sm_90a_are_there(self):
        folder = PAGE.parents[1] / "tests-cuda/cuda_kernels"
        for start in lease.OF_SM_90A:
            module, _, name = start.rpartition("::")
            self.assertRegex((folder / f"{module}.rs").read_text(), rf"#\[test\]\nfn {name}")

    def test_the_items_of_each_test_are_the_page_s(self):
        expected = {}
        for tests, what in self.rows:
            items = []
            for word in re.split(r", | and ", re.search(r"\(([0-9, to]+)\) *$", what)[1]):
                first, _, last = word.partition(" to ")
                items += range(int(first), int(last or first) + 1)
            expected |= {name: tuple(items) for name in re.findall(r"`([^`]+)`", tests) if "=" not in name}
        self.assertEqual({listed.line.split()[-1]: listed.items for listed in alternatives.FIRST}, expected)

    def test_switches_are_those_of_the_page_and_of_the_sources(self):
        listed = set(re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \|", self.page, re.M))
        self.assertEqual(listed, set(alternatives.SWITCHES))
        sources = "".join(path.read_text() for path in sorted(PAGE.parent.glob("*/*.cu*")))
        self.assertEqual(set(re.findall(r"\bCPATTN_([A-Z0-9_]+)\b", sources)), listed)
        for names in alternatives.SETS:
            self.assertLessEqual(set(names), listed)

    def test_the_items_of_each_switch_are_those_that_name_it(self):
        items = {int(number): text for number, text in re.findall(r"^### (\d+)\. (.*?)(?=^##)", self.page, re.M | re.S)}
        items |= {int(number): text for number, text in re.findall(r"^\| (\d+) \|(.*)$", self.page, re.M)}
        self.assertEqual(sorted(items), list(range(1, len(items) + 1)))
        for switch, known in alternatives.SWITCHES.items():
            self.assertEqual(known, tuple(sorted(n for n, text in items.items() if f"`{switch}`" in text)), switch)
        cubins = tuple(
            sorted(n for n, text in items.items() if re.search(r"\bbuilt: .*\bcubins\b|^built: cubins", text))
        )
        self.assertEqual(alternatives.CUBIN_ITEMS, cubins)

    def test_instructions_are_those_of_the_kernels(self):
        """Those without switches, as `ptx/compile --check` counts them, here and in ptx/DESIGN.md."""
        lines = (PAGE.parent / "loops.txt").read_text()
        counts = {
            (kind, shape): int(n) for kind, shape, n in re.findall(r"^hopper_(\w+)_bf16_(\d+): (\d+) ", lines, re.M)
        }
        shapes = "64", "128", "192128", "256"
        expected = {kind: [counts[kind, shape] for shape in shapes] for kind in ("backward", "forward")}
        said = [[int(n) for n in row.split(", ")] for row in re.findall(r"\(without: ([\d, ]+)\)", self.page)]
        self.assertEqual(said, [expected["backward"], expected["forward"]])
        text = re.search(
            r"^## The backward for `sm_90a`\n(.*?)^### ", (PAGE.parent / "DESIGN.md").read_text(), re.M | re.S
        )[1]
        for count in expected["backward"]:
            self.assertRegex(text, rf"\b{count}( instructions|,)")

    def test_tests_run_kernels_that_there_are(self):
        compiled = [path.name for path in (PAGE.parent / "compiled").iterdir()]
        # Of the sets that no library has (src/kernel/cuda/embedded.rs).
        compiled += ["hopper_cluster_bf16_128.ptx", "hopper_forward_bf16_96.ptx", "hopper_forward_bf16_192.ptx"]
        for listed in alternatives.FIRST:
            for kernel in listed.kernels:
                self.assertTrue(any(name.startswith(kernel) for name in compiled), kernel)


@unittest.skipUnless(PAGE.exists(), "a prepared folder has no sources")
class Compile(test_lease.Folder):
    """`ptx/compile` where it needs no compiler."""

    def refused(self, *words):
        done = subprocess.run(
            [PAGE.parent / "compile", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_HOME": "/nowhere"},
        )
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        return done.stderr

    def test_a_folder_that_holds_something_else_is_refused_and_left(self):
        (self.folder / "forward_bf16_64.ptx").write_text("text")
        for words in ["--with", "PAUSE"], ["--cubin"], ["--with", "PAUSE", "--cubin"]:
            for folder in self.folder, PAGE.parent / "compiled", self.folder / "forward_bf16_64.ptx":
                self.assertIn(f"{folder} is no folder of kernels that this script made", self.refused(*words, folder))
        self.assertEqual((self.folder / "forward_bf16_64.ptx").read_text(), "text")

    def test_folders_of_kernels_go_into_an_empty_folder_or_stay_where_they_are_made(self):
        (self.folder / "other").mkdir()
        (self.folder / "other/file").write_text("")
        with self.assertRaises(SystemExit) as refused:
            kernels.main(self.folder / "other")
        self.assertIn("is not an empty folder", str(refused.exception))

        def compiles(name, switches, of):
            made = self.folder / "made" / name
            made.mkdir(parents=True, exist_ok=True)
            (made / KERNEL).write_text(name)
            return made, ""

        with unittest.mock.patch.object(kernels, "make", compiles), unittest.mock.patch.object(sys, "stderr"):
            kernels.main()
            self.assertEqual({path.name for path in self.folder.iterdir()}, {"other", "made"})
            kernels.main(self.folder / "to")
        self.assertEqual(
            {path.name for path in (self.folder / "to").iterdir()}, {*alternatives.ALL, alternatives.APART}
        )

    def test_what_is_no_switch_is_refused(self):
        for name in "WHOLE_PANEL", "CUDA_KERNELS", ".", "PAUSE,RED":
            self.assertIn(
                f"{name.rpartition(',')[2]} is no switch of the sources",
                self.refused("--with", name, self.folder / "new"),
            )
        self.assertFalse((self.folder / "new").exists())


class Choice(test_lease.Folder):
    """`Search` over tests that pass with some folders."""

    def search(self, folders, passing, failed, slow=(), **limits):
        """`folders`: the texts of each. `passing`: the folders with which each test passes."""
        for name, texts in folders.items():
            (self.folder / name).mkdir()
            for text in texts:
                (self.folder / name / text).write_text("")
        stage = unittest.mock.Mock()
        stage.steps, stage.alive.return_value = steps.Steps(self.folder / "out", "stage", 60.0, {}), True
        first = [listed for listed in alternatives.FIRST if listed.line in passing]
        tests = {}
        for listed in first:
            good = "|".join(passing[listed.line]) or "-"
            command = [
                "bash",
                "-c",
                f"case ${{{alternatives.VARIABLE}##*/}} in {good}) ;; {'|'.join(slow) or '-'}) sleep 300 ;; *) exit 1 ;; esac",
            ]
            tests[listed] = lease.Test(listed.line, "group", command)
        found = alternatives.Search(stage, self.folder, tests, **limits)
        variables, why = found.choose([listed for listed in first if listed.line in failed])
        if variables:
            variables = {name: pathlib.Path(value).name for name, value in variables.items()}
        return (
            variables,
            why,
            found.tried(),
            [step["name"].rpartition(" with ")[2] for step in stage.steps.record["steps"]],
        )

    def test_those_of_the_item_come_first_and_the_first_that_passes_is_taken(self):
        folders = dict.fromkeys(["FENCES", "PAUSE", "WHOLE_PANELS"], [KERNEL])
        variables, why, tried, order = self.search(folders, {BACKWARD: ["WHOLE_PANELS", "PAUSE"]}, [BACKWARD])
        self.assertEqual((variables, order), ({alternatives.VARIABLE: "WHOLE_PANELS"}, ["WHOLE_PANELS"]))
        self.assertEqual(tried, {BACKWARD: {"passes": ["WHOLE_PANELS"], "fails": []}})
        self.assertIn("WHOLE_PANELS", why)

    def test_what_changes_no_kernel_of_the_test_is_not_tried(self):
        folders = {"WHOLE_PANELS": ["hopper_backward_bf16_192128.ptx"], "FENCES": [KERNEL], "cubins": [KERNEL]}
        variables, _, _, order = self.search(folders, {BACKWARD: ["cubins", "WHOLE_PANELS"]}, [BACKWARD])
        self.assertEqual((variables, order), ({alternatives.VARIABLE: "cubins"}, ["FENCES", "cubins"]))

    def test_a_folder_has_to_pass_all(self):
        both = "+".join(alternatives.SETS[2])
        other, third = "hopper_backward_shared::groups", "hopper_walks::bf16_64"
        folders = dict.fromkeys(
            ["WHOLE_PANELS", "NO_EMPTY_BOXES", "WAIT_ALL", both], [KERNEL, "hopper_forward_bf16_64.ptx"]
        )
        passing = {
            BACKWARD: ["WHOLE_PANELS", "WAIT_ALL", both],
            other: ["NO_EMPTY_BOXES", "WAIT_ALL", both],
            third: ["WAIT_ALL"],
        }
        # The third has passed with the library's own kernels, and does not with the set.
        variables, _, tried, _ = self.search(folders, passing, [BACKWARD, other])
        self.assertEqual(variables, {alternatives.VARIABLE: "WAIT_ALL"})
        self.assertEqual(tried[other]["passes"], ["NO_EMPTY_BOXES", both, "WAIT_ALL"])
        self.assertEqual(tried[third], {"passes": ["WAIT_ALL"], "fails": [both]})

    def test_where_nothing_passes_the_other_family_does_if_it_works(self):
        folders = {"WHOLE_PANELS": [KERNEL]}
        for failed, expected in ([BACKWARD], {"CPATTN_CUDA_FAMILY": "sm_80"}), ([OWN, BACKWARD], None):
            with self.subTest(failed=failed):
                variables, why, tried, _ = self.search(
                    folders if not (self.folder / "WHOLE_PANELS").exists() else {}, {BACKWARD: [], OWN: []}, failed
                )
                self.assertEqual((variables, tried), (expected, {BACKWARD: {"passes": [], "fails": ["WHOLE_PANELS"]}}))
                self.assertEqual("sm_80 fail too" in why, expected is None)

    def test_without_folders_it_is_said(self):
        variables, why, tried, order = self.search({}, {BACKWARD: [], OWN: []}, [BACKWARD])
        self.assertEqual((variables, tried, order), ({"CPATTN_CUDA_FAMILY": "sm_80"}, {}, []))
        self.assertIn("benches/peers/prepare makes them", why)

    def test_kernels_that_are_off_change_nothing_for_the_others(self):
        variables, _, tried, _ = self.search(
            {"RELEASE": ["hopper_cluster_bf16_128.ptx"]}, {CLUSTERS: ["RELEASE"]}, [CLUSTERS]
        )
        self.assertEqual((variables, tried), ({}, {CLUSTERS: {"passes": ["RELEASE"], "fails": []}}))

    def test_one_that_hangs_has_its_limit_and_all_have_theirs(self):
        folders = dict.fromkeys(["WHOLE_PANELS", "FENCES", "PAUSE", "WAIT_ALL"], [KERNEL])
        with (
            unittest.mock.patch.object(alternatives, "LEAST_S", 0.5),
            unittest.mock.patch.object(steps.Steps.run, "__defaults__", (None, None, 0.0)),
        ):
            variables, _, tried, order = self.search(
                folders,
                {BACKWARD: ["WAIT_ALL"]},
                [BACKWARD],
                slow=["WHOLE_PANELS", "FENCES", "PAUSE"],
                limit_s=1.0,
                budget_s=2.2,
            )
        self.assertEqual((variables, order), ({"CPATTN_CUDA_FAMILY": "sm_80"}, ["WHOLE_PANELS", "FENCES"]))
        self.assertEqual(tried[BACKWARD]["fails"], order)


class Stages(test_lease.Lease):
    """`lease` over stand-ins: kernels of which one fails but with some folder."""

    LISTING = f'if [ "$1" = --list ]; then printf "%s: test\\n" runs_repeat clusters::grids {BACKWARD} one; exit; fi\n'

    def broken(self, good):
        folder = self.folder / "kernels/WHOLE_PANELS"
        folder.mkdir(parents=True)
        (folder / KERNEL).write_text("")
        fails = f'[ "$2" != {BACKWARD} ] || [ "${{CPATTN_CUDA_KERNELS##*/}}" = {good} ]'
        return self.call("1", cuda_kernels=f"{self.LISTING}{fails}")

    def test_later_steps_and_stages_run_with_what_passed(self):
        done, record = self.broken("WHOLE_PANELS")
        chosen = {"CPATTN_CUDA_KERNELS": str(self.folder / "kernels/WHOLE_PANELS")}
        found = record["alternatives"]
        self.assertEqual(
            (found["failed"], found["variables"], found["folders"]), ([BACKWARD], chosen, ["WHOLE_PANELS"])
        )
        self.assertEqual(found["items"], {BACKWARD: [2]})
        self.assertIn(f"{BACKWARD} is the first to need items 2 of HARDWARE.md", done.stdout)
        self.assertIn(f"from here on: CPATTN_CUDA_KERNELS={chosen['CPATTN_CUDA_KERNELS']}", done.stdout)
        ran = {step["name"]: step.get("variables") for step in record["steps"]}
        self.assertNotIn("cuda_kernels clusters::grids", record["left_out"])
        self.assertEqual([ran[f"cuda_kernels {BACKWARD}"], ran["jit"], ran["cuda_plans two"]], [None, chosen, chosen])
        self.assertEqual(done.returncode, 1, "the library's own kernel has failed")
        _, record = self.call("2")
        self.assertEqual((record["variables"], record["steps"][-1]["variables"]), (chosen, chosen))
        rows = json.loads((self.folder / "out/rows.json").read_text())
        self.assertEqual({row["kernels"] for row in rows}, {"WHOLE_PANELS"})
        # The prepared folder may be elsewhere, as on another machine.
        (self.folder / "kernels").rename(self.folder / "moved")
        variables, said = lease.chosen(self.folder / "out/lease-1.json", self.folder / "moved")
        self.assertEqual((variables, said), ({alternatives.VARIABLE: str(self.folder / "moved/WHOLE_PANELS")}, ""))
        (self.folder / "moved").rename(self.folder / "kernels")
        # Without the folder the kernels would be those that failed.
        (self.folder / "kernels").rename(self.folder / "gone")
        self.begin("3", [])
        _, said = self.process.communicate()
        self.assertEqual(self.process.returncode, 1)
        self.assertIn("which is not there: bring it back", said)

    def test_where_nothing_passes_the_kernels_for_sm_80_are_used(self):
        _, record = self.broken("none")
        self.assertEqual(record["alternatives"]["variables"], {"CPATTN_CUDA_FAMILY": "sm_80"})
        self.assertEqual(record["alternatives"]["tried"], {BACKWARD: {"passes": [], "fails": ["WHOLE_PANELS"]}})
        self.assertEqual(record["steps"][-1]["variables"], {"CPATTN_CUDA_FAMILY": "sm_80"})
        self.assertIn("turned off", record["left_out"]["cuda_kernels clusters::grids"])
        self.assertNotIn("cuda_kernels clusters::grids", [step["name"] for step in record["steps"]])
        _, record = self.call("2")
        peers = {row["peer"] for row in json.loads((self.folder / "out/rows.json").read_text())}
        self.assertIn("ours-sm80", peers)
        self.assertFalse({"ours-sm90a", "ours-clusters"} & peers, "what failed is not measured")

    def test_it_is_said_where_kernels_that_failed_are_used(self):
        """Where stage 1 was ended before its search, and where nothing helped."""
        _, record = self.broken("none")
        path = self.folder / "out/lease-1.json"
        for found, expected in (
            (None, f"ended before it looked for others, and {BACKWARD} failed"),
            ({"variables": None, "why": "all fail"}, "all fail"),
        ):
            path.write_text(
                json.dumps(
                    {name: value for name, value in record.items() if name != "alternatives"}
                    | ({"alternatives": found} if found else {})
                )
            )
            variables, said = lease.chosen(path, self.folder)
            self.assertEqual(
                (variables, said.startswith(f"in {path}, "), said.endswith(expected)), ({}, True, True), said
            )

    def test_where_all_pass_nothing_is_tried(self):
        done, record = self.call("1", cuda_kernels=self.LISTING)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertFalse({"alternatives", "variables"} & set(record))
        self.assertEqual(lease.chosen(self.folder / "out/lease-1.json", self.folder), ({}, ""))


def load_tests(loader, _, __):
    """Those of this file: what `Stages` takes over from test_lease.py runs there."""
    suite = unittest.TestSuite()
    for case in (Page, Compile, Choice, Stages):
        suite.addTests(case(name) for name in loader.getTestCaseNames(case) if name in vars(case))
    return suite


if __name__ == "__main__":
    unittest.main()
