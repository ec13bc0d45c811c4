"""What `make hardware` measured: a page of tables for a reader, and raw tables behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import markdown, milliseconds, provenance

Record = dict[str, Any]
Rows = list[Record]
UNSHOWN = ("at_s", "copies", "waits", "job")
WAYS = ("padded", "turns", "merged", "tree")
"""Ways of a step, from the most tokens to the fewest."""


def calls_of(folder: Path) -> list[Record]:
    """Return what the calls left, in their order."""
    return [json.loads(file.read_text()) for file in sorted((folder / "hardware").glob("call*"))]


def rows_of(calls: Sequence[Record], item: str) -> Rows:
    """Return the rows of an item, of the last call that has any; those that failed are left out."""
    found: Rows = []
    for call in calls:
        own = [row for row in call["rows"] if row["item"] == item and "error" not in row]
        found = own or found
    return found


def where(among: Rows, /, **wanted: Any) -> Record:
    """Return the first row with such values, or nothing; ``of=None`` is of these kernels."""
    alike = (row for row in among if all(row.get(key) == one for key, one in wanted.items()))
    return next(alike, {})


def short(workload: str) -> str:
    """Return a workload's short name."""
    name, _, rest = workload.partition(": ")
    return rest if name == "multi-turn" else name


def in_short(folder: Path) -> str:
    """Return the front page's lines of a device."""
    calls = calls_of(folder)
    said = [*_head_in_short(rows_of(calls, "logprobs")), *_scans_in_short(rows_of(calls, "scans"))]
    return "\n".join(f"- {one}" for one in (*said, *map(described, calls[:1])))


def _head_in_short(rows: Rows) -> Iterator[str]:
    ours, none, dense, products = (
        where(rows, rows=8192, way=way, **{"pass": "both"}).get("cold_ms")
        for way in ("ours", "nothing kept", "dense", "products")
    )
    forward, whole = (
        where(rows, rows=8192, way=way, **{"pass": "forward"}).get("cold_ms")
        for way in ("ours", "dense")
    )
    if ours and forward:
        yield (
            f"**LM head** (8,192 rows, 4,096 wide, 151,936 tokens): both passes {ours:.1f} ms; "
            f"{none:.1f} without kept logits, {dense:.1f} with all logits at once, {products:.1f} "
            f"for the three products alone. Forward alone: {forward:.1f} ms against {whole:.1f}."
        )


def _scans_in_short(rows: Rows) -> Iterator[str]:
    found = [
        f"{1e3 * took:.1f} µs on {short(row['workload'])} (a copy {1e3 * copy:.1f})"
        for row in rows
        if row.get("masked") is False and "of" not in row
        for took, copy in [(row["cold_ms"], _copy_of(rows, row["workload"]))]
    ]
    if found:
        yield f"**GAE of tokens**: {'; '.join(found)}."


def _copy_of(rows: Rows, workload: str) -> float:
    return float(where(rows, workload=workload, way="copy", of=None).get("cold_ms", 0.0))


def page(folder: Path) -> str:
    """Return the tables of a device for a reader."""
    calls = calls_of(folder)
    sections: dict[str, Callable[[Rows], str]] = {
        "logprobs": _of_head,
        "step": _of_step,
        "trees": _of_trees,
        "scans": _of_scans,
        "grpo": _of_groups,
        "weights": _of_weights,
        "rivals": _of_rivals,
        "micro-batches": _of_micro_batches,
        "fields": _of_fields,
        "host": _of_host,
    }
    parts = [described(call) for call in calls]
    for name, section in sections.items():
        if rows := rows_of(calls, name):
            parts.append(section(rows))
    return "\n\n".join([*parts, _of_checks(calls)])


def described(call: Record) -> str:
    """Return hardware, versions, commit and command of a call."""
    return f"Call {call['call']}: " + provenance(call | {"measured": "gpu"})


def raw(folder: Path) -> str:
    """Return how items ended, and a table of each."""
    parts = []
    for call in calls_of(folder):
        parts += [f"## `make hardware`, call {call['call']}", described(call)]
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


def _section(title: str, text: str, *rows: Sequence[str]) -> str:
    return f"### {title}\n\n{text}\n\n{markdown([list(row) for row in rows])}"


def _ms(row: Record, name: str = "cold_ms") -> str:
    value = row.get(name)
    return "-" if value is None else milliseconds(min(value) if isinstance(value, list) else value)


def _us(row: Record) -> str:
    return "-" if "cold_ms" not in row else milliseconds(1e3 * row["cold_ms"])


