"""Responses that were recorded from a vLLM server, through the whole engine."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.agent.servers.loopback import NOTHING, Answer, Asked, generate, options, serving
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.vllm import VLLMEngine

RECORDED = Path(__file__).parents[4] / "shared" / "contracts"
pytestmark = pytest.mark.skipif(
    not RECORDED.is_dir(), reason=f"the recorded responses are not in {RECORDED}"
)
FILES = {
    "/inference/v1/generate": "vllm_inference_v1_generate.json",
    "/v1/completions": "vllm_v1_completions.json",
}
PROMPT = [369, 349, 198, 20, 21]


@pytest.mark.parametrize("endpoint", FILES)
async def test_a_recorded_response_becomes_the_reply(endpoint: str) -> None:
    body = (RECORDED / FILES[endpoint]).read_bytes()
    choice = json.loads(body)["choices"][0]
    logprobs = choice["logprobs"]
    expected = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs["content"]]

    async def say(asked: Asked) -> Answer:
        if asked.path == "/health":
            return Answer()
        return Answer(body=body) if asked.path == endpoint else NOTHING

    sizes = options(vocab_size=373)
    async with serving(VLLMEngine, say, version=5, options=sizes) as ((server,), engine):
        output = await generate(engine, "q@0", PROMPT, SamplingParams(3))
    assert list(output.prompt_ids) == PROMPT
    assert list(output.output_ids) == choice["token_ids"] == [207, 129, 350]
    assert np.array_equal(output.output_logprobs, np.float32(expected))
    assert output.no_eos  # it ended by length
    assert (output.version_start, output.version_end) == (5, 5)  # "default" is the engine's own
    first = "/inference/v1/generate"
    assert [draw.path for draw in server.draws] == (
        [first] if endpoint == first else [first, endpoint]
    )
