"""Data of TRL's trainer: prompts of its data set, and the rows that it trains on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trajpack.agent.environments.questions import Question
from trajpack.agent.protocols import Prompt
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.types import Trajectory

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Row(NamedTuple):
    """One completion in TRL's form."""

    prompt_ids: list[int]
    """Tokens before the first generated one."""
    completion_ids: list[int]
    """Tokens from the first generated one to the last."""
    env_mask: list[int]
    """1 where the completion was generated, 0 on observations."""
    logprobs: list[float]
    """Log-probabilities of the generated tokens, 0 on observations."""
    episode_reward: float | None = None
    """Score of the episode; TRL leaves a row without one out of its group's mean."""


def trl_dataset_rows(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Return questions as rows of a data set for the trainer, for ``Dataset.from_list``.

    Example:
        >>> trl_dataset_rows([Question("sum", ({"role": "user", "content": "2 + 3?"},), ("5",))])
        [{'prompt': [{'role': 'user', 'content': '2 + 3?'}]}]
    """
    return [{"prompt": [dict(message) for message in question.messages]} for question in questions]


def questions_by_prompt(questions: Iterable[Question]) -> dict[Any, Question]:
    """Return the questions by `prompt_key`, of their messages and of their text.

    Raises:
        ValueError: If two questions have the same messages and different answers.
    """
    known: dict[Any, Question] = {}
    for question in questions:
        for prompt in (question.messages, question.text):
            other = known.setdefault(prompt_key(prompt), question)
            if (other.solutions, other.gym_entry) != (question.solutions, question.gym_entry):
                raise ValueError(
                    f"questions {other.id!r} and {question.id!r} have the same messages, but not "
                    "the same answers"
                )
    return known


def prompt_key(prompt: Any) -> Any:
    """Return a hashable form of a prompt, without keys that a data set may have added."""
    if isinstance(prompt, str):
        return prompt
    try:
        return tuple((message["role"], message["content"]) for message in prompt)
    except (TypeError, KeyError) as error:
        raise TypeError(
            f"a prompt must be a str or a list of messages, got {prompt!r:.200}"
        ) from error


def encode_prompt(question: Question, prompt: Any, trainer: GRPOTrainer) -> Prompt:
    """Encode a prompt as TRL does when it generates by itself."""
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


def masked_row(prompt_ids: Sequence[int], eos_token_id: int) -> Row:
    """Return a row without trained tokens: TRL refuses an empty completion, but not a masked one.

    Example:
        >>> masked_row([5, 6], 2)[1:]
        ([2], [0], [0.0], None)
    """
    return Row([int(id) for id in prompt_ids], [eos_token_id], [0], [0.0])


def rows_of_episodes(episodes: Sequence[Sequence[Trajectory]]) -> list[list[Row]]:
    """Pack the trajectories of all episodes and return each episode's rows.

    A row is a sequence of the merged layout: a conversation in which each turn continues the
    one before. A sequence without generated tokens gives no row. Extra fields are dropped.

    Raises:
        TypeError, ValueError: As `trajpack.pack`.

    Cost: one pack on the host; then every token becomes a Python object.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> first, second = Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5], [-0.25])
        >>> rows_of_episodes([[Trajectory("a", [first, second])], []])[0][0][:4]
        ([1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25])
    """
    plain = [
        replace(path, turns=[replace(turn, fields=None) for turn in path.turns])
        for path in chain.from_iterable(episodes)
    ]
    batch = pack(plain, device="cpu")
    ids, mask = batch.input_ids.numpy(), batch.loss_mask.numpy()
    logprobs = batch.rollout_logprobs.numpy()
    num_turns = [sum(len(path.turns) for path in paths) for paths in episodes]
    episode = np.zeros(len(batch), np.int64)
    episode[batch.turn_sequence.numpy()] = np.repeat(np.arange(len(episodes)), num_turns)
    rows: list[list[Row]] = [[] for _ in episodes]
    bounds = pairwise(accumulate(batch.seqlens, initial=0))
    for owner, (begin, end) in zip(episode, bounds, strict=True):
        generated = np.flatnonzero(mask[begin:end])
        if generated.size:
            of = slice(begin + generated[0], begin + generated[-1] + 1)
            given: Any = ids[begin : of.start], ids[of], mask[of].astype(int), logprobs[of]
            rows[owner].append(Row(*(values.tolist() for values in given)))
    return rows
