"""One rollout: questions, model, engine, environment, agent and runner."""

from __future__ import annotations

import os
from collections import Counter
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
from functools import cached_property
from typing import Any

import torch

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, arithmetic_questions, load_questions
from trajpack.agent.errors import SetupError, has_engine_ended
from trajpack.agent.models.causal_model import ModelLimits, first_line, load_model, load_tokenizer
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, Progress, RolloutRunner
from trajpack.agent.seeding import derive_seed
from trajpack.packing.optional import require
from trajpack.packing.types import Trajectory


@dataclass(frozen=True)
class RolloutOutcome:
    """Results of the finished episodes, in order of prompt and sample."""

    results: tuple[EpisodeResult, ...]

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trajectories of all episodes."""
        return tuple(path for result in self.results for path in result.trajectories)

    @property
    def failures(self) -> Counter[str]:
        """Number of failed episodes by reason."""
        return Counter(result.error.reason for result in self.results if result.error is not None)

    @property
    def engine_failure(self) -> str | None:
        """Reason why the engine ended before the episodes, or ``None``."""
        errors = (result.error for result in self.results)
        return next((error.reason for error in errors if error and has_engine_ended(error)), None)


@dataclass(frozen=True)
class Rollout:
    """All parts of a rollout but the engine, checked before the first episode."""

    settings: RolloutSettings
    questions: list[Question]
    prompts: list[Prompt]
    """The questions in the same order, encoded."""
    model: Any
    """Model on its device; ``None`` with servers, or with workers that load their own."""
    tokenizer: Any
    vocab_size: int
    """Token ids are below it."""
    agent: MathMultiTurnAgent

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
            on_progress: As in `RolloutRunner`; with workers, turns and tokens are counted when
                they arrive.
            observers: As in `RolloutRunner`.
            finished: Names of episodes that do not run again.

        Raises:
            SetupError: If the engine or a worker cannot run the model, a question is too long for
                it, or the cluster has no resources for the workers.
        """
        settings = self.settings
        retries = RetryPolicy(max_attempts=settings.max_attempts)
        options: dict[str, Any] = {
            "policy": RolloutPolicy(retries=retries, seed=settings.seed),
            "on_progress": on_progress,
            "observers": observers,
            "finished": finished,
            "group_size": settings.group_size,
        }
        async with AsyncExitStack() as stack:
            if settings.num_workers:
                from trajpack.agent.rollout.workers import ray_runner

                runner = await stack.enter_async_context(ray_runner(self, **options))
            else:
                # An engine that continues a rollout must not repeat the random numbers of the
                # first one: its samples of a prompt would equal the earlier ones.
                seed = settings.seed
                if finished:
                    seed = derive_seed(settings.seed, "sampling", len(finished))
                parts = await stack.enter_async_context(self.worker_parts(seed))
                runner = RolloutRunner(*parts, concurrency=settings.concurrency, **options)
            yield await stack.enter_async_context(aclosing(runner.run(self.prompts)))

    @asynccontextmanager
    async def worker_parts(
        self, seed: int
    ) -> AsyncIterator[tuple[Any, MathMultiTurnAgent, MathVerifyEnvironment]]:
        """Start an environment and an engine that samples with ``seed``; return both and the agent.

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
                work = "use the servers" if settings.has_servers else "run this model"
                raise SetupError(f"the engine cannot {work}: {first_line(error)}") from error
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
            return _server_engine(settings, seed=seed, vocab_size=self.vocab_size)
        model = self.model
        if model is None:
            model = _load_model(settings)[0].to(settings.device)
        return TransformersEngine(model, seed=seed)

    def outcome(self, results: Iterable[EpisodeResult]) -> RolloutOutcome:
        """Return the results in order of prompt and sample."""
        place = {prompt.id: index for index, prompt in enumerate(self.prompts)}
        ordered = sorted(results, key=lambda result: (place[result.prompt.id], result.sample))
        return RolloutOutcome(tuple(ordered))


def prepare_rollout(settings: RolloutSettings) -> Rollout:
    """Load or make the parts of a rollout, and check that they fit together.

    Raises:
        SetupError: If a file cannot be read, the device does not exist, or a question is too long
            for the model.
        ModuleNotFoundError: If an optional package is missing.
    """
    require("anyio", "jinja2", "math_verify", "transformers")
    if settings.has_servers:
        _server_engine(settings)  # a wrong address is seen before anything is loaded
    questions = _choose_questions(settings)
    try:
        device = torch.device(settings.device)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise SetupError(f"device {settings.device!r} cannot be used: {reason}") from error
    if settings.model is not None and (settings.has_servers or settings.num_workers):
        limits, model = ModelLimits.load(settings.model), None
        tokenizer = load_tokenizer(settings.model)
    else:
        model, tokenizer = _load_model(settings)
        limits = ModelLimits.of(model.config)
        model = None if settings.num_workers else model
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


def _server_engine(settings: RolloutSettings, **options: Any) -> Any:
    """Return an engine for the servers; the token comes from the environment, not from a line."""
    from trajpack.agent.servers.options import ServerOptions
    from trajpack.agent.servers.sglang import SGLangEngine
    from trajpack.agent.servers.vllm import VLLMEngine

    kind = VLLMEngine if settings.engine == "vllm" else SGLangEngine
    token, ca_file = (os.environ.get(f"TRAJPACK_SERVER_{name}") for name in ("TOKEN", "CA_FILE"))
    try:
        made = ServerOptions(token=token, ca_file=ca_file, **options)
        return kind(settings.servers, options=made)
    except ValueError as error:
        raise SetupError(f"the server settings are wrong: {error}") from None


def _load_model(settings: RolloutSettings) -> tuple[Any, Any]:
    return load_model(settings.model) if settings.model else build_tiny_model(settings.seed)


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
        return arithmetic_questions(settings.num_prompts, settings.seed)
    try:
        return load_questions(settings.dataset, limit=settings.num_prompts)
    except OSError as error:
        raise SetupError(f"cannot read {settings.dataset}: {error.strerror or error}") from error
    except ValueError as error:
        raise SetupError(str(error)) from error


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
