"""What stands between an agent and what it talks to: it sees every request, reply and verdict."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Environment, Observation, Reply
from trajpack.agent.runner.gate import GenerationGate
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.watchdog import Patience, Watchdog
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)


class Audience:
    """All observers of a runner. What one of them raises is logged once for each hook."""

    def __init__(self, observers: Sequence[RolloutObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._logged: set[tuple[int, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._observers)

    def tell(self, hook: str, *values: Any, **named: Any) -> None:
        """Call a hook of every observer."""
        for number, observer in enumerate(self._observers):
            try:
                getattr(observer, hook)(*values, **named)
            except Exception as error:  # noqa: BLE001 - the rollout goes on, whatever it does
                if (number, hook) not in self._logged:
                    self._logged.add((number, hook))
                    self._log(f"{type(observer).__name__}.{hook}", error)

    def _log(self, name: str, error: Exception) -> None:
        # no whole traceback: its last line quotes what a model or a server may have written
        at, kind = traceback.extract_tb(error.__traceback__)[-1], type(error).__name__
        _logger.error(
            "%s has failed at %s:%d, told once: %s: %s",
            one_line(name), one_line(at.filename), at.lineno or 0, one_line(kind), one_line(error),
        )  # fmt: skip

    @asynccontextmanager
    async def waiting(self, reason: str) -> AsyncIterator[None]:
        """Tell of the time that the context lasts, which begins with a wait."""
        began = time.perf_counter()
        yield
        self.tell("wait_ended", reason, time.perf_counter() - began)


class EpisodeWatch:
    """Follows one attempt at an episode.

    Args:
        qid: Name of the episode.
        audience: Told of what happens.
        gate: Every request passes it.
        count_reply: Called with each reply before the agent gets it, if given.
        watchdog: Warns where the attempt waits for long, if given.
    """

    def __init__(
        self,
        qid: str,
        audience: Audience,
        gate: GenerationGate,
        count_reply: Callable[[Reply], None] | None = None,
        *,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.qid = qid
        """Name of the episode."""
        self.audience = audience
        """Told of what happens."""
        self.gate = gate
        """Every request passes it."""
        self.count_reply = count_reply
        """Called with each reply."""
        self.is_over = False
        """Whether the attempt has ended; what its agent left running may ask no more."""
        self.environment_errors: list[BaseException] = []
        """What the environment raised."""
        self.watchdog = watchdog
        """Warns where the attempt waits for long."""
        self.sign_at = 0.0
        """When something last happened in it, on the event loop's clock."""
        self.num_waits = 0
        """Calls of the environment and waits at the gate that are under way."""
        self._num_asked = 0
        self._num_replied = 0
        self._num_in_flight = 0
        self._num_seen = 0
        self._replies: asyncio.Queue[Reply] | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it waits for its agent alone: not for engine, environment or gate."""
        return self._num_in_flight == self.num_untaken and not self.num_waits

    @property
    def num_untaken(self) -> int:
        """Replies that have come to requests of it, and that its agent has not taken."""
        return 0 if self._replies is None else min(self._num_in_flight, self._replies.qsize())

    def look(self, now: float) -> None:
        """Note that something has happened now, if replies have come since the last look."""
        if self.num_untaken > self._num_seen:
            self.sign_at = now
        self._num_seen = self.num_untaken

    def follow(self, replies: asyncio.Queue[Reply]) -> None:
        """Take note of where the engine puts its replies."""
        self._replies = replies
        self.gate.untaken.add(self._count_untaken)
        if self.watchdog is not None:
            self.watchdog.begin(self)

    def asked(self, observation: Any) -> Observation:
        """Take note of a request that is about to be sent, and return it as a tuple.

        Raises:
            RuntimeError: If the attempt is over.
            EpisodeError: If it is no request, or the request is of another episode: no reply to
                it would ever come.
        """
        if self.is_over:
            raise RuntimeError(f"episode {self.qid!r} is over: it asks no more")
        try:
            qid, token_ids, sampling = observation  # as engines do, of whatever type it is
        except (TypeError, ValueError) as error:
            reason = (
                f"expected a request (qid, token_ids, sampling), got {one_line(repr(observation))}"
            )
            raise EpisodeError(self.qid, reason) from error
        if qid != self.qid:
            reason = f"the agent put a request with the qid {qid!r}"
            raise EpisodeError(self.qid, f"{reason}: it must be its prompt's id, {self.qid!r}")
        if self.watchdog is not None:
            self.watchdog.asked(self)
        turn = self._num_asked
        self._num_asked += 1
        self._num_in_flight += 1
        self.gate.num_in_flight += 1
        if self.audience:
            size = len(token_ids) if hasattr(token_ids, "__len__") else 0
            self.audience.tell("generation_started", self.qid, turn, size)
        return qid, token_ids, sampling

    def replied(self, reply: Reply) -> None:
        """Take note of a reply that the agent gets."""
        turn = self._num_replied
        self._num_replied += 1
        if self._num_in_flight:
            self._num_in_flight -= 1
            self.gate.land()
        if self.watchdog is not None:
            self.watchdog.replied(self)
        if self.count_reply is not None:
            self.count_reply(reply)
        if self.audience:
            self.audience.tell("generation_ended", self.qid, turn, reply)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Take note of a call of the environment, and of what it raises."""
        self.num_waits += 1
        if self.watchdog is not None:
            self.watchdog.called(self)
        try:
            yield
        except BaseException as raised:
            self.environment_errors.append(raised)
            raise
        finally:
            self.num_waits -= 1
            if self.watchdog is not None:
                self.watchdog.answered(self)

    async def judged(self, step: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call the environment's ``step``, and tell of it."""
        turn = max(self._num_asked - 1, 0)
        if self.audience:
            self.audience.tell("verification_started", self.qid, turn)
        error: BaseException | None = None
        try:
            with self.calling():
                return await step(*values, **named)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self.audience:
                self.audience.tell("verification_ended", self.qid, turn, error)

    def close(self) -> None:
        """End it; requests that were not answered are given up."""
        self.is_over = True
        if self.watchdog is not None:
            self.watchdog.end(self)
        self.gate.untaken.discard(self._count_untaken)
        if self._num_in_flight:
            self.gate.land(self._num_in_flight)
            self._num_in_flight = 0

    def _count_untaken(self) -> int:
        return self.num_untaken


class WatchedRequests(asyncio.Queue[Observation]):
    """Stands before an engine's queue of observations."""

    def __init__(self, requests: asyncio.Queue[Observation], watch: EpisodeWatch) -> None:
        super().__init__()
        self._requests = requests
        self._watch = watch

    @property
    def patience(self) -> Patience | None:
        """How long the run waits in silence before it warns; None where it does not watch."""
        return None if self._watch.watchdog is None else self._watch.watchdog.patience

    async def put(self, item: Observation) -> None:
        """Put an observation, once generation is not paused."""
        await self.wait_open()
        await self._requests.put(self._watch.asked(item))

    async def wait_open(self) -> None:
        """Wait until generation is not paused."""
        if self._watch.gate.is_closed:
            self._watch.num_waits += 1
            try:
                async with self._watch.audience.waiting("pause"):
                    await self._watch.gate.wait_open()
            finally:
                self._watch.num_waits -= 1
                if self._watch.watchdog is not None:
                    self._watch.watchdog.sign(self._watch)

    def put_nowait(self, item: Observation) -> None:
        """Put an observation; while generation is paused the queue counts as full.

        Raises:
            asyncio.QueueFull: If it cannot be put now.
        """
        if self.full():
            raise asyncio.QueueFull
        self._requests.put_nowait(self._watch.asked(item))

    async def get(self) -> Observation:
        """Take an observation as the engine does."""
        return await self._requests.get()

    def get_nowait(self) -> Observation:
        """Take an observation as the engine does."""
        return self._requests.get_nowait()

    def qsize(self) -> int:
        """Return how many observations wait, those of all episodes."""
        return self._requests.qsize()

    def empty(self) -> bool:
        """Return whether no observation waits."""
        return self._requests.empty()

    def full(self) -> bool:
        """Return whether none can be put now."""
        return self._watch.gate.is_closed or self._requests.full()


class WatchedReplies(asyncio.Queue[Reply]):
    """Stands before an engine's queue of replies; its contents are that queue's."""

    def __init__(self, replies: asyncio.Queue[Reply], watch: EpisodeWatch) -> None:
        super().__init__()
        self._replies = replies
        self._watch = watch
        watch.follow(replies)

    async def get(self) -> Reply:
        """Wait for the next reply."""
        reply = await self._replies.get()
        self._watch.replied(reply)
        return reply

    def get_nowait(self) -> Reply:
        """Return the next reply if it is there."""
        reply = self._replies.get_nowait()
        self._watch.replied(reply)
        return reply

    async def put(self, item: Reply) -> None:
        """Put a reply as the engine does."""
        await self._replies.put(item)

    def put_nowait(self, item: Reply) -> None:
        """Put a reply as the engine does."""
        self._replies.put_nowait(item)

    def qsize(self) -> int:
        """Return how many replies wait."""
        return self._replies.qsize()

    def empty(self) -> bool:
        """Return whether no reply waits."""
        return self._replies.empty()

    def full(self) -> bool:
        """Return whether no reply can be put."""
        return self._replies.full()

    def task_done(self) -> None:
        """Tell the engine's queue that a reply was dealt with."""
        self._replies.task_done()

    async def join(self) -> None:
        """Wait until every reply was dealt with."""
        await self._replies.join()


class WatchedEnvironment:
    """Stands before an environment; has whatever else that one has."""

    def __init__(self, environment: Environment, watch: EpisodeWatch) -> None:
        self._environment = environment
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(self, *values: Any, **named: Any) -> Any:
        """Start an episode."""
        with self._watch.calling():
            return await self._environment.reset(*values, **named)

    async def step(self, *values: Any, **named: Any) -> Any:
        """Take an action."""
        return await self._watch.judged(self._environment.step, *values, **named)
