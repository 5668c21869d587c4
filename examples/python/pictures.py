# SPDX-License-Identifier: MIT OR Apache-2.0
"""The picture of these examples: a number of each step, of one run and on top of it of others."""


def of_runs(title, runs, place=60):
    """An SVG of (name, numbers) of each run: the first as a wide line. `place` is the height of the names."""
    every = [number for _, numbers in runs for number in numbers]
    low, high = min(every), max(every)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 460 300" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="460" height="300" fill="white"/><text x="50" y="22" font-size="14">{title}</text>')
    for number, y in ((high, 40), ((low + high) / 2, 145), (low, 250)):
        parts.append(
            f'<path d="M50 {y}h390" stroke="#ddd"/><text x="44" y="{y + 4}" text-anchor="end">{number:.2f}</text>'
        )
    parts.append(f'<text x="50" y="268">1</text><text x="440" y="268" text-anchor="end">step {len(runs[0][1])}</text>')
    for at, (name, numbers) in enumerate(runs):
        color, width = ("#f5a742", 6) if at == 0 else ("#1d4ed8", 1.5)
        step = 390 / max(len(numbers) - 1, 1)
        points = " ".join(
            f"{50 + step * n:.1f},{40 + 210 * (high - number) / max(high - low, 1e-9):.1f}"
            for n, number in enumerate(numbers)
        )
        y = place + 18 * at
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        parts.append(
            f'<path d="M240 {y - 4}h24" stroke="{color}" stroke-width="{width}"/><text x="270" y="{y}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
