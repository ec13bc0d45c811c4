"""One rollout: questions, model, engine, environment, agent and runner."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, arithmetic_questions, load_questions
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import load_config, load_model, load_tokenizer, refused
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.agent.seeding import derive_seed
from trajpack.packing.optional import require


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

    @asynccontextmanager
    async def episodes(self, **options: Any) -> AsyncIterator[AsyncGenerator[EpisodeResult, None]]:
        """Start environment and engine; return the results of a `RolloutRunner` of these options.

        Leaving the context cancels the running episodes and shuts both down. A `SetupError` says
        why the engine or a worker cannot start.
        """
        settings = self.settings
        retries = RetryPolicy(max_attempts=settings.max_attempts)
        options["policy"] = RolloutPolicy(retries=retries, seed=settings.seed)
        options["group_size"] = settings.group_size
        async with AsyncExitStack() as stack:
            if settings.num_workers:
                workers = await stack.enter_async_context(self._workers())
                runner = workers.runner(**options)
            else:
                seed = settings.seed
                if finished := options.get("finished"):  # it must not draw its samples again
                    seed = derive_seed(settings.seed, "sampling", len(finished))
                parts = await stack.enter_async_context(self.parts(seed))
                runner = RolloutRunner(*parts, concurrency=settings.concurrency, **options)
            yield await stack.enter_async_context(aclosing(runner.run(self.prompts)))

    @asynccontextmanager
    async def _workers(self) -> AsyncIterator[Any]:
        """Start workers on Ray, which make their own models."""
        require("ray")
        from trajpack.agent.ray import RolloutWorkers, WorkerOptions, local_cluster

        count, device = self.settings.num_workers, self.settings.device.partition(":")[0]
        settings = replace(self.settings, device=device)  # a worker sees only its own GPUs
        alike = replace(self, model=None, settings=settings)

        def parts(number: int) -> Any:  # each start of a worker has its own sampling seed
            return alike.parts(derive_seed(settings.seed, "sampling", number, time.time_ns()))

        cores, gpus = max(count, os.cpu_count() or 1), torch.cuda.device_count()
        async with AsyncExitStack() as stack:
            stack.enter_context(local_cluster(num_cpus=cores, num_gpus=gpus))
            share = 0.0
            if device == "cuda":
                import ray

                gpus = int(ray.cluster_resources().get("GPU", 0))  # of other machines, too
                if not gpus:
                    raise SetupError("the cluster has no GPU for the workers")
                share = 1.0 / -(-count // gpus)  # all fit, and none spans two
            each = WorkerOptions(concurrency=-(-settings.concurrency // count), num_gpus=share)
            workers = RolloutWorkers(parts, count, options=each)
            try:
                await stack.enter_async_context(workers)
            except Exception as error:
                with refused("a worker cannot start: ", Exception):
                    raise getattr(error, "cause", error) from error  # it may be in Ray's wrapping
            yield workers

    @asynccontextmanager
    async def parts(
        self, seed: int
    ) -> AsyncIterator[tuple[Any, MathMultiTurnAgent, MathVerifyEnvironment]]:
        """Start an engine that samples with ``seed``, and an environment; return the agent too."""
        settings = self.settings
        async with MathVerifyEnvironment(self.questions) as environment, AsyncExitStack() as stack:
            with refused("the engine cannot start: ", RuntimeError):
                if settings.servers:
                    engine: Any = _server_engine(settings, seed)
                else:
                    model, name = self.model, settings.model
                    if model is None:  # it is a worker's
                        model, _ = load_model(name) if name else build_tiny_model(settings.seed)
                    engine = TransformersEngine(model.to(settings.device), seed=seed)
                await stack.enter_async_context(engine)
            yield engine, self.agent, environment


def prepare_rollout(settings: RolloutSettings) -> Rollout:
    """Load or make the parts of a rollout; a `SetupError` says what does not fit together."""
    require("anyio", "jinja2", "math_verify", "transformers")
    from jinja2 import TemplateError

    if settings.dataset is None:
        questions = arithmetic_questions(settings.num_prompts, settings.seed)
    else:
        with refused(""):
            questions = load_questions(settings.dataset, limit=settings.num_prompts)
    with refused(f"device {settings.device!r} cannot be used: ", RuntimeError, AssertionError):
        torch.zeros(1, device=settings.device).tolist()
    if settings.model is not None and (settings.servers or settings.num_workers):
        model, tokenizer = None, load_tokenizer(settings.model)
        config = load_config(settings.model)
    else:
        name = settings.model
        model, tokenizer = load_model(name) if name else build_tiny_model(settings.seed)
        config = model.config
        model = None if settings.num_workers else model.to(settings.device)
    text_config = config and config.get_text_config()
    agent = MathMultiTurnAgent(
        SamplingParams(max_new_tokens=settings.max_new_tokens),
        tokenizer,
        settings.answers,
        turn_level_discount=settings.turn_discount,
        num_turns=settings.num_turns,
        max_total_tokens=getattr(text_config, "max_position_embeddings", None),
    )
    prompts = []
    for question in questions:
        with refused(f"question {question.id!r} cannot be put as a chat: ", TemplateError):
            input_ids = agent.prompt_ids(question.messages)
        prompts.append(Prompt(question.id, input_ids, task_id=question.task_id))
    return Rollout(settings, questions, prompts, model, tokenizer, agent)


def _server_engine(settings: RolloutSettings, seed: int) -> Any:
    """Return an engine for the servers; the token comes from the environment, not from a line."""
    from trajpack.agent.servers.options import ServerOptions
    from trajpack.agent.servers.sglang import SGLangEngine
    from trajpack.agent.servers.vllm import VLLMEngine

    kind = VLLMEngine if settings.engine == "vllm" else SGLangEngine
    token, ca_file = (os.environ.get(f"TRAJPACK_SERVER_{name}") for name in ("TOKEN", "CA_FILE"))
    options = ServerOptions(token=token, ca_file=ca_file, seed=seed)
    return kind(settings.servers, options=options)
