"""Environments with Gymnasium's interface, one instance for each episode."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from trajpack.agent.agents.environment_agent import Closing, Opening
from trajpack.agent.blocking_work import contained
from trajpack.agent.seeding import derive_seed

_Step = tuple[Any, list[float], bool, bool, dict[str, Any]]


class _Instance:
    """One Gymnasium environment, used by at most one episode at a time."""

    env: Any = None
    """None before it is made, and after it has raised."""
    call: Future[_Step]
    """The last call into it, which goes on when its step is cancelled."""
    observation = ""


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
        self._episodes: dict[str, _Instance] = {}
        self._idle: list[_Instance] = []
        self._is_closed = False

    async def reset(self) -> tuple[None, dict[str, Any]]:
        """Has no effect: an `Opening` starts an episode, since it has the episode's name."""
        return None, {}

    async def step(self, action: Opening | Closing | tuple[str, Sequence[str]]) -> _Step:
        """Open, step or close an episode.

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
                return await self._act(self._episodes[qid], text)
        raise ValueError(f"step: expected a list of one text for {qid!r}, got {texts!r:.80}")

    async def close(self) -> None:
        """Wait for the steps in progress and close all instances."""
        self._is_closed = True
        for qid in list(self._episodes):
            self._release(qid)
        await asyncio.to_thread(self._threads.shutdown)
        closing = contextlib.ExitStack()  # closes all, and raises one of their errors
        while self._idle:
            if (env := self._idle.pop().env) is not None:
                closing.callback(env.close)
        await asyncio.to_thread(contained(closing.close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _open(self, qid: str, seed: int | None) -> _Step:
        self._release(qid)
        seed = derive_seed(self._seed, qid) if seed is None else seed
        instance = self._episodes[qid] = self._idle.pop() if self._idle else _Instance()

        def begin() -> _Step:
            if instance.env is None:
                instance.env = self._make_env()
            observation, info = instance.env.reset(seed=seed)
            return self._to_text(observation), [], False, False, dict(info)

        return await self._call(instance, begin)

    async def _act(self, instance: _Instance, text: str) -> _Step:
        try:
            action = self._to_action(text)
        except ValueError:
            seen = f"That is no action.\n{instance.observation}"
            return seen, [self._invalid_reward], False, False, {"invalid_action": True}

        def act() -> _Step:
            observation, reward, terminated, truncated, info = instance.env.step(action)
            seen = self._to_text(observation)
            return seen, [float(reward)], bool(terminated), bool(truncated), dict(info)

        return await self._call(instance, act)

    async def _call(self, instance: _Instance, work: Callable[[], _Step]) -> _Step:
        def call() -> _Step:
            try:
                step = work()
            except BaseException:
                env, instance.env = instance.env, None
                with contextlib.suppress(Exception):
                    env.close()
                raise
            instance.observation = step[0]
            return step

        instance.call = self._threads.submit(contained(call))
        return await asyncio.wrap_future(instance.call)

    def _release(self, qid: str) -> None:
        """Let an episode's instance be used again when its last call has returned."""
        if (instance := self._episodes.pop(qid, None)) is not None:
            instance.call.add_done_callback(lambda _: self._idle.append(instance))
