"""Warnings of long silences of the engine, the environment, an agent or the prompts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from trajpack.agent.protocols import Agent, Engine, Environment
    from trajpack.agent.runner.attempt import GenerationGate, RequestQueue

_logger = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""Seconds without a sign before the first warning, unless a policy says otherwise."""
_LONGEST_PATIENCE_S = 100_000.0
"""Longest silence, in seconds, that is waited for."""
_EARLY_S = 0.001
"""Tolerance for rounding: a check that fires early would be scheduled again at once."""
_LATE_S = 1.0
"""Delay of a timer, in seconds, that shows that the event loop stood still."""
_FACTORS = {"engine": 1, "environment": 1, "agent": 1, "prompts": 1, "weights": 6}
"""Patience with each subject, in units of the given one. New weights take a training step."""
_run_numbers = itertools.count()


@dataclass(frozen=True)
class Patience:
    """First patience of a run, which a watchdog in another process can adopt."""

    first_s: float
    """Seconds without a sign before the first warning; infinite where there is none."""
    run: int
    """Number of the run."""


class Watchdog:
    """Warns when the engine, the environment, an agent or the prompts keep a run waiting.

    A warning ends nothing, since a slow answer is no error. The second warning about a subject
    comes after twice the silence of the first, and so on until `reset`.

    The engine gives a sign with each reply, and the environment with each answer, to any episode.
    The agent gives a sign with each request, reply, call and answer of its own episode. It is
    waited for where its episode has no call open, and a reply has come to each request, whether
    the agent has taken the reply or not. The prompts are waited for where no episode is under way.

    Warnings name the parties by their types. An agent with a true ``is_remote`` is not watched: its
    episodes run in another process, which has its own watchdog. The first warning comes after
    ``patience_s`` seconds without a sign, never if that is None; ``warn`` is called with each
    warning, which are logged by default.

    Cost: reads the event loop's clock at each sign; one timer while episodes run, and no task.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        agent: Agent,
        *,
        gate: GenerationGate,
        patience_s: float | None = PATIENCE_S,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        parties = {"engine": engine, "environment": environment, "agent": agent}
        self._names = {name: one_line(f"{name} {type(x).__name__}") for name, x in parties.items()}
        self._is_remote = bool(getattr(agent, "is_remote", False))
        self._gate = gate
        self._warn = warn or _log
        self.patience = Patience(math.inf if patience_s is None else patience_s, -1)
        """Patience of the current run."""
        self._patience_s: dict[str, float] = {}
        self._attempts: dict[RequestQueue, None] = {}  # in the order of their beginnings
        self._num_calls = 0
        self._engine_sign_at = self._environment_sign_at = self._idle_at = 0.0
        self._wanted: tuple[int, float] | None = None
        self._prompt_waits: dict[object, float] = {}  # since when each run waits for one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.reset()

    def reset(self) -> None:
        """Return to the first patience, for a new run."""
        self.adopt(Patience(self.patience.first_s, next(_run_numbers)))

    def adopt(self, patience: Patience) -> None:
        """Return to the first patience of another watchdog's run, unless it is the present one."""
        if patience != self.patience:
            self.patience = patience
            self._patience_s = {name: patience.first_s * one for name, one in _FACTORS.items()}

    def begin(self, attempt: RequestQueue) -> None:
        """Watch an attempt at an episode."""
        self.sign(attempt)
        self._attempts[attempt] = None

    def end(self, attempt: RequestQueue) -> None:
        """Watch an attempt no more."""
        self._attempts.pop(attempt, None)
        if not self._attempts:
            self._idle_at = self.sign(attempt)

    def sign(self, attempt: RequestQueue) -> float:
        """Note that something has happened in an episode; return the time."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the interpreter closes what a dead event loop has left
            return attempt.sign_at
        attempt.sign_at = now = loop.time()
        self._look_at(now + self.patience.first_s, loop)
        return now

    def requested(self, attempt: RequestQueue) -> None:
        """Note a request to the engine; the gate counts it afterwards."""
        now = self.sign(attempt)
        if not self._gate.num_in_flight:
            self._engine_sign_at = now

    def replied(self, attempt: RequestQueue) -> None:
        """Note a reply of the engine."""
        self._engine_sign_at = self.sign(attempt)

    def called(self, attempt: RequestQueue) -> None:
        """Note a call of the environment."""
        now = self.sign(attempt)
        if not self._num_calls:
            self._environment_sign_at = now
        self._num_calls += 1

    def answered(self, attempt: RequestQueue) -> None:
        """Note that a call of the environment has ended."""
        self._environment_sign_at = self.sign(attempt)
        self._num_calls -= 1

    def want_weights(self, version: int | None) -> None:
        """Note that a run waits for weights newer than ``version``; None: that it does not."""
        if version is None:
            self._wanted = None
        elif self._wanted is None or self._wanted[0] != version:
            loop = asyncio.get_running_loop()
            self._wanted = version, loop.time()
            self._look_at(loop.time() + self.patience.first_s, loop)

    @contextmanager
    def wanting_prompt(self) -> Iterator[None]:
        """Note that a run waits for its next prompt while the context lasts."""
        loop, wait = asyncio.get_running_loop(), object()
        self._prompt_waits[wait] = now = loop.time()
        self._look_at(now + self.patience.first_s, loop)
        try:
            yield
        finally:
            del self._prompt_waits[wait]

    def _look_at(self, at: float, loop: asyncio.AbstractEventLoop) -> None:
        """Look at that time of the loop, unless an earlier look is planned."""
        if self._loop is not loop:  # a runner may see several, one after the other
            self._loop, self._timer = loop, None
        if at < (math.inf if self._timer is None else self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(at, self._look)

    def _look(self) -> None:
        """Warn of each silence that exceeds the patience with its subject, and plan the next."""
        assert self._loop is not None
        assert self._timer is not None
        now = self._loop.time()
        if now - self._timer.when() > _LATE_S:  # no sign could be noticed meanwhile
            self._engine_sign_at = self._environment_sign_at = self._idle_at = now
            for attempt in self._attempts:
                attempt.sign_at = now
        if self._gate.is_still:
            self._engine_sign_at = self._idle_at = now
        self._timer = None
        due = math.inf
        for subject, since, before, after in self._silences():
            silent_s = now - since
            if silent_s + _EARLY_S >= self._patience_s[subject]:
                self._warn(f"{before} for {silent_s:.0f} s{after}")
            while silent_s + _EARLY_S >= self._patience_s[subject]:
                self._patience_s[subject] *= 2
            due = min(due, self._patience_s[subject] - silent_s)
        if due <= _LONGEST_PATIENCE_S:
            self._look_at(now + due, self._loop)

    def _silences(self) -> Iterator[tuple[str, float, str, str]]:
        """Yield each subject that is waited for, since when, and the text around the seconds."""
        remedy = "RolloutPolicy(episode_timeout_s=...) ends such episodes"
        if num_open := self._gate.num_in_flight:
            after = (
                f" (requests open: {num_open}); generation may be slow, but an engine must be "
                "entered (async with engine:), and its tasks must run"
            )
            yield "engine", self._engine_sign_at, f"{self._names['engine']} has not replied", after
        if self._num_calls:
            before = f"{self._names['environment']} has not answered"
            after = f" (calls of reset or step open: {self._num_calls}); {remedy}"
            yield "environment", self._environment_sign_at, before, after
        if alone := [one for one in self._attempts if one.is_alone and not self._is_remote]:
            first = min(alone, key=lambda one: one.sign_at)
            after = (
                f" in episode {one_line(first.qid)}, which waits for no reply and no call of the "
                f"environment (such episodes: {len(alone)}; replies that this one has not taken: "
                f"{first.replies.qsize()}); one reply comes to each request under the episode's "
                f"own qid, and the agent takes it with act_queue.get(); {remedy}"
            )
            yield "agent", first.sign_at, f"{self._names['agent']} has done nothing", after
        if self._wanted is not None:
            version, since = self._wanted
            after = (
                ": all results were taken, and the policy's staleness waits for weights newer than "
                f"version {version}"
            )
            yield "weights", since, "no episode may begin", after
        if self._prompt_waits and not self._attempts:
            since = max(self._idle_at, min(self._prompt_waits.values()))
            after = (
                ", and no episode is under way: the run waits for the next item of its iterator of "
                "prompts"
            )
            yield "prompts", since, "no prompt has come", after


def _log(text: str) -> None:
    _logger.warning("%s", one_line(text, 2000))
