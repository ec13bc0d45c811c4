"""Completions of both engines: requests, resumptions, cancellation and whole rollouts."""

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trajpack
from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    always,
    ask,
    drawing,
    gated,
    generate,
    never,
    options,
    say_sglang,
    say_vllm,
    serving,
    sglang_body,
    vllm_body,
)
from trajpack.agent.errors import (
    EngineEndedError,
    MalformedResponseError,
    RequestRefusedError,
    ServerUnavailableError,
)
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.options import TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine
from trajpack.packing.types import VersionSpan

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
NEUTRAL |= {"frequency_penalty": 0.0, "temperature": 1.0, "top_p": 1.0}


async def test_servers_get_token_ids_and_return_a_checked_sample() -> None:
    vllm = {"max_tokens": 16, "top_k": 0, "logprobs": 0, **NEUTRAL}
    sglang = {"max_new_tokens": 16, "top_k": -1, "skip_special_tokens": False, **NEUTRAL}
    sglang |= {"no_stop_trim": True}
    for engine_type, say, ids, expected in (
        (VLLMEngine, say_vllm, "token_ids", vllm),
        (SGLangEngine, say_sglang, "input_ids", sglang),
    ):
        async with serving(engine_type, say, version=3) as ((server,), engine):
            output = await generate(engine, sampling=SamplingParams(16))
        (asked,) = server.draws
        assert asked.payload[ids] == output.prompt_ids == [1, 2, 3]
        assert asked.payload["sampling_params"] == expected
        assert asked.headers["accept-encoding"] == "identity"
        assert output.output_ids.tolist() == [4, 5]
        assert output.output_logprobs.tolist() == [-0.5 if engine_type is VLLMEngine else -0.25] * 2
        assert (output.qid, output.no_eos, output.version_spans) == ("a@0", False, None)
        assert (output.version_start, output.version_end) == (3, 3)


