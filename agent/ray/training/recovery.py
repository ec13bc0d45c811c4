"""Trainer ranks that come back: from the last checkpoint, and over the steps since then."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from trajpack.agent.ray.training.trainers import RankLostError, TrainerRanks
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class RecoveredTrainers:
    """Asks trainer ranks, and has them rebuilt as often as that takes.

    Args:
        trainers: The ranks.
        max_rebuilds: For the same question; then the error that ended them is raised.
    """

    def __init__(self, trainers: TrainerRanks, max_rebuilds: int) -> None:
        self.trainers = trainers
        """The ranks as they are."""
        self.num_rebuilds = 0
        """How often they were made anew."""
        self.saved: Any = None
        """The last checkpoint, ``None`` before there is one."""
        self._max_rebuilds = max_rebuilds
        self._since: list[Any] = []

    @property
    def num_since(self) -> int:
        """Steps taken since the last checkpoint."""
        return len(self._since)

    def mark(self, saved: Any) -> None:
        """Note a checkpoint: from now on, ranks begin with it.

        Args:
            saved: The trainer's state, or a reference to it.
        """
        self.saved, self._since = saved, []

    async def step(self, batch: Any) -> list[dict[str, float]]:
        """Take a step, and keep its batch until the next checkpoint.

        Args:
            batch: Reference to the arrays of its trajectories.
        """
        ranks = await self.ask(lambda: self.trainers.step(batch))
        self._since.append(batch)
        return ranks

    async def ask(self, question: Callable[[], Awaitable[_T]]) -> _T:
        """Ask the ranks something; where they are lost, rebuild them and ask again.

        What a trainer refuses, by a ValueError or a TypeError, it would refuse again.

        Raises:
            RankLostError: If that did not help.
        """
        for _ in range(self._max_rebuilds):
            try:
                return await question()
            except RankLostError as error:
                if isinstance(error.__cause__, ValueError | TypeError):
                    raise
                _logger.warning("the trainer ranks are rebuilt: %s", one_line(error))
            try:
                await self.rebuild()
            except RankLostError as error:
                _logger.warning("the trainer ranks were lost again: %s", one_line(error))
        return await question()

    async def rebuild(self) -> None:
        """Make all ranks anew from the last checkpoint, and take the steps since then again.

        Raises:
            RankLostError: If one is lost meanwhile.
        """
        self.num_rebuilds += 1
        await self.trainers.rebuild(self.saved)
        for batch in self._since:
            await self.trainers.step(batch)
