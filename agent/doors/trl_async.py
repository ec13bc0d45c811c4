"""TRL's asynchronous trainer: a rollout worker and the transfer of weights, in one process."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from itertools import cycle
from typing import Any

import torch

from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.packing.adapters.trl import to_async_samples
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.optional import require

WAIT_S = 0.02
"""Seconds between looks at a full queue."""


class AgentRolloutWorker:
    """``rollout_worker`` and ``weight_transfer`` of TRL's ``AsyncGRPOTrainer``.

    Episodes of an agent run in a thread on a model of their own, into which the trainer's weights
    are loaded between two tokens. Pass the worker as both arguments. The trainer's
    ``num_generations`` is for its own worker alone: here it is ``group_size``.

    Args:
        model: Model that generates, of the trainer's architecture; not the one that is trained.
        agent: Agent of the episodes.
        environment: Environment of all episodes, which the caller enters and closes.
        prompts: Prompts, which are taken again and again.
        group_size: Episodes for each prompt, which are compared.
        max_samples: Samples that wait for the trainer at most; then generation waits.
        estimator: Estimator of the advantages, one number for each sequence.
        options: Further options of the `RolloutRunner`, such as ``policy``.
    """

    def __init__(
        self,
        model: Any,
        agent: Any,
        environment: Any,
        prompts: Sequence[Prompt],
        *,
        group_size: int = 8,
        max_samples: int = 256,
        estimator: Any = "grpo",
        **options: Any,
    ) -> None:
        require("trl")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._model, self._prompts, self._estimator = model, prompts, estimator
        self._parts = agent, environment
        self._options = {"group_size": group_size, **options}
        self._max_samples, self._num_groups, self._version = max_samples, 0, 0
        self._ready, self._begun = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._last_sample = time.time()
        self._thread = threading.Thread(target=self._serve, name="trajpack rollouts", daemon=True)

    def init_weight_transfer(self) -> None:
        """Start the engine; TRL calls it before the first weights."""
        self._thread.start()
        self._ready.wait()
        self._raise_error()

    def pause(self) -> None:
        """Do nothing: weights are loaded between two tokens."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load the trainer's weights as those of the next version."""
        self._raise_error()
        weights, self._version = dict(iterator), self._version + 1
        update = self._engine.update_weights(weights, self._version)
        asyncio.run_coroutine_threadsafe(update, self._loop).result()

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def start(self) -> None:
        """Begin episodes."""
        self._last_sample = time.time()
        self._loop.call_soon_threadsafe(self._begin.set)

    def update_model_version(self, model_version: int) -> None:
        """Check that the version is the one of the weights that were sent last.

        Raises:
            RuntimeError: If it is another, as after a training that was resumed.
        """
        if model_version != self._version:
            raise RuntimeError(f"weights of version {self._version}, but TRL has {model_version}")

    def check_health(self, stale_after_s: float) -> None:
        """Raise if rollouts failed, or no sample came for so many seconds."""
        self._raise_error()
        since = time.time() - self._last_sample
        if self.rollout_buffer.empty() and since > stale_after_s:
            raise RuntimeError(f"no sample for {since:.0f} s")

    def stop(self) -> None:
        """Cancel the episodes and leave the engine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    destroy = stop

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError("the rollouts failed") from self._error

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 - the trainer's thread raises it
            self._error = error
        finally:
            self._ready.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin, self._end = asyncio.Event(), asyncio.Event()
        async with TransformersEngine(self._model) as self._engine:
            self._ready.set()
            rolling = asyncio.create_task(self._roll())
            ended = asyncio.create_task(self._end.wait())
            await asyncio.wait({rolling, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not rolling.done():
                rolling.cancel()
                await asyncio.wait({rolling})
            elif not rolling.cancelled():
                rolling.result()

    async def _roll(self) -> None:
        """Put the samples of one group after another."""
        await self._begin.wait()
        runner = RolloutRunner(self._engine, *self._parts, **self._options)
        async with aclosing(runner.run_groups(cycle(self._prompts))) as groups:
            async for group in groups:
                trajectories = group.trajectories
                if trajectories and group.rejected is None:
                    for sample in self._samples(trajectories):
                        self.rollout_buffer.put(sample)
                    self._last_sample = time.time()
                while self.rollout_buffer.qsize() >= self._max_samples:  # noqa: ASYNC110 - by a thread
                    await asyncio.sleep(WAIT_S)

    def _samples(self, trajectories: Sequence[Any]) -> Iterator[Any]:
        """Yield TRL's sample of each sequence; an episode counts once in its group."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        batch = pack(trajectories, device="cpu").with_advantages(self._estimator)
        versions = batch.policy_versions[batch.loss_mask].tolist()
        if not versions:  # no episode of the group sampled a token
            return
        self._num_groups += 1
        reward = float(batch.turn_rewards.sum()) / len(trajectories)
        for columns in to_async_samples(batch):
            yield RolloutSample(
                prompt=[],
                completion=[],
                **columns
                | {
                    "group_id": self._num_groups,
                    "metrics": {"reward": reward},
                    "model_version": min(versions),
                    "enqueued_at": time.time(),
                },
            )
