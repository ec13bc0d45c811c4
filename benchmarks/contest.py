"""Contests: several ways to do one job on one input, checked first, then timed in turn.

A contender's result is compared with the reference before anything is timed; one that differs
gets no number. The others then take turns, round after round, so that a busy machine slows
all of them. The rules are the same for everybody, ours included: the run that is checked is a
warm-up and not timed, unless it takes more than `SLOW` seconds; then it is the only one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

OURS = "trajpack"
SLOW = 2.5
"""Seconds: a run that takes longer is the only one, and counts."""
LONG = 0.3
"""Seconds of a first run that stands for a second."""
Clock = Callable[[Callable[[], Any]], tuple[float, Any]]


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
    rounds: int | None = None
    """Most rounds, where not the contest's."""
    tunes_threads: bool = False
    """Whether it runs on all of torch's threads or on one, as is faster."""

    @property
    def is_ours(self) -> bool:
        """Whether a failure of it is a failure of the benchmark."""
        return self.name.startswith(OURS)


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
    """At most; one whose share of seconds is used up stops earlier, though not before the first."""
    seconds: float = 0.6
    """Share of each contender, beside the run that is checked."""
    slow: float = SLOW
    """Seconds: a run that takes longer is the only one, and counts."""
    clock: Clock | None = None
    """Times one round in seconds, and returns it with the result; the wall clock if None."""


@dataclass
class Entry:
    """What came of one contender: a row of the table."""

    contender: str
    wrote: str
    checked: bool = False
    note: str = ""
    seconds: list[float] = field(default_factory=list, repr=False)
    first: float = 0.0
    """Seconds of the run that was checked."""
    spent: float = 0.0
    threads: int | None = None
    """Of torch, where it is given fewer than there are."""

    @property
    def best(self) -> float | None:
        """Seconds of the best round; None unless the result was checked."""
        return min(self.seconds) if self.checked and self.seconds else None

    @property
    def median(self) -> float | None:
        """Seconds of the median round; None unless the result was checked."""
        return statistics.median(self.seconds) if self.checked and self.seconds else None


def processor_clock(work: Callable[[], Any]) -> tuple[float, Any]:
    """Time one call on one thread, in its processor seconds, and return its result too."""
    with torch_threads(1):
        begin = time.process_time()
        result = work()
        return time.process_time() - begin, result


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
        racing = []
        for contender, entry in zip(contenders, entries, strict=True):
            if check_once(contest, contender, entry) and not entry.seconds:
                _choose_threads(contest, contender, entry)
                racing.append((contender, entry))
        for number in range(max((_rounds(contest, one) for one, _ in racing), default=0)):
            for contender, entry in racing:
                again = max(number, len(entry.seconds)) < _rounds(contest, contender)
                if again and (not entry.seconds or entry.spent < contest.seconds):
                    guarded(contender, entry, lambda: None, _run_round, contest, contender, entry)
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
    release = contender.release or (lambda: None)
    if not guarded(contender, entry, release, _run_checked, contest, contender, entry):
        return False
    return entry.checked


def guarded(
    contender: Contender,
    entry: Entry,
    afterwards: Callable[[], None],
    step: Callable[..., None],
    *given: Any,
) -> bool:
    """Take a step; a rival that fails gets a note instead of a number and stops nothing else."""
    try:
        try:
            step(*given)
        finally:
            afterwards()
    except Exception as error:
        if contender.is_ours:
            raise
        wrong = isinstance(error, AssertionError)
        said = str(error).strip().splitlines() or [type(error).__name__]
        entry.note = f"{'wrong result, not timed' if wrong else 'failed'}: {said[0][:60]}"
        entry.checked, entry.seconds = False, []
        return False
    return True


def _run_checked(contest: Contest, contender: Contender, entry: Entry) -> None:
    took, result = (contest.clock or wall_clock)(contender.work)
    (contender.check or contest.check)(result)
    entry.checked, entry.first = True, took
    if took > contest.slow:
        entry.seconds.append(took)


def _run_round(contest: Contest, contender: Contender, entry: Entry) -> None:
    if not entry.checked:
        return  # it failed in a round before
    begin = time.perf_counter()
    with torch_threads(entry.threads):
        seconds, result = (contest.clock or wall_clock)(contender.work)
    entry.seconds.append(seconds)
    del result
    if contender.release:
        contender.release()
    entry.spent += time.perf_counter() - begin


def _choose_threads(contest: Contest, contender: Contender, entry: Entry) -> None:
    """Run it, warm by now, on all threads and on one; what was faster is kept.

    One that takes long is not run on all threads again: its first run stands for that.
    """
    if not contender.tunes_threads or torch.get_num_threads() == 1:
        return
    tried = Entry(contender.name, "", checked=True)
    for count in (1,) if entry.first > LONG else (None, 1):
        tried.threads = count
        if not guarded(contender, entry, lambda: None, _run_round, contest, contender, tried):
            return
    on_one = tried.seconds.pop()
    if on_one < min([entry.first, *tried.seconds]):
        entry.threads, tried.seconds = 1, [on_one]
    entry.seconds, entry.spent = tried.seconds, tried.spent


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Give torch so many threads for a while; as many as it has if None."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def _rounds(contest: Contest, contender: Contender) -> int:
    return contender.rounds or contest.rounds


def as_record(contest: Contest, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return a contest as plain values for a results file: no number that was not checked."""
    rows = []
    for entry in entries:
        row: dict[str, Any] = {"contender": entry.contender, "wrote": entry.wrote}
        row |= {"best_ms": _in_ms(entry.best), "median_ms": _in_ms(entry.median)}
        row |= {"rounds": len(entry.seconds), "note": entry.note}
        if entry.threads is not None:
            row["torch_threads"] = entry.threads
        rows.append(row)
    named = {"job": contest.job, "workload": contest.workload, "tokens": contest.tokens}
    return named | {"entries": rows}


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 4)
