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


CAUSES = frozenset(
    kind.cause for kind in globals().values() if isinstance(kind, type) and hasattr(kind, "cause")
)
"""Every `EpisodeError.cause`."""


def reason_of(error: BaseException) -> str:
    """Return an exception's type and text, shortened to 1,000 characters."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - of an exception of others
        text = "without a text"
    rest = f"... ({len(text) - 1000:,} more characters)" if len(text) > 1000 else ""
    return f"{type(error).__name__}: {text[:1000]}{rest}"


def has_engine_ended(error: BaseException | None) -> bool:
    """Return whether an episode failed because its engine gives no more replies."""
    causes = () if error is None else causes_of(error)
    return any(isinstance(cause, EngineEndedError) for cause in causes)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its chain of causes, and the members of groups among them."""
    todo, seen = [error], set[int]()
    while todo:
        error = todo.pop()
        if id(error) not in seen:
            seen.add(id(error))
            yield error
            todo += [] if error.__cause__ is None else [error.__cause__]
            todo += error.exceptions if isinstance(error, BaseExceptionGroup) else []
