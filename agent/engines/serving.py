"""`ServedEngine`: the beginning and the end of an engine that is entered."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass

from trajpack.agent.errors import EngineEndedError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest


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


class ServedEngine(ABC):
    """Base of engines that serve requests within their context.

    A subclass calls `_begin_serving` once it has been entered, and `_end_serving` when it was left
    or has died.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: End | None = None

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return one completion, see `Engine.generate`."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that sample now."""

    def check_serving(self) -> None:
        """Raise unless the engine serves requests, or has died while it did so.

        Raises:
            RuntimeError: If the engine has not been entered, was left, or was entered in another
                event loop.
        """
        check_entered(self, self._end, self._loop)

    def _begin_serving(self) -> None:
        """Serve requests on this event loop."""
        self._loop = asyncio.get_running_loop()

    def _end_serving(self, end: End) -> None:
        """Refuse requests from now on; the first end counts."""
        self._end = self._end or end

    def _check_request(self, qid: str) -> None:
        """Raise unless a request can be served.

        Raises:
            EngineEndedError: If the engine has died or was left.
            RuntimeError: If it has not been entered, or in another event loop.
        """
        if self._end is not None:
            raise self._end.as_error(qid)
        self.check_serving()


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
