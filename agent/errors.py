"""Errors of episodes; each names its episode and its kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class EpisodeError(RuntimeError):
    """An episode ended without a trajectory.

    Args:
        qid: Name of the episode.
        reason: What went wrong, in one sentence.

    Attributes:
        cause: Kind of failure in one word, for counts and for rules about retries.
    """

    cause: ClassVar[str] = "agent"

    def __init__(self, qid: str, reason: str) -> None:
        super().__init__(f"episode {qid!r}: {reason}")
        self.qid = qid
        self.reason = reason

    def __reduce__(self) -> tuple[type[EpisodeError], tuple[str, str]]:
        return type(self), (self.qid, self.reason)


class EnvironmentFailedError(EpisodeError):
    """The environment raised, or its answer was invalid."""

    cause = "environment"


class EpisodeTimeoutError(EpisodeError):
    """The episode, or a reply in it, exceeded its time limit."""

    cause = "timeout"


class EpisodeCancelledError(EpisodeError):
    """The episode was cancelled from outside, or something that it awaited was."""

    cause = "cancelled"


class StaleEpisodeError(EpisodeError):
    """A token was sampled by weights older than allowed."""

    cause = "stale"


class GenerationError(EpisodeError):
    """The engine could not generate: the request was refused, cancelled or lost."""

    cause = "generation"


class RequestRefusedError(GenerationError):
    """The request can never be answered: too long, malformed, or not allowed."""

    cause = "refused"


class ServerUnavailableError(GenerationError):
    """No server answered: unreachable, overloaded or broken, after all retries."""

    cause = "unavailable"


class MalformedResponseError(GenerationError):
    """The response is not a valid answer to the request."""

    cause = "malformed"


class EngineEndedError(GenerationError):
    """The engine has died or was shut down: no later request can succeed either."""

    cause = "ended"


class SetupError(ValueError):
    """A configuration that cannot be set up; the message is one line for a person to read."""


def _causes_of_kinds(kind: type[EpisodeError]) -> frozenset[str]:
    return frozenset({kind.cause}).union(*map(_causes_of_kinds, kind.__subclasses__()))


CAUSES = _causes_of_kinds(EpisodeError)
"""Every `EpisodeError.cause`."""
_MAX_REASON_CHARS = 1000


def reason_of(error: BaseException) -> str:
    """Return an exception's type and text, shortened to about 1,000 characters."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception of other code may be broken itself
        return f"{kind} without a text"
    rest = len(text) - _MAX_REASON_CHARS
    if rest > 0:
        return f"{kind}: {text[:_MAX_REASON_CHARS]}... ({rest:,} more characters)"
    return f"{kind}: {text}"


def has_engine_ended(error: BaseException | None) -> bool:
    """Return whether an episode failed because its engine gives no more replies."""
    return error is not None and any(isinstance(one, EngineEndedError) for one in causes_of(error))


def end_of_program(error: BaseException) -> BaseException | None:
    """Return the `KeyboardInterrupt` or `SystemExit` that an exception is or, as a group, holds."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(end_of_program, error.exceptions)), None)
    return error if isinstance(error, KeyboardInterrupt | SystemExit) else None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its chain of causes, and the members of groups among them."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            todo.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            todo.extend(one.exceptions)
