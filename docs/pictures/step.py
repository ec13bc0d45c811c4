"""Draw ``step.svg``: one training step of the same rollouts, four ways, as measured on a device.

``python docs/pictures/step.py`` writes the picture beside this file from the rows of item "step" in
``benchmarks/results/hardware``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "hardware"
WAYS = ("padded", "turns", "merged", "tree")
PANELS = ("tokens computed", "ms of forward and backward", "GiB at most")
ALL, TRAINED, INK, PALE = "#c3cad3", "#4c8bf5", "#1f2933", "#7b8794"
LEFT, WIDTH, GAP, ROW = 78, 196, 84, 40


def step_of(results: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the last call that has steps, and their rows."""
    for file in sorted(results.glob("call*.json"), reverse=True):
        call = json.loads(file.read_text())
        rows = [row for row in call["rows"] if row["item"] == "step" and "ms" in row]
        if rows:
            return call, rows
    raise SystemExit(f"{results} has no steps: make hardware")


def values_of(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return what the panels show of a row."""
    return row["tokens"], min(row["ms"]), row["peak_mib"] / 2**10


def text(x: float, y: float, words: str, colour: str = INK, **options: str) -> str:
    """Return a text, which starts at a place."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in options.items())
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{more}>{words}</text>'


def bars(x: float, y: float, pair: list[float], most: float, form: str) -> list[str]:
    """Return a bar of all rows and one of trained rows; one where they are alike."""
    shown = pair[1:] if pair[0] == pair[1] else pair
    height, parts = 28 / len(shown), []
    for number, value in enumerate(shown):
        top, length = y + number * (height + 1), max(2.0, WIDTH * value / most)
        colour = TRAINED if number == len(shown) - 1 else ALL
        size = f'width="{length:.1f}" height="{height:.1f}"'
        parts.append(f'<rect x="{x}" y="{top:.1f}" {size} rx="2" fill="{colour}"/>')
        parts.append(text(x + length + 5, top + height / 2 + 4, form.format(value), font_size="12"))
    return parts


def picture(results: Path = RESULTS) -> str:
    """Return the SVG."""
    call, rows = step_of(results)
    parts, y = [], 84
    for number, title in enumerate(PANELS):
        parts.append(text(LEFT + number * (WIDTH + GAP), 58, title, PALE))
    for name in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == name]
        parts.append(text(14, y + 6, name, font_weight="bold"))
        y += 18
        most = [max(column) for column in zip(*map(values_of, own), strict=True)]
        for way in WAYS:
            parts.append(text(LEFT - 10, y + 19, way, text_anchor="end"))
            by_trained = {row["trained"]: values_of(row) for row in own if row["way"] == way}
            for number, form in enumerate(("{:,.0f}", "{:.0f}", "{:.1f}")):
                pair = [by_trained[trained][number] for trained in (False, True)]
                x = LEFT + number * (WIDTH + GAP)
                parts += bars(x, y, pair, most[number], form)
            y += ROW
        y += 20
    hardware = call["hardware"]["gpu"]
    versions = ", ".join(f"{one} {call['versions'][one]}" for one in ("torch", "triton"))
    said = f"8 layers of Qwen3-0.6B with its LM head, bfloat16; {hardware}, {versions}, commit "
    parts.append(text(14, y + 4, said + call["commit"][:7], PALE, font_size="12"))
    width = LEFT + 3 * (WIDTH + GAP)
    legend = ((ALL, "all rows through the LM head", 0), (TRAINED, "trained rows alone", 240))
    for colour, words, at in legend:
        parts.append(f'<rect x="{LEFT + at}" y="16" width="14" height="14" fill="{colour}"/>')
        parts.append(text(LEFT + at + 20, 28, words))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 18}" '
        f'width="{width}" height="{y + 18}" font-family="sans-serif" font-size="14" role="img">\n'
        f'<rect width="{width}" height="{y + 18}" rx="8" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
