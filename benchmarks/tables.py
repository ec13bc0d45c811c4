"""Tables of results as markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.contest import OURS
from benchmarks.promises import LISTS, PACK_ONLY, THREE, targets
from benchmarks.reasons import reason

SIZES = "cost against size"
SHOWN_SIZES = 5
FIRST = (OURS, PACK_ONLY, LISTS, THREE)
Record = dict[str, Any]


def render(results: Record) -> str:
    """Return every table of one results file."""
    records = results["contests"]
    parts = [provenance(results)]
    for job in dict.fromkeys(record["job"] for record in records):
        of_job = _thinned([record for record in records if record["job"] == job])
        if described := of_job[0].get("described"):  # of another run than the others
            parts.append(provenance(described | {"measured": results["measured"]}))
        parts.append(_host_table(of_job))
    if rows := targets(records):
        parts.append(markdown([["promise", "on", "times as fast", "measured", "kept"], *rows]))
    return "\n\n".join(parts) + "\n"


def provenance(results: Record) -> str:
    """Return the line without which a number is not a number."""
    hardware, versions = results["hardware"], results["versions"]
    machine = f"{hardware['cores']} cores of {hardware['processor']}"
    if results["measured"] == "gpu" and "gpu" in hardware:  # there is none in a rehearsal
        machine = f"{hardware['gpu']}, CUDA {hardware['cuda']}; {machine}"
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{machine}; {packages}; commit {results['commit']}; `{results['command']}`."


def _thinned(records: list[Record]) -> list[Record]:
    if records[0]["job"] != SIZES or len(records) <= SHOWN_SIZES:
        return records
    last = len(records) - 1
    shown = {round(last * step / (SHOWN_SIZES - 1)) for step in range(SHOWN_SIZES)}
    return [record for index, record in enumerate(records) if index in shown]


def _host_table(records: list[Record]) -> str:
    there = {entry["contender"]: None for record in records for entry in record["entries"]}
    names = [name for name in FIRST if name in there] + [n for n in there if n not in FIRST]
    head = ["ms, best / median", *(short(record) for record in records), "wrote"]
    tokens = ["tokens", *(_count(record["tokens"]) for record in records), ""]
    rows = [
        [name, *(_cell(record, name) for record in records), _wrote(records, name)]
        for name in names
    ]
    facts = {name: None for record in records for name in record.get("facts", ())}
    rows += [[name, *(record["facts"].get(name, "-") for record in records), ""] for name in facts]
    parts = (f"**{records[0]['job']}**", markdown([head, tokens, *rows]), _notes(records))
    return "\n\n".join(part for part in parts if part)


def _cell(record: Record, name: str) -> str:
    entry = entry_of(record, name)
    if entry is None or entry["best_ms"] is None:
        return "-"
    shown = f"{milliseconds(entry['best_ms'])} / {milliseconds(entry['median_ms'])}"
    ours = entry_of(record, OURS)
    if name.startswith(OURS) or ours is None or not ours["best_ms"]:
        return shown
    cell = f"{shown} ({compared(entry, ours)})"
    return f"**{cell}**" if is_rival(name) and beats(entry, ours) else cell


def compared(entry: Record, ours: Record) -> str:
    """Say how many times slower or faster than ours; best and median must agree on which."""
    best = entry["best_ms"] / ours["best_ms"]
    median = entry["median_ms"] / ours["median_ms"]
    if (best < 1) != (median < 1):
        return "even"
    times = max(best, 1 / best)
    number = f"{times:.2g}" if times < 10 else f"{times:.0f}"
    if number == "1":
        return "even"
    return f"{number}x {'faster' if best < 1 else 'slower'}"


def beats(entry: Record, ours: Record) -> bool:
    """Whether a contender was faster than ours, by its best and by its median round."""
    return compared(entry, ours).endswith("faster")


def winners(records: Iterable[Record]) -> list[tuple[str, Record]]:
    """Return the rivals that beat ours, with the record of each."""
    found = []
    for record in records:
        ours = entry_of(record, OURS)
        for entry in record["entries"]:
            if ours is None or ours["best_ms"] is None or entry["best_ms"] is None:
                continue
            if is_rival(entry["contender"]) and beats(entry, ours):
                found.append((entry["contender"], record))
    return found


def _notes(records: list[Record]) -> str:
    """Say where a rival wins and why, who ran on one thread, and who could not take part."""
    faster: dict[str, dict[str, list[str]]] = {}
    for name, record in winners(records):
        why = reason(name, record["job"], record["workload"], record["tokens"])
        faster.setdefault(why, {}).setdefault(name, []).append(short(record))
    absent: dict[str, list[str]] = {}
    single: dict[str, list[str]] = {}
    for record in records:
        for entry in record["entries"]:
            if entry["note"]:
                text = f"{entry['contender']}: {entry['note']}"
                absent.setdefault(text, []).append(short(record))
            elif "torch_threads" in entry:
                single.setdefault(entry["contender"], []).append(short(record))
    said = [
        f"- Faster than ours: {_listed(names)}. Because {why or 'of what is not known'}."
        for why, names in faster.items()
    ]
    said += [f"- {text}: {', '.join(where)}." for text, where in absent.items()]
    if single:
        said.append(f"- On one of torch's threads, since that was faster: {_listed(single)}.")
    return "\n".join(said)


def _listed(names: dict[str, list[str]]) -> str:
    return "; ".join(f"{name} on {', '.join(where)}" for name, where in names.items())


def entry_of(record: Record, name: str) -> Record | None:
    """Return a contender's row of a record."""
    return next((entry for entry in record["entries"] if entry["contender"] == name), None)


def _wrote(records: list[Record], name: str) -> str:
    entries = (entry_of(record, name) for record in records)
    return " / ".join(dict.fromkeys(entry["wrote"] for entry in entries if entry is not None))


def is_rival(name: str) -> bool:
    """Whether a contender is neither ours nor the copy."""
    return not name.startswith((OURS, "copy "))


def short(record: Record) -> str:
    """Return a workload's name for a column."""
    name: str = record["workload"]
    before, _, behind = name.partition(": ")
    return behind if before == "multi-turn" else before


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(value: int) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,}"


def markdown(rows: list[list[str]]) -> str:
    """Return a table whose first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    written = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join(
        [written[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *written[1:]]
    )
