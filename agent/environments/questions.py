"""Questions with known answers, drawn or from a file, and their comparison as text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trajpack.agent.environments.judging import JudgingEnvironment
from trajpack.packing.optional import require
from trajpack.packing.representation import brief_repr

Message: TypeAlias = Mapping[str, str]
"""Message of a chat: ``role`` and ``content``."""

DEFAULT_TASK = "chain_sum"
"""Default reasoning-gym task: sums and differences of integers."""

_LARGEST = 9  # so that an answer is one digit and one token


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
    r"""Read questions from a JSONL file, one object per line.

    A line has a question: ``question``, ``prompt`` or ``messages``, a string or a list of chat
    messages. It has accepted answers: ``solutions``, a list of strings, or ``answer``. An
    ``answer`` is a number, a string without spaces, or a text with the final answer after
    ``####``, GSM8K's form. ``query_id`` or ``id`` (a string or an integer) and ``task_id`` (an
    integer) are optional; a question without id is called after the file and the line,
    ``gsm8k_test-1``. Blank lines are skipped.

    Args:
        path: Path of the file.
        limit: Most questions to read; later lines are neither read nor checked.

    Raises:
        ValueError: If a line is malformed (with file and line number), the file has no question, or
            the limit is not positive.
        OSError: If the file cannot be read, `FileNotFoundError` if it does not exist.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "sums.jsonl"
        >>> line = '{"question": "1 + 1?", "answer": "One and one is two.\\n#### 2"}\n'
        >>> _ = path.write_text(line)
        >>> load_questions(path)[0].id, load_questions(path)[0].solutions
        ('sums-1', ('2',))
    """
    if limit is not None and limit < 1:
        raise ValueError(f"load_questions: limit must be at least 1, got {limit}")
    path = Path(path)
    questions: dict[str, tuple[Question, int]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                question = _parse(line, default_id=f"{path.stem}-{number}")
                if question.id in questions:
                    first = questions[question.id][1]
                    raise ValueError(f"id {question.id!r} is taken by line {first}")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            questions[question.id] = question, number
            if len(questions) == limit:
                break
    if not questions:
        raise ValueError(f"{path}: no question in this file")
    return [question for question, _ in questions.values()]


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


def reasoning_gym_questions(name: str = DEFAULT_TASK, *, size: int, seed: int) -> list[Question]:
    """Generate questions of one reasoning-gym task.

    Args:
        name: Task, as reasoning-gym names it.
        size: Number of questions.
        seed: Equal seeds give equal questions.

    Raises:
        ValueError: If ``size`` is not positive or no such task exists.
    """
    require("reasoning_gym")
    from reasoning_gym import create_dataset

    if size < 1:
        raise ValueError(f"reasoning_gym_questions: size must be at least 1, got {size}")
    entries = create_dataset(name, size=size, seed=seed)
    return [
        Question(
            id=f"{name}-{seed}-{i}",
            messages=({"role": "user", "content": entry["question"]},),
            solutions=() if entry["answer"] is None else (str(entry["answer"]),),
            gym_task=name,
            gym_entry=entry,
        )
        for i, entry in enumerate(entries)
    ]


class ExactAnswerEnvironment(JudgingEnvironment[Question]):
    """Judges an answer right if it equals one of the question's solutions as text.

    Surrounding space is ignored, and ``info`` of a step is empty. `MathVerifyEnvironment` compares
    answers of any form, at the cost of a process; it accepts ``2+3`` as the value of ``2+3``, which
    a trained policy exploits.

    An action is ``(qid, answers)``, where ``qid`` is a question's id, or one followed by ``@`` and
    anything without another ``@``. One environment serves any number of episodes at once.

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
        self, asked: Question, qid: str, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        solutions = {solution.strip() for solution in asked.solutions}
        return [answer.strip() in solutions for answer in answers], {}


def _parse(line: bytes, default_id: str) -> Question:
    try:
        fields = json.loads(line.rstrip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {type(fields).__name__}")
    name = next((name for name in ("question", "prompt", "messages") if name in fields), None)
    if name is None or not {"answer", "solutions"} & fields.keys():
        raise ValueError(
            "expected 'question', 'prompt' or 'messages', and 'answer' or 'solutions', got "
            f"{', '.join(map(repr, fields)) or 'no fields'}"
        )
    messages = _messages(fields[name], name)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{name} must end with the question, not with an assistant's message")
    task_id = fields.get("task_id")
    if task_id is not None and (isinstance(task_id, bool) or not isinstance(task_id, int)):
        raise ValueError(f"task_id must be an integer, got {task_id!r}")
    question_id = fields.get("query_id", fields.get("id", default_id))
    if isinstance(question_id, int) and not isinstance(question_id, bool):
        question_id = str(question_id)
    return Question(_text(question_id, "id"), messages, _solutions(fields), task_id)


def _solutions(fields: Mapping[str, Any]) -> tuple[str, ...]:
    if "solutions" in fields:
        given = fields["solutions"]
        if not isinstance(given, list) or not given:
            raise ValueError(f"solutions must be a list of at least one string, got {given!r:.80}")
        return tuple(_text(solution, "solutions") for solution in given)
    answer = fields["answer"]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return (str(answer),)
    _, mark, final = _text(answer, "answer").rpartition("####")
    final = final.strip()
    if not final or (not mark and len(final.split()) > 1):
        raise ValueError(
            "answer has several words and no final answer after '####'; a whole text goes into "
            f"solutions, a list of strings; got {answer!r:.80}"
        )
    return (final,)


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        return ({"role": "user", "content": _text(value, name)},)
    if not value:
        raise ValueError(f"{name} has no messages")
    if not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{name} must be a string or a list of messages")
    return tuple(
        {key: _text(message.get(key), f"{key} in {name}") for key in ("role", "content")}
        for message in value
    )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a string that is not empty, got {value!r:.80}")
    return value
