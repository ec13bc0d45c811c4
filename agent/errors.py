"""What can go wrong before and in an episode. An episode's errors name it."""

from __future__ import annotations


class EpisodeError(RuntimeError):
    """An episode ended without a trajectory."""

    def __init__(self, qid: str, reason: str) -> None:
        super().__init__(f"episode {qid!r}: {reason}")
        self.qid = qid
        self.reason = reason

    def __reduce__(self) -> tuple[type[EpisodeError], tuple[str, str]]:
        return type(self), (self.qid, self.reason)


class GenerationError(EpisodeError):
    """The engine could not generate: the request was refused, cancelled or lost."""


class EngineEndedError(GenerationError):
    """The engine has died or was shut down: no later request can succeed either."""


class SetupError(ValueError):
    """What was asked for cannot be set up; the message is one line for a person to read."""
