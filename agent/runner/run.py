"""One run of a runner: takes prompts, begins episodes, tries them again, hands over what ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from trajpack.agent.blocking_work import cancel_and_wait
from trajpack.agent.errors import (
    EpisodeCancelledError,
    EpisodeError,
    StaleEpisodeError,
    has_engine_ended,
)
from trajpack.agent.protocols import Prompt, Reply
from trajpack.agent.runner.attempt import attempt_episode, surviving_cancel
from trajpack.agent.runner.groups import OpenGroup
from trajpack.agent.runner.places import Places
from trajpack.agent.runner.results import EpisodeResult, Tally
from trajpack.agent.runner.staleness import stale_error
from trajpack.agent.runner.ticket import Outcome, Prompts, Rules, Ticket, one_by_one
from trajpack.agent.seeding import derive_seed

__all__ = ["EpisodeRun", "Prompts"]

if TYPE_CHECKING:
    from anyio import CancelScope
    from anyio.abc import TaskGroup

_VERSION_INTERVAL_S = 0.05
"""An engine does not tell of new weights; while no episode may begin, this often it is asked."""
_BEGUN_AT_ONCE = 8
"""Episodes that begin before the event loop has its turn."""


class _Mark(Enum):
    REPLIED = auto()
    ENDED = auto()


class EpisodeRun:
    """The moving parts of one call to `RolloutRunner.run` or `RolloutRunner.run_groups`."""

    def __init__(self, rules: Rules, prompts: Prompts, *, by_group: bool) -> None:
        self._rules = rules
        self._prompts = prompts
        self._by_group = by_group
        self._places = Places(rules.concurrency)
        self._events: asyncio.Queue[tuple[Ticket, EpisodeResult] | OpenGroup | _Mark]
        self._events = asyncio.Queue()
        self._changed = asyncio.Event()
        self._tally = Tally()
        self._has_replied = False
        self._tasks: TaskGroup | None = None
        self._taking: CancelScope | None = None
        self._scopes: dict[Ticket, CancelScope] = {}
        self._num_waits = 0
        self._num_units = 0  # that are under way for the staleness gate, and so not settled
        self.is_stopping = False
        """Whether no more episodes begin."""
        self.is_cancelling = False
        """Whether those in flight were cancelled."""

    @property
    def num_prompts(self) -> int:
        """Prompts taken so far."""
        return self._tally.num_prompts

    def stop(self, *, drain: bool) -> None:
        """Begin no more episodes; cancel those in flight, unless they are to ``drain``."""
        self.is_stopping = True
        if self._taking is not None:
            self._taking.cancel()
        if not drain:
            self.is_cancelling = True
            for scope in list(self._scopes.values()):
                scope.cancel()

    def wake(self) -> None:
        """Look again whether an episode may begin."""
        self._changed.set()

    async def events(self) -> AsyncGenerator[tuple[Ticket, EpisodeResult] | OpenGroup, None]:
        """Yield each ticket with its result as it ends, and each group that was cut short."""
        # The task group lives in a task of its own: its scope must not span a yield.
        driver = asyncio.create_task(self._drive())
        driver.add_done_callback(lambda _: self._events.put_nowait(_Mark.ENDED))
        try:
            while (event := await self._events.get()) is not _Mark.ENDED:
                if isinstance(event, tuple):
                    ticket, result = event
                    self._places.leave_place(ticket)
                    if result.error is not None or not self.retry_stale(ticket, result):
                        result = self.checked_age(ticket, result)
                        self._tally.count_result(result)
                        self._show_progress()
                        yield ticket, result
                elif isinstance(event, OpenGroup):
                    yield event
                else:
                    self._has_replied = False
                    self._show_progress()
            await driver
        finally:
            await cancel_and_wait(driver)
            if self._rules.staleness is not None:
                self._rules.staleness.give_back(self._num_units)

    def begin(self, ticket: Ticket) -> None:
        """Have an episode begin, as soon as there is room and a slot for it."""
        assert self._tasks is not None
        self._tally.num_started += ticket.attempts == 0
        self._tasks.start_soon(self._run_ticket, ticket)

    def settle(self, *, accepted: bool) -> None:
        """Count an episode, or a group, as handed over."""
        self._num_units -= 1
        if (gate := self._rules.staleness) is not None:
            gate.accept() if accepted else gate.give_back()
        self.wake()

    def is_stale(self, result: EpisodeResult) -> StaleEpisodeError | None:
        """Return the error of a result that is too old to be handed over, None if it is not."""
        return stale_error(result, self._rules.policy.staleness, self._rules.stage.engine.version)

    def retry_stale(self, ticket: Ticket, result: EpisodeResult) -> bool:
        """Begin an episode again whose result is stale, if that is allowed."""
        error = self.is_stale(result)
        if error is None or not self._may_retry(ticket, error):
            return False
        self._tell_end(ticket, error, final=False)
        self.begin(ticket)
        return True

    def checked_age(self, ticket: Ticket, result: EpisodeResult) -> EpisodeResult:
        """Return the result, or the failure that it is for being stale."""
        error = self.is_stale(result)
        if error is None:
            return result
        self._tell_end(ticket, error, final=True)
        return replace(result, trajectories=(), error=error)

    def recount(self, result: EpisodeResult, times: int) -> None:
        """Count a result once more, or take it back, since it was found stale in its group."""
        self._tally.count_result(result, times)

    async def _drive(self) -> None:
        from anyio import CancelScope, create_task_group

        try:
            async with create_task_group() as self._tasks:
                with CancelScope() as self._taking:
                    if not self.is_stopping:
                        await self._take_prompts()
                while self._num_units:
                    self._changed.clear()
                    await self._changed.wait()
            if self._tasks.cancel_scope.cancel_called:
                raise RuntimeError("an episode's task was cancelled before it began")
        except BaseExceptionGroup as errors:
            self.is_stopping = True
            # Episodes raise nothing, so this is what iterating the prompts raised.
            raise errors.exceptions[0] from None

    async def _take_prompts(self) -> None:
        prompts = one_by_one(self._prompts)
        while True:
            await self._wait_for_turn(is_unit=True)
            watchdog = self._rules.stage.watchdog
            try:
                with nullcontext() if watchdog is None else watchdog.wanting_prompt():
                    prompt = await anext(prompts)
            except StopAsyncIteration:
                return
            if not isinstance(prompt, Prompt):
                raise TypeError(f"prompts must be Prompts, got {type(prompt).__name__}")
            self._tally.num_prompts += 1
            await self._begin_samples(prompt)

    async def _begin_samples(self, prompt: Prompt) -> None:
        samples = self._rules.samples_of(prompt, by_group=self._by_group)
        group = OpenGroup(prompt, len(samples), len(samples)) if self._by_group else None
        num_begun = 0
        try:
            for sample in samples:
                if num_begun:
                    await self._wait_for_turn(is_unit=group is None)
                ticket = Ticket(prompt, sample, group)
                if not await self._take_place(ticket):
                    return
                if not num_begun or group is None:
                    self._begin_unit()
                num_begun += 1
                self.begin(ticket)
        finally:
            if group is not None and 0 < num_begun < len(samples):
                group.num_expected = num_begun
                if group.is_complete:  # otherwise the last of its results will complete it
                    self._events.put_nowait(group)

    async def _take_place(self, ticket: Ticket) -> bool:
        """Take a place and a slot for an episode, or neither where none begins any more."""
        try:
            await self._places.take_place(ticket)
            await self._places.take_slot(ticket)
        finally:
            if self.is_stopping:
                self._places.leave_slot(ticket)
                self._places.leave_place(ticket)
        return not self.is_stopping

    async def _wait_for_turn(self, *, is_unit: bool) -> None:
        """Wait until an episode might begin, without keeping the place from those that go on."""
        waiting = self._rules.stage.audience.waiting
        async with waiting("room"), self._places.room:
            pass
        if is_unit and (gate := self._rules.staleness) is not None:
            from anyio import move_on_after

            async with waiting("staleness"):
                try:
                    while gate.capacity(version := self._rules.stage.engine.version) < 1:
                        self._changed.clear()
                        self._want_weights(None if self._num_units else version)
                        with move_on_after(_VERSION_INTERVAL_S):
                            await self._changed.wait()
                finally:
                    self._want_weights(None)
        async with waiting("slot"), self._places.slots:
            pass
        self._num_waits += 1
        if self._num_waits % _BEGUN_AT_ONCE == 0:
            await asyncio.sleep(0)

    def _want_weights(self, version: int | None) -> None:
        if self._rules.stage.watchdog is not None:
            self._rules.stage.watchdog.want_weights(version)

    def _begin_unit(self) -> None:
        self._num_units += 1
        if self._rules.staleness is not None:
            self._rules.staleness.begin(self._rules.stage.engine.version)

    async def _run_ticket(self, ticket: Ticket) -> None:
        from anyio import CancelScope

        outcome: Outcome = EpisodeCancelledError(ticket.qid, "it was stopped")
        with surviving_cancel(), CancelScope() as scope:
            self._scopes[ticket] = scope
            if self.is_cancelling:
                scope.cancel()
            try:
                outcome = await self._outcome(ticket)
            except asyncio.CancelledError:
                if ticket.attempts:
                    self._tell_end(ticket, outcome, final=True)
                raise
            finally:
                del self._scopes[ticket]
        self._places.leave_slot(ticket)
        self._events.put_nowait((ticket, ticket.result(outcome)))

    async def _outcome(self, ticket: Ticket) -> Outcome:
        """Try until it works, or must not be tried again."""
        policy, stage = self._rules.policy, self._rules.stage
        await self._places.take_place(ticket)
        seed = policy.seed if ticket.prompt.seed is None else ticket.prompt.seed
        prompt = replace(ticket.prompt, id=ticket.qid, seed=derive_seed(seed, ticket.qid))
        count = None if self._rules.on_progress is None else self._count_reply
        while True:
            await self._places.take_slot(ticket)
            ticket.attempts += 1
            stage.audience.tell("episode_started", ticket.qid, ticket.attempts - 1)
            try:
                with surviving_cancel(ticket.qid):
                    found = await attempt_episode(stage, prompt, ticket.prompt.id, count)
            except EpisodeError as error:
                if has_engine_ended(error):
                    self.stop(drain=True)
                is_final = not self._may_retry(ticket, error)
                self._tell_end(ticket, error, final=is_final)
                if is_final:
                    return error
            else:
                self._tell_end(ticket, None, final=True)
                return found
            self._places.leave_slot(ticket)
            await asyncio.sleep(policy.retries.wait.seconds(ticket.qid, ticket.attempts))

    def _may_retry(self, ticket: Ticket, error: EpisodeError) -> bool:
        allows = self._rules.policy.retries.allows
        return not self.is_stopping and allows(error.cause, ticket.attempts)

    def _tell_end(self, ticket: Ticket, error: Any, *, final: bool) -> None:
        tell = self._rules.stage.audience.tell
        tell("episode_ended", ticket.qid, ticket.attempts - 1, error, final=final)

    def _count_reply(self, reply: Reply) -> None:
        self._tally.count_reply(reply)
        if not self._has_replied:
            self._has_replied = True
            self._events.put_nowait(_Mark.REPLIED)

    def _show_progress(self) -> None:
        if self._rules.on_progress is not None:
            self._rules.on_progress(self._tally.progress())
