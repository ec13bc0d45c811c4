"""What tests ask of an engine, and what they hold its replies against."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm_server import RunningServer, TinyModel
from trajpack.agent.protocols import GenerationOutput, GenerationRequest, SamplingParams
from trajpack.agent.servers.vllm import VLLMEngine

NEAR = 1e-4
"""How far a log-probability of the server may be from that of a full forward pass."""
_SOON_S = 60.0
_qids = map("episode-{}".format, itertools.count())


LONG = SamplingParams(max_new_tokens=450)


async def sample(
    engine: VLLMEngine, prompt: Sequence[int], sampling: SamplingParams
) -> GenerationOutput:
    """Return the completion of a prompt, in an episode of its own."""
    return await engine.generate(GenerationRequest(next(_qids), prompt, sampling))


async def sample_many(
    engine: VLLMEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[GenerationOutput]:
    """Return the completions of prompts that are all in flight at once."""
    return list(await asyncio.gather(*(sample(engine, prompt, sampling) for prompt in prompts)))


@contextlib.asynccontextmanager
async def long_ones(
    engine: VLLMEngine, server: RunningServer, number: int
) -> AsyncIterator[list[asyncio.Task[GenerationOutput]]]:
    """Begin long completions, and go on when the server is at some of them."""
    before = server.metric("vllm:generation_tokens_total")
    begun = [asyncio.create_task(sample(engine, [7, 8, 9], LONG)) for _ in range(number)]
    try:
        await until(lambda: server.metric("vllm:generation_tokens_total") > before + 2 * number)
        yield begun
    finally:
        for task in begun:
            task.cancel()
        await asyncio.wait(begun)


async def until(condition: Any) -> float:
    """Wait until a condition holds; return how many seconds that took."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - began > _SOON_S:
            pytest.fail(f"what was waited for did not come in {_SOON_S:g} s")
        await asyncio.sleep(0.02)  # the server's figures are all that there is to see
    return time.monotonic() - began


def distance(tiny: TinyModel, output: GenerationOutput, **distribution: Any) -> float:
    """Return how far its log-probabilities are from those of a full forward pass, at most."""
    assert len(output.output_ids) == len(output.output_logprobs) > 0
    expected = tiny.logprobs(output.prompt_ids, output.output_ids, **distribution)
    return float(np.abs(np.asarray(output.output_logprobs) - expected).max())
