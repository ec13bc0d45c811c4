"""What can go wrong before and in an episode. An episode's errors name it."""

from __future__ import annotations

from typing import ClassVar


class EpisodeError(RuntimeError):
    """An episode ended without a trajectory."""

    cause: ClassVar[str] = "agent"
    """The kind of failure in one word, for counts and for rules about retries."""

    def __init__(self, qid: str, reason: str) -> None:
        super().__init__(f"episode {qid!r}: {reason}")
        self.qid = qid
        self.reason = reason

    def __reduce__(self) -> tuple[type[EpisodeError], tuple[str, str]]:
        return type(self), (self.qid, self.reason)


class EnvironmentFailedError(EpisodeError):
    """The environment raised, or answered with what is no answer."""

    cause = "environment"


class EpisodeTimeoutError(EpisodeError):
    """The episode, or a reply in it, took longer than it may."""

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
    """The engine will never answer this request: too long, malformed, or not allowed."""

    cause = "refused"


class ServerUnavailableError(GenerationError):
    """No server answered: unreachable, overloaded or broken, after all retries."""

    cause = "unavailable"


class MalformedResponseError(GenerationError):
    """A server answered with what is no answer to the request."""

    cause = "malformed"


class EngineEndedError(GenerationError):
    """The engine has died or was shut down: no later request can succeed either."""

    cause = "ended"


class SetupError(ValueError):
    """What was asked for cannot be set up; the message is one line for a person to read."""
