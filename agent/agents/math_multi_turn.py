"""Agent that answers, is told whether it was right, and answers again."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from trajpack.agent.agents.answer_log import log_answers
from trajpack.agent.agents.chat_agent import ConversationAgent
from trajpack.agent.agents.conversation import (
    Conversation,
    ConversationLimits,
    Exchange,
    sampling_option,
)
from trajpack.packing.conversion import as_integer, as_number
from trajpack.packing.representation import brief_repr
from trajpack.packing.text import one_line

logger = logging.getLogger(__name__)

_FEEDBACK = {
    True: "Congratulations! You are correct!",
    False: "Unfortunately your answer is wrong. Let's try again.",
}


@dataclass(eq=False)
class MathMultiTurnAgent(ConversationAgent):
    """Asks for an answer `num_turns` times and tells the model each time how it did.

    The feedback is a newline and what the chat template renders of one user message. A template
    that writes a system message, or a token that begins a text, writes it again in every turn.

    A turn's reward is ``((success - 0.5) * 2 - reward_bias) * reward_scaling``, where
    ``success`` is the environment's number, 0 or 1.

    Attributes:
        gconfig: Sampling parameters. Where it has ``n`` or ``n_samples``, as an attribute or a key,
            that must be 1.
        tokenizer: A Hugging Face tokenizer with a chat template, or the local folder of one.
        answer_save_path: Folder of a log of finished episodes, see
            `trajpack.agent.agents.answer_log.log_answers`; None keeps no log. An episode that
            cannot be logged costs a warning.
        reward_scaling: Multiplies the reward, after the bias.
        reward_bias: Subtracted from the reward, which is 1 or -1 before.
        turn_level_discount: Discount from one turn to the next, stored in the trajectory.
        num_turns: Turns of an episode; at least 1.
        stop_on_success: End the episode at the first right answer.
        stop_on_terminated: End the episode when the environment says it is terminated or truncated.
            A `MathVerifyEnvironment` says so at every answer, so the episode ends after one turn.
        max_total_tokens: Tokens of the whole conversation at most; the last request takes the rest.

    Raises:
        ValueError: On an option out of range, or a ``gconfig`` that asks for several samples; as
            `SetupError`, where the tokenizer's folder cannot be read.
        TypeError: If a number of turns or tokens is not an integer.
    """

    gconfig: Any
    tokenizer: Any
    answer_save_path: str | os.PathLike[str] | None
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    turn_level_discount: float = 1.0
    num_turns: int = 5
    _: KW_ONLY
    stop_on_success: bool = False
    stop_on_terminated: bool = False
    max_total_tokens: int | None = None
    _feedback_ids: dict[bool, list[int]] = field(init=False, repr=False)

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        for name in ("n", "n_samples"):
            asked = sampling_option(self.gconfig, name, 1)
            if asked not in (None, 1):
                raise ValueError(f"gconfig.{name} must be 1, got {asked}: one sample per turn")
        if as_integer("num_turns", self.num_turns) < 1:
            raise ValueError(f"num_turns must be at least 1, got {self.num_turns}")
        for name in ("reward_scaling", "reward_bias"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        self.limits = ConversationLimits(self.num_turns, self.max_total_tokens)
        self.turn_discount = self.turn_level_discount
        super().__post_init__()
        self._feedback_ids = {}
        for is_right, content in _FEEDBACK.items() if self.num_turns > 1 else ():
            chat = [{"role": "user", "content": content}]
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer.encode(f"\n{text}", add_special_tokens=False)
            self._feedback_ids[is_right] = ids

    async def respond(self, conversation: Conversation, exchange: Exchange) -> list[int] | None:
        """Judge an answer and return the feedback; None ends the episode."""
        has_ended = await conversation.judge(exchange)
        exchange.success = exchange.reward != 0  # as Python takes a number for a truth
        shaped = ((exchange.reward - 0.5) * 2 - self.reward_bias) * self.reward_scaling
        exchange.reward = as_number("reward", shaped)
        is_last = len(conversation.exchanges) == self.num_turns
        is_over = has_ended and self.stop_on_terminated
        if is_last or is_over or (exchange.success and self.stop_on_success):
            return None
        return self._feedback_ids[exchange.success]

    async def converse(self, conversation: Conversation, observation: list[int] | None) -> None:
        """Run the turns, and log the answers if there is a folder for them."""
        await super().converse(conversation, observation)
        if self.answer_save_path is None:
            return
        try:
            turns = [(self.decode([*one.turn.prompt_ids]), one) for one in conversation.exchanges]
            await asyncio.to_thread(log_answers, self.answer_save_path, conversation.qid, turns)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything, too
            name = repr(conversation.qid)
            logger.warning(
                "episode %s: its answers were not logged: %s", one_line(name), one_line(error)
            )
