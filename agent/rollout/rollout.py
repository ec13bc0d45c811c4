"""A rollout from start to end: questions, model, engine, environment, agent and runner."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, load_questions, reasoning_gym_questions
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import ModelLimits, first_line, load_model, load_tokenizer
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.rollout.engine import rollout_engine, sampling_seed
from trajpack.agent.rollout.outcome import RolloutOutcome
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, Progress, RolloutRunner
from trajpack.packing.optional import require


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
    """On its device; ``None`` where others generate: servers, or workers with their own models."""
    tokenizer: Any
    """Of the model."""
    vocab_size: int
    """Token ids are below it."""
    agent: MathMultiTurnAgent
    """Leads the conversations."""

    @property
    def num_episodes(self) -> int:
        """Episodes of the whole rollout."""
        return len(self.prompts) * self.settings.group_size

    @asynccontextmanager
    async def episodes(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        observers: Sequence[RolloutObserver] = (),
        finished: Collection[str] = (),
    ) -> AsyncIterator[AsyncGenerator[EpisodeResult, None]]:
        """Start environment and engine, and give the results as episodes finish.

        Leaving the context, or being cancelled in it, cancels every episode in flight and
        shuts both down.

        Args:
            on_progress: As `RolloutRunner` has it.
            observers: As `RolloutRunner` has them.
            finished: Names of episodes that are not begun again.

        Raises:
            SetupError: If the engine cannot run the model, or a question is too long for it.
        """
        settings = self.settings
        retries = RetryPolicy(max_attempts=settings.max_attempts)
        policy = RolloutPolicy(retries=retries, seed=settings.seed)
        options: dict[str, Any] = {"policy": policy, "on_progress": on_progress}
        options |= {"observers": observers, "finished": finished}
        if settings.num_workers:
            from trajpack.agent.rollout.workers import ray_episodes

            async with ray_episodes(self, settings.num_workers, **options) as stream:
                yield stream
            return
        async with AsyncExitStack() as stack:
            try:
                environment = MathVerifyEnvironment(self.questions)
            except ValueError as error:
                raise SetupError(first_line(error)) from error
            await stack.enter_async_context(environment)
            seed = sampling_seed(settings, len(finished)) if finished else settings.seed
            engine = await stack.enter_async_context(
                rollout_engine(settings, self.vocab_size, model=self.model, seed=seed)
            )
            agent = self.fitted_agent(getattr(engine, "max_request_tokens", None))
            runner = RolloutRunner(
                engine,
                agent,
                environment,
                concurrency=settings.concurrency,
                group_size=settings.group_size,
                **options,
            )
            yield await stack.enter_async_context(aclosing(runner.run(self.prompts)))

    def fitted_agent(self, max_request_tokens: int | None) -> MathMultiTurnAgent:
        """Return an agent that asks nothing an engine of that limit would refuse for its length.

        Raises:
            SetupError: If a question is too long.
        """
        max_positions = self.agent.max_total_tokens
        if max_request_tokens is None:
            return self.agent
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
    require("anyio", "jinja2", "math_verify", "transformers")
    questions = _choose_questions(settings)
    device = _check_device(settings.device)
    model, tokenizer, limits = _load(settings)
    max_positions = limits.max_positions
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
    if model is not None:
        try:
            model = model.to(device)
        except RuntimeError as error:
            raise SetupError(f"the model does not fit {device}: {first_line(error)}") from error
    vocab_size = limits.vocab_size or len(tokenizer)
    return Rollout(settings, questions, prompts, model, tokenizer, vocab_size, agent)


def _load(settings: RolloutSettings) -> tuple[Any, Any, ModelLimits]:
    """Return the model, unless others generate, the tokenizer, and the model's limits."""
    if settings.model is None:
        model, tokenizer = build_tiny_model(settings.seed)
        limits = ModelLimits.of(model.config)
        return None if settings.num_workers else model, tokenizer, limits
    if settings.has_servers or settings.num_workers:
        limits = ModelLimits.load(settings.model)
        return None, load_tokenizer(settings.model), limits
    model, tokenizer = load_model(settings.model)
    return model, tokenizer, ModelLimits.of(model.config)


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