def _gib(row: Record) -> str:
    return f"{row['peak_mib'] / 2**10:.1f}" if "peak_mib" in row else "-"


def _of_head(rows: Rows) -> str:
    names = dict.fromkeys(row["way"] for row in rows if "way" in row and "missing" not in row)
    table = []
    for count in dict.fromkeys(row["rows"] for row in rows):
        for name in names:
            both, forward = (
                where(rows, rows=count, way=name, **{"pass": kind}) for kind in ("both", "forward")
            )
            cells = (_ms(both), _ms(forward), _gib(both), str(both.get("launches", "-")))
            table.append((f"{count:,}", name, *cells, _ms(both, "host_ms")))
    return _section(
        "LM head",
        "Log-probabilities of so many rows, 4,096 wide, of 151,936 tokens, bfloat16: milliseconds "
        "of GPU time with a cold cache. Dense: all logits at once. Products: the three matrix "
        "products and nothing else, in chunks of 8,192 tokens.",
        ("rows", "way", "both passes", "forward", "peak GiB", "launches", "host ms"),
        *table,
    )


def _of_step(rows: Rows) -> str:
    table = []
    for name in dict.fromkeys(row["workload"] for row in rows if "way" in row):
        for way in WAYS:
            every, few = (
                where(rows, workload=name, way=way, trained=trained) for trained in (False, True)
            )
            cells = (f"{few['tokens']:,}", _ms(every, "ms"), _ms(few, "ms"))
            table.append((name, way, *cells, _gib(every), _gib(few)))
    return _section(
        "A training step",
        "Forward and backward of 8 layers of Qwen3-0.6B with its LM head, bfloat16, micro-batches "
        "of 16,384 tokens, the same rollouts four ways; all have the same loss. Rows use torch's "
        "variable-length FlashAttention, trees FlexAttention. All: the LM head on all rows; "
        "trained: on those that are trained.",
        ("rollouts", "way", "tokens", "ms, all", "ms, trained", "GiB, all", "GiB, trained"),
        *table,
    )


def _of_trees(rows: Rows) -> str:
    table = []
    for model, key in (("one layer", "cold_ms"), ("a stack", "ms")):
        of_model = [row for row in rows if row.get("model") == model]
        for name in dict.fromkeys(row["workload"] for row in of_model if "workload" in row):
            tree, merged, turns = (
                where(of_model, workload=name, way=way) for way in ("tree", "merged", "turns")
            )
            tokens = (f"{one['tokens']:,}" for one in (tree, merged, turns))
            took, other = (_least(one[key]) for one in (tree, merged))
            fewer = merged["tokens"] / tree["tokens"]
            share = f"{other / took:.2f} of {fewer:.2f}"
            times = (_ms(one, key) for one in (tree, merged, turns))
            table.append((model, name, " / ".join(tokens), " / ".join(times), share))
    return _section(
        "Trees",
        "Forward and backward, bfloat16: attention of one layer of 8 heads of 128, and the 28 "
        "layers of Qwen3-0.6B without its head. Last column: times as fast as merged rows, of how "
        "many times fewer tokens. The goal is 0.85 of it. Attention alone gains less: "
        "FlexAttention takes longer for a token than FlashAttention.",
        ("model", "rollouts", "tokens: tree / merged / turns", "ms", "gain"),
        *table,
    )


def _least(value: float | list[float]) -> float:
    return min(value) if isinstance(value, list) else value


def _of_scans(rows: Rows) -> str:
    table = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        found = [where(rows, workload=name, way="copy", of=None)]
        found += [
            where(rows, workload=name, masked=masked, of=of)
            for masked in (False, True)
            for of in (None, "base")
        ]
        table.append((short(name), *map(_us, found)))
    return _section(
        "GAE of tokens",
        "µs of GPU time with a cold cache, the longest sequence known, beside a copy of as many "
        "bytes. Masked: a third of the tokens was not generated. Before: without load-ahead, in "
        "turn in the same call.",
        ("workload", "copy", "gae", "before", "masked", "before"),
        *table,
    )


def _of_groups(rows: Rows) -> str:
    names = dict.fromkeys(row["workload"] for row in rows)
    table = []
    for shape in dict.fromkeys(str(row["shape"]) for row in rows):
        for of in (None, "base"):
            found = [
                next((r for r in rows if r["workload"] == name and str(r["shape"]) == shape
                      and r.get("of") == of), {}) for name in names
            ]  # fmt: skip
            label = "as in the library" if shape == "None" else shape.strip("[]")
            if any(found):
                table.append((label, "before" if of else "now", *map(_us, found)))
    return _section(
        "GRPO of a batch",
        "µs, by tokens and threads of a program that writes the tokens' advantages. Now there is "
        "one launch more, of about 5 µs, for the metrics; groups of up to 16 take a thread each.",
        ("tokens, threads", "kernels", *map(short, names)),
        *table,
    )


