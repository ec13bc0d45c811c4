"""`ServedEngine`: the beginning and the end of an engine that is entered."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from trajpack.agent.errors import EngineEndedError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest


@dataclass(frozen=True)
class End:
    """Reason why an engine generates no more."""

    reason: str
    cause: BaseException | None = None
    has_left: bool = False
    """Whether the engine's context was left."""

    def as_error(self, qid: str) -> EngineEndedError:
        """Return the error of a request that comes too late."""
        error = EngineEndedError(qid, self.reason)
        error.__cause__ = self.cause
        return error


class ServedEngine(ABC):
    """Base of engines that serve requests within their context.

    A subclass calls `_begin_serving` once entered, `_end_serving` if it dies, `_shut_down` if left.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: End | None = None
        self._calls: set[asyncio.Timeout] = set()  # requests in flight
        self._call_ended = asyncio.Event()

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return one completion, see `Engine.generate`."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that sample now."""

    def check_serving(self) -> None:
        """Raise a `RuntimeError` unless the engine was entered in this event loop, and not left."""
        name, within = type(self).__name__, "within `async with engine:`"
        if self._end is not None and self._end.has_left:
            raise RuntimeError(f"the context of this {name} has ended: use a new one {within}")
        if self._end is None and self._loop is None:
            raise RuntimeError(f"this {name} has not been entered: use it {within}")
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError(f"this {name} was entered in another event loop: use it {within}")

    def _begin_serving(self) -> None:
        """Serve requests on this event loop."""
        self._loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def _answering(self, qid: str) -> AsyncIterator[None]:
        """Serve one request; an `EngineEndedError` if the engine has ended, or ends meanwhile."""
        if self._end is not None:
            raise self._end.as_error(qid)
        self.check_serving()
        call = asyncio.timeout(None)
        try:
            async with call:
                self._calls.add(call)
                yield
        except Exception:
            if call.expired() and self._end is not None:
                raise self._end.as_error(qid) from self._end.cause
            raise
        finally:
            self._calls.discard(call)
            self._call_ended.set()

    def _end_serving(self, end: End) -> None:
        """End the requests in flight, and refuse later ones; the first end counts."""
        self._end = self._end or end
        for call in self._calls:
            if not call.expired():
                call.reschedule(0)

    async def _shut_down(self) -> None:
        """End all requests, and wait for the last."""
        self._end_serving(End("the engine was shut down", has_left=True))
        while self._calls:
            self._call_ended.clear()
            await self._call_ended.wait()
