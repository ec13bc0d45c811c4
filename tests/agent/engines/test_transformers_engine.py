from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.replies import Reply, asking, reply_of
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.errors import EngineEndedError, GenerationError, RequestRefusedError
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import GenerationOutput, SamplingParams

torch.set_num_threads(1)
MODEL, TOKENIZER = build_tiny_model()
PROMPT: list[int] = TOKENIZER("What is 12 + 30?")["input_ids"]
NEVER = 10**6
"""An end-of-sequence token outside the vocabulary: completions run to their full length."""


def small_engine(model: Any = MODEL, **options: Any) -> TransformersEngine:
    options = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 256, **options}
    return TransformersEngine(model, **options)


async def ask(
    engine: TransformersEngine, qid: str, ids: Sequence[int] = PROMPT, sampling: Any = None
) -> Reply:
    sampling = sampling or SamplingParams(max_new_tokens=16)
    reply: Reply = await asyncio.wait_for(reply_of(engine, qid, ids, sampling), 30)
    return reply


async def generate(*args: Any, **kwargs: Any) -> GenerationOutput:
    reply = await ask(*args, **kwargs)
    assert isinstance(reply, GenerationOutput), reply
    return reply


def logits_of(output: GenerationOutput, model: Any = MODEL) -> torch.Tensor:
    """Logits of a full forward, one row for each sampled token."""
    ids = torch.tensor([[*output.prompt_ids, *output.output_ids]])
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=False).logits[0]
    return logits[len(output.prompt_ids) - 1 : -1]


def logprobs_under(scores: torch.Tensor, output: GenerationOutput) -> torch.Tensor:
    chosen = torch.tensor(list(output.output_ids))[:, None]
    return scores.log_softmax(-1).gather(1, chosen)[:, 0]


def assert_logprobs(output: GenerationOutput, scores: torch.Tensor) -> None:
    expected = logprobs_under(scores, output)
    torch.testing.assert_close(torch.tensor(output.output_logprobs), expected, atol=1e-4, rtol=0)


def generation_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "generation" in thread.name]


def test_many_episodes_of_many_turns_get_one_reply_each() -> None:
    async def episode(engine: TransformersEngine, qid: str) -> list[GenerationOutput]:
        ids, outputs = PROMPT, []
        for turn in range(3):
            given = (ids, np.array(ids), torch.tensor(ids))[turn]
            output = await generate(engine, f"{qid}.{turn}", given)
            assert output.prompt_ids == ids
            outputs.append(output)
            ids = [*output.prompt_ids, *output.output_ids, *PROMPT]
        return outputs

    async def body() -> list[list[GenerationOutput]]:
        async with small_engine() as engine:
            return await asyncio.gather(*(episode(engine, str(k)) for k in range(24)))

    for outputs in asyncio.run(body()):
        for output in outputs:
            assert_logprobs(output, logits_of(output))


def test_the_stop_token_belongs_to_the_completion_and_decides_no_eos() -> None:
    common = list(range(0, 384, 2))

    async def body() -> tuple[GenerationOutput, GenerationOutput]:
        async with small_engine(eos_token_id=common) as engine:
            stopped = await generate(engine, "a", sampling=SamplingParams(max_new_tokens=200))
        async with small_engine(eos_token_id=NEVER) as engine:
            return stopped, await generate(engine, "a")

    stopped, cut = asyncio.run(body())
    assert not stopped.no_eos
    assert stopped.output_ids[-1] in common
    assert not set(stopped.output_ids[:-1]) & set(common)
    assert cut.no_eos
    assert len(cut.output_ids) == 16


