"""`JudgingEnvironment`: base of environments that judge answers to questions or problems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from trajpack.agent.protocols import Action


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_HasId)


class JudgingEnvironment(ABC, Generic[T]):
    """Judges answers, each by itself. One environment serves any number of episodes at once.

    An action is an `Action`, or a tuple ``(qid, answers)``: its question is the one that the task
    is called after, or else the ``qid``.
    """

    def __init__(self, asked: Iterable[T], kind: str) -> None:
        self._kind = kind
        self._by_id: dict[str, T] = {}
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
        successes, info = await self._judge(asked, qid, answers)
        return None, successes, True, False, info

    async def close(self) -> None:
        """Release everything, and wait for it. A `step` in progress raises."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @abstractmethod
    async def _judge(
        self, asked: T, qid: str, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        """Return a success for each answer, and info."""
