"""Which worker takes the next episode, and who waits until one has room."""

from __future__ import annotations

import asyncio
from collections import deque

from trajpack.agent.errors import EngineEndedError
from trajpack.agent.ray.rollouts.life import WorkerLife


class Dispatch:
    """Workers that serve, and episodes that wait for one: first come, first served."""

    def __init__(self) -> None:
        self.serving: list[WorkerLife] = []
        """Workers that take episodes now."""
        self.end: str | None = None
        """Why none will ever take one again."""
        self._waiting: deque[asyncio.Future[WorkerLife]] = deque()

    def enlist(self, life: WorkerLife) -> None:
        """Let a worker take episodes."""
        self.serving.append(life)
        self._hand_out()

    def dismiss(self, life: WorkerLife) -> None:
        """Let it take none any more."""
        if life in self.serving:
            self.serving.remove(life)

    async def acquire(self, qid: str) -> WorkerLife:
        """Wait for a place on the worker with the most room.

        Raises:
            EngineEndedError: If none will ever have any.
        """
        if self.end is not None:
            raise EngineEndedError(qid, self.end)
        place: asyncio.Future[WorkerLife] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release(place.result())
            raise
        except EngineEndedError as error:
            raise EngineEndedError(qid, error.reason) from None

    def release(self, life: WorkerLife) -> None:
        """Give a place back."""
        life.num_running -= 1
        self._hand_out()

    def finish(self, reason: str) -> None:
        """Refuse all that wait or come later."""
        self.end = self.end or reason
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(EngineEndedError("", self.end))

    def _hand_out(self) -> None:
        while self._waiting:
            able = [life for life in self.serving if life.num_free > 0 and not life.lost.done()]
            if not able:
                return
            place = self._waiting.popleft()
            if not place.done():
                life = max(able, key=lambda life: life.num_free)
                life.num_running += 1
                place.set_result(life)
