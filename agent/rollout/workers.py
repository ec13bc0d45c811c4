"""The runner of a rollout over workers on Ray."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.agent.ray.cluster import local_cluster
from trajpack.agent.ray.worker import WorkerOptions
from trajpack.agent.ray.workers import RolloutWorkers
from trajpack.agent.runner.runner import Progress, RolloutRunner
from trajpack.agent.seeding import derive_seed

if TYPE_CHECKING:
    from trajpack.agent.rollout.rollout import Rollout


@asynccontextmanager
async def ray_runner(
    prepared: Rollout, on_progress: Callable[[Progress], None] | None, **runner_options: Any
) -> AsyncIterator[RolloutRunner]:
    """Start the workers of a rollout, which make their own models, and return their runner.

    Uses the cluster that this process is connected to, or a local one. ``settings.concurrency``
    is divided among the workers. Leaving the context ends them.

    Raises:
        SetupError: If a worker cannot run the model, or the cluster has no resources for it.
    """
    settings = prepared.settings
    num_workers, device = settings.num_workers, settings.device.partition(":")[0]
    # A worker sees only its own GPUs.
    alike = replace(prepared, model=None, settings=replace(settings, device=device))
    num_cpus = max(num_workers, os.cpu_count() or 1)
    async with AsyncExitStack() as stack:
        stack.enter_context(local_cluster(num_cpus=num_cpus, num_gpus=torch.cuda.device_count()))
        num_gpus = 0.0
        if device == "cuda":
            import ray

            # The cluster may have other machines than this one.
            num_there = int(ray.cluster_resources().get("GPU", 0))
            if not num_there:
                raise SetupError("the cluster has no GPU for the workers")
            num_gpus = 1.0 / -(-num_workers // num_there)  # all fit, and none spans two
        concurrency = -(-settings.concurrency // num_workers)
        options = WorkerOptions(concurrency=concurrency, num_gpus=num_gpus)
        workers = RolloutWorkers(partial(_parts_of, alike), num_workers, options=options)
        try:
            await stack.enter_async_context(workers)
        except Exception as error:
            cause = getattr(error, "cause", error)  # the worker's error, in Ray's wrapping
            problem = "" if isinstance(cause, SetupError) else "a worker cannot start: "
            raise SetupError(f"{problem}{first_line(cause)}") from error

        def tell(progress: Progress) -> None:
            assert on_progress is not None
            counts = {"num_turns": workers.num_turns, "num_tokens": workers.num_tokens}
            on_progress(replace(progress, **counts))

        yield workers.runner(on_progress=on_progress and tell, **runner_options)


def _parts_of(prepared: Rollout, number: int) -> AbstractAsyncContextManager[Any]:
    """Return the context of a worker; each start has its own sampling seed."""
    return prepared.parts(derive_seed(prepared.settings.seed, "sampling", number, time.time_ns()))