def test_texts_and_tokens_of_a_request_end_its_completion() -> None:
    async def body(**ends: Any) -> GenerationOutput:
        async with small_engine(tokenizer=TOKENIZER, eos_token_id=NEVER, seed=1) as engine:
            sampling = SimpleNamespace(max_new_tokens=40, **ends)
            return await generate(engine, "a", sampling=sampling)

    whole = asyncio.run(body())
    ids = list(whole.output_ids)
    assert (whole.stop_reason, whole.no_eos) == ("length", True)
    texts = [TOKENIZER.decode(ids[:end]) for end in range(1, 41)]
    for begin, stop in ((9, 12), (20, 21), (3, 30)):
        text = texts[30][begin:stop]
        cases: list[dict[str, Any]] = [{"stop": ("never said", text)}, {"stop": text}]
        for ends in cases:
            output = asyncio.run(body(**ends))
            kept = next(number for number, said in enumerate(texts, 1) if text in said)
            assert output.output_ids == ids[:kept]
            assert output.output_logprobs == whole.output_logprobs[:kept]
            assert (output.stop_reason, output.no_eos) == ("stop", False)
    stopped = asyncio.run(body(stop_token_ids=[ids[7]]))
    assert stopped.output_ids == ids[: ids.index(ids[7]) + 1]
    assert (stopped.stop_reason, stopped.no_eos) == ("stop", False)


def test_the_seed_decides_what_is_sampled() -> None:
    async def body(seed: int) -> GenerationOutput:
        async with small_engine(seed=seed) as engine:
            return await generate(engine, "a")

    first, again, other = (asyncio.run(body(seed)) for seed in (1, 1, 2))
    assert vars(first) == vars(again)
    assert first.output_ids != other.output_ids


def test_each_request_is_sampled_with_its_own_parameters() -> None:
    settings = {
        "plain": SamplingParams(24),
        "cold": SamplingParams(24, temperature=0.3),
        "hot": SamplingParams(24, temperature=2.5),
        "greedy": SamplingParams(24, temperature=0.0),
        "greedy object": SimpleNamespace(max_new_tokens=24, greedy=True, top_k=10**8, top_p=1.0),
        "top k": SamplingParams(24, top_k=3),
        "top p": SamplingParams(24, top_p=0.4),
        "all": SamplingParams(24, temperature=0.7, top_p=0.8, top_k=5),
    }

    async def body() -> list[GenerationOutput]:
        async with small_engine(eos_token_id=NEVER) as engine:
            asked = (generate(engine, qid, sampling=given) for qid, given in settings.items())
            return await asyncio.gather(*asked)

    outputs = {output.qid: output for output in asyncio.run(body())}
    for qid, temperature in (("plain", 1.0), ("cold", 0.3), ("hot", 2.5)):
        assert_logprobs(outputs[qid], logits_of(outputs[qid]) / temperature)
    for qid in ("greedy", "greedy object"):
        likeliest = logits_of(outputs[qid]).argmax(-1).tolist()
        assert list(outputs[qid].output_ids) == likeliest
        assert outputs[qid].output_logprobs == [0.0] * 24
    few = logits_of(outputs["top k"])
    assert_logprobs(outputs["top k"], keep_top_k(few, 3))
    assert_logprobs(outputs["top p"], keep_top_p(logits_of(outputs["top p"]), 0.4))
    scores = keep_top_p(keep_top_k(logits_of(outputs["all"]) / 0.7, 5), 0.8)
    assert_logprobs(outputs["all"], scores)


def keep_top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    return scores.masked_fill(scores < scores.topk(k).values[:, -1:], -math.inf)


def keep_top_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    ordered, order = scores.sort(descending=True)
    probs = ordered.softmax(-1)
    beyond = probs.cumsum(-1) - probs >= p
    return scores.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -math.inf)


