"""One rollout: questions, model, engine, environment, agent and runner."""

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
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, load_questions, reasoning_gym_questions
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import ModelLimits, first_line, load_model, load_tokenizer
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.rollout.report import RolloutOutcome
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, Progress, RolloutRunner
from trajpack.agent.seeding import derive_seed
from trajpack.packing.optional import require


@dataclass(frozen=True)
class Rollout:
    """All parts of a rollout but the engine, checked before the first episode."""

    settings: RolloutSettings
    """Settings of the rollout."""
    questions: list[Question]
    """Questions, in order."""
    prompts: list[Prompt]
    """The same questions, encoded."""
    model: Any
    """Model on its device; ``None`` with servers, or with workers that load their own."""
    tokenizer: Any
    """Tokenizer of the model."""
    vocab_size: int
    """Exclusive upper bound of token ids."""
    agent: MathMultiTurnAgent
    """Agent of all episodes."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.prompts) * self.settings.group_size

    @asynccontextmanager
    async def episodes(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        observers: Sequence[RolloutObserver] = (),
        finished: Collection[str] = (),
    ) -> AsyncIterator[AsyncGenerator[EpisodeResult, None]]:
        """Start environment and engine, and return the stream of results.

        Leaving the context cancels the running episodes and shuts both down.

        Args:
            on_progress: As in `RolloutRunner`.
            observers: As in `RolloutRunner`.
            finished: Names of episodes that do not run again.

        Raises:
            SetupError: If the engine cannot run the model, or a question is too long for it.
        """
        settings = self.settings
        retries = RetryPolicy(max_attempts=settings.max_attempts)
        policy = RolloutPolicy(retries=retries, seed=settings.seed)
        options: dict[str, Any] = {"policy": policy, "on_progress": on_progress}
        options |= {"observers": observers, "finished": finished}
        options |= {"group_size": settings.group_size}
        if settings.num_workers:
            from trajpack.agent.rollout.workers import ray_episodes

            async with ray_episodes(self, settings.num_workers, **options) as stream:
                yield stream
            return
        # An engine that continues a rollout must not repeat the random numbers of the first one:
        # its samples of a prompt would equal the earlier ones.
        seed = settings.seed
        if finished:
            seed = derive_seed(settings.seed, "sampling", len(finished))
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(self.worker_parts(seed))
            runner = RolloutRunner(*parts, concurrency=settings.concurrency, **options)
            yield await stack.enter_async_context(aclosing(runner.run(self.prompts)))

    @asynccontextmanager
    async def worker_parts(
        self, seed: int
    ) -> AsyncIterator[tuple[Any, MathMultiTurnAgent, MathVerifyEnvironment]]:
        """Start an environment and an engine, and return engine, agent and environment.

        Args:
            seed: Seed of the engine's sampling.

        Raises:
            SetupError: If the engine cannot start, or a question is too long for it.
        """
        settings = self.settings
        async with AsyncExitStack() as stack:
            try:
                environment = MathVerifyEnvironment(self.questions)
            except ValueError as error:
                raise SetupError(first_line(error)) from error
            await stack.enter_async_context(environment)
            try:
                engine = self._make_engine(seed)
                await stack.enter_async_context(engine)
            except SetupError:
                raise
            except (RuntimeError, ValueError) as error:
                what = "use the servers" if settings.has_servers else "run this model"
                raise SetupError(f"the engine cannot {what}: {first_line(error)}") from error
            agent, limit = self.agent, getattr(engine, "max_request_tokens", None)
            most = agent.max_total_tokens
            if limit is not None and (most is None or limit < most):
                where = f"the engine takes {limit:,}"
                _check_lengths(self.prompts, settings.max_new_tokens, limit, where=where)
                agent = replace(agent, max_total_tokens=limit)
            yield engine, agent, environment

    def _make_engine(self, seed: int) -> Any:
        settings = self.settings
        if settings.has_servers:
            from trajpack.agent.servers.settings import ServerSettings

            found = ServerSettings.from_environment(settings.servers, seed=seed)
            kind: Any = settings.engine  # not "transformers"
            vocab_size = found.options.vocab_size or self.vocab_size
            options = replace(found.options, vocab_size=vocab_size)
            return replace(found, kind=kind, options=options).make_engine()
        model = self.model
        if model is None:
            folder, seed_of_model = settings.model, settings.seed
            model, _ = load_model(folder) if folder else build_tiny_model(seed_of_model)
            model = model.to(settings.device)
        return TransformersEngine(model, seed=seed)

    def outcome(self, results: Iterable[EpisodeResult]) -> RolloutOutcome:
        """Return the results in order of prompt and sample."""
        place = {prompt.id: index for index, prompt in enumerate(self.prompts)}
        ordered = sorted(results, key=lambda result: (place[result.prompt.id], result.sample))
        return RolloutOutcome(tuple(ordered))


def prepare_rollout(settings: RolloutSettings) -> Rollout:
    """Load or make the parts of a rollout, and check that they fit together.

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
    if max_positions is not None:
        where = f"the model has {max_positions:,} positions"
        _check_lengths(prompts, settings.max_new_tokens, max_positions, where=where)
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
    """Return the model, or None if servers or workers generate, its tokenizer and its limits."""
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
    prompts: Iterable[Prompt], max_new_tokens: int, limit: int, *, where: str
) -> None:
    for prompt in prompts:
        if len(prompt.input_ids) + max_new_tokens > limit:
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
