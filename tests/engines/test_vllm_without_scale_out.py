"""A vLLM server of the other kind: processed log-probabilities, and `/v1/completions` alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines import server_episodes as episodes
from tests.engines.server_episodes import NEAR
from tests.engines.vllm_server import RunningServer, TinyModel
from trajpack.agent.protocols import GenerationOutput, SamplingParams
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.vllm import VLLMEngine


@pytest.fixture
def server(serve: Callable[..., RunningServer]) -> RunningServer:
    return serve("--logprobs-mode", "processed_logprobs")


def test_processed_logprobs_are_those_of_the_endpoint_that_there_is(
    server: RunningServer, tiny: TinyModel, figure: Callable[[str], None]
) -> None:
    samplings = {
        "temperature 0.5": (SamplingParams(temperature=0.5), {"temperature": 0.5}),
        "temperature 0.8, top_k 5": (
            SamplingParams(temperature=0.8, top_k=5),
            {"temperature": 0.8, "top_k": 5},
        ),
        "temperature 1": (SamplingParams(), {}),
    }

    async def collect() -> dict[str, list[GenerationOutput]]:
        options = ServerOptions(logprobs="processed")
        async with VLLMEngine(server.url, options=options, version=4) as engine:
            return {
                name: await episodes.sample_many(engine, [[5, 6, 7], [3]] * 4, sampling)
                for name, (sampling, _) in samplings.items()
            }

    for name, outputs in asyncio.run(collect()).items():
        distribution: dict[str, Any] = samplings[name][1]
        worst = max(episodes.distance(tiny, output, **distribution) for output in outputs)
        figure(f"processed, {name}: within {worst:.1e} of a full forward pass")
        assert worst < NEAR
        assert {output.version_start for output in outputs} == {4}  # none is reported here
