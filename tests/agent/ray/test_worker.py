"""The actor of a worker without a cluster: weights and errors as it takes and gives them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from trajpack.agent.errors import EngineEndedError, EpisodeError, EpisodeTimeoutError
from trajpack.agent.protocols import Prompt
from trajpack.agent.ray import RolloutWorkers, WorkerOptions
from trajpack.agent.ray.workers import RolloutWorker, Weights
from trajpack.agent.servers.vllm import VLLMEngine

pytest.importorskip("ray")


def test_weights_of_any_dtype_are_views_of_what_was_sent():
    state_dict = {
        "wide": torch.randn(3, 2),
        "narrow": torch.randn(4).to(torch.bfloat16),
        "count": torch.tensor(7),
    }
    weights = pickle.loads(pickle.dumps(Weights.of(state_dict, version=4)))
    assert weights.version == 4
    received = weights.state_dict()
    for name, value in state_dict.items():
        assert received[name].dtype is value.dtype
        assert torch.equal(received[name], value)
    pointer = weights.arrays["wide"][1].__array_interface__["data"][0]
    assert received["wide"].data_ptr() == pointer


class OwnError(EpisodeTimeoutError):
    def __init__(self, qid: str, seconds: float) -> None:
        super().__init__(qid, f"took {seconds} s")


def ended(qid: str) -> EpisodeError:
    error = EpisodeError(qid, "no reply")
    error.__cause__ = EngineEndedError(qid, "out of memory")
    return error


class Idle:
    """An engine that is not asked."""

    version = 0

    async def generate(self, request: Any) -> Any:
        raise AssertionError("it is not asked")


@pytest.mark.parametrize(
    ("make_error", "kind", "text"),
    [
        (lambda qid: OwnError(qid, 3.0), EpisodeTimeoutError, "took 3.0 s"),
        (lambda qid: KeyError("answer"), EpisodeError, "KeyError: 'answer'"),
        (ended, EngineEndedError, "no reply"),
    ],
)
def test_errors_travel_as_the_nearest_kind_that_every_process_knows(make_error, kind, text):
    async def run(prompt: Prompt, env: Any, generate: Any) -> list[Any]:
        raise make_error(prompt.id)

    @asynccontextmanager
    async def make(number: int) -> AsyncIterator[Any]:
        yield Idle(), run, None

    async def body() -> Any:
        worker = RolloutWorker(make, 0)
        await worker.update(None)
        return await worker.roll_out(Prompt("q0@0", [1]), None)

    error = pickle.loads(pickle.dumps(asyncio.run(body())))
    assert type(error) is kind
    assert str(error) == f"episode 'q0@0': {text}"


def test_an_engine_that_a_worker_has_not_entered_is_an_error_at_its_start():
    @asynccontextmanager
    async def make(number: int) -> AsyncIterator[Any]:
        yield VLLMEngine("http://127.0.0.1:9"), None, None

    with pytest.raises(RuntimeError, match="this VLLMEngine has not been entered: use it within"):
        asyncio.run(RolloutWorker(make, 0).update(None))


@pytest.mark.parametrize(
    ("count", "options", "name"), [(0, {}, "num_workers"), (1, {"concurrency": 0}, "concurrency")]
)
def test_numbers_that_would_wait_for_ever_are_refused(count, options, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        RolloutWorkers(None, count, options=WorkerOptions(**options)).runner()
