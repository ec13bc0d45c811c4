"""Demonstrations of the training's task, sums of one digit."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajpack.agent.environments.questions import Question, arithmetic_questions
from trajpack.packing.types import Trajectory, Turn

_RETRY = "Unfortunately your answer is wrong. Let's try again."


def encode_question(question: Question, tokenizer: Any, *, before: str = "") -> list[int]:
    """Return the token ids of ``before``, the question's messages and the generation prompt."""
    messages = list(question.messages)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(before + text, add_special_tokens=False)
    return ids


def lazy_demonstrations(
    size: int, tokenizer: Any, *, num_turns: int, skill: float = 1 / 3, seed: int = 0
) -> list[Trajectory]:
    """Return conversations of a teacher that adds correctly only with probability ``skill``.

    Otherwise it answers with one of the two numbers, which is wrong. It gets the feedback that
    `MathMultiTurnAgent` gives, and retries until it is right or the turns are used up. All
    log-probabilities are 0.

    Raises:
        ValueError: If ``size`` or ``num_turns`` is not positive, or ``skill`` is not in [0, 1].
    """
    if num_turns < 1:
        raise ValueError(f"lazy_demonstrations: num_turns must be at least 1, got {num_turns}")
    if not 0 <= skill <= 1:
        raise ValueError(f"lazy_demonstrations: skill must be in [0, 1], got {skill}")
    draw = np.random.default_rng([seed, size])
    feedback = Question("feedback", ({"role": "user", "content": _RETRY},), ())
    retry = encode_question(feedback, tokenizer, before="\n")
    trajectories = []
    for question in arithmetic_questions(size, seed):
        ids = encode_question(question, tokenizer)
        turns: list[Turn] = []
        while len(turns) < num_turns and not (turns and turns[-1].reward > 0):
            numbers = question.text.split("+")
            answer = question.solutions[0] if draw.random() < skill else str(draw.choice(numbers))
            completion = tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False)
            reward = 1.0 if answer in question.solutions else -1.0
            turns.append(Turn(list(ids), completion, [0.0] * len(completion), reward))
            ids += [*completion, *retry]
        trajectories.append(Trajectory(question.id, turns))
    return trajectories
