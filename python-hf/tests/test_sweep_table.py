# SPDX-License-Identifier: MIT OR Apache-2.0
"""The page of models that were tried: what is tried again replaces its row alone."""

from __future__ import annotations

import unittest
from pathlib import Path

from sweep_table import CAUSAL, IMAGES, MASKED, rows_of, updated

PAGE = Path(__file__).with_name("transformers_models.md").read_text()


class Table(unittest.TestCase):
    def test_the_page_is_what_is_made_of_its_rows(self) -> None:
        self.assertEqual(updated(PAGE, [], "2030-01-02"), PAGE)
        self.assertGreater(len(rows_of(PAGE)[CAUSAL]), 180)

    def test_one_model_tried_again(self) -> None:
        page = updated(PAGE, [("llama", "LlamaForCausalLM", "refused", "a | b <c>")], "2030-01-02")
        before, after = PAGE.split("\n"), page.split("\n")
        self.assertEqual(len(before), len(after))
        changed = [line for line in after if line not in before]
        self.assertEqual(len(changed), 2, changed)
        self.assertIn("| `llama` | LlamaForCausalLM | refused | a / b &lt;c> | 2030-01-02 |", changed)
        counts = [
            next(line for line in lines if line.startswith(f"| {CAUSAL} |")).split(" | ")[1:3]
            for lines in (before, after)
        ]
        self.assertEqual([int(counts[1][i]) - int(counts[0][i].rstrip(" |")) for i in range(2)], [-1, 1])

    def test_the_other_cell_of_a_model_of_images_stays(self) -> None:
        old = rows_of(PAGE)[IMAGES]["aria"]
        new = rows_of(updated(PAGE, [("images:aria", "Aria", "refused", "no")], "2030-01-02"))[IMAGES]["aria"]
        self.assertEqual(new, ["Aria", old[1], "refused: no", "2030-01-02"])

    def test_a_new_model(self) -> None:
        page = updated(PAGE, [("masked:aaa", "Aaa", "right", "loss 0")], "2030-01-02")
        self.assertEqual(rows_of(page)[MASKED]["aaa"], ["Aaa", "right", "loss 0", "2030-01-02"])


if __name__ == "__main__":
    unittest.main()