REFUSED = {
    "empty": ([], SamplingParams(), "the prompt must be non-empty"),
    "nested": ([[1, 2]], SamplingParams(), "token ids must be integers"),
    "floats": ([1.0, 2.0], SamplingParams(), "integers"),
    "negative": ([1, -1], SamplingParams(), "token ids must be 0 or more, got -1"),
    "unknown id": ([1, 384], SamplingParams(), "384 is out of vocabulary"),
    "huge id": ([2**70], SamplingParams(), "token ids"),
    "too long": ([1] * 1000, SamplingParams(25), "exceed the 1024 tokens of a request"),
    "too many": ([1], SamplingParams(1024), "exceed the 1024 tokens of a request"),
    "cold": ([1], SamplingParams(temperature=1e-9), "temperature"),
    "no length": ([1], SimpleNamespace(temperature=1.0), "max_new_tokens"),
    "endless": ([1], SimpleNamespace(max_new_tokens=math.inf), "infinity"),
    "two samples": ([1], SimpleNamespace(max_new_tokens=4, n_samples=2), "n_samples=2"),
    "penalty": ([1], SimpleNamespace(max_new_tokens=4, frequency_penalty=0.5), "penalty"),
    "floor": ([1], SimpleNamespace(max_new_tokens=4, min_p=0.1), "min_p=0.1"),
    "repetition": ([1], SimpleNamespace(max_new_tokens=4, repetition_penalty=1.2), "repetition"),
    "stop": ([1], SamplingParams(4, stop=("a",)), "stop: texts need the engine's tokenizer"),
    "stop tokens": ([1], SimpleNamespace(max_new_tokens=4, stop_token_ids=9), "stop_token_ids"),
}


def test_a_refused_request_gets_an_error_and_the_others_live_on() -> None:
    async def body() -> tuple[list[Reply], list[GenerationOutput]]:
        async with small_engine() as engine:
            good = [asyncio.create_task(generate(engine, f"good {k}")) for k in range(4)]
            bad = (ask(engine, qid, ids, params) for qid, (ids, params, _) in REFUSED.items())
            refused = await asyncio.gather(*bad)
            return refused, [*await asyncio.gather(*good), await generate(engine, "later")]

    refused, outputs = asyncio.run(body())
    assert len(outputs) == 5
    for reply, (qid, (_, _, reason)) in zip(refused, REFUSED.items(), strict=True):
        assert isinstance(reply, RequestRefusedError)
        assert reply.qid == qid
        assert reason in str(reply)


def test_requests_may_fill_the_whole_cache_and_wait_for_it() -> None:
    async def many() -> list[GenerationOutput]:
        async with small_engine(num_blocks=10, eos_token_id=NEVER) as engine:
            asked = (generate(engine, str(k), PROMPT, SamplingParams(100)) for k in range(5))
            return await asyncio.gather(*asked)

    for output in asyncio.run(many()):
        assert len(output.output_ids) == 100
        assert_logprobs(output, logits_of(output))

    async def body() -> list[GenerationOutput]:
        async with small_engine(num_blocks=16, eos_token_id=NEVER) as engine:
            first = generate(engine, "a", [5] * 232, SamplingParams(24))
            second = generate(engine, "b", [6] * 3, SamplingParams(253))
            return await asyncio.gather(first, second)

    first, second = asyncio.run(body())
    assert (len(first.output_ids), len(second.output_ids)) == (24, 253)
    assert_logprobs(first, logits_of(first))
    assert_logprobs(second, logits_of(second))


def weights_that_only_sample(token: int, model: Any) -> dict[str, torch.Tensor]:
    """Every hidden state is the vector of ones, and one row of the output layer sees it."""
    weights = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        weights[name].fill_(1.0)
    weights["lm_head.weight"][token] = 10.0
    return weights


