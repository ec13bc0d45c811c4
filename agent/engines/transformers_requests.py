"""What the embedded engine keeps of episodes and of requests in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trajpack.agent.errors import EngineEndedError, GenerationError
from trajpack.agent.protocols import GenerationOutput, Observation, Reply
from trajpack.packing.text import one_line
from trajpack.packing.types import VersionSpan

_logger = logging.getLogger(__name__)


class ObservationQueue(asyncio.Queue[Observation]):
    """A queue that hands over what is put once nobody takes from it any more."""

    def __init__(self, take_late: Callable[[Observation], bool]) -> None:
        super().__init__()
        self._take_late = take_late

    def put_nowait(self, item: Observation) -> None:
        """Queue ``item``, unless it was handed over."""
        if not self._take_late(item):
            super().put_nowait(item)


@dataclass
class OpenEpisode:
    """Where replies go, and what they are still to come for."""

    replies: asyncio.Queue[Reply] = field(default_factory=asyncio.Queue)
    """Read by the agent."""
    request_ids: set[str] = field(default_factory=set)
    """Requests in flight."""


@dataclass(frozen=True)
class End:
    """Why nothing is generated any more."""

    reason: str
    """For a person to read."""
    cause: BaseException | None = None
    """The exception behind it, if there was one."""
    has_left: bool = False
    """Whether this is the end of the engine's context."""

    def as_error(self, qid: str) -> EngineEndedError:
        """Return the reply to a request that can no longer be honoured."""
        error = EngineEndedError(qid, self.reason)
        error.__cause__ = self.cause
        return error


def check_entered(engine: object, end: End | None, loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise where an engine is used outside of its context.

    An engine that has died within its context is not refused: it replies with its `End`.

    Args:
        engine: Named by its type.
        end: Its end, if it has ended.
        loop: Where it was entered, if it was.

    Raises:
        RuntimeError: If the engine has not been entered, was left, or was entered elsewhere.
    """
    name, within = type(engine).__name__, "within `async with engine:`"
    if end is not None and end.has_left:
        raise RuntimeError(f"the context of this {name} has ended: use a new one {within}")
    if end is None and loop is None:
        raise RuntimeError(f"this {name} has not been entered: use it {within}")
    if loop is not None and loop is not asyncio.get_running_loop():
        raise RuntimeError(f"this {name} was entered in another event loop: use it {within}")


def warn_unentered(engine: object) -> None:
    """Log that a request waits for an engine that may never be entered."""
    _logger.warning(
        "a request waits in the queue of a %s that has not been entered: it is served within "
        "`async with engine:`",
        one_line(type(engine).__name__),
    )


@dataclass
class Request:
    """One generation in flight."""

    qid: str
    """The episode it belongs to."""
    prompt: list[int]
    """Token ids the model saw."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Which version sampled which of the tokens reported so far."""

    def extend_to(self, num_tokens: int, version: int) -> None:
        """Tag the tokens that have come since the last call."""
        start = self.spans[-1].end if self.spans else 0
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, num_tokens))

    def complete(self, result: Any, eos_token_ids: frozenset[int]) -> Reply:
        """Turn the finished result of continuous batching into the reply."""
        ids, logprobs = result.generated_tokens, result.logprobs
        if len(ids) != len(logprobs) or not ids:
            reason = f"{len(ids)} tokens came with {len(logprobs)} log-probabilities"
            return GenerationError(self.qid, reason)
        return GenerationOutput(
            qid=self.qid,
            prompt_ids=self.prompt,
            output_ids=ids,
            output_logprobs=logprobs,
            no_eos=ids[-1] not in eos_token_ids,
            version_start=self.spans[0].version,
            version_end=self.spans[-1].version,
            version_spans=tuple(self.spans) if len(self.spans) > 1 else None,
        )
