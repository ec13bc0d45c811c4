"""An environment for answers that can be compared as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trajpack.agent.environments.questions import Question


class ExactAnswerEnvironment:
    """Calls an answer right that is one of the question's solutions, word for word.

    Space around it does not matter. Where the form of an answer is free, take
    `MathVerifyEnvironment`, which costs a process; note that it calls ``2+3`` a right answer to
    what ``2+3`` is, and that a policy that is trained on its verdicts will find that out.

    An action is ``(qid, answers)``, where ``qid`` is a question's id, or one followed by ``@`` and
    anything without another ``@``. One environment serves any number of episodes at once.

    Args:
        questions: Every question that will be asked, with at least one solution each.

    Raises:
        ValueError: If an id appears twice, or a question has no solutions.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self._solutions: dict[str, frozenset[str]] = {}
        for question in questions:
            if question.id in self._solutions:
                raise ValueError(f"question id {question.id!r} appears twice")
            if not question.solutions:
                raise ValueError(f"question {question.id!r} has no solutions to compare with")
            self._solutions[question.id] = frozenset(map(str.strip, question.solutions))

    async def reset(self) -> tuple[None, dict[str, Any]]:
        """Start an episode; there is nothing to do."""
        return None, {}

    async def step(
        self, action: tuple[str, Sequence[str]]
    ) -> tuple[None, list[bool], bool, bool, dict[str, Any]]:
        """Judge the answers to one question.

        Returns:
            ``(None, successes, True, False, {})`` with one success per answer.

        Raises:
            ValueError: If no question has this ``qid``.
            TypeError: If an answer is not a string.
        """
        qid, answers = action
        solutions = self._solutions.get(qid, self._solutions.get(qid.rpartition("@")[0]))
        if solutions is None:
            raise ValueError(f"step: no question has the id {qid!r}")
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise TypeError(f"step: the answers to {qid!r} must be a list of strings")
        return None, [answer.strip() in solutions for answer in answers], True, False, {}
