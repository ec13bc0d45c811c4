"""Benchmarks of a device that ran in parts, as one set of results, and a summary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contest import OURS
from benchmarks.promises import GAE, LOGPROBS, OVER_COLUMNS, PRODUCTS
from benchmarks.tables import entry_of, is_rival, markdown, provenance, short

Record = dict[str, Any]
Times = tuple[float, str, str]
"""How many times as long as ours a rival takes, its name, and the workload."""
SAME = ("hardware", "versions")
OVER = f"{GAE}, against the {OVER_COLUMNS}"
SHOWN = ("build", GAE, OVER, "importance weights of tokens", "loss weights of sequences")
"""Jobs that the front page shows, beside those in which another way is faster."""


UNSHOWN = ("at_s", "copies", "waits", "job")


class Summary(NamedTuple):
    """A job on all workloads."""

    job: str
    shares: Sequence[float]
    """Times of the copy over ours."""
    times: Sequence[Times]
    """Of the fastest rivals, by GPU time with a cold cache."""
    wall: Sequence[Times]
    """Of the fastest rivals by wall time of one call."""


def of_parts(folder: Path) -> list[Record]:
    """Return the benchmarks of all parts as one set of results; none where no part wrote any.

    A contest that ran on other hardware or with other versions than `make hardware` at last says
    so itself.
    """
    file = folder / "hardware.json"
    if not file.exists():
        return []
    said = json.loads(file.read_text())
    commits: dict[str, list[str]] = {}
    contests: list[Record] = []
    for name in (part["part"] for part in said["parts"]):
        path = folder / "hardware" / name / "gpu.json"
        if path.exists():
            part = json.loads(path.read_text())
            commits.setdefault(part["commit"], []).append(name)
            own = {key: part[key] for key in (*SAME, "commit", "command")}
            alike = all(part[key] == said[key] for key in SAME)
            contests += [one if alike else one | {"described": own} for one in part["contests"]]
    commit = ", ".join(f"{one} ({', '.join(names)})" for one, names in commits.items())
    joined = said | {"measured": "gpu", "commit": commit, "contests": contests}
    return [joined] if contests else []


def outcomes(results: Record, folder: Path) -> str:
    """Return a table of the parts: how each ended, and how many of its checks passed."""
    rows = [["part", "outcome", "seconds", "checks passed", "commit"]]
    for part in results["parts"]:
        file = folder / "hardware" / f"{part['part']}.json"
        checks = json.loads(file.read_text())["rows"] if file.exists() else []
        passed = sum(row["outcome"] == "passed" for row in checks)
        values = (part["outcome"], part.get("seconds", "-"), passed or "-", part["commit"])
        rows.append([part["part"], *map(str, values)])
    return markdown(rows)


def of_calls(folder: Path) -> str:
    """Return what the calls of `make hardware` left: how items ended, and a table of each."""
    parts = []
    for file in sorted((folder / "hardware").glob("call*.json")):
        call = json.loads(file.read_text())
        parts += [
            f"## `make hardware`, call {call['call']}",
            provenance(call | {"measured": "gpu"}),
        ]
        parts.append(_table_of(call["items"]))
        for name in dict.fromkeys(row["item"] for row in call["rows"]):
            own = [row for row in call["rows"] if row["item"] == name]
            parts += [f"**{name}**", _table_of([{**row, "item": None} for row in own])]
    return "\n\n".join(parts)


def _table_of(rows: Sequence[Record]) -> str:
    """Return rows as a table with a column for each name that has a plain value."""
    kept = [
        {name: value for name, value in row.items() if name not in UNSHOWN and _is_plain(value)}
        for row in rows
    ]
    names = list(dict.fromkeys(name for row in kept for name in row))
    return markdown([names, *([str(row.get(name, "-")) for name in names] for row in kept)])


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) or (isinstance(value, list) and len(value) <= 2)


def table(results: Record) -> str:
    """Return a table of all jobs: the share of a copy, and the fastest other way."""
    head = ["job", "of the copy", "times as fast as the fastest other way", "by wall time"]
    rows = [
        [one.job, _span(one.shares, "{:.0%}"), _span_of(one.times), _span_of(one.wall)]
        for one in summaries(results["contests"])
    ]
    return markdown([head, *([cell or "-" for cell in row] for row in rows)])


def in_short(results: Record) -> str:
    """Say how fast ours is on the device, how near to a copy, and where another way is faster."""
    fast, slow = [], []
    for one in summaries(results["contests"]):
        if one.job in SHOWN and one.times:
            near = f" ({_span(one.shares, '{:.0%}')})" if one.shares else ""
            fast.append(f"{one.job} {_span_of(one.times)}{near}")
        if behind := [pair for pair in one.times if pair[0] < 1]:
            names = "`, `".join(dict.fromkeys(name for _, name, _ in behind))
            some = ", ".join(workload for *_, workload in behind)
            where = f" on {some}" if len(behind) < len(one.times) else ""
            span = _span([1 / times for times, *_ in behind])
            slow.append(f"{one.job} {span} times (`{names}`{where})")
    gpu = results["hardware"].get("gpu", "the host")
    said = {
        f"{gpu}, times as fast as the fastest other way, in GPU time, or wall time of a rival that "
        "takes more than 0.25 s (in brackets: share of a copy of as many bytes)": fast,
        f"{gpu}, slower than another way, in GPU time, packing from the host in wall time": slow,
    }
    return "\n".join(f"- **{what}**: {'; '.join(jobs)}." for what, jobs in said.items() if jobs)


def summaries(records: Sequence[Record]) -> list[Summary]:
    """Return a summary of each job; a second one of GAE, beside the loop that trainers have."""
    found = []
    for job in dict.fromkeys(one["job"] for one in records):
        own = [one for one in records if one["job"] == job]
        shares = [share for one in own if (share := _ours(one).get("of_copy"))]
        times, wall = (
            [min(every) for one in own if (every := [*_times(one, kind)])]
            for kind in ("cold_ms", "wall_ms")
        )
        found.append(Summary(job, [] if job == LOGPROBS else shares, times, wall))
        if job == GAE:
            times, wall = (
                [each for one in own for each in _times(one, kind) if each[1] == OVER_COLUMNS]
                for kind in ("cold_ms", "wall_ms")
            )
            found.append(Summary(OVER, [], times, wall))
    return found


def _ours(record: Record) -> Record:
    return entry_of(record, OURS) or {}


def _times(record: Record, kind: str) -> Iterator[Times]:
    """Yield what each rival takes; by wall time where one of the two has no other.

    So it is where the host has a part in the job, which brings its input to the device.
    """
    ours, kind = _ours(record), "wall_ms" if record.get("sent") else kind
    for entry in record["entries"]:
        name = entry["contender"]
        if ours and entry["best_ms"] and is_rival(name) and name != PRODUCTS:
            used = kind if entry.get(kind) and ours.get(kind) else "wall_ms"
            yield entry[used] / ours[used], name, short(record)


def _span_of(times: Sequence[Times]) -> str:
    return _span([each for each, *_ in times])


def _span(values: Sequence[float], form: str = "") -> str:
    """Return the least and the most; nothing of no values."""
    ends = (min(values), max(values)) if values else ()
    forms = [(form or ("{:.2g}" if end < 10 else "{:,.0f}")).format(end) for end in ends]
    return " to ".join(dict.fromkeys(forms))