def test_spans_break_exactly_where_the_weights_changed() -> None:
    model, _ = build_tiny_model()
    model.load_state_dict(weights_that_only_sample(0, model))

    async def body() -> list[GenerationOutput]:
        async with small_engine(model, eos_token_id=NEVER) as engine:
            asked = (generate(engine, str(k), PROMPT, SamplingParams(110)) for k in range(8))
            pending = asyncio.gather(*asked)
            version = 0
            while not pending.done() and version < 300:
                version += 1
                await engine.update_weights(weights_that_only_sample(version, model), version)
            return await pending

    for output in asyncio.run(body()):
        assert output.version_spans is not None
        assert len(output.version_spans) > 3
        claimed = [v for v, start, end in output.version_spans for _ in range(start, end)]
        assert claimed == list(output.output_ids)
        assert (output.version_start, output.version_end) == (claimed[0], claimed[-1])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_bad_update_changes_nothing() -> None:
    with pytest.raises(RuntimeError, match="not running"):
        asyncio.run(small_engine().update_weights({}, 1))
    with pytest.raises(ValueError, match=r"version must be in \[0, 2147483647\], got -1"):
        small_engine(version=-1)
    model, _ = build_tiny_model(seed=1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    new = dict(build_tiny_model(seed=2)[0].state_dict())
    last = list(new)[-1]  # a load would come to it after all others
    weight = new[last]
    freed = weight.clone()
    freed.untyped_storage().resize_(0)
    bad: list[tuple[Any, Any, type[Exception], str]] = [
        (new, 3, ValueError, "exceed 3"),
        (new, 2**40, ValueError, "fit int32"),
        (new, 1.5, TypeError, "version must be an integer"),
        ({**new, "extra": weight}, 4, ValueError, "unknown.*extra"),
        ({name: new[name] for name in new if name != last}, 4, ValueError, f"missing.*{last}"),
        ({**new, last: weight[:-1]}, 4, ValueError, r"\(383, 64\)"),
    ]
    values = [weight.numpy(), None, 1.0, weight.to("meta"), weight.to_sparse()]
    values += [weight.to(torch.complex64), torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)]
    bad += [({**new, last: value}, 4, TypeError, f"{last} must be a dense") for value in values]
    bad.append(({**new, last: freed}, 4, ValueError, "memory was freed"))
    for value in (math.nan, math.inf, -1e300):
        wrong = weight.double()
        wrong[-1, -1] = value
        bad.append(({**new, last: wrong}, 4, ValueError, f"{last} must be finite"))

    async def body() -> None:
        async with small_engine(model, version=3) as engine:
            for weights, version, error, reason in bad:
                with pytest.raises(error, match=reason):
                    await engine.update_weights(weights, version)
            assert engine.version == 3
            unchanged = model.state_dict().items()
            assert all(torch.equal(weight, before[name]) for name, weight in unchanged)
            await engine.update_weights({**new, last: weight.double()}, 4)
            await generate(engine, "a")

    asyncio.run(body())
    assert all(torch.equal(weight, new[name]) for name, weight in model.state_dict().items())


def test_a_new_prompt_after_an_update_sees_nothing_of_the_old_weights() -> None:
    model, _ = build_tiny_model(seed=1)
    new = build_tiny_model(seed=2)[0].state_dict()
    prompt = PROMPT * 10

    async def body() -> GenerationOutput:
        async with small_engine(model) as engine:
            await generate(engine, "before", prompt)
            await engine.update_weights(new, 1)
            return await generate(engine, "after", prompt)

    after = asyncio.run(body())
    assert_logprobs(after, logits_of(after, model))


def test_cancelling_a_request_ends_it_alone() -> None:
    async def body() -> tuple[GenerationOutput, Any]:
        async with small_engine(num_blocks=32, eos_token_id=NEVER) as engine:
            gone = asking(engine, "gone", PROMPT, SamplingParams(450))
            other = asyncio.create_task(generate(engine, "stays"))
            await asyncio.sleep(0.05)
            gone.cancel()
            output = await other
            # The cache of 512 tokens is free again only if the first was really cancelled.
            await generate(engine, "next", PROMPT, SamplingParams(450))
            return output, engine._batching.output_router.result_handlers

    output, handlers = asyncio.run(body())
    assert len(output.output_ids) == 16
    assert handlers == {}


