"""A rollout over workers on Ray: the work of ``trajpack rollout --ray``."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.agent.protocols import Agent, Engine, Environment
from trajpack.agent.ray.cluster import local_cluster
from trajpack.agent.ray.worker import WorkerOptions
from trajpack.agent.ray.workers import RolloutWorkers
from trajpack.agent.runner.runner import EpisodeResult, Progress
from trajpack.agent.seeding import derive_seed

if TYPE_CHECKING:
    from trajpack.agent.rollout.rollout import Rollout


@dataclass(frozen=True)
class MakeRolloutWorker:
    """The `MakeWorker` of a rollout.

    Each start of a worker has its own sampling seed. Servers named in the environment are those
    of the worker's environment, which a cluster of this machine inherits.
    """

    prepared: Rollout
    """The rollout, without a model."""

    def __call__(
        self, number: int
    ) -> AbstractAsyncContextManager[tuple[Engine, Agent, Environment]]:
        """Return the context of worker ``number``; entering it raises as `Rollout.worker_parts`."""
        seed = derive_seed(self.prepared.settings.seed, "sampling", number, time.time_ns())
        return self.prepared.worker_parts(seed)


@asynccontextmanager
async def ray_episodes(
    prepared: Rollout,
    num_workers: int,
    on_progress: Callable[[Progress], None] | None = None,
    **runner_options: Any,
) -> AsyncIterator[AsyncGenerator[EpisodeResult, None]]:
    """Return the stream of results of a rollout, as `Rollout.episodes`, from workers.

    Uses the cluster that this process is connected to, or a local one. ``settings.concurrency``
    is divided among the workers. Leaving the context ends them.

    Args:
        prepared: The rollout; each worker makes its own model.
        num_workers: Number of processes, with an engine each.
        on_progress: As in `RolloutRunner`; turns and tokens are counted when they arrive.
        **runner_options: Other arguments of `RolloutRunner`.

    Raises:
        SetupError: If a worker cannot run the model, or the cluster has no resources for it.
    """
    settings = prepared.settings
    is_cuda = settings.device.startswith("cuda")
    device = settings.device.partition(":")[0]  # a worker sees only its own GPUs
    make = MakeRolloutWorker(
        replace(prepared, model=None, settings=replace(settings, device=device))
    )
    num_cpus = max(num_workers, os.cpu_count() or 1)
    async with AsyncExitStack() as stack:
        stack.enter_context(local_cluster(num_cpus=num_cpus, num_gpus=torch.cuda.device_count()))
        options = WorkerOptions(
            concurrency=-(-settings.concurrency // num_workers),
            num_gpus=gpu_share(_num_gpus(), num_workers) if is_cuda else 0.0,
        )
        workers = RolloutWorkers(make, num_workers, options=options)
        try:
            await stack.enter_async_context(workers)
        except Exception as error:
            cause = getattr(error, "cause", error)  # the worker's error, in Ray's wrapping
            if isinstance(cause, SetupError):
                raise SetupError(str(cause)) from error
            raise SetupError(f"a worker cannot start: {first_line(cause)}") from error

        def tell(progress: Progress) -> None:
            assert on_progress is not None
            counts = {"num_turns": workers.num_turns, "num_tokens": workers.num_tokens}
            on_progress(replace(progress, **counts))

        runner = workers.runner(on_progress=None if on_progress is None else tell, **runner_options)
        yield await stack.enter_async_context(aclosing(runner.run(prepared.prompts)))


def gpu_share(num_gpus: int, num_workers: int) -> float:
    """Return the fraction of a GPU for each worker, so that all fit and none spans two GPUs.

    Example:
        >>> gpu_share(num_gpus=4, num_workers=6), gpu_share(num_gpus=4, num_workers=3)
        (0.5, 1.0)
    """
    if not num_gpus:
        raise SetupError("the cluster has no GPU for the workers")
    return 1.0 / -(-num_workers // num_gpus)


def _num_gpus() -> int:
    """Return the number of GPUs of the cluster, which may have other machines than this one."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))
