# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows of results, the table and the plot made of them. Nothing here measures, and nothing here makes numbers up: a time
that is missing stays missing in all three."""

import statistics
from xml.sax.saxutils import escape

COLOURS = {
    "cudnn": "#4477aa",
    "flash": "#ee6677",
    "flash-deterministic": "#228833",
    "varlen": "#ccbb44",
    "varlen-deterministic": "#66ccee",
    "cudnn-varlen": "#004488",
    "fa3": "#bb5566",
    "fa3-varlen": "#ddaa33",
    "triton": "#000000",
    "copy": "#aa3377",
    "ours-first": "#bbbbbb",
    "ours-sm80": "#aaaa00",
    "ours-sm90a": "#332288",
    "ours-clusters": "#117733",
    "torch": "#4477aa",
    "torch-loop": "#228833",
    "torch-masked": "#ccbb44",
    "ours-dense": "#bbbbbb",
}


def merge(case, ours, peer, peer_times, failed=None, about=None):
    """One row. `ours` are the answers of our rounds, `peer_times` the seconds of the peer's; whoever failed has none. Where
    ours failed, `about` says why (`ours_failed`), and what else an answer would have said.

    tflops and tb_per_s are given at each round's own time and scaled to the median of the rounds.
    """
    ours_s = statistics.median(answer["ours_s"] for answer in ours) if ours else None
    peer_s = statistics.median(peer_times) if peer_times else None
    first = ours[0] if ours else {}

    def rate(name):
        value = first.get(name)
        return None if value is None else value * first["ours_s"] / ours_s

    row = {
        "case": case,
        "direction": first.get("direction"),
        "dtype": first.get("dtype"),
        "family": first.get("family"),
        "clusters": first.get("clusters"),
        "ours_s": ours_s,
        "peer": peer,
        "peer_s": peer_s,
        "ratio": peer_s / ours_s if peer_s is not None and ours_s is not None else None,
        "tflops": rate("tflops"),
        "tb_per_s": rate("tb_per_s"),
        "ours_rounds_s": [answer["ours_s"] for answer in ours],
        "peer_rounds_s": list(peer_times),
        "error": max((answer["error"] for answer in ours), default=None),
    }
    if failed:
        row["failed"] = failed
    return row | (about or {})


def share(row, ceilings):
    """Which of the ceilings of `machine.py` bounds a row, and the part of it that ours reaches."""
    name, rate = (
        ("copy_tb_per_s", row["tb_per_s"]) if row["tb_per_s"] is not None else ("matmul_bf16_tflops", row["tflops"])
    )
    best = (ceilings or {}).get(name)
    if best is None or rate is None:
        return {"ceiling": None, "ceiling_value": None, "ceiling_share": None}
    return {"ceiling": name, "ceiling_value": best, "ceiling_share": rate / best}


def seconds(value):
    return "-" if value is None else f"{value * 1e3:.4f}"


def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def columns(lines, left):
    """Lines of cells, one under another; those of the columns `left` begin at the same place, others end there."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def table(rows):
    """Times in milliseconds, ratio = peer / ours: above 1 we are faster."""
    head = ("case", "dtype", "ours ms", "TFLOP/s", "TB/s", "peer", "peer ms", "ratio")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row["case"],
                row["dtype"],
                seconds(row["ours_s"]) if "ours_failed" not in row else "failed",
                number(row["tflops"], 1),
                number(row["tb_per_s"], 3),
                row["peer"] or "-",
                seconds(row["peer_s"]) if "failed" not in row else "refused",
                number(row["ratio"], 3),
            )
        )
    refused = [f"{row['case']}, {row['peer']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([columns(lines, left=(0, 1, 5))] + ([""] + refused if refused else []))


def plot(rows, title):
    """An SVG of horizontal bars: the ratio of every row that has one, with a line where both are equal."""
    bars = [row for row in rows if row["ratio"] is not None]
    names = list(dict.fromkeys(row["case"] for row in bars))
    label, width, bar, gap, top = 330, 560, 12, 8, 70
    largest = max([row["ratio"] for row in bars] + [1.25])
    scale = width / largest
    out, y = [], top
    for name in names:
        mine = [row for row in bars if row["case"] == name]
        middle = y + bar * len(mine) / 2 + 4
        out.append(f'<text x="{label - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        for row in mine:
            length = row["ratio"] * scale
            colour = COLOURS.get(row["peer"], "#000000")
            out.append(f'<rect x="{label}" y="{y}" width="{length:.1f}" height="{bar - 1}" fill="{colour}"/>')
            out.append(f'<text x="{label + length + 4:.1f}" y="{y + bar - 2}" font-size="10">{row["ratio"]:.2f}</text>')
            y += bar
        y += gap
    one = label + scale
    out.append(f'<line x1="{one:.1f}" y1="{top - 6}" x2="{one:.1f}" y2="{y}" stroke="#000000" stroke-dasharray="4 3"/>')
    x = label
    for peer in dict.fromkeys(row["peer"] for row in bars):
        out.append(f'<rect x="{x}" y="38" width="10" height="10" fill="{COLOURS.get(peer, "#000000")}"/>')
        out.append(f'<text x="{x + 14}" y="47">{escape(peer)}</text>')
        x += 24 + 7 * len(peer)
    if not bars:
        out.append(f'<text x="{label}" y="{top}">nothing was compared</text>')
        y += 20
    size = f'width="{max(label + width + 60, x)}" height="{y + 20}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="12" y="22" font-size="14">{escape(title)}</text>',
            '<text x="12" y="47">peer time / our time: longer is better for us</text>',
            *out,
            "</svg>",
            "",
        ]
    )
