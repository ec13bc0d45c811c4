"""A rollout whose every token says where it comes from, in a time that can be skipped."""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from tests.agent.agents.chat_cases import END, Characters
from tests.agent.chaos.fault_plan import Fault, FaultPlan
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.protocols import GenerationOutput, GenerationRequest, Prompt, SamplingParams
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.agent.seeding import derive_seed
from trajpack.packing.types import Turn

_T = TypeVar("_T")
NUM_TURNS = 3
MARKS = 0x10000
"""Added to a number it gives a token that no text has."""
NUM_MARKED = 6
"""Tokens of a completion: the episode, the attempt, the turn, two of no meaning, the end."""


def chaos_policy(**changes: Any) -> RolloutPolicy:
    limits = {"episode_timeout_s": 60.0, "generation_timeout_s": 20.0}
    retries = RetryPolicy(max_attempts=4, wait_initial_s=0.5, wait_max_s=4.0)
    return RolloutPolicy(**({"retries": retries} | limits | changes))


def chaos_agent(num_turns: int = NUM_TURNS) -> MathMultiTurnAgent:
    sampling = SamplingParams(max_new_tokens=NUM_MARKED)
    return MathMultiTurnAgent(sampling, Characters(), None, num_turns=num_turns)


def chaos_prompts(count: int, first: int = 0) -> Iterator[Prompt]:
    return (Prompt(f"q{k}", [ord("?"), 48 + k % 10]) for k in range(first, first + count))


