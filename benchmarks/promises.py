"""What is promised of speed, asserted in every run, and printed with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.contest import OURS
from benchmarks.workloads import GAE_LENGTHS, SEQUENCES

PACK_ONLY = f"{OURS}, pack only"
THREE = "Python lists, 3 fields"
LISTS = "Python lists"
FROM_ARRAYS = "pack, from arrays"
FROM_LISTS = "pack, from lists"
GAE = "gae of tokens"
GAE_MASKED = "gae of tokens, a third not generated"
OVER_COLUMNS = "loop over columns, as verl's"
ONE_LANE = "a lane for each sequence, as cugae's"
LOGPROBS = "log-probabilities of tokens and their gradients"
PRODUCTS = "the matrix products alone"
WHOLE = "promise: the whole job, from arrays"
OF_LISTS = "promise: the whole job, from lists"
ROWS = "promise: 1,024 rows of lists"
SAVED, LOADED = "promise: save", "promise: load"
BY_NUMPY = "numpy.concatenate per field"
BY_THREE = THREE
OF_SKYRL = "SkyRL's vectorised rows"
IN_SAFETENSORS = "safetensors of all fields"
Record = dict[str, Any]


class Promise(NamedTuple):
    """A contender is so many times as fast as another, on every workload but the exceptions."""

    job: str
    fast: str
    slow: str
    times: float
    words: str


PROMISES = (
    Promise(
        FROM_ARRAYS,
        PACK_ONLY,
        THREE,
        20,
        "packing a filled buffer (ten fields) against Python lists of three fields, arrays in",
    ),
    Promise(FROM_ARRAYS, OURS, LISTS, 20, "the whole job against Python lists, arrays in"),
    Promise(FROM_LISTS, OURS, LISTS, 4, "the whole job against Python lists, plain lists in"),
    Promise(GAE, OURS, OVER_COLUMNS, 50, "GAE of packed tokens against a loop over columns"),
)
TARGETS = (
    Promise(WHOLE, OURS, BY_NUMPY, 1, "the whole job against concatenation per field, arrays in"),
    Promise(OF_LISTS, OURS, BY_THREE, 4, "the whole job against lists of three fields, lists in"),
    Promise(ROWS, OURS, OF_SKYRL, 1 / 0.6, "rows for a trainer against SkyRL's own rows"),
    Promise(SAVED, OURS, IN_SAFETENSORS, 1, "save against safetensors of all fields"),
    Promise(LOADED, OURS, IN_SAFETENSORS, 1, "load against safetensors of all fields"),
)
"""What packing is to reach; the run prints each with what was measured, and fails for none."""
PER_TURN = "a hundred thousand turns of 32 tokens: the cost is Python's per turn, not per token"
_, _, C, _ = SEQUENCES
PER_COLUMN = (
    "the loop takes as long for one sequence as for many: here it has more of them to a step"
)
SHORTER, MANY_LONG = tuple(GAE_LENGTHS)[:2], tuple(GAE_LENGTHS)[-1]
EXCEPTIONS: dict[tuple[str, str, str], tuple[float, str]] = {
    (FROM_ARRAYS, PACK_ONLY, C): (4, PER_TURN),
    (FROM_ARRAYS, OURS, C): (2.5, PER_TURN),
    (FROM_LISTS, OURS, C): (1.5, PER_TURN),
    (GAE, OURS, SHORTER[0]): (5, PER_COLUMN),
    (GAE, OURS, SHORTER[1]): (20, PER_COLUMN),
    (GAE, OURS, MANY_LONG): (10, PER_COLUMN),
}
"""By job, contender and workload: what is promised there, and why it is less."""


def ratio(record: Record, promise: Promise) -> float | None:
    """Return how many times as fast it was, best round against best round."""
    best = {entry["contender"]: entry["best_ms"] for entry in record["entries"]}
    fast, slow = best.get(promise.fast), best.get(promise.slow)
    return slow / fast if fast and slow else None


def promised(record: Record, promise: Promise) -> tuple[float, str]:
    """Return what is promised on a record's workload, and why it is less, if it is."""
    return EXCEPTIONS.get((promise.job, promise.fast, record["workload"]), (promise.times, ""))


def targets(records: Sequence[Record]) -> list[list[str]]:
    """Return a row for each target and workload: what is promised, where, and what was measured."""
    rows = []
    for promise in TARGETS:
        for record in records:
            if record["job"] == promise.job:
                times = ratio(record, promise)
                said = "not measured" if times is None else f"{times:.2f}"
                kept = "" if times is None else "yes" if times >= promise.times else "no"
                rows.append([promise.words, record["workload"], f"{promise.times:.2f}", said, kept])
    return rows


def broken(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each promise that a record does not keep."""
    found = []
    for record in records:
        for promise in PROMISES:
            if promise.job == record["job"]:
                wanted, _ = promised(record, promise)
                measured = ratio(record, promise)
                if measured is None or measured < wanted:
                    said = "not measured" if measured is None else f"{measured:.1f} times"
                    found.append(
                        f"{record['workload']}: {promise.words}: {said}, promised {wanted:g}"
                    )
    return found