async def test_routed_experts_are_asked_for_and_become_a_field() -> None:
    routes = np.arange(24, dtype=np.int32).reshape(4, 2, 3)
    with io.BytesIO() as file:
        np.save(file, routes.astype(np.uint16))
        npy = base64.b64encode(file.getvalue()).decode()

    vllm = vllm_body([7, 8])
    vllm["choices"][0]["routed_experts"] = npy

    async def sglang(asked: Asked) -> Answer:
        assert asked.payload["return_routed_experts"] is True
        body = sglang_body([7, 8])
        body["meta_info"]["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return Answer(body=body)

    asking = options(routed_experts=(2, 3))
    for engine_type, say in ((VLLMEngine, always(vllm)), (SGLangEngine, drawing(sglang))):
        async with serving(engine_type, say, options=asking) as (_, engine):
            fields = (await generate(engine)).fields
            assert fields is not None
            assert fields["routed_experts"].tolist() == [*routes.tolist(), [[0, 1, 2]] * 2]


@pytest.mark.parametrize(("finish", "matched"), [("stop", 7), ("stop", "bye"), ("length", None)])
async def test_stop_tokens_and_texts_are_ends_and_the_length_is_none(
    finish: str, matched: Any
) -> None:
    bodies = vllm_body([7], finish=finish), sglang_body([7], {"type": finish, "matched": matched})
    sampling = SamplingParams(8, stop=("bye",), stop_token_ids=(7,))
    for engine_type, answer in zip((VLLMEngine, SGLangEngine), bodies, strict=True):
        async with serving(engine_type, always(answer)) as ((server,), engine):
            output = await generate(engine, sampling=sampling)
            assert (output.no_eos, output.stop_reason) == (finish != "stop", finish)
        sent = server.draws[0].payload["sampling_params"]
        assert (sent["stop"], sent["stop_token_ids"]) == (["bye"], [7])
        assert sent["skip_special_tokens"] is False
        assert sent.get("no_stop_trim") or sent["include_stop_str_in_output"]


@pytest.mark.parametrize("status", [403, 404])
async def test_vllm_falls_back_to_completions_once(status: int) -> None:
    async def completions(asked: Asked) -> Answer:
        if asked.path != "/v1/completions":
            return Answer(status, {"error": {"message": "not enabled"}})
        (choice,) = vllm_body([9])["choices"]
        choice |= {"prompt_token_ids": asked.payload["prompt"]}
        return Answer(body={"choices": [choice | {"logprobs": {"token_logprobs": [-2.0]}}]})

    async with serving(VLLMEngine, drawing(completions), options=options(seed=4)) as it:
        (server,), engine = it
        await asyncio.gather(*(generate(engine, f"a@{k}") for k in range(3)))
        output = await generate(engine, "b@0", sampling=SamplingParams(5))
        assert output.output_ids.tolist() == [9]
    paths = sorted(asked.path for asked in server.draws)
    assert paths == ["/inference/v1/generate"] * 3 + ["/v1/completions"] * 4
    payload = server.draws[-1].payload
    assert payload["prompt"] == [1, 2, 3]
    assert (payload["max_tokens"], payload["logprobs"]) == (5, 0)
    assert payload["return_token_ids"] is True
    assert payload["seed"] == derive_seed(4, "b@0", 0)


async def test_seeds_come_from_the_episode_and_the_number_of_the_request() -> None:
    for seed, wanted in ((7, [derive_seed(7, "a@0", k) for k in (0, 1)]), (None, [None, None])):
        async with serving(SGLangEngine, say_sglang, options=options(seed=seed)) as it:
            (server,), engine = it
            await generate(engine)
            await generate(engine)
        params = [asked.payload["sampling_params"] for asked in server.draws]
        assert [one.get("sampling_seed") for one in params] == wanted


async def test_spans_of_versions_become_numbers() -> None:
    spans = [("default", 0, 1), ("8", 1, 3), ("8", 3, 4), ("11", 4, 5)]

    answer = vllm_body([4, 5, 6, 7, 8], versions=spans)
    async with serving(VLLMEngine, always(answer), version=6) as (_, engine):
        output = await generate(engine)
    assert output.version_spans == [
        VersionSpan(6, 0, 1),
        VersionSpan(8, 1, 4),
        VersionSpan(11, 4, 5),
    ]
    assert (output.version_start, output.version_end) == (6, 11)


async def test_sampling_may_be_any_object_and_is_refused_by_name() -> None:
    async with Loopback(say_sglang) as server:
        limited = options(vocab_size=100, max_request_tokens=20)
        async with SGLangEngine(server.url, options=limited) as engine:
            theirs = SimpleNamespace(max_new_tokens=4, greedy=True, stop_token_ids=[5])
            theirs.stop = "</search>"
            await generate(engine, sampling=theirs)
            sent = server.draws[0].payload["sampling_params"]
            assert (sent["temperature"], sent["stop_token_ids"]) == (0.0, [5])
            assert (sent["stop"], sent["no_stop_trim"]) == (["</search>"], True)
            for prompt, sampling, reason in (
                ([1], SimpleNamespace(max_new_tokens=4, n=2), "n=2"),
                ([1], None, "max_new_tokens"),
                ([], SamplingParams(4), "non-empty"),
                ([100], SamplingParams(4), "token id 100 is out of vocabulary"),
                ([1] * 17, SamplingParams(4), "exceed the 20 tokens"),
                ([1], SamplingParams(4, top_p=0.5), "top_p 0.5 and top_k 0"),
            ):
                reply = await ask(engine, "a@0", prompt, sampling)
                assert isinstance(reply, RequestRefusedError), reply
                assert reason in str(reply)
            assert len(server.draws) == 1


async def test_it_serves_within_its_context_and_answers_what_is_in_flight_at_its_end() -> None:
    async with Loopback(drawing(never)) as server:
        engine = VLLMEngine(server.url, options=options())
        with pytest.raises(RuntimeError, match="has not been entered"):
            await generate(engine)
        async with engine:
            asked = [asyncio.create_task(ask(engine, str(k))) for k in range(3)]
            await server.wait_for_draws(3)
        for k, task in enumerate([*asked, asyncio.create_task(ask(engine, "3"))]):
            error = await task
            assert isinstance(error, EngineEndedError)
            assert str(error) == f"episode '{k}': the engine was shut down"
        await asyncio.wait_for(server.noticed.wait(), 5)
        with pytest.raises(RuntimeError, match="once"):
            await engine.__aenter__()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_addresses_are_checked() -> None:
    for urls, reason in (
        ([], "got none"),
        (["ftp://a"], "http://"),
        (["http://a?x=1"], "no query"),
        (["http://a:b"], "expected http://"),
        (["http://a", "http://me:x@a/"], "named twice"),
        (["a:8000"], "expected http://"),
    ):
        with pytest.raises(ValueError, match=reason):
            VLLMEngine(urls)


ABORT = {"type": "abort", "message": "the weights are about to change"}


def in_turn(*answers: Any) -> Callable[[Asked], Awaitable[Answer]]:
    """Give these bodies to draws, one after the other."""
    waiting = iter(answers)

    async def draw(asked: Asked) -> Answer:
        return Answer(body=next(waiting))

    return draw


async def test_an_interrupted_generation_goes_on_where_it_was() -> None:
    draw = in_turn(
        sglang_body([10, 11], ABORT, [("1", 0, 2)]),
        sglang_body([], ABORT, [("2", 0, 0)]),
        sglang_body([12], ABORT, [("2", 0, 1)]),
        sglang_body([13, 14], versions=[("2", 0, 1), ("3", 1, 2)]),
    )
    arguments: dict[str, Any] = {"version": 1, "options": options(seed=5)}
    say = drawing(draw, say_sglang)
    async with serving(SGLangEngine, say, **arguments) as ((server,), engine):
        output = await generate(engine, prompt=[1, 2], sampling=SamplingParams(9))
        sent = [asked.payload for asked in server.draws]
    np.testing.assert_array_equal(output.output_ids, [10, 11, 12, 13, 14])
    assert len(output.output_logprobs) == 5
    assert output.version_spans == [
        VersionSpan(1, 0, 2),
        VersionSpan(2, 2, 4),
        VersionSpan(3, 4, 5),
    ]
    assert (output.version_start, output.version_end, output.no_eos) == (1, 3, False)
    assert output.prompt_ids == [1, 2]
    assert [one["input_ids"] for one in sent] == [
        [1, 2],
        [1, 2, 10, 11],
        [1, 2, 10, 11],
        [1, 2, 10, 11, 12],
    ]
    params = [one["sampling_params"] for one in sent]
    assert [one["max_new_tokens"] for one in params] == [9, 7, 7, 6]
    seeds = [one["sampling_seed"] for one in params]
    assert len(set(seeds)) == 3
    assert seeds[1] == seeds[2]


async def test_parts_of_an_interrupted_generation_fit_together() -> None:
    def part(ids: list[int], finish: str, **fields: Any) -> dict[str, Any]:
        (choice,) = vllm_body(ids, finish=finish)["choices"]
        return {"choices": [choice | fields]}

    begun = part([4, 5], "abort", sampling_mask=[[4, 9], [5]])
    good = part([6], "stop", sampling_mask=[[6, 7]])
    npy = io.BytesIO()
    np.save(npy, np.zeros((4, 2, 3), int))
    short = part([6], "stop", routed_experts=base64.b64encode(npy.getvalue()).decode())
    for options_of, answers, expected in (
        ({}, (begun, good), None),
        ({}, (begun, part([6], "stop")), "sampling_mask of all tokens of a completion or of none"),
        ({}, (part([4, 5], "abort"), good), "sampling_mask of all tokens of a completion"),
        ({"routed_experts": (2, 3)}, (part([4, 5], "abort"), short), "routed_experts of 5 tokens"),
    ):
        draw = drawing(in_turn(*answers))
        async with serving(VLLMEngine, draw, options=options(**options_of)) as (_, engine):
            reply: Any = await ask(engine)
        if isinstance(expected, str):
            assert isinstance(reply, MalformedResponseError)
            assert expected in str(reply)
        else:
            mask = reply.fields["sampling_mask"]
            assert (mask.values.tolist(), mask.cu.tolist()) == ([4, 9, 5, 6, 7], [0, 2, 3, 5])


async def test_an_interruption_at_the_last_token_needs_no_other_request() -> None:
    draw = in_turn(vllm_body([4, 5], finish="abort"))
    async with serving(VLLMEngine, drawing(draw)) as (_, engine):
        output = await generate(engine, sampling=SamplingParams(2))
    assert output.output_ids.tolist() == [4, 5]
    assert output.no_eos


async def test_interruptions_without_a_token_come_to_an_end() -> None:
    brief = options(time_limits=TimeLimits(generation_s=0.1))
    say = always(vllm_body([], finish="abort"))
    async with serving(VLLMEngine, say, options=brief) as ((server,), engine):
        reply = await ask(engine)
        assert isinstance(reply, ServerUnavailableError)
        assert f":{server.port}: no completion within 0.1 s" in str(reply)
        assert 1 < len(server.draws) < 30  # with pauses


async def test_a_generation_does_not_go_on_with_older_weights() -> None:
    draw = in_turn(
        vllm_body([4], finish="abort", versions=[("8", 0, 1)]),
        vllm_body([99, 98], versions=[("7", 0, 2)]),
        vllm_body([5], versions=[("8", 0, 1)]),
    )
    async with serving(VLLMEngine, drawing(draw), version=8) as (_, engine):
        output = await generate(engine)
    assert output.output_ids.tolist() == [4, 5]
    assert (output.version_start, output.version_end) == (8, 8)


@pytest.mark.parametrize(
    "spans",
    [
        [("1", 0, 1)],
        [("1", 0, 2), ("1", 1, 3)],
        [("1", 0, 4)],
        [("1", 1, 3)],
        [("2", 0, 1), ("1", 1, 3)],
        [("99999999999", 0, 3)],
        [("1" * 5000, 0, 3)],
        [("1", 0, 5), ("1", 5, 3)],
        [],
    ],
)
async def test_spans_that_make_no_sense_are_refused(spans: Any) -> None:
    async with serving(VLLMEngine, always(vllm_body([4, 5, 6], versions=spans))) as (_, engine):
        reply = await ask(engine)
        assert isinstance(reply, MalformedResponseError)
        assert "weight_versions" in str(reply)


@pytest.mark.parametrize(
    ("engine_type", "say"), [(SGLangEngine, say_sglang), (VLLMEngine, say_vllm)]
)
async def test_a_cancelled_call_frees_its_server_and_leaves_others_alone(
    engine_type: Any, say: Any
) -> None:
    gate = asyncio.Event()
    async with serving(engine_type, gated(gate, say)) as ((server,), engine):
        gone, stays = (asyncio.create_task(generate(engine)) for _ in range(2))
        await server.wait_for_draws(2)
        gone.cancel()
        await asyncio.wait_for(server.noticed.wait(), 5)
        assert len(server.hung_up) == 1
        gate.set()
        assert (await stays).output_ids.tolist() == [4, 5]
        assert gone.cancelled()
        assert engine._calls == set()


async def test_a_cancelled_request_gives_its_turn_to_the_next() -> None:
    async def draw(asked: Asked) -> Answer:
        return await (never(asked) if asked.payload["token_ids"] == [1] else say_vllm(asked))

    one = options(max_connections=1)
    async with serving(VLLMEngine, drawing(draw), options=one) as ((server,), engine):
        first = asyncio.create_task(generate(engine, "first", [1]))
        await server.wait_for_draws(1)
        second = asyncio.create_task(generate(engine, "second"))
        third = asyncio.create_task(generate(engine, "third"))
        await asyncio.sleep(0.02)
        assert len(server.draws) == 1
        first.cancel()
        await asyncio.gather(second, third)


async def test_a_missing_logprob_is_told_once_and_marked_for_corrections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say = always(vllm_body([7, 8, 9], [-0.5, None, -9999.0]))

    async def outputs(**changes: Any) -> list[Any]:
        async with serving(VLLMEngine, say, options=options(**changes)) as (_, engine):
            return [await ask(engine) for _ in range(2)]

    for output in await outputs():
        assert (output.output_logprobs.tolist(), output.fields) == ([-0.5, 0, 0], None)
    told = "no log-probability of 2 of 3 tokens: 0 is taken (missing_logprobs)"
    assert [record.getMessage() for record in caplog.records] == [told]
    for reply in await outputs(missing_logprobs="refuse"):
        assert isinstance(reply, MalformedResponseError)
    output, _ = await outputs(missing_logprobs="mark")
    turn = trajpack.Turn([1], output.output_ids, output.output_logprobs, fields=output.fields)
    field = trajpack.TokenField("logprob_missing", torch.bool)
    batch = trajpack.pack([trajpack.Trajectory("a", [turn])], fields=[field])
    assert batch.fields["logprob_missing"].tolist() == [False, False, True, True]
