"""Which faults there are, what they must be called, and a seeded plan of who meets which.

Whether a request or a step goes wrong, and how, follows from the seed and the name of the
episode, its attempt and its turn. So a run can be repeated, and what must come of it be foretold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from trajpack.agent.seeding import derive_seed


class Fault(StrEnum):
    DELAY = "delay"
    """It comes, but not at once."""
    LATE = "late"
    """It comes when nobody waits for it any more."""
    DROP = "drop"
    """It never comes."""
    DUPLICATE = "duplicate"
    """It comes twice; the second time in place of the next reply."""
    TRUNCATE = "truncate"
    """It has fewer tokens than were sampled, and sometimes says that it has not."""
    WRONG_LENGTH = "wrong length"
    """It has a number too many, or too few."""
    NAN = "nan"
    """One of its numbers is none."""
    UNKNOWN_ID = "unknown id"
    """One of its tokens is of no vocabulary."""
    STRAY = "stray"
    """It belongs to another episode."""
    EXCEPTION = "exception"
    """An error comes in its place."""
    KILL = "kill"
    """What should have given it died."""
    CANCEL = "cancel"
    """The task of the episode is cancelled by somebody else."""


CAUSES: dict[str, dict[Fault, str | None]] = {
    "engine": {
        Fault.DELAY: None,
        Fault.LATE: "timeout",
        Fault.DROP: "timeout",
        Fault.DUPLICATE: "malformed",  # of the turn after it, if there is one
        Fault.TRUNCATE: None,
        Fault.WRONG_LENGTH: "malformed",
        Fault.NAN: "malformed",
        Fault.UNKNOWN_ID: "malformed",
        Fault.STRAY: "malformed",
        Fault.EXCEPTION: "generation",
        Fault.KILL: "unavailable",
    },
    "environment": {
        Fault.DELAY: None,
        Fault.DROP: "timeout",
        Fault.WRONG_LENGTH: "environment",
        Fault.NAN: "environment",
        Fault.EXCEPTION: "environment",
        Fault.KILL: "environment",
        Fault.CANCEL: "cancelled",
    },
}
"""Every fault by the place where it is injected, with the failure that it must be named."""


def rates(place: str, rate: float) -> dict[Fault, float]:
    return dict.fromkeys(CAUSES[place], rate)


@dataclass(eq=False)
class FaultPlan:
    """Decides which requests and steps go wrong, and counts those that did."""

    seed: int
    engine: Mapping[Fault, float] = field(default_factory=dict)
    """For each fault, the share of requests that it befalls."""
    environment: Mapping[Fault, float] = field(default_factory=dict)
    """For each fault, the share of steps that it befalls."""
    delay_s: float = 0.5
    late_s: float = 90.0
    counts: Counter[tuple[str, Fault]] = field(default_factory=Counter)
    """Faults injected, by place and kind."""
    twice: dict[str, Any] = field(default_factory=dict)
    """Replies that come again in place of the next one, by episode."""
    _attempts: dict[str, int] = field(default_factory=dict)
    _counts: dict[str, Counter[str]] = field(default_factory=dict)
    _injected: dict[str, list[tuple[str, Fault]]] = field(default_factory=dict)

    def draw(self, *names: str | int) -> int:
        return derive_seed(self.seed, *names)

    def engine_fault(self, qid: str, attempt: int, turn: int) -> Fault | None:
        """Return what goes wrong with a request; nothing does after a reply that comes twice."""
        if turn and self._fault("engine", qid, attempt, turn - 1) is Fault.DUPLICATE:
            return None
        return self._fault("engine", qid, attempt, turn)

    def environment_fault(self, qid: str, attempt: int, turn: int) -> Fault | None:
        return self._fault("environment", qid, attempt, turn)

    def num_kept(self, qid: str, attempt: int, turn: int, num_tokens: int) -> int:
        """Return how many tokens a truncated reply still has."""
        return self.draw("kept", qid, attempt, turn) % max(num_tokens, 1)

    def cause(self, qid: str, attempt: int, num_turns: int) -> str | None:
        """Foretell what an attempt must fail of, if it must."""
        for turn in range(num_turns):
            if turn and self.engine_fault(qid, attempt, turn - 1) is Fault.DUPLICATE:
                return CAUSES["engine"][Fault.DUPLICATE]
            fault = self.engine_fault(qid, attempt, turn)
            if fault not in (None, Fault.DUPLICATE) and (cause := CAUSES["engine"][fault]):
                return cause
            fault = self.environment_fault(qid, attempt, turn)
            if fault is not None and (cause := CAUSES["environment"][fault]):
                return cause
        return None

    def begin(self, qid: str, attempt: int) -> None:
        """Note that an attempt at an episode begins."""
        self._attempts[qid] = attempt
        self._injected[qid] = []
        self._counts[qid] = Counter()

    def next_request(self, qid: str) -> tuple[int, int]:
        """Count a request, and return the attempt and which request of it this is, from 0."""
        return self._next("request", qid)

    def next_step(self, qid: str) -> tuple[int, int]:
        """The same for a step."""
        return self._next("step", qid)

    def _next(self, what: str, qid: str) -> tuple[int, int]:
        counts = self._counts.setdefault(qid, Counter())
        counts[what] += 1
        return self._attempts.get(qid, 0), counts[what] - 1

    def inject(self, place: str, qid: str, fault: Fault | None) -> None:
        if fault is not None:
            self.counts[place, fault] += 1
            self._injected.setdefault(qid, []).append((place, fault))

    def end(self, qid: str) -> list[tuple[str, Fault]]:
        """Forget an episode; return the faults of its last attempt."""
        self._attempts.pop(qid, None)
        self._counts.pop(qid, None)
        self.twice.pop(qid, None)
        return self._injected.pop(qid, [])

    def _fault(self, place: str, qid: str, attempt: int, turn: int) -> Fault | None:
        left = _chance(self.seed, place, qid, attempt, turn)
        for fault, rate in (self.engine if place == "engine" else self.environment).items():
            left -= rate
            if left < 0:
                return fault
        return None


@lru_cache(4096)  # asked for again and again while an episode lasts
def _chance(*names: str | int) -> float:
    return derive_seed(0, *names) / 2**31
