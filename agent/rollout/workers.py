"""A rollout of prepared questions over several workers: what ``trajpack rollout --ray`` does."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.agent.protocols import Agent, Engine, Environment
from trajpack.agent.ray.cluster import local_cluster
from trajpack.agent.ray.worker import WorkerOptions
from trajpack.agent.ray.workers import RolloutWorkers
from trajpack.agent.rollout.engine import rollout_engine, sampling_seed
from trajpack.agent.runner.runner import EpisodeResult, Progress

if TYPE_CHECKING:
    from trajpack.agent.rollout.rollout import Rollout


@dataclass(frozen=True)
class MakeRolloutWorker:
    """Makes on a worker what a `Rollout` has in one process: engine, environment, agent.

    Where servers are named in the environment, it is the worker's own, which a cluster of this
    machine inherits.
    """

    prepared: Rollout
    """What to roll out, without a model."""

    @asynccontextmanager
    async def __call__(self, number: int) -> AsyncIterator[tuple[Engine, Agent, Environment]]:
        """Make them for one worker; its sampling has a seed of its own at each start.

        Raises:
            SetupError: If the engine cannot run the model, or a prompt is too long for it.
        """
        prepared = self.prepared
        seed = sampling_seed(prepared.settings, number, time.time_ns())
        async with AsyncExitStack() as stack:
            try:
                environment = MathVerifyEnvironment(prepared.questions)
            except ValueError as error:
                raise SetupError(first_line(error)) from error
            await stack.enter_async_context(environment)
            engine = await stack.enter_async_context(
                rollout_engine(prepared.settings, prepared.vocab_size, seed=seed)
            )
            agent = prepared.fitted_agent(getattr(engine, "max_request_tokens", None))
            yield engine, agent, environment


@asynccontextmanager
async def ray_episodes(
    prepared: Rollout,
    num_workers: int,
    on_progress: Callable[[Progress], None] | None = None,
    **runner_options: Any,
) -> AsyncIterator[AsyncGenerator[EpisodeResult, None]]:
    """Give the results of a rollout as episodes finish, as `Rollout.episodes` does, from workers.

    Uses the cluster that this process is connected to, or one of its own on this machine.
    ``settings.concurrency`` is divided among the workers. Leaving the context ends them.

    Args:
        prepared: What to roll out. Its own model is not used: each worker makes one.
        num_workers: Processes with an engine each.
        on_progress: As `RolloutRunner` has it; turns and tokens are counted as they come back.
        **runner_options: Others of `RolloutRunner`.

    Raises:
        SetupError: If a worker cannot run the model, or there is no room for it.
    """
    settings = prepared.settings
    device = settings.device.partition(":")[0]  # a worker sees no GPUs but its own
    make = MakeRolloutWorker(
        replace(prepared, model=None, settings=replace(settings, device=device))
    )
    num_cpus = max(num_workers, os.cpu_count() or 1)
    async with AsyncExitStack() as stack:
        stack.enter_context(local_cluster(num_cpus=num_cpus, num_gpus=torch.cuda.device_count()))
        is_cuda = settings.device.startswith("cuda")
        options = WorkerOptions(
            concurrency=-(-settings.concurrency // num_workers),
            num_gpus=gpu_share(_num_gpus(), num_workers) if is_cuda else 0.0,
        )
        workers = RolloutWorkers(make, num_workers, options=options)
        await stack.enter_async_context(_setting_up(workers))

        def tell(progress: Progress) -> None:
            assert on_progress is not None
            counts = {"num_turns": workers.num_turns, "num_tokens": workers.num_tokens}
            on_progress(replace(progress, **counts))

        runner = workers.runner(
            group_size=settings.group_size,
            on_progress=None if on_progress is None else tell,
            **runner_options,
        )
        yield await stack.enter_async_context(aclosing(runner.run(prepared.prompts)))


@asynccontextmanager
async def _setting_up(workers: RolloutWorkers) -> AsyncIterator[None]:
    """Enter workers; what keeps them from starting is one line for a person."""
    try:
        await workers.__aenter__()
    except Exception as error:
        cause = getattr(error, "cause", error)  # what the worker raised, in Ray's wrapping
        if isinstance(cause, SetupError):
            raise SetupError(str(cause)) from error
        raise SetupError(f"a worker cannot start: {first_line(cause)}") from error
    try:
        yield
    finally:
        await workers.__aexit__()


def gpu_share(num_gpus: int, num_workers: int) -> float:
    """Return which part of a GPU each worker gets, so that all find room: none spans two.

    Example:
        >>> gpu_share(num_gpus=4, num_workers=6), gpu_share(num_gpus=4, num_workers=3)
        (0.5, 1.0)
    """
    if not num_gpus:
        raise SetupError("the cluster has no GPU for the workers")
    return 1.0 / -(-num_workers // num_gpus)


def _num_gpus() -> int:
    """Return how many the cluster has: this machine may be one of many, or have none."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))
