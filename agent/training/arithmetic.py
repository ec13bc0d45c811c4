"""The task of the demonstration: sums of one digit, a tiny model, and demonstrations for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trajpack.agent.environments.questions import Question
from trajpack.agent.models.tiny_model import build_qwen3, train_tokenizer
from trajpack.packing.optional import require
from trajpack.packing.types import Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LARGEST = 9
"""Largest sum, so that an answer is one digit and one token."""
_PAD, _USER, _ASSISTANT, _END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_RETRY = "Unfortunately your answer is wrong. Let's try again."
_TEXT = (_RETRY, "Congratulations! You are correct!") * 2


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
    sums = draw.integers(2, LARGEST + 1, size)
    lefts = draw.integers(1, sums)
    return [
        Question(
            id=f"sum-{index}",
            messages=({"role": "user", "content": f"{left}+{total - left}"},),
            solutions=(str(total),),
        )
        for index, (left, total) in enumerate(zip(lefts.tolist(), sums.tolist(), strict=True))
    ]


def build_arithmetic_model(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build a tiny Qwen3 with random weights, and a tokenizer with one token for each digit.

    The model has 2 layers of width 64 and positions for 512 tokens. The tokenizer is a byte-level
    byte-pair encoding; a message ends with ``<|end|>``, ``<|pad|>`` pads.

    Returns the model, in evaluation mode and float32 on the CPU, and its tokenizer. Torch's global
    random state does not change.

    Raises:
        ImportError: If transformers is not installed.

    Cost: under a second once transformers is imported.
    """
    require("tokenizers", "transformers")
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    # Without a split at words, the agent's feedback becomes a single token.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = train_tokenizer(
        pre_tokenizers.Sequence([digits, words]),
        _TEXT,
        special_tokens=(_PAD, _END, _USER, _ASSISTANT),
        vocab_size=512,
        chat_template=_CHAT_TEMPLATE,
    )
    # The default initializer range learns several times slower at this width.
    return build_qwen3(tokenizer, seed, max_positions=512, initializer_range=0.1), tokenizer


def encode_question(question: Question, tokenizer: Any) -> list[int]:
    """Return the token ids of a question's messages, generation prompt included."""
    return _encode_messages(list(question.messages), tokenizer)


def _encode_messages(messages: list[Any], tokenizer: Any, before: str = "") -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(before + text, add_special_tokens=False)
    return ids


def lazy_demonstrations(
    size: int, tokenizer: Any, *, num_turns: int, skill: float = 1 / 3, seed: int = 0
) -> list[Trajectory]:
    """Return conversations of a teacher that adds correctly only with probability ``skill``.

    Otherwise it answers with one of the two numbers, which is wrong. It gets the feedback that
    `MathMultiTurnAgent` gives, and retries until it is right or the turns are used up.

    Their log-probabilities are 0.

    Raises:
        ValueError: If ``size`` or ``num_turns`` is not positive, or ``skill`` is not in [0, 1].
    """
    if num_turns < 1:
        raise ValueError(f"lazy_demonstrations: num_turns must be at least 1, got {num_turns}")
    if not 0 <= skill <= 1:
        raise ValueError(f"lazy_demonstrations: skill must be in [0, 1], got {skill}")
    draw = np.random.default_rng([seed, size])
    retry = _encode_messages([{"role": "user", "content": _RETRY}], tokenizer, before="\n")
    trajectories = []
    for question in arithmetic_questions(size, seed):
        ids = encode_question(question, tokenizer)
        turns: list[Turn] = []
        while len(turns) < num_turns and not (turns and turns[-1].reward > 0):
            numbers = question.text.split("+")
            answer = question.solutions[0] if draw.random() < skill else str(draw.choice(numbers))
            completion = tokenizer.encode(answer + _END, add_special_tokens=False)
            reward = 1.0 if answer in question.solutions else -1.0
            turns.append(Turn(list(ids), completion, [0.0] * len(completion), reward))
            ids += [*completion, *retry]
        trajectories.append(Trajectory(question.id, turns))
    return trajectories