def _of_weights(rows: Rows) -> str:
    table = []
    for way in dict.fromkeys(row["way"] for row in rows):
        for of in (None, "base"):
            names = dict.fromkeys(row["workload"] for row in rows)
            found = [where(rows, workload=n, way=way, of=of) for n in names]
            if any(found):
                table.append((way, "before" if of else "now", *map(_us, found)))
    return _section("Weights and whitening", "µs.", ("way", "kernels", *map(short, names)), *table)


def _of_rivals(rows: Rows) -> str:
    table = []
    for job in dict.fromkeys(row["job"] for row in rows):
        for name in dict.fromkeys(row["workload"] for row in rows if row["job"] == job):
            own = [row for row in rows if (row["job"], row["workload"]) == (job, name)]
            timed = [row for row in own if "wall_ms" in row]
            others = [row for row in timed if not row["way"].startswith("trajpack")]
            ours = where(own, way="trajpack")
            if ours and others:
                best = min(others, key=_time)
                times = f"{_time(best) / _time(ours):.2g}"
                cells = (milliseconds(1e3 * _time(one)) for one in (ours, best))
                table.append((job, short(name), *cells, best["way"], times))
    return _section(
        "Beside other ways",
        "µs of the fastest other way. A loop that takes the host longer has wall time.",
        ("job", "workload", "ours", "other", "other way", "times"),
        *table,
    )


def _time(row: Record) -> float:
    return float(row.get("cold_ms", row["wall_ms"]))


def _of_micro_batches(rows: Rows) -> str:
    table = [
        (
            row["job"].removeprefix("micro-batches of "), short(row["workload"]), row["way"],
            _ms(row), _ms(row, "host_ms"), str(row["launches"]),
            f"{row['select_gb_per_s']:.0f}" if "select_gb_per_s" in row else "-",
        )
        for row in rows
    ]  # fmt: skip
    return _section(
        "Micro-batches",
        "ms of the device and of the host for all micro-batches. A launch moves about 2.4 MB in 7 "
        "µs, so its rate is 0.3 TB/s; the host takes longer.",
        ("micro-batches of", "workload", "way", "device", "host", "launches", "GB/s"),
        *table,
    )


def _of_fields(rows: Rows) -> str:
    table = [
        (
            short(row["workload"]), f"{row['field_bytes'] / 1e6:.0f}", f"{row['extend_ms']:.0f}",
            _ms(row), f"{row['sent_gb_per_s']:.0f}", f"{row['gather_gb_per_s']:,.0f}",
        )
        for row in rows
    ]  # fmt: skip
    return _section(
        "Routed experts",
        "Fields of 48 layers and 8 experts, uint8; A and 256 x 5 turns, an eighth of each.",
        ("workload", "MB", "extend ms", "pack ms", "sent GB/s", "gathered GB/s"),
        *table,
    )


def _of_host(rows: Rows) -> str:
    table = []
    for row in rows:
        first, again = ([one["all"] for one in row[name]] for name in ("pack", "again"))
        cells = (median(row["extend"]), median(row["add_us"]), median(first), median(again))
        table.append((short(row["workload"]), f"{row['turns']:,}", *map(milliseconds, cells)))
    return _section(
        "Host",
        "Medians. Extend stores and checks all turns; add stores a trajectory; pack after extend, "
        "and again without a change.",
        ("workload", "turns", "extend ms", "add µs", "pack ms", "again ms"),
        *table,
    )


def _of_checks(calls: Sequence[Record]) -> str:
    """Say what the tests and tools found."""
    said = []
    for row in rows_of(calls, "tests"):
        said.append(f"- GPU tests: {row['last_line'].strip('= ')}.")
    for name in ("racecheck of scans", "memcheck"):
        if rows := [row for row in rows_of(calls, name) if "tool" in row]:
            clean = all(not row["status"] and not row["told"] for row in rows)
            found = "nothing found" if clean else "see the raw tables"
            passed = sum(row["passed"] for row in rows)
            said.append(f"- compute-sanitizer, {name}: {passed} checks passed, {found}.")
    return "\n".join(["### Checks", "", *said])
