"""Contests: several ways to do one job on one input, checked first, then timed in turn.

A contender's result is compared with the reference before anything is timed; one that differs
gets no number. The others then take turns, round after round, so that a busy machine slows
all of them; the best round counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "trajpack"
FEW = 3
"""Rounds that a contender gets even where they take thrice its share of time."""
SLOW = 3
"""A rival whose first run takes this many shares of time gets no other."""


@dataclass(frozen=True)
class Contender:
    """One way to do the job."""

    name: str
    work: Callable[[], Any] | None
    """Does the whole job once and returns the result; None where ``missing`` says why not."""
    wrote: str
    """What it writes, for the table."""
    check: Callable[[Any], None] | None = None
    """Raises where its result is not the reference's; the contest's own check if None."""
    missing: str = ""
    """Why it cannot run here."""
    release: Callable[[], None] | None = None
    """Undoes what a round left behind, not timed."""
    on_host: bool = False
    """True where part of the work is the host's, so that a captured graph would leave it out."""


@dataclass(frozen=True)
class Contest:
    """One job on one input."""

    job: str
    workload: str
    tokens: int
    """Tokens of the result, by which rates are computed."""
    check: Callable[[Any], None]
    """Raises AssertionError where a result is not the reference's."""
    rounds: int = 5
    """At most; one whose share of seconds is used up stops earlier, see `FEW`."""
    seconds: float = 0.35
    """Share of each contender, beside the run that is checked."""
    clock: Callable[[Callable[[], Any]], tuple[float, Any]] | None = None
    """Times one round in seconds, and returns it with the result; the wall clock if None."""


@dataclass
class Entry:
    """What came of one contender: a row of the table."""

    contender: str
    wrote: str
    checked: bool = False
    note: str = ""
    seconds: list[float] = field(default_factory=list, repr=False)

    @property
    def best(self) -> float | None:
        """Seconds of the best round; None unless the result was checked."""
        return min(self.seconds) if self.checked and self.seconds else None


def wall_clock(work: Callable[[], Any]) -> tuple[float, Any]:
    """Time one call by the wall clock, in seconds, and return its result too."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def race(contest: Contest, contenders: Sequence[Contender]) -> list[Entry]:
    """Check every contender, then let them take turns.

    Raises:
        AssertionError: If the result of one of ours differs from the reference.
    """
    entries = [Entry(contender.name, contender.wrote) for contender in contenders]
    gc.collect()
    gc.disable()  # a collection would charge one contender for another's objects
    try:
        racing = [
            pair
            for pair in zip(contenders, entries, strict=True)
            if check_once(contest, *pair) and not pair[1].seconds
        ]
        spent = dict.fromkeys((entry.contender for _, entry in racing), 0.0)
        for _ in range(contest.rounds):
            for contender, entry in racing:
                few = len(entry.seconds) < FEW  # one round may have met a busy machine
                if spent[entry.contender] < (3 if few else 1) * contest.seconds:
                    begin = time.perf_counter()
                    seconds, result = (contest.clock or wall_clock)(contender.work)
                    entry.seconds.append(seconds)
                    del result
                    if contender.release:
                        contender.release()
                    spent[entry.contender] += time.perf_counter() - begin
    finally:
        gc.enable()
    return entries


def check_once(contest: Contest, contender: Contender, entry: Entry) -> bool:
    """Run a contender once, check what it made, and say whether it passed.

    This run is a warm-up. Only of a contender too slow for a second one its time counts.
    """
    if contender.work is None:
        entry.note = contender.missing or "cannot run here"
        return False
    try:
        took, result = (contest.clock or wall_clock)(contender.work)
        (contender.check or contest.check)(result)
    except (RuntimeError, TypeError, ValueError, Warning, AssertionError) as error:
        if contender.name.startswith(OURS):
            raise
        wrong = isinstance(error, AssertionError)
        said = str(error).strip().splitlines() or [type(error).__name__]
        entry.note = f"{'wrong result, not timed' if wrong else 'failed'}: {said[0][:60]}"
        return False
    finally:
        if contender.release:
            contender.release()
    entry.checked = True
    if took > SLOW * contest.seconds and not contender.name.startswith(OURS):
        entry.seconds.append(took)
    return True


def as_record(contest: Contest, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return a contest as plain values for a results file: no number that was not checked."""
    return {
        "job": contest.job,
        "workload": contest.workload,
        "tokens": contest.tokens,
        "entries": [
            {
                "contender": entry.contender,
                "wrote": entry.wrote,
                "best_ms": None if entry.best is None else round(1e3 * entry.best, 4),
                "median_ms": None if entry.best is None else round(1e3 * _median(entry), 4),
                "rounds": len(entry.seconds),
                "note": entry.note,
            }
            for entry in entries
        ],
    }


def best_of(entries: Sequence[Entry], name: str) -> float:
    """Return the best seconds of a contender that must have been checked."""
    (entry,) = (entry for entry in entries if entry.contender == name)
    if entry.best is None:
        raise AssertionError(f"{name}: {entry.note or 'not timed'}")
    return entry.best


def _median(entry: Entry) -> float:
    return sorted(entry.seconds)[len(entry.seconds) // 2]
