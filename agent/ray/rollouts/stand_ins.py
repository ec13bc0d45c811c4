"""What stands in for the agents and environments that are on the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from trajpack.agent.protocols import Environment, Observation, Prompt, Reply
from trajpack.agent.runner.bridge import RequestQueue
from trajpack.agent.runner.watchdog import Patience
from trajpack.packing.types import Trajectory


class RemoteAgent:
    """An agent whose episodes run on workers, with the agents and environments that are there.

    Args:
        roll_out: Runs one there.
    """

    is_remote = True
    """Whether episodes run in another process, whose `Watchdog` warns of long waits."""

    def __init__(
        self, roll_out: Callable[[Prompt, Patience | None], Awaitable[list[Trajectory]]]
    ) -> None:
        self._roll_out = roll_out

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        """Have the episode run by a worker, which warns with the patience of this run.

        Environment and queues are not used here.
        """
        patience = obs_queue.patience if isinstance(obs_queue, RequestQueue) else None
        return await self._roll_out(prompt, patience)


class RemoteEnvironment:
    """Stands where a runner wants an environment, while the real ones are on the workers."""

    async def reset(self) -> None:
        """Do nothing."""

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Refuse: nobody should ask here.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("the environment is on the rollout workers")