def marked_ids(qid: str, attempt: int, turn: int) -> list[int]:
    """Return what the engine says: it tells the episode, the attempt and the turn."""
    prompt, _, sample = qid[1:].partition("@")
    number = int(prompt) % 50_000 * 16 + int(sample or 0)  # all are characters
    spice = derive_seed(0, qid, attempt, turn) % 1000
    parts = (number, attempt, turn, spice, spice // 2)
    return [*(MARKS + part for part in parts), ord(END)]


def marked_logprobs(ids: Iterable[int]) -> list[float]:
    return [-((token % 997) + 1) / 331 for token in ids]


class MarkingEngine:
    """Answers in tokens that say which question of which attempt they answer."""

    def __init__(self, plan: FaultPlan, version: int = 0) -> None:
        self.plan = plan
        self.version = version
        self.open: list[str] = []
        """Episodes whose requests are in flight."""
        self.on_request: Callable[[str], None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self.open == []

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        if self.on_request is not None:
            self.on_request(request.qid)
        self.open.append(request.qid)
        try:
            return await self.answer(request, *self.plan.next_request(request.qid))
        finally:
            self.open.remove(request.qid)

    async def answer(self, request: GenerationRequest, attempt: int, turn: int) -> GenerationOutput:
        await asyncio.sleep(0)
        qid, ids, _ = request
        said = marked_ids(qid, attempt, turn)
        version = self.version
        return GenerationOutput(qid, ids, said, marked_logprobs(said), False, version, version)


class CoinJudge:
    """Judges an answer by what it is, and by nothing else."""

    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        qid, answers = action
        return None, [derive_seed(0, qid, text) % 2 for text in answers], False, False, {}


@dataclass(eq=False)
class Beginnings(RolloutObserver):
    """Tells the plan which attempt of an episode is under way."""

    plan: FaultPlan

    def episode_started(self, qid: str, attempt: int) -> None:
        self.plan.begin(qid, attempt)


@dataclass(eq=False)
class Account(Beginnings):
    """What has come of a run, every result held against the plan."""

    policy: RolloutPolicy = field(default_factory=chaos_policy)
    num_turns: int = NUM_TURNS
    besides: frozenset[str] = frozenset()
    """Causes that the plan knows nothing of."""
    seen: Counter[str] = field(default_factory=Counter)
    """Results by episode."""
    started: set[str] = field(default_factory=set)
    failed: Counter[str] = field(default_factory=Counter)
    """Episodes that failed for good, by cause."""
    tried_again: Counter[str] = field(default_factory=Counter)
    """Attempts that were followed by another, by the cause of their failure."""
    misnamed: list[tuple[str, int, Exception | None, str | None]] = field(default_factory=list)
    """Attempts that did not fail of what they had to: what an observer raises goes no further."""
    num_attempts: int = 0
    num_accepted: int = 0

    def episode_started(self, qid: str, attempt: int) -> None:
        super().episode_started(qid, attempt)
        self.started.add(qid)
        self.num_attempts += 1

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        cause, foretold = (
            getattr(error, "cause", None),
            self.plan.cause(qid, attempt, self.num_turns),
        )
        if cause != foretold and cause not in self.besides:
            self.misnamed.append((qid, attempt, error, foretold))
        if not final:
            self.tried_again[str(cause)] += 1

    def take(self, result: EpisodeResult) -> None:
        """Check one result; what is wrong with it is raised."""
        self.seen[result.qid] += 1
        cause = None if result.error is None else result.error.cause
        if not self.besides:
            assert (result.attempts, cause) == self.foretold(result.qid)
        if result.error is not None:
            assert result.error.qid == result.qid
            assert result.error.reason
            assert result.trajectories == ()
            self.failed[result.error.cause] += 1
            return
        self.num_accepted += 1
        (trajectory,) = result.trajectories
        assert (trajectory.id, trajectory.group) == (result.qid, result.prompt.id)
        assert len(trajectory.turns) == self.num_turns
        self.check_turns(result, list(trajectory.turns))

    def check_turns(self, result: EpisodeResult, turns: list[Turn]) -> None:
        """Check that each turn is the answer to its own question, in this very attempt."""
        attempt, conversation = result.attempts - 1, list(result.prompt.input_ids)
        for number, turn in enumerate(turns):
            ids = marked_ids(result.qid, attempt, number)
            if self.plan.engine_fault(result.qid, attempt, number) is Fault.TRUNCATE:
                ids = ids[: self.plan.num_kept(result.qid, attempt, number, len(ids))]
            assert list(turn.completion_ids) == ids
            expected = marked_logprobs(ids)
            assert all(
                abs(a - b) < 1e-6 for a, b in zip(turn.completion_logprobs, expected, strict=True)
            )
            prompt = list(turn.prompt_ids)
            assert prompt[: len(conversation)] == conversation
            assert all(token < MARKS for token in prompt[len(conversation) :])
            conversation = [*prompt, *ids]

    def foretold(self, qid: str) -> tuple[int, str | None]:
        """Return how often an episode must have been tried, and what it must have failed of."""
        retries = self.policy.retries
        for attempt in range(retries.max_attempts):
            cause = self.plan.cause(qid, attempt, self.num_turns)
            if cause is None or not retries.allows(cause, attempt + 1):
                break
        return attempt + 1, cause

    @property
    def num_doubled(self) -> int:
        return sum(count - 1 for count in self.seen.values())

    def num_lost(self, qids: Iterable[str]) -> int:
        return sum(qid not in self.seen for qid in qids)


class _NoWaiting(selectors.DefaultSelector):
    """Where all wait, it skips the time until the first need not."""

    skipped_s = 0.0
    patience_s = 20.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            # threads may still be at work; the event loop itself has nothing to wait for
            if not (ready := super().select(self.patience_s)):
                raise RuntimeError("everything waits, and for nothing that will happen")
            return ready
        ready = super().select(0)
        if not ready and timeout > 0:
            self.skipped_s += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while something can be done, and then jumps: time limits cost none."""

    def __init__(self, patience_s: float) -> None:
        self._no_waiting = _NoWaiting()
        self._no_waiting.patience_s = patience_s
        super().__init__(self._no_waiting)

    def time(self) -> float:
        return self._no_waiting.skipped_s


def run_skipping(body: Coroutine[Any, Any, _T], patience_s: float = 20.0) -> _T:
    """Run ``body`` in skipped time; all tasks but its own must be gone when it ends.

    Where all wait, and no time will end it, threads have ``patience_s`` real seconds to do so.
    """
    with asyncio.Runner(loop_factory=lambda: SkippingLoop(patience_s)) as skipping:
        loop = skipping.get_loop()
        result = skipping.run(body)
        left = asyncio.all_tasks(loop)
        assert not left, left
        return result
