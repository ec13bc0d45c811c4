"""Which log-probabilities a server gives is found out, and what does not fit is not asked."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    ask,
    drawing,
    generate,
    options,
    say_sglang,
    say_vllm,
    serving,
    sglang_body,
    vllm_body,
)
from trajpack.agent.errors import RequestRefusedError, SetupError
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.api import NEUTRAL
from trajpack.agent.servers.options import TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

LOGITS = np.random.default_rng(0).normal(size=(64, 64))


def top_logprobs(token: int, temperature: float, scale: float = 1.0) -> list[list[Any]]:
    if scale < 0:  # logits, as with vLLM's --logprobs-mode raw_logits
        return [[-scale * float(one), k] for k, one in enumerate(sorted(LOGITS[token])[:-6:-1])]
    logits = scale * LOGITS[token] / temperature
    logprobs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logprobs)[:5]
    return [[float(logprobs[k]), int(k)] for k in order]


def model_server(
    kind: type, is_raw: bool, refused: tuple[int, ...] = (), scale: float = 1.0
) -> Any:
    """Serve top log-probabilities as a real server would, through the same payloads."""

    async def draw(asked: Asked) -> Answer:
        payload = asked.payload
        ids = payload.get("token_ids") or payload.get("input_ids") or payload.get("prompt")
        if ids[0] in refused:
            return Answer(400, {"error": "a token for nobody"})
        sampling = payload.get("sampling_params", payload)
        # left out, they may come from the model's folder, and cut off what is asked for
        assert NEUTRAL.items() <= sampling.items()
        assert (sampling["top_p"], sampling["top_k"]) in ((1.0, 0), (1.0, -1))
        top = top_logprobs(ids[0], 1.0 if is_raw else sampling["temperature"], scale)
        if asked.path == "/generate":
            body = sglang_body([1])
            body["meta_info"]["output_top_logprobs"] = [[[*one, None] for one in top]]
            return Answer(body=body)
        body = vllm_body([1])
        if asked.path == "/v1/completions":
            named = [{f"token_id:{token}": logprob for logprob, token in top}]
            body["choices"][0]["logprobs"] = {"token_logprobs": [-1.0], "top_logprobs": named}
        elif kind is None:
            return Answer(403)
        else:
            entries = [{"token_id": token, "logprob": logprob} for logprob, token in top]
            # the sampled token comes too, wherever it ranks
            entries.append({"token_id": 60, "logprob": -20.0})
            body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = entries
        return Answer(body=body)

    return drawing(draw, say_sglang if kind is SGLangEngine else say_vllm)


@pytest.mark.parametrize("kind", [VLLMEngine, SGLangEngine, None])
@pytest.mark.parametrize("is_raw", [True, False])
def test_raw_and_processed_are_told_apart(kind: Any, is_raw: bool) -> None:
    async def body() -> None:
        say = model_server(kind, is_raw, refused=(0, 1))
        arguments = {"options": options(logprobs="detect")}
        async with serving(kind or VLLMEngine, say, **arguments) as (_, engine):
            (server,) = engine._control.router.servers
            assert server.logprobs == ("raw" if is_raw else "processed")
            hot = await ask(engine, "a@0", [5], SamplingParams(4, temperature=0.7))
            assert isinstance(hot, RequestRefusedError) == is_raw
            await generate(engine, "a@0", [5])

    asyncio.run(body())


@pytest.mark.parametrize("scale", [0.0, float("nan"), -1.0])
def test_what_cannot_be_told_must_be_declared(scale: float) -> None:
    async def body() -> None:
        late = options(logprobs="detect", time_limits=TimeLimits(start_s=60))
        with pytest.raises(SetupError, match="log-probabilities"):
            async with serving(VLLMEngine, model_server(VLLMEngine, True, (), scale), options=late):
                pass

    asyncio.run(body())


HOT = SamplingParams(8, temperature=0.5)
GREEDY = SamplingParams(8, temperature=0.0)
TOP_P = SamplingParams(8, top_p=0.9)
TOP_K = SamplingParams(8, top_k=5)


@pytest.mark.parametrize(
    ("engine_type", "logprobs", "refused"),
    [
        (VLLMEngine, None, [HOT, GREEDY, TOP_P, TOP_K]),
        (VLLMEngine, "processed", []),
        (SGLangEngine, None, [TOP_P, TOP_K]),
        (SGLangEngine, "raw", [HOT, GREEDY, TOP_P, TOP_K]),
    ],
)
def test_what_does_not_fit_is_refused_unless_allowed(
    engine_type: Any, logprobs: Any, refused: list[SamplingParams]
) -> None:
    say = say_vllm if engine_type is VLLMEngine else say_sglang

    async def body(is_allowed: bool) -> None:
        changed = options(logprobs=logprobs, allow_other_logprobs=is_allowed)
        async with serving(engine_type, say, options=changed) as ((server,), engine):
            for params in (HOT, GREEDY, TOP_P, TOP_K, SamplingParams(8)):
                before = len(server.draws)
                reply = await ask(engine, sampling=params)
                is_refused = params in refused and not is_allowed
                assert isinstance(reply, RequestRefusedError) == is_refused
                assert len(server.draws) == before + (not is_refused)
                if is_refused:
                    assert "the server's log-probabilities are those" in str(reply)

    asyncio.run(body(False))
    asyncio.run(body(True))
