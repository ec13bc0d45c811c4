"""One conversation between an engine and an environment, as an agent leads it.

What comes back from either is checked here, at the border: whatever does not belong to
the question that was asked ends the episode with an `EpisodeError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeCancelledError,
    EpisodeError,
    EpisodeTimeoutError,
    GenerationError,
    MalformedResponseError,
)
from trajpack.agent.protocols import Environment, GenerationOutput, Observation, Reply
from trajpack.agent.runner.bridge import RequestQueue
from trajpack.packing.conversion import as_ids, as_logprobs, as_number, as_version_runs
from trajpack.packing.types import Turn


class Completion(NamedTuple):
    """A reply that belongs to what was asked."""

    start: int
    """Where it begins in the conversation: the length of its prompt."""
    ids: npt.NDArray[np.int32]
    """Sampled tokens."""
    logprobs: npt.NDArray[np.float32]
    """One for each token."""
    version_start: int
    """Policy version of the first of them."""
    version_end: int
    """Policy version of the last of them."""
    reply: GenerationOutput
    """What the engine said, as it said it."""


class Exchange(NamedTuple):
    """A turn that is over."""

    completion: Completion
    """What the engine sampled."""
    answer: str
    """Its text, as the environment saw it."""
    success: bool
    """What the environment said of it."""
    reward: float
    """As shaped by the agent, not discounted."""


@dataclass(eq=False)
class Episode:
    """The state of one episode. It grows turn by turn and is dropped if one fails."""

    qid: str
    """Names the episode in every request and error."""
    env: Environment
    """Judges the answers."""
    obs_queue: asyncio.Queue[Observation]
    """Where requests go."""
    act_queue: asyncio.Queue[Reply]
    """Where one reply to each comes."""
    token_ids: list[int] = field(default_factory=list)
    """The whole conversation so far. What is appended between turns is observation."""
    exchanges: list[Exchange] = field(default_factory=list)
    """The turns so far."""

    def error(self, reason: str, kind: type[EpisodeError] = EpisodeError) -> EpisodeError:
        """Return an error that names the episode and the turn it is in."""
        return kind(self.qid, f"turn {len(self.exchanges)}: {reason}")

    async def begin(self, prompt_ids: Sequence[int]) -> None:
        """Reset the environment and open the conversation with ``prompt_ids``.

        Raises:
            EpisodeError: If the environment fails, or these are not token ids.
        """
        if not isinstance(self.qid, str):
            raise self.error(f"the qid must be a str, got {type(self.qid).__name__}")
        with self.guard("the environment's reset failed", EnvironmentFailedError):
            await self.env.reset()
        with self.guard("the prompt was refused"):
            self.token_ids = as_ids("prompt_ids", prompt_ids).tolist()
        if not self.token_ids:
            raise self.error("the prompt has no tokens")

    @contextmanager
    def guard(self, failure: str, kind: type[EpisodeError] = EpisodeError) -> Iterator[None]:
        """Raise whatever is raised within as an error of this episode, with its cause.

        That includes a cancellation which nobody asked of the task that runs the episode: it
        is somebody else's and must not end this task silently.

        Raises:
            EpisodeError: Of this ``kind``, that begins with ``failure``.
            EpisodeCancelledError: If something within was cancelled.
            asyncio.CancelledError: If the task is being cancelled.
        """
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self.error(f"{failure}: it was cancelled", EpisodeCancelledError) from error
        except Exception as error:
            reason = str(error) if isinstance(error, TypeError | ValueError) else repr(error)
            raise self.error(f"{failure}: {reason}", kind) from error

    async def ask(self, gconfig: Any, timeout: float | None) -> Completion:  # noqa: ASYNC109
        """Have the conversation continued.

        Args:
            gconfig: How to sample, as the engine takes it.
            timeout: Seconds to wait at most, once generation is not paused; None waits for ever.

        Raises:
            EpisodeError: If no reply comes in time, or one to something else.
            GenerationError: As the engine gave it for a reply.
        """
        request = (self.qid, self.token_ids.copy(), gconfig)
        if isinstance(self.obs_queue, RequestQueue):
            await self.obs_queue.wait_open()  # a pause for new weights is no lateness
        try:
            async with asyncio.timeout(timeout):
                with self.guard("the engine's queues failed"):
                    await self.obs_queue.put(request)
                    reply = await self.act_queue.get()
        except TimeoutError as error:
            raise self.error(f"no reply within {timeout} s", EpisodeTimeoutError) from error
        if isinstance(reply, GenerationError):
            if reply.qid != self.qid:
                raise self._malformed(f"an error of another episode came: {reply}") from reply
            raise reply
        if not isinstance(reply, GenerationOutput):
            raise self._malformed(f"expected a GenerationOutput, got {type(reply).__name__}")
        return self._checked(reply)

    async def judge(self, answer: str) -> tuple[float, bool]:
        """Return the environment's number for ``answer``, and whether it ended the episode.

        Raises:
            EpisodeError: If it fails, or does not return exactly one finite success.
        """
        with self.guard("the environment's step failed", EnvironmentFailedError):
            _, successes, terminated, truncated, _ = await self.env.step((self.qid, [answer]))
            scores = [as_number("success", success) for success in successes]
            ended = bool(terminated) or bool(truncated)
        if len(scores) != 1:
            reason = f"expected one success of the environment, got {len(scores)}"
            raise self.error(reason, EnvironmentFailedError)
        return scores[0], ended

    def keep(self, exchange: Exchange) -> None:
        """Add a turn that is over; its completion joins the conversation."""
        self.token_ids += exchange.completion.ids.tolist()
        self.exchanges.append(exchange)

    def turns(self) -> list[Turn]:
        """Return the turns. Their prompts are views of one array: all begin alike."""
        conversation = as_ids("token_ids", self.token_ids)
        return [
            Turn(
                prompt_ids=conversation[: completion.start],
                completion_ids=completion.ids,
                completion_logprobs=completion.logprobs,
                reward=exchange.reward,
                truncated=bool(completion.reply.no_eos),
                version_start=completion.version_start,
                version_end=completion.version_end,
                version_spans=completion.reply.version_spans,
            )
            for exchange in self.exchanges
            for completion in [exchange.completion]
        ]

    def _checked(self, reply: GenerationOutput) -> Completion:
        if not isinstance(reply.qid, str) or reply.qid != self.qid:
            raise self._malformed(f"the reply answers episode {reply.qid!r}")
        with self.guard("the reply was refused", MalformedResponseError):
            num_prompt, is_same = self._compare(reply.prompt_ids)
            ids = as_ids("output_ids", reply.output_ids)
            logprobs = as_logprobs("output_logprobs", reply.output_logprobs)
            _, first, last = as_version_runs(
                "", reply.version_spans, reply.version_start, reply.version_end, ids.size
            )
            if not isinstance(reply.no_eos, bool | np.bool_):
                raise TypeError(f"no_eos must be a bool, got {type(reply.no_eos).__name__}")
        if not is_same:
            raise self._malformed(
                f"the reply answers another prompt: expected the {len(self.token_ids)} tokens "
                f"that were sent, got {num_prompt}"
            )
        if logprobs.shape != ids.shape:
            reason = f"the reply has {logprobs.size} log-probabilities for {ids.size} ids"
            raise self._malformed(reason)
        return Completion(len(self.token_ids), ids, logprobs, first, last, reply)

    def _compare(self, prompt_ids: Any) -> tuple[int, bool]:
        """Return how many tokens an engine says it saw, and whether they are what was sent."""
        if type(prompt_ids) is list and prompt_ids == self.token_ids:
            return len(prompt_ids), True  # long ones need not be converted to find that out
        seen = as_ids("prompt_ids", prompt_ids).tolist()
        return len(seen), seen == self.token_ids

    def _malformed(self, reason: str) -> EpisodeError:
        return self.error(reason, MalformedResponseError)