@pytest.mark.filterwarnings("error")
def test_shutdown_answers_what_is_pending_and_what_comes_later() -> None:
    async def body() -> list[Reply]:
        engine = small_engine(eos_token_id=NEVER)
        async with engine:
            asked = [asking(engine, "0", PROMPT, SamplingParams(900))]
            await asyncio.sleep(0.05)
            asked.append(asking(engine, "1", PROMPT, SamplingParams(900)))
            await asyncio.sleep(0)
        asked.append(asking(engine, "2", PROMPT, SamplingParams(900)))
        await asyncio.wait(asked)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not generation_threads()
        with pytest.raises(RuntimeError, match="not running"):
            await engine.update_weights({}, 1)
        with pytest.raises(RuntimeError, match="once"):
            await engine.__aenter__()
        return [one.result() for one in asked]

    before = threading.active_count()
    replies = asyncio.run(body())
    assert threading.active_count() == before
    for qid, reply in enumerate(replies):
        assert isinstance(reply, EngineEndedError)
        assert str(reply) == f"episode '{qid}': the engine was shut down"


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.1])
def test_cancellation_at_any_time_leaves_no_thread(delay: float) -> None:
    async def body() -> None:
        async with small_engine(eos_token_id=NEVER) as engine:
            await ask(engine, "a", sampling=SamplingParams(1000))

    async def cancelled() -> None:
        task = asyncio.create_task(body())
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = threading.active_count()
    asyncio.run(cancelled())
    assert threading.active_count() == before


def test_the_model_is_left_as_it_was() -> None:
    model, _ = build_tiny_model()
    model.train()
    model.set_attn_implementation("eager")

    async def body() -> GenerationOutput:
        async with small_engine(model) as engine:
            return await generate(engine, "a")

    output = asyncio.run(body())
    assert model.training
    assert model.config._attn_implementation == "eager"
    assert_logprobs(output, logits_of(output, model))


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing() -> None:
    async def body() -> None:
        async with small_engine(page_size=1):
            pass

    before = threading.active_count()
    with pytest.raises(ValueError, match="page_size"):
        asyncio.run(body())
    assert threading.active_count() == before


def test_the_death_of_generation_reaches_every_request(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build_tiny_model()

    async def body() -> tuple[list[Reply], Reply]:
        async with small_engine(model, eos_token_id=NEVER) as engine:
            asked = [asyncio.create_task(ask(engine, str(k))) for k in range(3)]
            with torch.no_grad():
                model.lm_head.weight.fill_(math.nan)
            replies = await asyncio.gather(*asked, ask(engine, "last"))
            return replies, await ask(engine, "later")

    replies, later = asyncio.run(body())
    for reply in (replies[-1], later):
        assert isinstance(reply, EngineEndedError)
        assert "probability tensor" in str(reply)
        assert reply.__cause__ is not None
    assert "generation has died" in caplog.text
    assert not generation_threads()


@pytest.mark.parametrize("cause", [None, OSError("no results")])
def test_requests_end_with_the_task_that_watches_generation(cause: OSError | None) -> None:
    async def body() -> list[Reply]:
        async with small_engine(eos_token_id=NEVER) as engine:
            asked = asyncio.create_task(ask(engine, "a", sampling=SamplingParams(900)))
            await asyncio.sleep(0.05)
            if cause is None:
                engine._watching.cancel()
            else:
                engine._batching.get_result = Mock(side_effect=cause)
            return [await asked, await ask(engine, "later")]

    for reply in asyncio.run(body()):
        assert isinstance(reply, EngineEndedError)
        assert "the engine's task was ended" in str(reply)
        assert reply.__cause__ is cause


def test_the_greatest_request_is_the_lesser_of_cache_and_positions() -> None:
    model, _ = build_tiny_model()
    positions = model.config.max_position_embeddings

    async def body(num_blocks: int) -> int:
        engine = small_engine(model, num_blocks=num_blocks, page_size=32, eos_token_id=NEVER)
        with pytest.raises(RuntimeError, match="not running"):
            _ = engine.max_request_tokens
        async with engine:
            limit = engine.max_request_tokens
            room = SamplingParams(max_new_tokens=4)
            fits = [5] * (limit - 4)
            assert isinstance(await ask(engine, "fits", fits, room), GenerationOutput)
            assert isinstance(await ask(engine, "not", [*fits, 5], room), GenerationError)
        return limit

    assert asyncio.run(body(8)) == 8 * 32
    assert asyncio.run(body(2 * positions // 32)) == positions
