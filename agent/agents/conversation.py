"""One conversation of an agent with an engine and an environment.

Replies of both are checked here: one that does not answer the request ends the episode with an
`EpisodeError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
from trajpack.agent.protocols import Environment, GenerationOutput, Observation, Prompt, Reply
from trajpack.agent.runner.attempt import RequestQueue
from trajpack.agent.runner.trajectory_check import checked_completion
from trajpack.packing.conversion import as_ids, as_integer, as_number, as_version_runs, several
from trajpack.packing.types import Trajectory, Turn

_REWARDS = "the second value, the rewards, must be a list of one number"


@dataclass(frozen=True)
class ConversationLimits:
    """Limits on the length of a conversation and on the wait for a reply.

    Attributes:
        max_turns: Completions at most.
        max_total_tokens: Tokens of the whole conversation at most. A turn whose prompt and
            ``gconfig.max_new_tokens`` might exceed it is not requested.
        generation_timeout: Seconds to wait for a reply at most.

    Raises:
        ValueError: If one is out of range.
        TypeError: If a number of turns or tokens is not an integer.
    """

    max_turns: int = 8
    max_total_tokens: int | None = None
    generation_timeout: float | None = None

    def __post_init__(self) -> None:
        if as_integer("max_turns", self.max_turns) < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")
        limit = self.max_total_tokens
        if limit is not None and as_integer("max_total_tokens", limit) < 1:
            raise ValueError(f"max_total_tokens must be positive, got {limit}")
        if self.generation_timeout is not None and not self.generation_timeout > 0:
            raise ValueError(f"generation_timeout must be positive, got {self.generation_timeout}")


def sampling_option(gconfig: Any, name: str, default: Any) -> Any:
    """Return a sampling option, which is a key of a mapping or else an attribute."""
    if isinstance(gconfig, Mapping):
        return gconfig.get(name, default)
    return getattr(gconfig, name, default)


@dataclass(eq=False)
class Exchange:
    """One turn: the engine's checked completion, and its judgement.

    Attributes:
        start: Offset in the conversation: the length of its prompt in tokens.
        ids: Sampled tokens.
        logprobs: Log-probability of each token.
        version_start: Policy version of the first token.
        version_end: Policy version of the last token.
        reply: Reply as the engine gave it.
        text: Text of the completion, as the environment sees it.
        success: Judgement of the environment.
        reward: Reward as shaped by the agent, not discounted.
    """

    start: int
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    version_start: int
    version_end: int
    reply: GenerationOutput
    text: str = ""
    success: bool = False
    reward: float = 0.0

    def turn(self, prompt_ids: npt.NDArray[np.int32]) -> Turn:
        """Return the turn, with the tokens of its prompt."""
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=self.ids,
            completion_logprobs=self.logprobs,
            reward=self.reward,
            truncated=bool(self.reply.no_eos),
            version_start=self.version_start,
            version_end=self.version_end,
            version_spans=self.reply.version_spans,
            fields=self.reply.fields,
        )


@dataclass(eq=False)
class Conversation:
    """State of one episode. It grows turn by turn and is dropped if a turn fails.

    Attributes:
        qid: Name of the episode in every request and error.
        env: Environment that judges the answers.
        obs_queue: Queue of requests.
        act_queue: Queue of replies, one for each request.
        token_ids: Token ids so far. Tokens appended between turns are observation.
        exchanges: Finished turns.
        observation: Observation that the environment gave last.
        birth_time_ms: Unix time of the beginning, in milliseconds.
    """

    qid: str
    env: Environment
    obs_queue: asyncio.Queue[Observation]
    act_queue: asyncio.Queue[Reply]
    token_ids: list[int] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    observation: Any = None
    unanswered: int = 0
    """Requests whose reply was not taken, because the wait for it ended early."""
    birth_time_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    def error(self, reason: str, kind: type[EpisodeError] = EpisodeError) -> EpisodeError:
        """Return an error that names the episode and the turn it is in."""
        return kind(self.qid, f"turn {len(self.exchanges)}: {reason}")

    @contextmanager
    def guard(self, failure: str, kind: type[EpisodeError] = EpisodeError) -> Iterator[None]:
        """Convert exceptions of the body to an error of this episode, with its cause.

        So is a cancellation of something awaited, if this task itself is not being cancelled.

        Raises:
            EpisodeError: Of this ``kind``, that begins with ``failure``.
            EpisodeCancelledError: If something awaited was cancelled.
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

    async def ask(self, gconfig: Any, timeout: float | None) -> Exchange:  # noqa: ASYNC109
        """Request the next completion, check it and return it.

        The wait lasts ``timeout`` seconds at most, once generation is not paused.

        Raises:
            EpisodeError: If no reply comes in time, or it does not answer the request.
            GenerationError: As the engine put it on `act_queue`.
        """
        request = (self.qid, self.token_ids.copy(), gconfig)
        if isinstance(self.obs_queue, RequestQueue):
            await self.obs_queue.wait_open()  # a pause for new weights is no lateness
        try:
            async with asyncio.timeout(timeout):
                with self.guard("the engine's queues failed"):
                    reply = await self._reply_to(request)
        except TimeoutError as error:
            raise self.error(f"no reply within {timeout} s", EpisodeTimeoutError) from error
        if isinstance(reply, GenerationError) and reply.qid == self.qid:
            raise reply
        with self.guard("the reply was refused", MalformedResponseError):
            if isinstance(reply, GenerationError):
                raise ValueError(f"an error of another episode came: {reply}") from reply
            if not isinstance(reply, GenerationOutput):
                raise TypeError(f"expected a GenerationOutput, got {type(reply).__name__}")
            if not isinstance(reply.qid, str) or reply.qid != self.qid:
                raise ValueError(f"the reply answers episode {reply.qid!r}")
            seen = reply.prompt_ids
            if type(seen) is not list or seen != self.token_ids:  # a long list is not converted
                seen = as_ids("prompt_ids", seen).tolist()
            ids, logprobs = checked_completion("output", reply.output_ids, reply.output_logprobs)
            _, first, last = as_version_runs(
                "", reply.version_spans, reply.version_start, reply.version_end, ids.size
            )
            if not isinstance(reply.no_eos, bool | np.bool_):
                raise TypeError(f"no_eos must be a bool, got {type(reply.no_eos).__name__}")
            if seen != self.token_ids:
                raise ValueError(
                    "the reply answers another prompt: expected the "
                    f"{len(self.token_ids)} tokens that were sent, got {len(seen)}"
                )
        return Exchange(len(self.token_ids), ids, logprobs, first, last, reply)

    async def _reply_to(self, request: Observation) -> Reply:
        """Send a request and return its reply, after that of a request whose wait has ended."""
        while self.unanswered:
            await self.act_queue.get()
            self.unanswered -= 1
        await self.obs_queue.put(request)
        self.unanswered = 1
        reply = await self.act_queue.get()
        self.unanswered = 0
        return reply

    async def judge(self, answer: str) -> tuple[float, bool]:
        """Return the environment's number for ``answer``, and whether it ended the episode.

        Raises:
            EpisodeError: If it fails, or does not return exactly one finite success.
        """
        with self.guard("the environment's step failed", EnvironmentFailedError):
            self.observation, successes, terminated, truncated, _ = await self.env.step(
                (self.qid, [answer])
            )
            scores = [as_number("success", one) for one in several(_REWARDS, successes)]
            ended = bool(terminated) or bool(truncated)
        if len(scores) != 1:
            reason = f"expected one success of the environment, got {len(scores)}"
            raise self.error(reason, EnvironmentFailedError)
        return scores[0], ended

    def keep(self, exchange: Exchange) -> None:
        """Append a finished turn."""
        self.token_ids += exchange.ids.tolist()
        self.exchanges.append(exchange)

    def turns(self) -> list[Turn]:
        """Return the turns; their prompts are views of one array."""
        conversation = as_ids("token_ids", self.token_ids)
        return [one.turn(conversation[: one.start]) for one in self.exchanges]

    def trajectory(self, prompt: Prompt, turn_discount: float) -> Trajectory:
        """Return the conversation as a trajectory."""
        return Trajectory(
            id=prompt.id,
            turns=self.turns(),
            turn_discount=turn_discount,
            task_id=prompt.task_id,
            birth_time_ms=self.birth_time_ms,
        )
