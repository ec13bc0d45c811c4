"""The task of the training: questions for sums of one digit, and demonstrations of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajpack.agent.environments.questions import Question
from trajpack.packing.types import Trajectory, Turn

_LARGEST = 9  # so that an answer is one digit and one token
_RETRY = "Unfortunately your answer is wrong. Let's try again."


def arithmetic_questions(size: int, seed: int) -> list[Question]:
    """Return questions for sums of two positive integers, up to 9, drawn with a seed.

    Raises:
        ValueError: If ``size`` is not positive.

    Example:
        >>> [(one.id, one.text, one.solutions) for one in arithmetic_questions(2, seed=0)]
        [('sum-0', '4+4', ('8',)), ('sum-1', '2+5', ('7',))]
    """
    if size < 1:
        raise ValueError(f"arithmetic_questions: size must be at least 1, got {size}")
    draw = np.random.default_rng(seed)
    sums = draw.integers(2, _LARGEST + 1, size)
    lefts = draw.integers(1, sums)
    return [
        Question(
            id=f"sum-{index}",
            messages=({"role": "user", "content": f"{left}+{total - left}"},),
            solutions=(str(total),),
        )
        for index, (left, total) in enumerate(zip(lefts.tolist(), sums.tolist(), strict=True))
    ]


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
