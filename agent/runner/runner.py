"""Many episodes at once, on one engine, with results as they finish."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager

from trajpack.agent.protocols import Agent, Engine, Environment
from trajpack.agent.runner.attempt import Stage, check_serving
from trajpack.agent.runner.gate import GenerationGate
from trajpack.agent.runner.groups import OpenGroup
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.outcome import RunOutcome
from trajpack.agent.runner.policy import GroupPolicy, RolloutPolicy
from trajpack.agent.runner.results import EpisodeResult, GroupResult, Progress
from trajpack.agent.runner.run import EpisodeRun
from trajpack.agent.runner.staleness import StalenessGate
from trajpack.agent.runner.ticket import Prompts, Rules, Ticket
from trajpack.agent.runner.watch import Audience
from trajpack.agent.runner.watchdog import Watchdog
from trajpack.packing.optional import require

__all__ = ["EpisodeResult", "GroupResult", "Progress", "RolloutRunner"]

_DEFAULT_POLICY = RolloutPolicy()


class RolloutRunner:
    """Rolls prompts out: one agent and one environment, any number of episodes at once.

    Sample ``k`` of the prompt ``q`` is the episode ``q@k``. Its trajectories get the group
    ``q``, unless the agent gave them one, so that samples of a prompt can be compared.

    An episode that fails is data: a result with an error that says why, and no trajectories;
    whatever was raised, but for what ends a program, `KeyboardInterrupt` and `SystemExit`.
    What an agent returns is checked before it counts, as a `TrajectoryBuffer` would check it.

    Args:
        engine: Has been entered by the caller, and is not closed here.
        agent: Collects the trajectories.
        environment: Shared by all episodes.
        concurrency: Episodes in flight at most. As many more may wait for their next attempt,
            or to be taken; then no new ones begin.
        group_size: Episodes for each prompt.
        policy: Retries, time limits, staleness, what becomes of groups, and the seed.
        observers: Told of every step. What one of them raises is logged and goes no further.
        finished: Names of episodes that were finished before and are not begun again, such as
            those of a `TrajectoryLog`. A group is begun as a whole, unless ``group_size`` of
            its episodes are finished.
        on_progress: Called while results are waited for, after replies of the engine and
            before each result is handed over. What it raises ends the run.

    Raises:
        ValueError: If ``concurrency`` or ``group_size`` is below 1.

    Cost: 0.2 milliseconds of Python a turn or less, agent included (docs/rollouts.md).
    """

    def __init__(  # noqa: PLR0913 - the first three are what it runs, the others are options
        self,
        engine: Engine,
        agent: Agent,
        environment: Environment,
        *,
        concurrency: int = 64,
        group_size: int = 1,
        policy: RolloutPolicy = _DEFAULT_POLICY,
        observers: Sequence[RolloutObserver] = (),
        finished: Collection[str] = (),
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        for name, value in (("concurrency", concurrency), ("group_size", group_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        require("anyio")
        self._gate = GenerationGate()
        staleness = None if policy.staleness is None else StalenessGate(policy.staleness)
        self._watchdog = Watchdog(
            engine, environment, agent, gate=self._gate, patience_s=policy.silence_warning_s
        )
        self._rules = Rules(
            Stage(
                engine,
                agent,
                environment,
                Audience(observers),
                self._gate,
                policy.episode_timeout_s,
                self._watchdog,
            ),
            policy,
            concurrency,
            group_size,
            set(finished) if isinstance(finished, list | tuple) else finished,
            staleness,
            on_progress,
        )
        self._runs: set[EpisodeRun] = set()

    @property
    def staleness(self) -> StalenessGate | None:
        """Counts of results accepted and under way, where the policy limits staleness."""
        return self._rules.staleness

    async def run(self, prompts: Prompts) -> AsyncGenerator[EpisodeResult, None]:
        """Yield a result for each episode, in the order in which they finish.

        Prompts are taken one by one, as episodes end. An exception in an episode, from
        the agent or the environment, is its result's ``error``. Leaving the loop early,
        closing the generator or cancelling the task that iterates cancels every episode
        in flight and closes it in the engine; close the generator with
        `contextlib.aclosing` where that must have happened before the next statement.

        Once an episode has failed because the engine ended, no new ones begin; those in
        flight still give their results. A run that ends without a single success logs an error.

        Raises:
            RuntimeError: If the engine knows that it does not serve: it has not been entered, or
                was left.
            ValueError: If the policy has rules for groups: those are for `run_groups`.
            Exception: What iterating ``prompts`` or ``on_progress`` raised; episodes in
                flight are cancelled.
        """
        if self._rules.policy.groups != GroupPolicy():
            raise ValueError("the policy has rules for groups, which run does not look at")
        async with self._running(prompts, by_group=False) as (run, events):
            outcome = RunOutcome()
            async for event in events:
                assert isinstance(event, tuple)
                result = event[1]
                run.settle(accepted=result.error is None)
                outcome.count(result)
                self._tell_accepted(result)
                yield result
            self._log_outcome(run, outcome)

    async def run_groups(self, prompts: Prompts) -> AsyncGenerator[GroupResult, None]:
        """Yield a group for each prompt, in the order in which they are complete.

        Groups that the policy rejects are yielded too, with the reason. For staleness, a group
        counts as one result. Otherwise as `run`; an episode that was stopped counts as failed,
        and a group that was stopped before all of its episodes began is not complete.

        Raises:
            Exception: What iterating ``prompts``, ``on_progress`` or a filter raised; episodes
                in flight are cancelled.
        """
        async with self._running(prompts, by_group=True) as (run, events):
            outcome = RunOutcome()
            tickets: dict[tuple[OpenGroup, int], Ticket] = {}
            async for event in events:
                if isinstance(event, tuple):
                    ticket, result = event
                    assert ticket.group is not None
                    group = ticket.group
                    group.results.append(result)
                    tickets[group, result.sample] = ticket
                else:
                    group = event
                if not group.is_complete or self._goes_on(run, group, tickets):
                    continue
                for result in group.results:
                    del tickets[group, result.sample]
                judged = group.judge(self._rules.policy.groups)
                run.settle(accepted=judged.rejected is None)
                outcome.count_group(judged)
                self._tell_group(judged)
                yield judged
            self._log_outcome(run, outcome)

    def stop(self, *, drain: bool = True) -> None:
        """Have the runs of this moment begin no more episodes, and then end.

        Their generators still yield a result for each episode that has begun: as it ends where
        they ``drain``, otherwise at once, with an `EpisodeCancelledError`. What fails meanwhile is
        not tried again. Runs that begin later are not concerned.
        """
        for run in list(self._runs):
            run.stop(drain=drain)

    @asynccontextmanager
    async def paused(self, *, drain: bool = False) -> AsyncIterator[None]:
        """Let no request reach the engine while the context lasts, for a weight update.

        Episodes go on until they ask; what they ask waits until the end of the context. Where
        several pauses overlap, until the end of the last. Time limits of episodes stand still
        while the context lasts.

        Args:
            drain: Wait first until every request was answered, those of a failed episode until
                the episode has ended. Time limits go on until then.
        """
        self._gate.close()
        try:
            if drain:
                await self._gate.wait_drained()
            with self._gate.standstill():
                yield
        finally:
            self._gate.open()
            for run in self._runs:
                run.wake()

    @asynccontextmanager
    async def _running(
        self, prompts: Prompts, *, by_group: bool
    ) -> AsyncIterator[
        tuple[EpisodeRun, AsyncGenerator[tuple[Ticket, EpisodeResult] | OpenGroup, None]]
    ]:
        check_serving(self._rules.stage.engine)
        if not self._runs:
            self._watchdog.reset()
        run = EpisodeRun(self._rules, prompts, by_group=by_group)
        self._runs.add(run)
        try:
            async with aclosing(run.events()) as events:
                yield run, events
        finally:
            self._runs.discard(run)

    def _goes_on(
        self, run: EpisodeRun, group: OpenGroup, tickets: dict[tuple[OpenGroup, int], Ticket]
    ) -> bool:
        """Begin again what is stale, and begin what has to stand in for what failed."""
        for result in list(group.results):
            ticket = tickets[group, result.sample]
            if run.is_stale(result) is None:
                continue
            group.results.remove(result)
            run.recount(result, -1)
            if not run.retry_stale(ticket, result):
                group.results.append(run.checked_age(ticket, result))
                run.recount(group.results[-1], 1)
        if group.is_complete and not run.is_stopping:
            for sample in group.refill(self._rules.policy.groups):
                run.begin(Ticket(group.prompt, sample, group))
        return not group.is_complete

    def _log_outcome(self, run: EpisodeRun, outcome: RunOutcome) -> None:
        if not run.is_cancelling:
            had_prompts = run.num_prompts > 0 or run.is_stopping
            outcome.log(had_prompts=had_prompts, group_size=self._rules.group_size)

    def _tell_accepted(self, result: EpisodeResult) -> None:
        stage = self._rules.stage
        if stage.audience and result.error is None:
            stage.audience.tell("result_accepted", result, stage.engine.version)

    def _tell_group(self, judged: GroupResult) -> None:
        if judged.rejected is None:
            for result in judged.results:
                self._tell_accepted(result)
        audience = self._rules.stage.audience
        if audience:
            audience.tell("group_ended", judged.prompt.id, judged.results, judged.rejected)
