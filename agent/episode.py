"""One conversation between an engine and an environment, as an agent leads it.

What comes back from either is checked here, at the border: whatever does not belong to
the question that was asked ends the episode with an `EpisodeError`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.agent.errors import EpisodeError, GenerationError
from trajpack.agent.protocols import Environment, GenerationOutput, Observation, Reply
from trajpack.packing.types import Turn

_INT32_MAX = 2**31 - 1


class Completion(NamedTuple):
    """A reply that belongs to what was asked."""

    start: int
    """Where it begins in the conversation: the length of its prompt."""
    ids: npt.NDArray[np.int32]
    """Sampled tokens."""
    logprobs: npt.NDArray[np.float32]
    """One for each token."""
    reply: GenerationOutput
    """What the engine said besides."""


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

    def error(self, reason: str) -> EpisodeError:
        """Return an error that names the episode and the turn it is in."""
        return EpisodeError(self.qid, f"turn {len(self.exchanges)}: {reason}")

    async def begin(self, prompt_ids: Sequence[int]) -> None:
        """Reset the environment and open the conversation with ``prompt_ids``.

        Raises:
            EpisodeError: If the environment fails, or these are not token ids.
        """
        try:
            await self.env.reset()
        except Exception as error:
            raise self.error(f"the environment's reset failed: {error!r}") from error
        self.token_ids = self._checked_ids("the prompt", prompt_ids).tolist()
        if not self.token_ids:
            raise self.error("the prompt has no tokens")

    async def ask(self, gconfig: Any, timeout: float | None) -> Completion:  # noqa: ASYNC109
        """Have the conversation continued.

        Args:
            gconfig: How to sample, as the engine takes it.
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            EpisodeError: If no reply comes in time, or one to something else.
            GenerationError: As the engine gave it for a reply.
        """
        request = (self.qid, self.token_ids.copy(), gconfig)
        try:
            async with asyncio.timeout(timeout):
                await self.obs_queue.put(request)
                reply = await self.act_queue.get()
        except TimeoutError as error:
            raise self.error(f"no reply within {timeout} s") from error
        if isinstance(reply, GenerationError):
            raise reply
        if not isinstance(reply, GenerationOutput):
            raise self.error(f"expected a GenerationOutput, got {type(reply).__name__}")
        return self._checked(reply)

    async def judge(self, answer: str) -> tuple[float, bool]:
        """Return the environment's number for ``answer``, and whether it ended the episode.

        Raises:
            EpisodeError: If it fails, or does not return exactly one finite success.
        """
        try:
            _, successes, terminated, truncated, _ = await self.env.step((self.qid, [answer]))
            scores = [float(success) for success in successes]
        except Exception as error:
            raise self.error(f"the environment's step failed: {error!r}") from error
        if len(scores) != 1 or not math.isfinite(scores[0]):
            raise self.error(f"expected one finite success of the environment, got {scores}")
        return scores[0], bool(terminated or truncated)

    def keep(self, exchange: Exchange) -> None:
        """Add a turn that is over; its completion joins the conversation."""
        self.token_ids += exchange.completion.ids.tolist()
        self.exchanges.append(exchange)

    def turns(self) -> list[Turn]:
        """Return the turns. Their prompts are views of one array: all begin alike."""
        conversation = np.asarray(self.token_ids, dtype=np.int32)
        return [
            Turn(
                prompt_ids=conversation[: completion.start],
                completion_ids=completion.ids,
                completion_logprobs=completion.logprobs,
                reward=exchange.reward,
                truncated=bool(completion.reply.no_eos),
                version_start=completion.reply.version_start,
                version_end=completion.reply.version_end,
                version_spans=completion.reply.version_spans,
            )
            for exchange in self.exchanges
            for completion in [exchange.completion]
        ]

    def _checked(self, reply: GenerationOutput) -> Completion:
        if reply.qid != self.qid:
            raise self.error(f"the reply answers episode {reply.qid!r}")
        prompt_ids = reply.prompt_ids
        if not isinstance(prompt_ids, list):
            prompt_ids = self._array("prompt ids", prompt_ids).tolist()
        if prompt_ids != self.token_ids:
            raise self.error(
                f"the reply answers another prompt: expected the {len(self.token_ids)} tokens "
                f"that were sent, got {len(prompt_ids)}"
            )
        ids = self._checked_ids("the reply", reply.output_ids)
        logprobs = self._array("log-probabilities", reply.output_logprobs)
        if logprobs.shape != ids.shape:
            raise self.error(f"the reply has {logprobs.size} log-probabilities for {ids.size} ids")
        if logprobs.size and (logprobs.dtype.kind not in "iuf" or not np.isfinite(logprobs).all()):
            raise self.error("the reply has a log-probability that is not a finite number")
        return Completion(len(self.token_ids), ids, logprobs.astype(np.float32), reply)

    def _checked_ids(self, owner: str, ids: Sequence[int]) -> npt.NDArray[np.int32]:
        array = self._array("token ids", ids)
        if array.size == 0:
            return np.empty(0, dtype=np.int32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise self.error(f"{owner} has {array.ndim}-D {array.dtype} token ids, not integers")
        if array.min() < 0 or array.max() > _INT32_MAX:
            raise self.error(f"{owner} has a token id outside [0, {_INT32_MAX}]")
        return array.astype(np.int32)

    def _array(self, what: str, values: Any) -> npt.NDArray[Any]:
        try:
            return np.asarray(values)
        except (TypeError, ValueError) as error:
            raise self.error(f"cannot read {what}: {error}") from error
