"""What a rollout tells those who watch it: metrics, traces, tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trajpack.agent.protocols import Reply

if TYPE_CHECKING:
    from trajpack.agent.runner.runner import EpisodeResult


class RolloutObserver:
    """Watches a `RolloutRunner`; every method does nothing until it is overridden.

    All are called on the event loop, in order, and must return at once. What one raises is
    logged and goes no further. Times are the observer's own to take.
    """

    def episode_started(self, qid: str, attempt: int) -> None:
        """Episode ``qid`` begins; ``attempt`` counts from 0."""

    def wait_ended(self, reason: str, seconds: float) -> None:
        """Something that was about to go on could not for ``seconds``, which may be 0.

        The next episode waits, one after the other, for ``"room"`` (results that nobody takes and
        failed episodes that will begin again fill it), with a staleness policy for
        ``"staleness"`` (newer weights) and for a ``"slot"`` (the runner's concurrency). A
        request to the engine waits for the end of a ``"pause"``.
        """

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        """The agent has asked the engine for the completion of a turn, from 0."""

    def generation_ended(self, qid: str, turn: int, reply: Reply) -> None:
        """The agent has got the engine's reply, an error included."""

    def verification_started(self, qid: str, turn: int) -> None:
        """The agent has given an action to the environment."""

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        """The environment has answered, or failed with ``error``."""

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        """One attempt at an episode is over; ``final`` where no other will follow.

        A result that turns out to be stale when it is handed over ends its attempt a second
        time, with the error.
        """

    def result_accepted(self, result: EpisodeResult, version: int) -> None:
        """A result without an error is handed over; ``version`` is the engine's at that moment."""

    def group_ended(
        self, prompt_id: str, results: Sequence[EpisodeResult], reason: str | None
    ) -> None:
        """A group is complete or given up; ``reason`` says why it was dropped, or is None."""
