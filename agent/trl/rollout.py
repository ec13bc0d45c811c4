"""The ``rollout_func`` of TRL's ``GRPOTrainer``: episodes of agents as rows that it trains on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from trajpack.agent.agents.conversation import sampling_option
from trajpack.agent.doors.episode import reward_of, sequences_of
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.questions import Question
from trajpack.agent.errors import EpisodeError, has_engine_ended
from trajpack.agent.protocols import Agent, Engine, Environment, Prompt
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.optional import require
from trajpack.packing.types import Trajectory

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Row(NamedTuple):
    """One completion in TRL's form, see `TRLRollout`."""

    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int]
    logprobs: list[float]
    episode_reward: float | None = None


def sum_of_rewards(result: EpisodeResult) -> float:
    """Return the undiscounted sum of the rewards of an episode's turns."""
    return reward_of(result.trajectories)


@dataclass(eq=False)
class TRLRollout:
    """The ``rollout_func`` of TRL's ``GRPOTrainer``, by an agent of this library.

    Called with prompts and the trainer, it runs an episode for each prompt on the model that is
    being trained, and returns lists with one entry for each prompt: ``prompt_ids``,
    ``completion_ids``, ``env_mask`` (1 where generated, 0 on observations), ``logprobs`` (as
    sampled, 0 on observations), ``episode_reward`` (None: TRL leaves the row out), ``episode_id``
    and ``episode_turns``.

    TRL's ``max_completion_length`` has no effect: the agent's limits have. With
    ``mask_truncated_completions`` the rows of truncated trajectories are masked, and no others.

    Attributes:
        agent: Agent of the episodes. Its ``prompt_ids(messages)`` makes the prompts; without it,
            the trainer's chat template does. Its ``gconfig`` has the trainer's temperature.
        environment: Environment of the episodes, which the caller enters and closes. Each call has
            an event loop of its own.
        questions: All questions. A prompt of the trainer is looked up by its text; the question's
            id is the prompt id of agent and environment.
        concurrency: Maximum number of running episodes.
        score: Score of an episode.
        failures: Treatment of an episode that failed, sampled nothing, or has several sequences:
            raise, or leave it out. An engine that ended always raises.
        seed: Seed of the sampling, together with step, number of the call and process.
        make_engine: Makes the engine of one call from the model, a ``seed`` and a ``version``,
            which is the trainer's step.
        on_results: Called with the episodes of each call, in the order of the prompts.

    Raises:
        ValueError: If an option is out of range, or two questions have the same text.
    """

    agent: Agent
    environment: Environment
    questions: Iterable[Question]
    _: KW_ONLY
    concurrency: int = 64
    score: Callable[[EpisodeResult], float] = sum_of_rewards
    failures: Literal["raise", "mask"] = "raise"
    seed: int = 0
    make_engine: Callable[..., Engine] = TransformersEngine
    on_results: Callable[[list[EpisodeResult]], None] | None = None

    def __post_init__(self) -> None:
        if self.failures not in ("raise", "mask"):
            raise ValueError(f"failures must be 'raise' or 'mask', got {self.failures!r}")
        self._by_text = questions_by_text(self.questions)
        self._calls = count()

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Run an episode for each prompt and return TRL's fields.

        Raises:
            ValueError: If a prompt is none of the questions or not one of the agent, options of
                trainer and agent differ, or the weights are sharded.
            EpisodeError: If an episode failed and that is to raise, or the engine ended.
        """
        self._check_trainer(trainer)
        by_text = {text_of(prompt): prompt for prompt in prompts}
        asked = {text: self._ask(text, prompt, trainer) for text, prompt in by_text.items()}
        results = self._generate([asked[text_of(prompt)] for prompt in prompts], trainer)
        sequences = rows_of_episodes([result.trajectories for result in results])
        rows = [
            self._choose_row(result, of_episode, trainer)
            for result, of_episode in zip(results, sequences, strict=True)
        ]
        if self.on_results is not None:
            self.on_results(results)
        return {
            **{name: [getattr(row, name) for row in rows] for name in Row._fields},
            "episode_id": [result.qid for result in results],
            "episode_turns": [len(result.turns) for result in results],
        }

    def _ask(self, text: str, prompt: Any, trainer: GRPOTrainer) -> Prompt:
        """Encode a prompt as the agent does, or else as TRL does when it generates by itself."""
        if (question := self._by_text.get(text)) is None:
            raise ValueError(f"a trainer's prompt is none of the questions: {prompt!r:.200}")
        if hasattr(self.agent, "prompt_ids"):
            ids = self.agent.prompt_ids([dict(message) for message in question.messages])
        elif isinstance(prompt, str):
            ids = trainer.processing_class(text=prompt)["input_ids"]
        else:
            ids = trainer.processing_class.apply_chat_template(
                prompt,
                chat_template=trainer.chat_template,
                add_generation_prompt=True,
                return_dict=False,
                **trainer.chat_template_kwargs,
            )
        return Prompt(question.id, list(ids), task_id=question.task_id)

    def _generate(self, prompts: Sequence[Prompt], trainer: GRPOTrainer) -> list[EpisodeResult]:
        require("trl")
        from trl.models import unwrap_model_for_generation

        accelerator, step = trainer.accelerator, int(trainer.state.global_step)
        entropy = [self.seed, accelerator.process_index, step, next(self._calls)]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        device = accelerator.device
        unwrapped = unwrap_model_for_generation(
            trainer.model_wrapped,
            accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )
        # The engine seeds the generator that the trainer draws its dropout from.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), unwrapped as model:
            episodes = self._episodes(self.make_engine(model, seed=seed, version=step), prompts)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(episodes)
            with ThreadPoolExecutor(1) as thread:  # a loop runs here, as in a notebook
                return thread.submit(asyncio.run, episodes).result()

    async def _episodes(self, engine: Engine, prompts: Sequence[Prompt]) -> list[EpisodeResult]:
        """Run an episode for each prompt; those of equal prompts are numbered and one group."""
        episodes: dict[str, EpisodeResult] = {}
        async with engine:
            runner = RolloutRunner(
                engine, self.agent, self.environment, concurrency=self.concurrency
            )
            async with aclosing(runner.run(prompts)) as results:
                async for result in results:
                    error, group = result.error, result.prompt.id
                    if error and (self.failures == "raise" or has_engine_ended(error)):
                        raise error
                    label = f"{group}#{result.sample}"  # the runner's, where a prompt comes again
                    episodes[result.qid] = replace(
                        result,
                        trajectories=tuple(
                            replace(path, group=group) if path.group == label else path
                            for path in result.trajectories
                        ),
                    )
        numbers: defaultdict[str, count[int]] = defaultdict(count)
        return [episodes[f"{prompt.id}@{next(numbers[prompt.id])}"] for prompt in prompts]

    def _choose_row(self, result: EpisodeResult, rows: list[Row], trainer: GRPOTrainer) -> Row:
        """Return the row that TRL trains, or a masked one."""
        eos_token_id = int(trainer.processing_class.eos_token_id)
        if len(rows) != 1:
            if result.error is None and self.failures == "raise":
                what = f"it has {len(rows)} sequences with samples, and TRL takes one row for it"
                raise EpisodeError(result.qid, what)
            # TRL refuses an empty completion, but not a masked one.
            return Row([int(id) for id in result.prompt.input_ids], [eos_token_id], [0], [0.0])
        row = rows[0]._replace(episode_reward=float(self.score(result)))
        if not trainer.args.mask_truncated_completions:
            return row
        if result.trajectories[-1].is_truncated:
            return row._replace(env_mask=[0] * len(row.env_mask))
        # TRL masks each completion that does not end with this token.
        ids, mask, logprobs = row.completion_ids, row.env_mask, row.logprobs
        return row._replace(
            completion_ids=[*ids, eos_token_id], env_mask=[*mask, 0], logprobs=[*logprobs, 0.0]
        )

    def _check_trainer(self, trainer: GRPOTrainer) -> None:
        if trainer.is_fsdp_enabled:
            raise ValueError("the engine needs whole weights, but the trainer shards them by FSDP")
        if trainer.chat_template_kwargs and hasattr(self.agent, "prompt_ids"):
            raise ValueError(
                f"chat_template_kwargs={trainer.chat_template_kwargs} of the trainer: the agent "
                "makes the prompts without them; leave them out, and override its prompt_ids"
            )
        gconfig = getattr(self.agent, "gconfig", None)
        sampled = sampling_option(gconfig, "temperature", None)
        if sampled is not None and sampled != trainer.args.temperature:
            raise ValueError(
                f"the agent samples at temperature {sampled}, but the trainer's loss is at "
                f"{trainer.args.temperature}: they must be the same"
            )


def episode_reward(
    *,
    episode_reward: list[float | None],
    episode_turns: Sequence[int] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the scores of a `TRLRollout`; one of the trainer's ``reward_funcs``.

    Args:
        episode_reward: Score of each row, None where the episode was left out.
        episode_turns: Turns of each row's episode.
        log_metric: Given the mean number of turns as ``episode/turns``, and the share of episodes
            that were left out as ``episode/left_out``.
    """
    if log_metric is not None and episode_reward:
        log_metric("episode/turns", sum(episode_turns) / len(episode_reward))
        log_metric("episode/left_out", episode_reward.count(None) / len(episode_reward))
    return episode_reward


