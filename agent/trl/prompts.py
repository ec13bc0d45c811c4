"""Prompts of TRL's trainer as prompts of our agents, and the other way round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trajpack.agent.environments.questions import Question
from trajpack.agent.protocols import Prompt

if TYPE_CHECKING:
    from trl import GRPOTrainer


def trl_dataset_rows(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Return the questions as rows of a data set for the trainer, for ``Dataset.from_list``.

    Example:
        >>> trl_dataset_rows([Question("sum", ({"role": "user", "content": "2 + 3?"},), ("5",))])
        [{'prompt': [{'role': 'user', 'content': '2 + 3?'}]}]
    """
    return [{"prompt": [dict(message) for message in question.messages]} for question in questions]


def questions_by_prompt(questions: Iterable[Question]) -> dict[Any, Question]:
    """Return the questions by `prompt_key`, of their messages and of their text.

    Raises:
        ValueError: If two of them have the same messages and not the same answers.
    """
    known: dict[Any, Question] = {}
    for question in questions:
        for prompt in (question.messages, question.text):
            other = known.setdefault(prompt_key(prompt), question)
            if other is not question and (other.solutions, other.gym_entry) != (
                question.solutions,
                question.gym_entry,
            ):
                raise ValueError(
                    f"questions {other.id!r} and {question.id!r} have the same messages, but not "
                    "the same answers"
                )
    return known


def prompt_key(prompt: Any) -> Any:
    """Return what a prompt is looked up by: data sets may add keys without values."""
    if isinstance(prompt, str):
        return prompt
    try:
        return tuple((message["role"], message["content"]) for message in prompt)
    except (TypeError, KeyError) as error:
        raise TypeError(
            f"a prompt must be a str or a list of messages, got {prompt!r:.200}"
        ) from error


def encode_prompt(question: Question, prompt: Any, trainer: GRPOTrainer) -> Prompt:
    """Turn a prompt into token ids as TRL does where it generates itself."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        input_ids = tokenizer(text=prompt)["input_ids"]
    else:
        input_ids = tokenizer.apply_chat_template(
            prompt,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            return_dict=False,
            **trainer.chat_template_kwargs,
        )
    return Prompt(question.id, input_ids, task_id=question.task_id)


def number_samples(ids: Iterable[str]) -> list[tuple[str, int]]:
    """Number the prompts of each question, from 0.

    Example:
        >>> number_samples(["a", "a", "b", "a"])
        [('a', 0), ('a', 1), ('b', 0), ('a', 2)]
    """
    seen: Counter[str] = Counter()
    samples = []
    for id in ids:
        samples.append((id, seen[id]))
        seen[id] += 1
    return samples
