"""Observers of a rollout, such as metrics and traces, and the calls of their hooks."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import GenerationOutput
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from trajpack.agent.runner.results import EpisodeResult

_logger = logging.getLogger(__name__)


class RolloutObserver:
    """Base of observers of a `RolloutRunner`; each hook does nothing until it is overridden.

    Hooks are called on the event loop, in order, and must return at once. An exception in a hook
    is logged and goes no further. Hooks get no times: an observer reads its own clock.
    """

    def episode_started(self, qid: str, attempt: int) -> None:
        """Episode ``qid`` begins; ``attempt`` counts from 0."""

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        """A request for the completion of a turn, from 0, goes to the engine."""

    def generation_ended(self, qid: str, turn: int, reply: GenerationOutput | EpisodeError) -> None:
        """The engine's reply to a request has come and was checked, or there is none."""

    def verification_started(self, qid: str, turn: int) -> None:
        """The agent has given an action to the environment."""

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        """The environment has answered, or failed with ``error``."""

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        """One attempt at an episode is over; ``final`` if no other will follow.

        A result that turns out to be stale when it is handed over ends its attempt a second
        time, with the error; so does an episode that is stopped while it waits for its next one.
        """

    def result_accepted(self, result: EpisodeResult, version: int) -> None:
        """A result without an error is handed over; ``version`` is the engine's at that moment."""

    def group_ended(
        self, prompt_id: str, results: Sequence[EpisodeResult], reason: str | None
    ) -> None:
        """A group is complete or given up; ``reason`` says why it was dropped, or is None."""


class Observers:
    """Calls a hook of every observer; an exception is logged once per observer and hook."""

    def __init__(self, observers: Sequence[RolloutObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._logged: set[tuple[int, str]] = set()
        self.called_at = 0.0
        """Time of the last call, by the event loop: what happened last in a runner."""

    def __call__(self, hook: str, *values: Any, **named: Any) -> None:
        """Call a hook."""
        self.called_at = asyncio.get_running_loop().time()
        for number, observer in enumerate(self._observers):
            try:
                getattr(observer, hook)(*values, **named)
            except Exception as error:  # noqa: BLE001 - the rollout goes on
                if (number, hook) in self._logged:
                    continue
                self._logged.add((number, hook))
                # No traceback: its last line may quote text of a model or a server.
                at = traceback.extract_tb(error.__traceback__)[-1]
                _logger.error(
                    "%s has failed at %s:%d, told once: %s: %s",
                    one_line(f"{type(observer).__name__}.{hook}"),
                    one_line(at.filename),
                    at.lineno or 0,
                    one_line(type(error).__name__),
                    one_line(error),
                )
