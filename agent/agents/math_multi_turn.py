"""Agent that answers, is told whether it was right, and answers again."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from trajpack.agent.agents.answer_log import AnswerLog, LoggedTurn
from trajpack.agent.agents.conversation import (
    Conversation,
    ConversationLimits,
    Exchange,
    decode,
    sampling_option,
)
from trajpack.agent.models.causal_model import load_tokenizer
from trajpack.agent.protocols import Environment, Observation, Prompt, Reply
from trajpack.packing.conversion import as_integer, as_number
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory

logger = logging.getLogger(__name__)

_FEEDBACK = {
    True: "Congratulations! You are correct!",
    False: "Unfortunately your answer is wrong. Let's try again.",
}


@dataclass(eq=False)
class MathMultiTurnAgent:
    """Asks for an answer `num_turns` times and tells the model each time how it did.

    Each turn's prompt is the last turn's prompt, its completion, and the feedback: a
    newline and the chat template applied to one user message, with the generation prompt.
    The template is encoded as it renders and the tokenizer adds nothing of its own, so a
    template that writes a system message or a beginning-of-sequence token writes it again
    in every turn.

    A turn's reward is ``((success - 0.5) * 2 - reward_bias) * reward_scaling``, where
    ``success`` is the environment's number, 0 or 1.

    One agent serves any number of episodes at once.

    Raises:
        ValueError: On an option out of range, or where the ``gconfig`` asks for more
            samples than one; as `SetupError`, where the tokenizer's folder cannot be read.
        TypeError: If a number of turns or tokens is not an integer.

    Cost: tokens are handled a constant number of times per turn, by numpy and the
    tokenizer; the conversation is stored once and the turns are views of it.
    """

    gconfig: Any
    """Sampling parameters, handed to the engine unchanged. Where it has ``n`` or ``n_samples``,
    as an attribute or a key, that must be 1."""
    tokenizer: Any
    """A Hugging Face tokenizer with a chat template, or the local folder of one."""
    answer_save_path: str | os.PathLike[str] | None
    """Folder of the `AnswerLog`; None keeps no log. A finished episode is logged whole, an
    unfinished one not at all. Where the folder cannot be written to, the trajectory is
    returned all the same and a warning is logged."""
    reward_scaling: float = 1.0
    """Multiplies the reward, after the bias."""
    reward_bias: float = 0.0
    """Subtracted from the reward, which is 1 or -1 before."""
    turn_level_discount: float = 1.0
    """Discount from one turn to the next, stored in the trajectory."""
    num_turns: int = 5
    """Turns of an episode; at least 1."""
    _: KW_ONLY
    stop_on_success: bool = False
    """End the episode at the first right answer."""
    stop_on_terminated: bool = False
    """End the episode when the environment says it is terminated or truncated. A
    `MathVerifyEnvironment` says so at every answer, so the episode ends after one turn."""
    max_total_tokens: int | None = None
    """Tokens of the whole conversation at most. A turn whose prompt and
    ``gconfig.max_new_tokens`` might exceed it is not requested; the episode ends before it."""
    generation_timeout: float | None = None
    """Seconds to wait for a reply at most."""
    _feedback_ids: dict[bool, list[int]] = field(init=False, repr=False)
    _limits: ConversationLimits = field(init=False, repr=False)
    _log: AnswerLog | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_options()
        if isinstance(self.tokenizer, str | os.PathLike):
            self.tokenizer = load_tokenizer(self.tokenizer)
        self._feedback_ids = {}
        if self.num_turns > 1:
            self._feedback_ids = {
                key: self._encode_feedback(text) for key, text in _FEEDBACK.items()
            }
        self._log = None if self.answer_save_path is None else AnswerLog(self.answer_save_path)

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        """Run one episode and return its one trajectory.

        Args:
            prompt: Opening; its id is the episode's ``qid`` and the trajectory's id.
            env: Takes ``(qid, [answer])`` and returns a list of one success as its reward.
            obs_queue: Queue of requests, ``(qid, token_ids, gconfig)`` for each turn.
            act_queue: Queue of replies, one for each request.

        Raises:
            EpisodeError: If the environment fails, a reply is late or does not answer
                its request, or ``max_total_tokens`` leaves no room for a first turn.
            GenerationError: As the engine put it on ``act_queue``.
            asyncio.CancelledError: If cancelled; the message names the episode.
        """
        conversation = Conversation(prompt.id, env, obs_queue, act_queue)
        try:
            await self._converse(conversation, prompt.input_ids)
            await self._write_log(conversation)
        except asyncio.CancelledError as error:
            message = f"episode {prompt.id!r}: cancelled in turn {len(conversation.exchanges)}"
            raise asyncio.CancelledError(message) from error
        return [conversation.trajectory(prompt, self.turn_level_discount)]

    async def _converse(self, conversation: Conversation, prompt_ids: Sequence[int]) -> None:
        await conversation.begin(prompt_ids)
        for turn in range(self.num_turns):
            feedback = self._feedback_ids[conversation.exchanges[-1].success] if turn else []
            if not self._limits.fit(len(conversation.token_ids) + len(feedback), self.gconfig):
                break
            conversation.token_ids += feedback
            completion, answer = await conversation.listen(
                self.gconfig, self.tokenizer, self.generation_timeout
            )
            score, ended = await conversation.judge(answer)
            with conversation.guard("its reward is out of range"):
                shaped = ((score - 0.5) * 2 - self.reward_bias) * self.reward_scaling
                reward = as_number("reward", shaped)
            conversation.keep(Exchange(completion, answer, bool(score), reward))
            if (score and self.stop_on_success) or (ended and self.stop_on_terminated):
                break
        conversation.require_turn(self._limits, self.gconfig)

    async def _write_log(self, conversation: Conversation) -> None:
        if self._log is None:
            return
        try:
            await self._log.write(conversation.qid, self._logged(conversation))
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything, too
            logger.warning(
                "episode %s: its answers were not logged: %s",
                one_line(repr(conversation.qid)),
                one_line(error),
            )

    def _logged(self, conversation: Conversation) -> list[LoggedTurn]:
        """Return the turns for the log; every piece of the conversation is decoded once."""
        logged: list[LoggedTurn] = []
        end, prompt_text = 0, ""
        for turn, (completion, answer, success, reward) in enumerate(conversation.exchanges):
            prompt_text += decode(self.tokenizer, conversation.token_ids[end : completion.start])
            logged.append(
                LoggedTurn(
                    turn=turn,
                    prompt_text=prompt_text,
                    completion_text=answer,
                    prompt_len=completion.start,
                    answer_len=len(completion.ids),
                    success=success,
                    reward=reward,
                    version_start=completion.version_start,
                    version_end=completion.version_end,
                )
            )
            prompt_text += decode(self.tokenizer, completion.ids.tolist())
            end = completion.start + len(completion.ids)
        return logged

    def _encode_feedback(self, message: str) -> list[int]:
        text: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer.encode("\n" + text, add_special_tokens=False)
        return ids

    def _check_options(self) -> None:
        for name in ("n", "n_samples"):
            asked = sampling_option(self.gconfig, name, 1)
            if asked not in (None, 1):
                raise ValueError(f"gconfig.{name} must be 1, got {asked}: one sample per turn")
        if as_integer("num_turns", self.num_turns) < 1:
            raise ValueError(f"num_turns must be at least 1, got {self.num_turns}")
        for name in ("reward_scaling", "reward_bias", "turn_level_discount"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        self._limits = ConversationLimits(
            self.num_turns, self.max_total_tokens, self.generation_timeout
        )
        self._limits.check_sampling(self.gconfig)
