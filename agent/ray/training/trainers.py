"""A group of trainer ranks on a Ray cluster, which lives and dies as one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trajpack.agent.blocking_work import run_to_end
from trajpack.agent.ray.rollouts.life import told_by
from trajpack.agent.ray.room import describe_room, lacking_room
from trajpack.agent.ray.training.rank import MakeTrainer, RankOptions, TrainerRank
from trajpack.agent.ray.weights import Weights
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_CULPRIT_S = 2.0
"""How long a rank's error waits for the news that another has died, which explains it."""
_KILL_TIMEOUT_S = 5.0


class RankLostError(RuntimeError):
    """A rank has died or failed, and with it the whole group: none can go on alone."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"trainer rank {rank}: {reason}")
        self.rank = rank
        """Which one, from 0."""
        self.reason = reason
        """What is known of it."""

    def __reduce__(self) -> tuple[type[RankLostError], tuple[int, str]]:
        return type(self), (self.rank, self.reason)


class TrainerRanks:
    """Trainer ranks in one process group: gloo between CPUs, NCCL between GPUs.

    Use it as an asynchronous context manager; Ray must have been initialised. When a rank
    dies, whatever is waited for raises at once, and so does whatever is asked later, until
    `rebuild` has made all ranks anew.

    Args:
        make_trainer: Makes the trainer on each rank.
        num_ranks: How many.
        options: How they are run.

    Raises:
        ValueError: If ``num_ranks`` is below 1.
    """

    def __init__(
        self, make_trainer: MakeTrainer, num_ranks: int, *, options: RankOptions | None = None
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self.num_ranks = num_ranks
        """Of the group."""
        self.pids: tuple[int, ...] = ()
        """Processes of the ranks."""
        require("ray")
        self._make_trainer = make_trainer
        self._options = options or RankOptions()
        self.lost: asyncio.Future[RankLostError]
        """Done with the reason as soon as a rank of the present group is lost."""
        self._initial: Any = None
        self._actors: list[Any] = []
        self._calls: set[asyncio.Future[Any]] = set()

    def begin_with(self, state: Any) -> None:
        """Say which state ranks have when they are entered: what `rebuild` takes."""
        self._initial = state

    async def __aenter__(self) -> TrainerRanks:
        try:
            await self.rebuild(self._initial)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end()

    async def rebuild(self, state: Any) -> None:
        """End all ranks there are, and make new ones.

        Args:
            state: What `state` returned, or a reference to it; ``None`` is that of new trainers.

        Raises:
            RankLostError: If one cannot start, or is lost meanwhile.

        Cost: some 3 s to start the processes, and what their trainers take.
        """
        import ray

        await self._end()
        if lacking := await run_to_end(lambda: self._room(lacking_room)):
            _logger.warning("waiting for a larger cluster: %s", one_line(lacking))
        self.lost = asyncio.get_running_loop().create_future()
        options = self._options
        rank_class = ray.remote(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_restarts=0,  # one alone cannot come back
            concurrency_groups={"watch": 1},
        )(TrainerRank)
        self._actors = [
            rank_class.remote(self._make_trainer, rank, self.num_ranks, options)
            for rank in range(self.num_ranks)
        ]
        for rank, actor in enumerate(self._actors):
            watch = actor.watch.options(concurrency_group="watch").remote()
            self._future(watch).add_done_callback(partial(_lose, self.lost, rank))
        try:
            async with asyncio.timeout(options.start_timeout_s):
                (address,) = await self._ask(self._actors[:1], "address")
                self.pids = tuple(await self._ask(self._actors, "join", address, state))
        except TimeoutError:
            room = await run_to_end(lambda: self._room(describe_room))
            reason = f"the group did not start within {options.start_timeout_s:g} s; {room}"
            if not self.lost.done():  # else a rank that never joined would be asked
                self.lost.set_result(RankLostError(0, reason))
            raise self.lost.result() from None

    async def step(self, arrays: Any) -> list[dict[str, float]]:
        """Have all ranks take a step together; return what each says of it.

        Args:
            arrays: `TrajectoryArrays`, or better a reference to them: one copy for each node.

        Raises:
            RankLostError: If a rank is lost or fails.
        """
        return await self._ask(self._actors, "step", arrays)

    async def state(self) -> Any:
        """Return the trainer's state as a uint8 array: rank 0's, which is everyone's.

        Raises:
            RankLostError: If the rank is lost or fails.
        """
        return (await self._ask(self._actors[:1], "state"))[0]

    async def weights(self, version: int) -> Weights:
        """Return the weights, as arrays that may be views of shared memory.

        Raises:
            RankLostError: If the rank is lost or fails.
        """
        weights: Weights = (await self._ask(self._actors[:1], "weights", version))[0]
        return weights

    def _room(self, tell: Callable[[str, int, RankOptions], str]) -> str:
        return tell("trainer ranks", self.num_ranks, self._options)

    async def check(self) -> None:
        """Do nothing if all is well.

        Raises:
            RankLostError: If a rank is lost.
        """
        if self.lost.done():
            raise self.lost.result()

    async def _ask(self, actors: Sequence[Any], method: str, *args: Any) -> list[Any]:
        """Call a method of some ranks, and wait for all of them or for the first failure."""
        if not actors:
            raise RuntimeError(f"{method}: the trainer ranks have not been entered")
        await self.check()
        replies = [self._future(getattr(actor, method).remote(*args)) for actor in actors]
        waiting: set[asyncio.Future[Any]] = {*replies}
        while waiting:
            done, _ = await asyncio.wait({*waiting, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            waiting -= done
            failed = [reply for reply in done - {self.lost} if reply.exception() is not None]
            if failed and not self.lost.done():
                # Most likely another rank's death broke a collective: let it be named.
                await asyncio.wait({self.lost}, timeout=_CULPRIT_S)
            if failed:
                _lose(self.lost, replies.index(failed[0]), failed[0])
            if self.lost.done():
                raise self.lost.result()
        return [reply.result() for reply in replies]

    def _future(self, ref: Any) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        self._calls.add(reply)
        reply.add_done_callback(self._forget)
        return reply

    def _forget(self, reply: asyncio.Future[Any]) -> None:
        self._calls.discard(reply)
        if not reply.cancelled():
            reply.exception()  # nobody may be left to look at it

    async def _end(self) -> None:
        import ray

        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        if self._calls:  # their callbacks come from another thread, and need this event loop
            await asyncio.wait(self._calls, timeout=_KILL_TIMEOUT_S)
        for reply in self._calls:
            reply.cancel()


def _lose(lost: asyncio.Future[RankLostError], rank: int, ended: asyncio.Future[Any]) -> None:
    """Note in ``lost`` that a rank's call has ended badly; the first one counts."""
    if ended.cancelled() or (error := ended.exception()) is None or lost.done():
        return
    told = RankLostError(rank, " ".join(told_by(error).split()))
    told.__cause__ = error
    lost.set_result(told)
