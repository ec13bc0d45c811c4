"""One rollout: questions, model, engine, environment, agent and runner."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, arithmetic_questions, load_questions
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import ModelLimits, first_line, load_model, load_tokenizer
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, Progress, RolloutRunner
from trajpack.agent.seeding import derive_seed
from trajpack.packing.optional import require


@contextmanager
def refused(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds, or of values, into a `SetupError` of one line."""
    try:
        yield
    except SetupError:
        raise
    except (ValueError, *kinds) as error:
        raise SetupError(f"{problem}{first_line(error)}") from error


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
    agent: MathMultiTurnAgent

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.prompts) * self.settings.group_size

    def in_order(self, results: Iterable[EpisodeResult]) -> list[EpisodeResult]:
        """Return results in order of prompt and sample."""
        place = {prompt.id: index for index, prompt in enumerate(self.prompts)}
        return sorted(results, key=lambda result: (place[result.prompt.id], result.sample))

    @asynccontextmanager
    async def episodes(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        observers: Iterable[RolloutObserver] = (),
        finished: Collection[str] = (),
    ) -> AsyncIterator[AsyncGenerator[EpisodeResult, None]]:
        """Start environment and engine, and return the stream of results.

        Leaving the context cancels the running episodes and shuts both down. The arguments are
        those of `RolloutRunner`.

        Raises:
            SetupError: If the engine or a worker cannot run the model, or the cluster has no
                resources for the workers.
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
                parts = await stack.enter_async_context(self.parts(seed))
                runner = RolloutRunner(*parts, concurrency=settings.concurrency, **options)
            yield await stack.enter_async_context(aclosing(runner.run(self.prompts)))

    @asynccontextmanager
    async def parts(
        self, seed: int
    ) -> AsyncIterator[tuple[Any, MathMultiTurnAgent, MathVerifyEnvironment]]:
        """Start an engine that samples with ``seed``, and an environment; return the agent too.

        Raises:
            SetupError: If the engine cannot start.
        """
        settings = self.settings
        work = "use the servers" if settings.has_servers else "run this model"
        async with MathVerifyEnvironment(self.questions) as environment, AsyncExitStack() as stack:
            with refused(f"the engine cannot {work}: ", RuntimeError):
                if settings.has_servers:
                    engine = _server_engine(settings, seed)
                else:
                    model = self.model or _load_model(settings)[0].to(settings.device)
                    engine = TransformersEngine(model, seed=seed)
                await stack.enter_async_context(engine)
            yield engine, self.agent, environment


def prepare_rollout(settings: RolloutSettings) -> Rollout:
    """Load or make the parts of a rollout, and check that they fit together.

    Raises:
        SetupError: If a file cannot be read, the device does not exist, or a question is too long
            for the model.
        ModuleNotFoundError: If an optional package is missing.
    """
    require("anyio", "jinja2", "math_verify", "transformers")
    from jinja2 import TemplateError

    if settings.has_servers:
        _server_engine(settings, 0)  # a wrong address is seen before anything is loaded
    if settings.dataset is None:
        questions = arithmetic_questions(settings.num_prompts, settings.seed)
    else:
        with refused(""):
            questions = load_questions(settings.dataset, limit=settings.num_prompts)
    device = settings.device
    with refused(f"device {device!r} cannot be used: ", RuntimeError, AssertionError):
        torch.zeros(1, device=device).tolist()
    if settings.model is not None and (settings.has_servers or settings.num_workers):
        model, tokenizer = None, load_tokenizer(settings.model)
        limits = ModelLimits.load(settings.model)
    else:
        model, tokenizer = _load_model(settings)
        limits = ModelLimits.of(model.config)
        model = None if settings.num_workers else model.to(device)
    agent = MathMultiTurnAgent(
        SamplingParams(max_new_tokens=settings.max_new_tokens),
        tokenizer,
        settings.answers,
        turn_level_discount=settings.turn_discount,
        num_turns=settings.num_turns,
        max_total_tokens=limits.max_positions,
    )
    prompts = []
    for question in questions:
        with refused(f"question {question.id!r} cannot be put as a chat: ", TemplateError):
            input_ids = agent.prompt_ids(question.messages)
        prompts.append(Prompt(question.id, input_ids, task_id=question.task_id))
        num_tokens, most = len(input_ids) + settings.max_new_tokens, limits.max_positions
        if most is not None and num_tokens > most:
            raise SetupError(
                f"question {question.id!r} is too long: {len(input_ids):,} tokens and "
                f"{settings.max_new_tokens:,} new ones, the model has {most:,} positions"
            )
    return Rollout(settings, questions, prompts, model, tokenizer, agent)


def _load_model(settings: RolloutSettings) -> tuple[Any, Any]:
    return load_model(settings.model) if settings.model else build_tiny_model(settings.seed)


def _server_engine(settings: RolloutSettings, seed: int) -> Any:
    """Return an engine for the servers; the token comes from the environment, not from a line."""
    from trajpack.agent.servers.options import ServerOptions
    from trajpack.agent.servers.sglang import SGLangEngine
    from trajpack.agent.servers.vllm import VLLMEngine

    kind = VLLMEngine if settings.engine == "vllm" else SGLangEngine
    token, ca_file = (os.environ.get(f"TRAJPACK_SERVER_{name}") for name in ("TOKEN", "CA_FILE"))
    with refused("the server settings are wrong: "):
        options = ServerOptions(token=token, ca_file=ca_file, seed=seed)
        return kind(settings.servers, options=options)
