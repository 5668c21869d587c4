# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is run first of ptx/HARDWARE.md, and the other kernels that are tried where a test of it fails.

`FIRST`, `SWITCHES` and `SETS` are all that the scripts know of that page; test_alternatives.py compares them with it. A
folder of kernels (`kernels.py` makes them, `CPATTN_CUDA_KERNELS` names one) has the name of its switches, or `CUBINS`.
"""

import time
import typing

VARIABLE = "CPATTN_CUDA_KERNELS"


class Listed(typing.NamedTuple):
    """A test of *The first two minutes*."""

    line: str
    """Variables, if any, and a test of cuda_kernels."""
    items: tuple
    """What it is the first to need, by the page's numbers."""
    kernels: tuple
    """How the names of the texts begin that it runs: a folder without such a text changes nothing in it."""
    needed: bool = True
    """Whether calls run these kernels by default, so that they may not stay in use if it fails."""


SM_80 = "CPATTN_CUDA_FAMILY=sm_80 runs_repeat"
"""The test of what is left where no alternative helps."""

FIRST = (
    Listed(SM_80, (1, 6), ("forward_", "fused_"), needed=False),
    Listed("hopper_walks::bf16_128", tuple(range(3, 12)), ("hopper_forward_bf16_128",)),
    Listed("hopper_backward::bf16_128", (5, 6, 7, 8), ("hopper_backward_bf16_128", "hopper_forward_bf16_128")),
    Listed("hopper_backward::bf16_64", (2,), ("hopper_backward_bf16_64", "hopper_forward_bf16_64")),
    Listed("hopper_backward::bf16_192128", (2, 4), ("hopper_backward_bf16_192128", "hopper_forward_bf16_192128")),
    Listed("hopper_backward::bf16_256", (7, 10), ("hopper_backward_bf16_256", "hopper_forward_bf16_256")),
    Listed("hopper_walks::bf16_64", (4,), ("hopper_forward_bf16_64",)),
    Listed("hopper_walks::bf16_192128", (7,), ("hopper_forward_bf16_192128",)),
    Listed("hopper_walks::bf16_256", (7,), ("hopper_forward_bf16_256",)),
    Listed("hopper_backward_shared::groups", (9,), ("hopper_backward_bf16_64", "hopper_forward_bf16_64")),
    Listed("shared_tiles::groups", (9,), ("hopper_forward_bf16_64",)),
    Listed("hopper_backward::runs_repeat", (6,), ("hopper_",)),
    Listed("hopper::counters_come_back_to_zero", (13,), ("hopper_forward_bf16_64",)),
    Listed("clusters::bf16_128", (14,), ("hopper_cluster_bf16_128",), needed=False),
    Listed("hopper_walks::bf16_96", (19,), ("hopper_forward_bf16_96",), needed=False),
    Listed("hopper_walks::bf16_192", (19,), ("hopper_forward_bf16_192",), needed=False),
    Listed("wide::dims", (1,), ("forward_", "backward_"), needed=False),
)
"""In the order of the page."""

SWITCHES = {
    "WHOLE_PANELS": (2,),
    "WRAPPED_MAPS": (3,),
    "LOAD_STORE": (5,),
    "FENCES": (6, 11),
    "PAUSE": (6, 18),
    "PANEL_PRODUCTS": (7,),
    "SMALL_TILES": (7, 15),
    "ROUND_BASE": (8,),
    "NO_EMPTY_BOXES": (9,),
    "WAIT_ALL": (10,),
    "FIXED_ITEMS": (13,),
    "RELEASE": (14,),
    "RED_V4": (16,),
    "NO_PREFETCH": (22,),
}
"""Switches of the compiler, and the items of the page that name them."""

WAITS = ("FENCES", "WAIT_ALL", "RELEASE", "NO_PREFETCH")
SETS = (
    WAITS,
    (*WAITS, "LOAD_STORE", "PANEL_PRODUCTS", "ROUND_BASE", "NO_EMPTY_BOXES"),
    (*WAITS, "WHOLE_PANELS", "RED_V4", "PAUSE"),
)
"""Several at once, for a device that refutes more than one item: those that the page says were run together."""

APART, APART_SETS = "apart", ("CLUSTER", "FORWARD_96_192")
"""Kernels that no library has, and what ptx/compile calls them: a folder for the tests and cases that are about them. The
folders of switches have them too."""

