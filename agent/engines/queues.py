"""The queue protocol of engines, served by their coroutine `generate`."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from trajpack.agent.errors import (
    EngineEndedError,
    GenerationError,
    end_of_program,
    reason_of,
)
from trajpack.agent.protocols import (
    Engine,
    GenerationOutput,
    GenerationRequest,
    Observation,
    Reply,
)
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class End:
    """Reason why an engine generates no more."""

    reason: str
    """Text for a person to read."""
    cause: BaseException | None = None
    """Exception behind it, if there was one."""
    has_left: bool = False
    """Whether the engine's context was left."""

    def as_error(self, qid: str) -> EngineEndedError:
        """Return the error of a request that comes too late."""
        error = EngineEndedError(qid, self.reason)
        error.__cause__ = self.cause
        return error


class ObservationQueue(asyncio.Queue[Observation]):
    """Queue that calls ``take`` with each item, and keeps the item if the result is false."""

    def __init__(self, take: Callable[[Observation], bool]) -> None:
        super().__init__()
        self._take = take

    def put_nowait(self, item: Observation) -> None:
        """Queue ``item``, unless the callback takes it."""
        if not self._take(item):
            super().put_nowait(item)


@dataclass
class _OpenEpisode:
    replies: asyncio.Queue[Reply] = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[Reply]] = field(default_factory=set)

    def take_reply(self, task: asyncio.Task[Reply]) -> None:
        """Queue the reply of a task that has ended, unless it was cancelled or ends the program."""
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is None:
            self.replies.put_nowait(task.result())


class QueuedEngine(ABC):
    """Base of engines whose core is the coroutine `generate`; it answers the queues, too.

    A subclass calls `_begin_serving` once it has been entered, and `_end_serving` when it was left
    or has died.
    """

    def __init__(self) -> None:
        self._obs_queue = ObservationQueue(self._take)
        self._episodes: dict[str, _OpenEpisode] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: End | None = None

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return one completion; a cancelled call ends its generation.

        Calls run concurrently, any number for one episode. The caller opens the episode before
        and closes it afterwards.

        Raises:
            GenerationError: With the request's ``qid``, if there is no completion: as a
                `RequestRefusedError`, `ServerUnavailableError` or `MalformedResponseError` where
                that is known, and as an `EngineEndedError` once the engine has died or was left.
            RuntimeError: If the engine has not been entered.
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that sample now."""

    @property
    def obs_queue(self) -> asyncio.Queue[Observation]:
        """Queue of requests; a reply comes on the queue of the request's episode."""
        return self._obs_queue

    def check_serving(self) -> None:
        """Raise unless the engine serves requests, or has died while it did so.

        Raises:
            RuntimeError: If the engine has not been entered, was left, or was entered in another
                event loop.
        """
        check_entered(self, self._end, self._loop)

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        """Return the queue on which replies to ``qid`` will come.

        Raises:
            ValueError: If an episode of that name is open.
        """
        if qid in self._episodes:
            raise ValueError(f"episode {qid!r} is open already")
        episode = self._episodes[qid] = _OpenEpisode()
        return episode.replies

    def close_episode(self, qid: str) -> None:
        """Forget ``qid``; requests of it that came by the queue are cancelled.

        Closing an episode that is not open does nothing.
        """
        episode = self._episodes.pop(qid, None)
        for task in episode.tasks if episode else ():
            task.cancel()

    def _begin_serving(self) -> None:
        """Serve requests on this event loop, those in the queue first."""
        self._loop = asyncio.get_running_loop()
        self._take_waiting()

    def _end_serving(self, end: End) -> None:
        """Refuse requests from now on, those in the queue first; the first end counts."""
        self._end = self._end or end
        self._take_waiting()

    def _take_waiting(self) -> None:
        while not self._obs_queue.empty():
            self._take(self._obs_queue.get_nowait())

    def _take(self, observation: Observation) -> bool:
        """Begin to serve a request; return False before the engine was entered."""
        if self._loop is None and self._end is None:
            if self._obs_queue.empty():
                _logger.warning(
                    "a request waits in the queue of a %s that has not been entered: it is served "
                    "within `async with engine:`",
                    one_line(type(self).__name__),
                )
            return False
        try:
            request = GenerationRequest(*observation)
            episode = self._episodes.get(request.qid)
        except (TypeError, ValueError):
            _logger.warning("ignored, no (qid, ids, sampling): %s", one_line(observation))
            return True
        if episode is None:
            _logger.warning("ignored, an episode that is not open: %s", one_line(request.qid))
        elif self._end is not None:
            episode.replies.put_nowait(self._end.as_error(request.qid))
        else:
            task = asyncio.get_running_loop().create_task(reply_to(request, self.generate))
            episode.tasks.add(task)
            task.add_done_callback(episode.take_reply)
        return True


async def reply_to(
    request: GenerationRequest,
    generate: Callable[[GenerationRequest], Awaitable[Reply]],
) -> Reply:
    """Await ``generate(request)`` and return its result, or its failure as a `GenerationError`.

    It must be the outermost coroutine of its task: a `GeneratorExit` passes all inner ones.

    Raises:
        asyncio.CancelledError: If the calling task is being cancelled.
        KeyboardInterrupt: As `SystemExit`, alone or within a group: these end the program.
    """
    task = asyncio.current_task()
    try:
        return await generate(request)
    except GenerationError as error:
        # The error says all there is to say; frames would keep bodies of replies alive.
        error.__context__ = None
        return error.with_traceback(None)
    except asyncio.CancelledError:
        if task is None or task.cancelling():
            raise
        return GenerationError(request.qid, "the generation was cancelled")
    except BaseException as error:  # a defect of an engine, of any kind, fails its request alone
        if (end := end_of_program(error)) is not None:
            raise end from None  # a task hands on no group that holds it
        if isinstance(error, GeneratorExit) and not is_running(task):
            raise  # the interpreter closes this coroutine
        failure = GenerationError(request.qid, f"the engine failed: {reason_of(error)}")
        failure.__cause__ = error
        return failure


def is_running(task: asyncio.Task[Any] | None) -> bool:
    """Return whether an event loop runs the task now."""
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False


def coroutine_of(
    engine: Engine, replies: asyncio.Queue[Reply]
) -> Callable[[GenerationRequest], Awaitable[Reply]]:
    """Return the coroutine that answers one request of an open episode, by queues if need be."""
    if isinstance(engine, QueuedEngine):
        return engine.generate

    async def generate(request: GenerationRequest) -> Reply:
        await engine.obs_queue.put(request)
        return await replies.get()

    return generate


def check_entered(engine: object, end: End | None, loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise if an engine is used outside of its context; one that died within it passes.

    Raises:
        RuntimeError: If the engine has not been entered, was left, or was entered in another event
            loop than ``loop``.
    """
    name, within = type(engine).__name__, "within `async with engine:`"
    if end is not None and end.has_left:
        raise RuntimeError(f"the context of this {name} has ended: use a new one {within}")
    if end is None and loop is None:
        raise RuntimeError(f"this {name} has not been entered: use it {within}")
    if loop is not None and loop is not asyncio.get_running_loop():
        raise RuntimeError(f"this {name} was entered in another event loop: use it {within}")