def trl_dataset_rows(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Return questions as rows of a data set for the trainer, for ``Dataset.from_list``.

    Args:
        questions: Those that the `TRLRollout` is given.

    Example:
        >>> trl_dataset_rows([Question("sum", ({"role": "user", "content": "2 + 3?"},), ("5",))])
        [{'prompt': [{'role': 'user', 'content': '2 + 3?'}]}]
    """
    return [{"prompt": [dict(message) for message in question.messages]} for question in questions]


def questions_by_text(questions: Iterable[Question]) -> dict[str, Question]:
    """Return the questions by their text, see `text_of`."""
    known: dict[str, Question] = {}
    for question in questions:
        other = known.setdefault(question.text, question)
        if replace(other, id="", task_id=None) != replace(question, id="", task_id=None):
            raise ValueError(
                f"questions {other.id!r} and {question.id!r} have the same text, but not the same "
                "messages and answers"
            )
    return known


def text_of(prompt: Any) -> str:
    """Return the contents of a prompt's messages, as `Question.text` does, or the prompt itself."""
    try:
        return prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
    except (TypeError, KeyError):
        raise TypeError(f"a prompt must be a str or messages, got {prompt!r:.200}") from None


def rows_of_episodes(episodes: Sequence[Sequence[Trajectory]]) -> list[list[Row]]:
    """Pack the trajectories of each episode and return its rows.

    A row is a sequence of the merged layout: a conversation in which each turn continues the
    one before. A sequence without generated tokens gives no row. Extra fields are dropped.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> first, second = Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5], [-0.25])
        >>> rows_of_episodes([[Trajectory("a", [first, second])], []])[0][0][:4]
        ([1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25])
    """
    return [
        [
            Row(one.prompt_ids, one.response_ids, one.response_mask, one.logprobs)
            for one in sequences_of(trajectories)
        ]
        for trajectories in episodes
    ]
