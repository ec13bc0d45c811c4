"""Tables of results: for the terminal, and, from committed results, for the documents.

The documents are the speed section of README.md and docs/benchmarks/README.md.

``python -m benchmarks.report`` writes both from ``benchmarks/results``; ``--check`` only says
whether they are what it would write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import OURS
from benchmarks.reasons import REASONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "benchmarks" / "README.md"
BEGIN = "<!-- speed: begin; written by python -m benchmarks.report -->"
END = "<!-- speed: end -->"
SHORT_JOBS = ("pack, from arrays", "pack, from lists", "pack to the device")
SIZES = "cost against size"
SHOWN_SIZES = 5
DEVICE_COLUMNS = {
    "cold_ms": "cold ms",
    "warm_ms": "warm ms",
    "graph_ms": "graph ms",
    "wall_ms": "wall ms",
    "enqueue_ms": "host ms",
    "launches": "launches",
    "copies": "copies",
    "waits": "waits",
    "of_copy": "of the copy",
}
Record = dict[str, Any]


def render(results: Record, jobs: Sequence[str] | None = None) -> str:
    """Return every table of one results file as markdown that also reads well as text."""
    records = results["contests"]
    named = list(dict.fromkeys(record["job"] for record in records))
    parts = [provenance(results)]
    for job in named:
        if jobs is None or job in jobs:
            of_job = [record for record in records if record["job"] == job]
            parts.append(_device_tables(of_job) if "device" in of_job[0] else _host_table(of_job))
    return "\n\n".join(parts) + "\n"


def provenance(results: Record) -> str:
    """Return the line without which a number is not a number."""
    hardware, versions = results["hardware"], results["versions"]
    machine = hardware.get("gpu", f"{hardware['cores']} cores of {hardware['processor']}")
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{machine}; {packages}; commit {results['commit']}; `{results['command']}`."


def _host_table(records: list[Record]) -> str:
    if records[0]["job"] == SIZES:
        last = len(records) - 1
        shown = {round(last * step / (SHOWN_SIZES - 1)) for step in range(SHOWN_SIZES)}
        records = [record for index, record in enumerate(records) if index in shown]
    names = list(
        dict.fromkeys(entry["contender"] for record in records for entry in record["entries"])
    )
    head = ["milliseconds", *(f"{_short(record)}" for record in records), "wrote"]
    tokens = ["tokens", *(_count(record["tokens"]) for record in records), ""]
    rows = [
        [name, *(_cell(record, name) for record in records), _wrote(records, name)]
        for name in names
    ]
    return "\n\n".join(
        part
        for part in (
            f"**{records[0]['job']}**",
            _markdown([head, tokens, *rows]),
            _notes(records),
        )
        if part
    )


def _cell(record: Record, name: str) -> str:
    entry = _entry(record, name)
    if entry is None or entry["best_ms"] is None:
        return "-"
    shown = _milliseconds(entry["best_ms"])
    ours = _entry(record, OURS)
    if name.startswith(OURS) or ours is None or not ours["best_ms"]:
        return shown
    ratio = entry["best_ms"] / ours["best_ms"]
    cell = f"{shown} ({ratio:.2g}x)" if ratio < 10 else f"{shown} ({ratio:.0f}x)"
    return f"**{cell}**" if _is_rival(name) and ratio < 1 else cell


def _notes(records: list[Record]) -> str:
    """Say where a rival wins and why, and who could not take part."""
    faster: dict[str, dict[str, list[str]]] = {}
    for name, record in winners(records):
        reason = REASONS.get(name, "of what is not known")
        faster.setdefault(reason, {}).setdefault(name, []).append(_short(record))
    absent: dict[str, list[str]] = {}
    for record in records:
        for entry in record["entries"]:
            if entry["note"]:
                text = f"{entry['contender']}: {entry['note']}"
                absent.setdefault(text, []).append(_short(record))
    lines = [
        "- Faster than ours: "
        + "; ".join(f"{name} on {', '.join(where)}" for name, where in names.items())
        + f". Because {reason}."
        for reason, names in faster.items()
    ]
    lines += [f"- {text}: {', '.join(where)}." for text, where in absent.items()]
    return "\n".join(lines)


def winners(records: Iterable[Record]) -> list[tuple[str, Record]]:
    """Return the rivals that beat ours, with the record of each."""
    found = []
    for record in records:
        ours = _entry(record, OURS)
        for entry in record["entries"]:
            if ours is None or ours["best_ms"] is None or entry["best_ms"] is None:
                continue
            if _is_rival(entry["contender"]) and entry["best_ms"] < ours["best_ms"]:
                found.append((entry["contender"], record))
    return found


def _device_tables(records: list[Record]) -> str:
    head = ["workload", "contender", *DEVICE_COLUMNS.values(), "wrote"]
    rows = []
    for record in records:
        for entry in record["entries"]:
            values = [_measured(entry, column) for column in DEVICE_COLUMNS]
            rows.append([_short(record), entry["contender"], *values, entry["wrote"]])
    parts = [f"**{records[0]['job']}**", _markdown([head, *rows]), _notes(records)]
    return "\n\n".join(part for part in parts if part)


def _measured(entry: Record, column: str) -> str:
    value = entry.get(column)
    if value is None or entry["best_ms"] is None:
        return "-"
    if column == "of_copy":
        return f"{value:.0%}"
    return _milliseconds(value) if column.endswith("_ms") else str(value)


def _entry(record: Record, name: str) -> Record | None:
    return next((entry for entry in record["entries"] if entry["contender"] == name), None)


def _wrote(records: list[Record], name: str) -> str:
    entries = (_entry(record, name) for record in records)
    return next(entry["wrote"] for entry in entries if entry is not None)


def _is_rival(name: str) -> bool:
    return not name.startswith((OURS, "copy "))


def _short(record: Record) -> str:
    name = record["workload"]
    return name.split(": ", 1)[-1] if name.startswith("multi-turn") else name.split(":")[0]


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(value: int) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,}"


def _markdown(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def load(folder: Path = RESULTS) -> list[Record]:
    """Return the committed results, the host's first."""
    paths = (folder / f"{device}.json" for device in ("cpu", "gpu"))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


LEGEND = (
    "The best round of each, contenders in turn in one run, each result first compared with the "
    "reference. In brackets: how many times our time. Bold: faster than ours end to end. "
    f"`{OURS}` checks, stores and packs; the others check nothing."
)


def speed_section(results: Sequence[Record]) -> str:
    """Return README's part between the markers."""
    parts = [BEGIN, LEGEND, *(render(one, SHORT_JOBS).strip() for one in results)]
    if not any("gpu" in one["hardware"] for one in results):
        parts.append("No GPU was measured; `make bench-gpu` is for a machine that has one.")
    return "\n\n".join([*parts, END])


def document(results: Sequence[Record]) -> str:
    """Return docs/benchmarks/README.md: every table."""
    head = (DOCUMENT.parent / "jobs.md").read_text().strip()
    parts = [head, LEGEND]
    for one in results:
        parts.append(f"![milliseconds to pack, against tokens]({_plot(one)})")
        parts.append(render(one).strip())
    return "\n\n".join(parts) + "\n"


def _plot(results: Record) -> str:
    return f"sizes_{'gpu' if 'gpu' in results['hardware'] else 'cpu'}.png"


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
        from benchmarks.plots import write_png  # which itself needs this module

        for path in stale:
            path.write_text(texts[path])
        for results in load():
            write_png(results, DOCUMENT.parent / _plot(results))
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what its results say: python -m benchmarks.report")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
