"""Write the documents' tables from committed results: README.md's and docs/benchmarks/results.md.

``python -m benchmarks.report`` writes both from ``benchmarks/results``; ``--check`` only says
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
DOCUMENT = ROOT / "docs" / "benchmarks" / "results.md"
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
DEVICE_LEGEND = (
    "Milliseconds, medians. Cold and warm: GPU time with the second-level cache flushed or not; "
    "graph: a replay of the captured call; wall: a call and the wait for it; host: a call without "
    "the wait; peak: device memory that a call took. Of the copy: the time of a copy in the same "
    "run over the cold time: on the device as many bytes as must be read and written, or, for "
    "packing, one from pinned memory of the bytes that are sent. A star: so short (less than 20 "
    "microseconds) that the launch is what is measured. A dash: not measured, or nothing to "
    "capture."
)


def load(folder: Path = RESULTS) -> list[Record]:
    """Return the committed results: the host's; a device's, of one run or of `make hardware`."""
    host, device = folder / "cpu.json", folder / "gpu.json"
    found = [json.loads(path.read_text()) for path in (host, device) if path.exists()]
    return found if device.exists() else [*found, *device_report.of_parts(folder)]


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
    parts = [BEGIN]
    for one in results:
        if one["measured"] == "gpu":
            parts += [device_report.in_short(one), provenance(one)]
            continue
        rows = []
        for promise in PROMISES:
            records = [record for record in one["contests"] if record["job"] == promise.job]
            times = [found for record in records if (found := ratio(record, promise)) is not None]
            if times:
                rows.append(f"| {promise.words} | {min(times):.1f} to {max(times):.0f} |")
        if rows:
            parts.append("\n".join(["| | times faster |", "|---|---|", *rows]))
        parts.append(provenance(one))
    return "\n\n".join([*parts, END])


def document(results: Sequence[Record]) -> str:
    """Return docs/benchmarks/results.md: every table."""
    parts = ["# Benchmark results", "Written by `python -m benchmarks.report`; [rules](README.md)."]
    for one in results:
        if series(one):
            parts.append(f"![milliseconds to pack, against tokens]({_plot(one)})")
        parts += _introduced(one)
    calls = device_report.of_calls(RESULTS)
    return "\n\n".join([*parts, calls] if calls else parts) + "\n"


def _introduced(results: Record) -> list[str]:
    if results["measured"] == "gpu":
        ended = device_report.outcomes(results, RESULTS) if "parts" in results else ""
        said = [device_report.in_short(results), ended, device_report.table(results), DEVICE_LEGEND]
    else:
        said = [in_short(results), LEGEND]
    return [part for part in (*said, render(results).strip()) if part]


def _plot(results: Record) -> str:
    return f"sizes_{results['measured']}.png"


def written(results: Sequence[Record]) -> dict[Path, str]:
    """Return what each document is to hold."""
    readme = README.read_text()
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise SystemExit(f"{README.name} must hold each marker once: {BEGIN} and {END}")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return {README: before + speed_section(results) + after, DOCUMENT: document(results)}


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
            write_png(results, DOCUMENT.parent / _plot(results))
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what its results say: python -m benchmarks.report")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
