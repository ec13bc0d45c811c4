"""Environments with Gymnasium's interface, one instance for each episode."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from trajpack.agent.agents.environment_agent import Closing, Opening
from trajpack.agent.blocking_work import contained, to_end
from trajpack.agent.seeding import derive_seed

_Step = tuple[Any, list[float], bool, bool, dict[str, Any]]


class GymnasiumEnvironment:
    """Steps one Gymnasium environment for each episode, in threads.

    Actions are those of an `EnvironmentAgent`: an `Opening` resets an instance; ``(qid, [text])``
    steps it; a `Closing` releases it for other episodes. Instances are made when needed and reused,
    unless they raised. It must be closed, by `close` or ``async with``.

    Args:
        make_env: Returns a new instance: an object with ``reset(seed=...)``, which returns
            ``(observation, info)``, ``step(action)``, which returns ``(observation, reward,
            terminated, truncated, info)``, and ``close()``. Called in a thread.
        to_text: Converts an observation to text.
        to_action: Parses a completion as an action and raises `ValueError` if it is none. It must
            not evaluate the text, which comes from a model.
        invalid_reward: Reward of a text that is no action. The instance is not stepped, and the
            observation is repeated.
        seed: With the episode's name, the seed of an `Opening` without one.
        workers: Threads, and so concurrent calls into instances.

    Raises:
        ValueError: If ``workers`` is not positive.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        *,
        to_text: Callable[[Any], str] = str,
        to_action: Callable[[str], Any] = str,
        invalid_reward: float = 0.0,
        seed: int = 0,
        workers: int = 4,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._make_env = make_env
        self._to_text = to_text
        self._to_action = to_action
        self._invalid_reward = invalid_reward
        self._seed = seed
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-gymnasium")
        self._episodes: dict[str, Any] = {}
        self._observations: dict[str, str] = {}
        self._idle: list[Any] = []
        self._is_closed = False

    async def reset(self) -> tuple[None, dict[str, Any]]:
        """Has no effect: an `Opening` starts an episode, since it has the episode's name."""
        return None, {}

    async def step(self, action: Opening | Closing | tuple[str, Sequence[str]]) -> _Step:
        """Open, step or close an episode. A call in progress ends before a cancellation does.

        Returns:
            ``(observation, rewards, terminated, truncated, info)``, with one reward for a text.
            ``info`` is the instance's, or ``{"invalid_action": True}`` where the text was none.

        Raises:
            ValueError: If no episode has this ``qid``, or the answers are not a list of one text.
            RuntimeError: If the environment is closed.
            Exception: Any exception of the instance.
        """
        if isinstance(action, Closing):
            self._release(action.qid)
            return None, [], True, False, {}
        if self._is_closed:
            raise RuntimeError("the environment is closed")
        if isinstance(action, Opening):
            return await self._open(*action)
        qid, texts = action
        if qid not in self._episodes:
            raise ValueError(f"step: no episode {qid!r} is open")
        match texts:
            case [str(text)]:
                return await self._act(qid, text)
        raise ValueError(f"step: expected a list of one text for {qid!r}, got {texts!r:.80}")

    async def close(self) -> None:
        """Wait for the steps in progress and close all instances."""
        self._is_closed = True
        await asyncio.to_thread(self._threads.shutdown)
        closing = contextlib.ExitStack()  # closes all, and raises one of their errors
        for env in [*self._idle, *self._episodes.values()]:
            closing.callback(env.close)
        self._idle.clear()
        self._episodes.clear()
        await asyncio.to_thread(contained(closing.close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _open(self, qid: str, seed: int | None) -> _Step:
        self._release(qid)
        idle = self._idle.pop() if self._idle else None

        def begin() -> _Step:
            env = self._episodes[qid] = self._make_env() if idle is None else idle
            chosen = derive_seed(self._seed, qid) if seed is None else seed
            observation, info = env.reset(seed=chosen)
            return self._to_text(observation), [], False, False, dict(info)

        return await self._call(qid, begin)

    async def _act(self, qid: str, text: str) -> _Step:
        try:
            action = self._to_action(text)
        except ValueError:
            seen = f"That is no action.\n{self._observations[qid]}"
            return seen, [self._invalid_reward], False, False, {"invalid_action": True}

        def act() -> _Step:
            observation, reward, *ended, info = self._episodes[qid].step(action)
            terminated, truncated = map(bool, ended)
            return self._to_text(observation), [float(reward)], terminated, truncated, dict(info)

        return await self._call(qid, act)

    async def _call(self, qid: str, work: Callable[[], _Step]) -> _Step:
        """Call into an episode's instance, which is closed if it raises."""

        def call() -> _Step:
            try:
                return work()
            except BaseException:
                with contextlib.suppress(Exception):
                    self._episodes.pop(qid).close()
                raise

        loop = asyncio.get_running_loop()
        step = await to_end(loop.run_in_executor(self._threads, contained(call)))
        self._observations[qid] = step[0]
        return step

    def _release(self, qid: str) -> None:
        self._observations.pop(qid, None)
        if qid in self._episodes:
            self._idle.append(self._episodes.pop(qid))