CUBINS = "cubins"
CUBIN_ITEMS = (4, 21)
"""The kernels for sm_90a as they are, by the pinned compiler in the place of the driver's."""

ALL = {**{name: (name,) for name in SWITCHES}, **{"+".join(names): names for names in SETS}, CUBINS: ()}
"""The folders, and the switches of each."""

LIMIT_S, BUDGET_S, LEAST_S = 20.0, 120.0, 5.0
"""Of one try, of all of them, and what a try needs to begin."""


def items_of(folder):
    return CUBIN_ITEMS if folder == CUBINS else {item for switch in ALL[folder] for item in SWITCHES[switch]}


def ordered(listed, root):
    """The folders below `root` that change a kernel of the test: those of its items first, in the order of the items
    and one switch before several, then the others."""

    def rank(folder):
        shared = [listed.items.index(item) for item in items_of(folder) if item in listed.items]
        return not shared, len(ALL[folder]) > 1, min(shared, default=0)

    return sorted((folder for folder in ALL if touches(root / folder, listed)), key=rank)


def touches(folder, listed):
    """Whether a folder has a kernel that the test runs."""
    return folder.is_dir() and any(path.name.startswith(listed.kernels) for path in folder.iterdir())


class Search:
    """Tries folders of kernels for tests that failed: each test with each folder in a process of its own."""

    def __init__(self, stage, root, tests, limit_s=LIMIT_S, budget_s=BUDGET_S):
        """`tests` has what is run for each of `FIRST` that came along."""
        self.stage, self.root, self.tests, self.limit_s = stage, root, tests, limit_s
        self.until, self.seen, self.lost = time.monotonic() + budget_s, {}, False

    def passes(self, folder, listed):
        """Whether a test passes with a folder; None where there is no time left, or no device."""
        if (folder, listed) not in self.seen:
            limit_s = min(self.limit_s, self.until - time.monotonic())
            if self.lost or limit_s < LEAST_S:
                return None
            test = self.tests[listed]
            env = test.env | {VARIABLE: str(self.root / folder)}
            done = self.stage.steps.run(f"{test.name} with {folder}", test.command, limit_s, env)
            if done is None:
                return None
            self.seen[folder, listed] = done["ok"]
            self.lost = bool(done.get("timed_out")) and not self.stage.alive()
        return self.seen[folder, listed]

    def all_pass(self, folder, some):
        return all(self.passes(folder, listed) for listed in some)

    def choose(self, failed):
        """The variables with which all that is needed passes: those of the first folder that does it, else those of
        the family sm_80 if that does. None are needed where only kernels failed that no call runs by default. Returns
        them and a sentence; None in their place where nothing helps."""
        for listed in sorted(failed, key=lambda listed: not listed.needed):
            # What helped another test comes first.
            helped = [folder for (folder, _), ok in self.seen.items() if ok]
            for folder in sorted(ordered(listed, self.root), key=lambda folder: folder not in helped):
                if self.passes(folder, listed) in (True, None):
                    break
        needed = [listed for listed in failed if listed.needed]
        if not needed:
            return {}, "no call runs by default what failed"
        # Most likely those that have passed some test. What passed with the own kernels has to with these.
        score = {folder: sum(ok for (of, _), ok in self.seen.items() if of == folder) for folder in ALL}
        for folder in sorted(ordered(needed[0], self.root), key=lambda folder: -score[folder]):
            if not all(touches(self.root / folder, listed) for listed in needed):
                continue
            others = [
                listed
                for listed in self.tests
                if listed.needed and listed not in failed and touches(self.root / folder, listed)
            ]
            if self.all_pass(folder, needed) and self.all_pass(folder, others):
                return {VARIABLE: str(self.root / folder)}, f"all that is needed passes with {folder}"
        why = "no folder was found with which all that is needed passes"
        if self.lost:
            why = "the device answered no more"
        elif not any((self.root / folder).is_dir() for folder in ALL):
            why = f"{self.root} has no folders of kernels: benches/peers/prepare makes them, in the repository benches/peers/kernels.py"
        if any(listed.line == SM_80 for listed in failed):
            return None, f"{why}, and the kernels for sm_80 fail too"
        return {"CPATTN_CUDA_FAMILY": "sm_80"}, why

    def tried(self):
        """What passed and what did not, for the record."""
        found = {}
        for (folder, listed), ok in self.seen.items():
            found.setdefault(listed.line, {"passes": [], "fails": []})["passes" if ok else "fails"].append(folder)
        return found
