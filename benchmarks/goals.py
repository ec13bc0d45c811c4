"""The goals of the device path, each met or not by what was measured: printed with the tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.contest import OURS
from benchmarks.device_contest import SENT
from benchmarks.promises import GAE, LOGPROBS, ONE_LANE, PACK_ONLY, PRODUCTS

Record = dict[str, Any]
BUILD = "build"
JOBS = ("pack to the device", "cost against size")
OF_COPY = {"A": 0.85, "B": 0.75, "C": 0.5}
"""Share of the copy that `build` is to reach; for C, "no cliff" is read as half of it."""
GAE_OF_COPY, GAE_TIMES = 0.8, 5
"""Share of the copy that one pass of `gae` is to reach on A; how many times `ONE_LANE`, on B."""
MOST_LAUNCHES = 3
ENQUEUE_MS = 0.07
WALL_TIMES, WALL_MORE_MS = 1.15, 0.1
TIMES_PRODUCTS, MOST_GIB = 1.5, 3
"""Most time of log-probabilities, by that of their matrix products; most memory beside weights and
gradients."""


class Goal(NamedTuple):
    """What is wanted, what was measured, and whether that meets it; None if it was not."""

    wanted: str
    measured: str
    met: bool | None


def goals(records: Iterable[Record]) -> list[Goal]:
    """Return a goal for each workload or size that has one."""
    found = []
    for record in records:
        if record["job"] == BUILD:
            found += _of_build(record)
        elif record["job"] == GAE:
            found += _of_gae(record)
        elif record["job"] == LOGPROBS:
            found += _of_logprobs(record)
        elif record["job"] in JOBS:
            found += _of_pack(record)
    return found


def lines(records: Iterable[Record]) -> list[str]:
    """Return a line for each goal."""
    words = {True: "met", False: "not met", None: "not measured"}
    return [f"- {words[goal.met]}: {goal.wanted}: {goal.measured}" for goal in goals(records)]


def _of_build(record: Record) -> list[Goal]:
    name = record["workload"].partition(":")[0]
    if name not in OF_COPY:
        return []
    share, ours = OF_COPY[name], _entry(record, OURS)
    measured = ours.get("of_copy")
    wanted = f"build at {share:.0%} of a copy of as many bytes or more, {name}"
    return [_goal(wanted, measured, "{:.0%}", lambda value: value >= share)]


def _of_gae(record: Record) -> list[Goal]:
    name, ours = record["workload"].partition(":")[0], _entry(record, OURS)
    if name == "A":
        wanted = f"gae at {GAE_OF_COPY:.0%} of a copy of as many bytes or more, A"
        share = ours.get("of_copy")
        return [_goal(wanted, share, "{:.0%}", lambda value: value >= GAE_OF_COPY)]
    if name == "B":
        wanted = f"gae {GAE_TIMES} times as fast as {ONE_LANE}, or more, B"
        took, lane = ours.get("cold_ms"), _entry(record, ONE_LANE).get("cold_ms")
        times = lane / took if took and lane else None
        return [_goal(wanted, times, "{:.1f} times", lambda value: value >= GAE_TIMES)]
    return []


def _of_logprobs(record: Record) -> list[Goal]:
    name, ours, bare = record["workload"], _entry(record, OURS), _entry(record, PRODUCTS)
    took, products, peak = ours.get("cold_ms"), bare.get("cold_ms"), ours.get("peak_mib")
    times = took / products if took and products else None
    # what the job writes are the gradients
    beside = None if peak is None else (peak - record["written"] / 2**20) / 2**10
    return [
        _goal(
            f"log-probabilities in {TIMES_PRODUCTS} times the matrix products or less, {name}",
            times,
            "{:.2f} times",
            lambda value: value <= TIMES_PRODUCTS,
        ),
        _goal(
            f"log-probabilities in {MOST_GIB} GiB or less beside weights and gradients, {name}",
            beside,
            "{:.2f} GiB",
            lambda value: value <= MOST_GIB,
        ),
    ]


def _of_pack(record: Record) -> list[Goal]:
    where, ours, copy = record["workload"], _entry(record, PACK_ONLY), _entry(record, SENT)
    took = copy.get("warm_ms")
    found = [
        _goal(
            f"{PACK_ONLY}, enqueued in {ENQUEUE_MS} ms or less, {where}",
            ours.get("enqueue_ms"),
            "{:.3f} ms",
            lambda value: value <= ENQUEUE_MS,
        )
    ]
    if record["job"] != JOBS[0]:
        return found
    counts = [ours.get(name) for name in ("copies", "launches", "waits")]
    counted = None if None in counts else counts
    found.append(
        _goal(
            f"{PACK_ONLY}, one copy, {MOST_LAUNCHES} launches or fewer, no wait, {where}",
            counted,
            "{0[0]} copies, {0[1]} launches, {0[2]} waits",
            lambda got: got[0] == 1 and got[1] <= MOST_LAUNCHES and got[2] == 0,
        )
    )
    limit = None if took is None else WALL_TIMES * took + WALL_MORE_MS
    wall = None if limit is None else ours.get("wall_ms")
    wanted = "no measured copy" if limit is None else f"{limit:.3f} ms"
    found.append(
        _goal(
            f"{PACK_ONLY}, wall time within {WALL_TIMES} times the copy of what is sent and "
            f"{WALL_MORE_MS} ms ({wanted}), {where}",
            wall,
            "{:.3f} ms",
            lambda value: value <= limit,
        )
    )
    return found


def _goal(wanted, measured, shown, meets) -> Goal:
    if measured is None:
        return Goal(wanted, "-", None)
    return Goal(wanted, shown.format(measured), bool(meets(measured)))


def _entry(record: Record, name: str) -> Record:
    return next((entry for entry in record["entries"] if entry["contender"] == name), {})
