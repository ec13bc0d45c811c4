"""Write the documents' tables from committed results: of README.md and docs/benchmarks.

``python -m benchmarks.report`` writes them from ``benchmarks/results``; ``--check`` only says
whether they are what it would write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import device_report
from benchmarks.contest import OURS
from benchmarks.plots import series, write_png
from benchmarks.promises import FROM_ARRAYS, FROM_LISTS, PACK_ONLY, PROMISES, promised, ratio
from benchmarks.tables import Record, entry_of, provenance, render, short, winners

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks" / "README.md"
DOCUMENT = PAGE.with_name("results.md")
PLOT = "sizes_cpu.png"
BEGIN = "<!-- speed: begin; written by python -m benchmarks.report -->"
END = "<!-- speed: end -->"
LEGEND = (
    "Milliseconds, best round / median round; contenders in turn in one run, each result first "
    "compared with the reference. In brackets: how many times slower or faster than ours end to "
    "end; bold: faster, by best and by median. Fresh memory is noisy: where best and median are "
    f"far apart, pages were being made. `{OURS}` checks, stores and packs; the others check "
    f"nothing. `{PACK_ONLY}` packs a buffer that was filled before. A: 4,096 sequences of 50 to "
    "4,000 tokens; B: 64 of 32,768; C: 100,000 of 1 to 64; power law: 2,000 of 200 to 32,768; "
    "256 x 5 and 256 x 32: conversations and their turns."
)


def load(folder: Path = RESULTS) -> list[Record]:
    """Return the committed results of the host, if there are any."""
    host = folder / "cpu.json"
    return [json.loads(host.read_text())] if host.exists() else []


def in_short(results: Record) -> str:
    """Say what is faster than what, by how much, and where it is not: from the results alone."""
    said = []
    for promise in PROMISES:
        kept, less, floors = [], [], [f"{promise.times:g}"]
        for record in results["contests"]:
            times = ratio(record, promise) if record["job"] == promise.job else None
            if times is None:
                continue
            wanted, why = promised(record, promise)
            if why:
                floors.append(f"on {short(record)} below {wanted:g}")
            if times < promise.times:
                less.append(f"{times:.2g} times on {short(record)} ({why or 'not kept'})")
            else:
                kept.append(times)
        if kept:
            but = f"; less: {'; '.join(less)}" if less else ""
            said.append(
                f"- **{min(kept):.0f} to {max(kept):.0f} times faster**: {promise.words} (the "
                f"benchmark fails below {', '.join(floors)}){but}."
            )
    return "\n".join([*said, _slower(results)]).strip()


def _slower(results: Record) -> str:
    """Say in a line where rivals that do the whole job are faster."""
    where: dict[str, list[str]] = {}
    most = 1.0
    records = [one for one in results["contests"] if one["job"] in (FROM_ARRAYS, FROM_LISTS)]
    for name, record in winners(records):
        source = "arrays" if record["job"] == FROM_ARRAYS else "lists"
        where.setdefault(name, []).append(f"{short(record)} ({source})")
        ours, rival = (entry_of(record, one) for one in (OURS, name))
        most = max(most, ours["best_ms"] / rival["best_ms"])
    if not where:
        return ""
    listed = "; ".join(f"`{name}` on {', '.join(names)}" for name, names in where.items())
    return (
        f"- **Up to {most:.2g} times slower** end to end than code written by hand that checks and "
        f"stores nothing: {listed}."
    )


def speed_section(results: Sequence[Record]) -> str:
    """Return README's part between the markers: promises, the device's lines, the hardware."""
    parts = []
    for one in results:
        rows = []
        for promise in PROMISES:
            records = [record for record in one["contests"] if record["job"] == promise.job]
            times = [found for record in records if (found := ratio(record, promise)) is not None]
            if times:
                rows.append(f"| {promise.words} | {min(times):.1f} to {max(times):.0f} |")
        if rows:
            parts.append("\n".join(["| | times faster |", "|---|---|", *rows]))
        parts.append(provenance(one))
    return "\n\n".join([*parts, device_report.in_short(RESULTS)])


def document(results: Sequence[Record]) -> str:
    """Return docs/benchmarks/results.md: every table."""
    parts = ["# Benchmark results", "Written by `python -m benchmarks.report`; [rules](README.md)."]
    for one in results:
        if series(one):
            parts.append(f"![milliseconds to pack, against tokens]({PLOT})")
        parts += [in_short(one), LEGEND, render(one).strip()]
    return "\n\n".join([*parts, device_report.raw(RESULTS)]) + "\n"


def written(results: Sequence[Record]) -> dict[Path, str]:
    """Return what each document is to hold."""
    texts = {DOCUMENT: document(results)}
    for path, section in ((README, speed_section(results)), (PAGE, device_report.page(RESULTS))):
        text = path.read_text()
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            raise SystemExit(f"{path.name} must hold each marker once: {BEGIN} and {END}")
        before, rest = text.split(BEGIN)
        texts[path] = "".join([before, BEGIN, f"\n\n{section}\n\n", END, rest.split(END)[1]])
    return texts


def main(arguments: Sequence[str]) -> int:
    """Write the documents, or with ``--check`` name those that are not up to date."""
    if not set(arguments) <= {"--check"}:
        raise SystemExit("usage: python -m benchmarks.report [--check]")
    texts = written(load())
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if not arguments:
        for path in stale:
            path.write_text(texts[path])
        for results in filter(series, load()):
            write_png(results, DOCUMENT.parent / PLOT)
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what its results say: python -m benchmarks.report")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
