# SPDX-License-Identifier: MIT OR Apache-2.0
"""The page of models that were tried (transformers_models.md), with new rows in the place of old ones.

The text of the page is written by hand and stays; what is made here is its tables: a row for each model with the day on
which it was tried, and the counts. So a few models can be tried again, and the page still says when each row is from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CAUSAL, MASKED, IMAGES = "Causal language models", "Masked language models", "Models of images and texts"
HEADS = {
    CAUSAL: "| model | class | result | | date |",
    MASKED: "| model | class | result | | date |",
    IMAGES: "| model | class | texts alone | with images | date |",
}
VERDICTS = ("right", "refused", "not tried")
COUNTS = "| | right | refused | not tried |"


def rows_of(page: str) -> dict[str, dict[str, list[str]]]:
    """The cells of each section's rows, by model: class, two cells of results, date."""
    found: dict[str, dict[str, list[str]]] = {title: {} for title in HEADS}
    section = ""
    for line in page.split("\n"):
        if line.startswith("## "):
            section = line[3:]
        elif match := re.match(r"\| `([^`]+)` \| (.*) \|$", line):
            found[section][match[1]] = [cell.strip() for cell in f" {match[2]} ".split(" | ")]
    return found


def updated(page: str, tried: Iterable[tuple[str, str, str, str]], day: str) -> str:
    """The page with what was tried on a day: the name of a model (`masked:`, `texts:` or `images:` before it), its class, a
    verdict and details."""
    sections = rows_of(page)
    for kind, made, verdict, detail in tried:
        of, _, name = kind.rpartition(":")
        text = detail.replace("|", "/").replace("<", "&lt;").replace("\n", " ")
        if of in ("texts", "images"):
            row = sections[IMAGES].get(name, [made, "", "", day])
            row[0], row[3], row[1 if of == "texts" else 2] = made, day, f"{verdict}: {text}"
            sections[IMAGES][name] = row
        else:
            sections[MASKED if of == "masked" else CAUSAL][name] = [made, verdict, text, day]
    lines = [page.split(COUNTS)[0].rstrip("\n"), "", COUNTS, "|---|---|---|---|"]
    for title, rows in sections.items():
        for column, what in ((1, ""),) if title != IMAGES else ((1, ", texts alone"), (2, ", with images")):
            # Of models of images the verdict stands before the details; there are other verdicts while a fault is looked for.
            verdicts = [row[column].split(":")[0] for row in rows.values()]
            lines.append(f"| {title}{what} | {' | '.join(str(verdicts.count(verdict)) for verdict in VERDICTS)} |")
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", HEADS[title], "|---|---|---|---|---|"]
        lines += [f"| `{name}` | {' | '.join(rows[name])} |" for name in sorted(rows)]
    return "\n".join(lines) + "\n"
