"""A rollout from start to end: questions, model, engine, environment, agent and runner."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from trajpack.agent.causal_model import first_line, load_model
from trajpack.agent.errors import SetupError
from trajpack.agent.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.math_verify_environment import MathVerifyEnvironment
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.questions import Question, load_questions, reasoning_gym_questions
from trajpack.agent.rollout_outcome import RolloutOutcome
from trajpack.agent.rollout_settings import RolloutSettings
from trajpack.agent.runner import EpisodeResult, Progress, RolloutRunner
from trajpack.agent.tiny_model import build_tiny_model
from trajpack.agent.transformers_engine import TransformersEngine


@dataclass(frozen=True)
class Rollout:
    """Everything episodes need, made and checked before the first one begins."""

    settings: RolloutSettings
    """As given."""
    questions: list[Question]
    """What is asked, in order."""
    prompts: list[Prompt]
    """The same questions as the model sees them."""
    model: Any
    """On its device."""
    tokenizer: Any
    """Of the model."""
    agent: MathMultiTurnAgent
    """Leads the conversations."""

    @property
    def num_episodes(self) -> int:
        """Episodes of the whole rollout."""
        return len(self.prompts) * self.settings.group_size

    @asynccontextmanager
    async def episodes(
        self, on_progress: Callable[[Progress], None] | None = None
    ) -> AsyncIterator[AsyncGenerator[EpisodeResult, None]]:
        """Start environment and engine, and give the results as episodes finish.

        Leaving the context, or being cancelled in it, cancels every episode in flight and
        shuts both down.

        Raises:
            SetupError: If the engine cannot run the model, or a question is too long for it.
        """
        settings = self.settings
        async with AsyncExitStack() as stack:
            try:
                environment = MathVerifyEnvironment(self.questions)
            except ValueError as error:
                raise SetupError(first_line(error)) from error
            await stack.enter_async_context(environment)
            try:
                engine = TransformersEngine(self.model, seed=settings.seed)
                await stack.enter_async_context(engine)
            except (RuntimeError, ValueError) as error:
                raise SetupError(
                    f"the engine cannot run this model: {first_line(error)}"
                ) from error
            agent = self._fit_agent(engine.max_request_tokens)
            runner = RolloutRunner(
                engine,
                agent,
                environment,
                concurrency=settings.concurrency,
                group_size=settings.group_size,
                on_progress=on_progress,
            )
            yield await stack.enter_async_context(aclosing(runner.run(self.prompts)))

    def _fit_agent(self, max_request_tokens: int) -> MathMultiTurnAgent:
        """Return an agent that asks nothing the engine would refuse for its length."""
        max_positions = self.agent.max_total_tokens
        if max_positions is not None and max_positions <= max_request_tokens:
            return self.agent
        where = f"the engine takes {max_request_tokens:,}"
        _check_lengths(self.prompts, self.settings.max_new_tokens, max_request_tokens, where)
        return replace(self.agent, max_total_tokens=max_request_tokens)

    def outcome(self, results: Iterable[EpisodeResult]) -> RolloutOutcome:
        """Put results, which come as they finish, into the order of the prompts."""
        place = {prompt.id: index for index, prompt in enumerate(self.prompts)}
        ordered = sorted(results, key=lambda result: (place[result.prompt.id], result.sample))
        return RolloutOutcome(tuple(ordered))


def prepare_rollout(settings: RolloutSettings) -> Rollout:
    """Load or make what a rollout needs, and check that it fits together.

    Raises:
        SetupError: With one line for the user, if a file cannot be read, the device does not
            exist, or a question is too long for the model.
        ModuleNotFoundError: If an optional package is missing.

    Cost: imports transformers, some seconds, and loads the model.
    """
    questions = _choose_questions(settings)
    device = _check_device(settings.device)
    if settings.model is None:
        model, tokenizer = build_tiny_model(settings.seed)
    else:
        model, tokenizer = load_model(settings.model)
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    prompts = [_encode(question, tokenizer) for question in questions]
    where = f"the model has {max_positions:,} positions" if max_positions else ""
    _check_lengths(prompts, settings.max_new_tokens, max_positions, where)
    agent = MathMultiTurnAgent(
        SamplingParams(max_new_tokens=settings.max_new_tokens),
        tokenizer,
        settings.answers,
        turn_level_discount=settings.turn_discount,
        num_turns=settings.num_turns,
        max_total_tokens=max_positions,
    )
    try:
        model = model.to(device)
    except RuntimeError as error:
        raise SetupError(f"the model does not fit {device}: {first_line(error)}") from error
    return Rollout(settings, questions, prompts, model, tokenizer, agent)


def _check_lengths(
    prompts: Iterable[Prompt], max_new_tokens: int, limit: int | None, where: str
) -> None:
    for prompt in prompts:
        if limit is not None and len(prompt.input_ids) + max_new_tokens > limit:
            raise SetupError(
                f"question {prompt.id!r} is too long: {len(prompt.input_ids):,} tokens and "
                f"{max_new_tokens:,} new ones, {where}"
            )


def _choose_questions(settings: RolloutSettings) -> list[Question]:
    if settings.dataset is None:
        return reasoning_gym_questions(size=settings.num_prompts, seed=settings.seed)
    try:
        return load_questions(settings.dataset, limit=settings.num_prompts)
    except OSError as error:
        raise SetupError(f"cannot read {settings.dataset}: {error.strerror or error}") from error
    except ValueError as error:
        raise SetupError(str(error)) from error


def _check_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        raise SetupError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


def _encode(question: Question, tokenizer: Any) -> Prompt:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(question.messages), tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, ValueError) as error:
        reason = first_line(error)
        raise SetupError(f"question {question.id!r} cannot be put as a chat: {reason}") from error
    input_ids = tokenizer.encode(text, add_special_tokens=False)
    return Prompt(question.id, input_ids, task_id=question.task_id)
