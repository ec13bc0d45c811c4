"""`RolloutRunner`: many episodes at once on one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from trajpack.agent.protocols import Engine, SamplingParams
from trajpack.agent.runner.episode import check_made, coroutine_of
from trajpack.agent.runner.gate import GenerationGate
from trajpack.agent.runner.observers import Observers, RolloutObserver
from trajpack.agent.runner.policy import GroupPolicy, RolloutPolicy, StalenessGate, check_least
from trajpack.agent.runner.results import EpisodeResult, GroupResult, Progress
from trajpack.agent.runner.run import Prompts, Run
from trajpack.packing.optional import require

__all__ = ["EpisodeResult", "GroupResult", "Progress", "RolloutRunner"]


@dataclass(eq=False)
class RolloutRunner:
    """Rolls prompts out: one agent and one environment, any number of episodes at once.

    Sample ``k`` of the prompt ``q`` is the episode ``q@k``. Its trajectories get the group
    ``q``, unless the agent gave them one. A prompt that comes again in a run goes on counting, in
    the group ``q#1``. A failed episode is data: a result with an error and no trajectories,
    whatever was raised, except `KeyboardInterrupt`, `SystemExit` and `GeneratorExit`. Trajectories
    are checked as a `TrajectoryBuffer` would check them.

    Args:
        engine: Engine that the caller has entered; it is not closed here.
        agent: Agent that collects the trajectories, or the coroutine function that is one.
        environment: Environment that all episodes share.
        concurrency: Episodes in flight at most. As many more may wait for their next attempt,
            or to be taken; then no new prompts are taken.
        group_size: Episodes for each prompt.
        sampling: Sampling parameters of requests that name none; None takes `SamplingParams()`.
        policy: Retries, time limits, staleness, groups, and the seed.
        observers: Told of every step. An exception of one is logged and goes no further.
        finished: Names of episodes that are not started again, such as those of a
            `TrajectoryLog`. A group is started as a whole, unless all of its episodes are finished.
        on_progress: Called while results are waited for, after replies of the engine and
            before each result is handed over. Its exception ends the run.

    Raises:
        TypeError: If the agent or the engine has no coroutine or is a class, or an option is of
            the wrong kind.
        ValueError: If ``concurrency`` or ``group_size`` is below 1.
    """

    engine: Engine
    agent: Any
    environment: Any
    _: KW_ONLY
    concurrency: int = 64
    group_size: int = 1
    sampling: Any = None
    policy: RolloutPolicy = field(default_factory=RolloutPolicy)
    observers: Sequence[RolloutObserver] = ()
    finished: Collection[str] = ()
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        check_least(self, concurrency=1, group_size=1)
        if not isinstance(self.policy, RolloutPolicy):
            raise TypeError(f"policy must be a RolloutPolicy, got {type(self.policy).__name__}")
        if isinstance(self.finished, str):
            raise TypeError(f"finished must be several names, got {self.finished!r}")
        require("anyio")
        check_made("engine", self.engine)
        check_made("environment", self.environment)
        if not hasattr(self.engine, "generate"):
            got = type(self.engine).__name__
            wrap = "; wrap it: FunctionEngine(function)" if callable(self.engine) else ""
            raise TypeError(f"engine must have a coroutine generate(request), got {got}{wrap}")
        self.finished = frozenset(self.finished)
        self.run_agent = coroutine_of(self.agent)
        self.sampling = SamplingParams() if self.sampling is None else self.sampling
        self.staleness = StalenessGate(self.policy.staleness)
        """Counts of results accepted and under way."""
        self.tell = Observers(self.observers)
        self.gate = GenerationGate()
        self.num_calls = 0
        """Calls of the environment that are under way."""
        self.runs: set[Run] = set()

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
        async with aclosing(Run(self, prompts, by_group=False).results()) as groups:
            async for group in groups:
                yield group.results[0]

    def run_groups(self, prompts: Prompts) -> AsyncGenerator[GroupResult, None]:
        """Yield a group for each prompt, in the order in which they are complete.

        Groups that the policy rejects are yielded too, with the reason. For staleness, a group
        counts as one result. An episode that was stopped counts as failed. Otherwise as `run`; a
        filter may raise, too.
        """
        return Run(self, prompts, by_group=True).results()

    def stop(self, *, drain: bool = True) -> None:
        """Stop starting episodes in all current runs, then finish these runs.

        Their generators still yield a result for each episode that has started: as it ends if
        they ``drain``, otherwise at once, with an `EpisodeCancelledError`. Episodes of a group that
        have not started get that error, too. An episode that fails meanwhile is not retried. Later
        runs are not affected.
        """
        for run in list(self.runs):
            run.stop(drain=drain)

    def paused(self, *, drain: bool = False) -> AbstractAsyncContextManager[None]:
        """Hold back requests to the engine while the context lasts, for a weight update.

        Episodes go on until their next request, which waits until the end of the context; of
        overlapping pauses, until the end of the last. Time limits stand still while the context
        lasts.

        Args:
            drain: Wait first until every request was answered, those of a failed episode until
                the episode has ended. Time limits run until then.
        """
        return self.gate.paused(drain=drain)
