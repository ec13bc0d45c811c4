"""`RolloutRunner`: many episodes at once on one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager

from trajpack.agent.runner.episode import RunnerContext, check_serving
from trajpack.agent.runner.policy import GroupPolicy
from trajpack.agent.runner.results import EpisodeResult, GroupResult, Progress
from trajpack.agent.runner.run import Prompts, Run

__all__ = ["EpisodeResult", "GroupResult", "Progress", "RolloutRunner"]


class RolloutRunner(RunnerContext):
    """Rolls prompts out: one agent and one environment, any number of episodes at once.

    Sample ``k`` of the prompt ``q`` is the episode ``q@k``. Its trajectories get the group
    ``q``, unless the agent gave them one. A prompt that comes again in a run goes on counting, in
    the group ``q#1``. A failed episode is data: a result with an error and no trajectories,
    whatever was raised, except `KeyboardInterrupt` and `SystemExit`. Trajectories are checked as a
    `TrajectoryBuffer` would check them.

    Args:
        engine: Engine that the caller has entered; it is not closed here.
        agent: Agent that collects the trajectories, or the coroutine function that is one.
        environment: Environment that all episodes share.
        concurrency: Episodes in flight at most. As many more may wait for their next attempt,
            or to be taken; then no new ones start.
        group_size: Episodes for each prompt.
        sampling: Sampling parameters of requests that name none; None takes `SamplingParams()`.
        policy: Retries, time limits, staleness, groups, and the seed.
        observers: Told of every step. An exception of one is logged and goes no further.
        finished: Names of episodes that are not started again, such as those of a
            `TrajectoryLog`. A group is started as a whole, unless ``group_size`` of its episodes
            are finished.
        on_progress: Called while results are waited for, after replies of the engine and
            before each result is handed over. Its exception ends the run.

    Raises:
        TypeError: If the agent has no coroutine, or an option is of the wrong kind.
        ValueError: If ``concurrency`` or ``group_size`` is below 1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._runs: set[Run] = set()

    async def run(self, prompts: Prompts) -> AsyncGenerator[EpisodeResult, None]:
        """Yield a result for each episode, in the order in which they finish.

        Prompts are taken one by one, as episodes end. Leaving the loop early, closing the generator
        or cancelling the task that iterates cancels every episode in flight; close the generator
        with `contextlib.aclosing` if that must have happened before the next statement. Once an
        episode has failed because the engine ended, no new ones start.

        Raises:
            RuntimeError: If the engine reports that it has not been entered, or was left.
            ValueError: If the policy has rules for groups: those are for `run_groups`.
            Exception: As iterating ``prompts`` or ``on_progress`` raised it; episodes in
                flight are cancelled.
        """
        if self.policy.groups != GroupPolicy():
            raise ValueError("the policy has rules for groups, which run does not look at")
        with self._running(prompts, by_group=False) as run:
            async with aclosing(run.results()) as groups:
                async for group in groups:
                    yield group.results[0]

    async def run_groups(self, prompts: Prompts) -> AsyncGenerator[GroupResult, None]:
        """Yield a group for each prompt, in the order in which they are complete.

        Groups that the policy rejects are yielded too, with the reason. For staleness, a group
        counts as one result. An episode that was stopped counts as failed, and a group that was
        stopped before all of its episodes started is not complete. Otherwise as `run`; a filter may
        raise, too.
        """
        with self._running(prompts, by_group=True) as run:
            async with aclosing(run.results()) as groups:
                async for group in groups:
                    yield group

    def stop(self, *, drain: bool = True) -> None:
        """Stop starting episodes in all current runs, then finish these runs.

        Their generators still yield a result for each episode that has started: as it ends if
        they ``drain``, otherwise at once, with an `EpisodeCancelledError`. An episode that fails
        meanwhile is not retried. Later runs are not affected.
        """
        for run in list(self._runs):
            run.stop(drain=drain)

    @asynccontextmanager
    async def paused(self, *, drain: bool = False) -> AsyncIterator[None]:
        """Hold back requests to the engine while the context lasts, for a weight update.

        Episodes go on until their next request, which waits until the end of the context; of
        overlapping pauses, until the end of the last. Time limits stand still while the context
        lasts.

        Args:
            drain: Wait first until every request was answered, those of a failed episode until
                the episode has ended. Time limits run until then.
        """
        try:
            async with self.gate.paused(drain=drain):
                yield
        finally:
            for run in self._runs:
                run.wake()

    @contextmanager
    def _running(self, prompts: Prompts, *, by_group: bool) -> Iterator[Run]:
        check_serving(self.engine)
        run = Run(self, prompts, by_group=by_group)
        if not self._runs:
            self.silence.start()
        self._runs.add(run)
        try:
            yield run
        finally:
            self._runs.discard(run)
            if not self._runs:
                self.silence.stop()
