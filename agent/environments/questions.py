"""Questions with known answers, drawn or from a file, and the base of environments that judge."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from trajpack.agent.protocols import Action
from trajpack.packing.optional import require
from trajpack.packing.representation import brief_repr

Message: TypeAlias = Mapping[str, str]
"""Message of a chat: ``role`` and ``content``."""


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        id: Unique among the questions used together.
        messages: Chat messages that ask the question.
        solutions: Accepted answers.
        task_id: Kind of task, numbered by the data set.
        gym_task: reasoning-gym task whose scorer judges the answer instead of ``solutions``.
        gym_entry: Argument of that scorer.
    """

    id: str
    messages: tuple[Message, ...]
    solutions: tuple[str, ...]
    task_id: int | None = None
    gym_task: str | None = None
    gym_entry: Mapping[str, Any] | None = None

    __repr__ = brief_repr

    @property
    def text(self) -> str:
        """Contents of all messages."""
        return "\n\n".join(message["content"] for message in self.messages)


def load_questions(path: str | os.PathLike[str], limit: int | None = None) -> list[Question]:
    """Read questions from a JSONL file, one object per line.

    A line has ``prompt``, a string or a list of chat messages, and ``solutions``, a list of
    strings; or ``question`` and ``answer``, a number or word, or a text with one after ``####``
    (GSM8K). ``id``, by default file and line (``gsm8k_test-1``), and ``task_id``, an integer, are
    optional. Blank lines are skipped, and lines after ``limit`` questions not read.

    Raises:
        ValueError: If a line is malformed (with file and line number), the file has no question, or
            the limit is not positive.
        OSError: If the file cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"load_questions: limit must be at least 1, got {limit}")
    path = Path(path)
    questions: list[Question] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig"))
                questions.append(_parse(fields, f"{path.stem}-{number}"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if len(questions) == limit:
                break
    if not questions:
        raise ValueError(f"{path}: no question in this file")
    return questions


def _parse(fields: Any, default_id: str) -> Question:
    match fields:
        case {"prompt": asked, "solutions": [_, *_] as solutions}:
            pass
        case {"question": asked, "answer": str() | int() | float() as answer}:
            _, mark, final = str(answer).rpartition("####")
            if not mark and len(final.split()) > 1:
                raise ValueError(f"answer has no final answer after '####', got {answer!r:.80}")
            solutions = [final.strip()]
        case _:
            asked, solutions = "", []
    chat = _user(asked) if isinstance(asked, str) else asked
    try:
        messages = tuple({key: message[key] for key in ("role", "content")} for message in chat)
        texts = [*solutions, *(text for message in messages for text in message.values())]
        is_valid = all(text.strip() for text in texts) and messages[-1]["role"] != "assistant"
    except (AttributeError, IndexError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            "expected 'prompt' and 'solutions', or 'question' and 'answer', without empty strings, "
            f"and messages that end with a question, got {fields!r:.120}"
        )
    id, task_id = fields.get("id", default_id), fields.get("task_id")
    if type(id) not in (str, int) or (task_id is not None and type(task_id) is not int):
        raise ValueError(f"id must be a name and task_id an integer, got {id!r} and {task_id!r}")
    return Question(str(id), messages, tuple(solutions), task_id)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def arithmetic_questions(size: int, seed: int) -> list[Question]:
    """Return questions for sums of two positive integers, up to 9, drawn with a seed.

    Raises:
        ValueError: If ``size`` is not positive.
    """
    if size < 1:
        raise ValueError(f"arithmetic_questions: size must be at least 1, got {size}")
    draw = np.random.default_rng(seed)
    sums = draw.integers(2, 10, size)  # so that an answer is one digit and one token
    lefts = draw.integers(1, sums)
    return [
        Question(f"sum-{i}", _user(f"{left}+{total - left}"), (str(total),))
        for i, (left, total) in enumerate(zip(lefts.tolist(), sums.tolist(), strict=True))
    ]


def reasoning_gym_questions(name: str = "chain_sum", *, size: int, seed: int) -> list[Question]:
    """Generate questions of one reasoning-gym task; equal seeds give equal questions.

    Raises:
        ValueError: If ``size`` is not positive or no such task exists.
    """
    require("reasoning_gym")
    from reasoning_gym import create_dataset

    if size < 1:
        raise ValueError(f"reasoning_gym_questions: size must be at least 1, got {size}")
    return [
        Question(
            f"{name}-{seed}-{i}",
            _user(entry["question"]),
            () if entry["answer"] is None else (str(entry["answer"]),),
            gym_task=name,
            gym_entry=entry,
        )
        for i, entry in enumerate(create_dataset(name, size=size, seed=seed))
    ]


class JudgingEnvironment:
    """Judges answers, each by itself. One environment serves any number of episodes at once.

    An action is an `Action`, or a tuple ``(qid, answers)``: its question is the one that the task
    is called after, or else the ``qid``.
    """

    def __init__(self, asked: Iterable[Any], kind: str) -> None:
        self._kind = kind
        self._by_id: dict[str, Any] = {}
        for question in asked:
            if question.id in self._by_id:
                raise ValueError(f"{kind} id {question.id!r} appears twice")
            self._by_id[question.id] = question

    async def reset(self) -> tuple[None, dict[str, Any]]:
        """Start an episode; has no effect."""
        return None, {}

    async def step(
        self, action: tuple[str, Sequence[str]]
    ) -> tuple[None, list[bool], bool, bool, dict[str, Any]]:
        """Return ``(None, successes, True, False, info)``, with one success per answer.

        Raises:
            ValueError: If no question has this ``qid``.
            TypeError: If the answers are not a list of strings.
            RuntimeError: If an answer could not be judged; not a verdict on the answer.
        """
        qid, answers = action
        asked = self._by_id.get(Action(qid, answers).task, self._by_id.get(qid))
        if asked is None:
            raise ValueError(f"step: no {self._kind} has the id {qid!r}")
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise TypeError(f"step: the answers to {qid!r} must be a list of strings")
        successes, info = await self._judge(asked, answers)
        return None, successes, True, False, info

    async def close(self) -> None:
        """Release everything, and wait for it. A `step` in progress raises."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _judge(self, asked: Any, answers: Sequence[str]) -> tuple[list[bool], dict[str, Any]]:
        """Return a success for each answer, and info."""
        raise NotImplementedError


class ExactAnswerEnvironment(JudgingEnvironment):
    """Judges an answer right if it equals one of the question's solutions as text.

    Surrounding space is ignored, and ``info`` of a step is empty. `MathVerifyEnvironment` compares
    answers of any form, at the cost of a process; it accepts ``2+3`` as the value of ``2+3``, which
    a trained policy exploits.

    Args:
        questions: All questions of the rollout, with at least one solution each.

    Raises:
        ValueError: If an id appears twice, or a question has no solutions.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        super().__init__(questions, "question")
        for question in self._by_id.values():
            if not question.solutions:
                raise ValueError(f"question {question.id!r} has no solutions to compare with")

    async def _judge(
        self, asked: Question, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        solutions = {solution.strip() for solution in asked.solutions}
        return [answer.strip() in solutions for answer in answers], {}
