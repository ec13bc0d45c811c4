"""Both readers of a response: every shape, every limit, and what is refused in which words."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agent.servers.responses.vllm_bodies import (
    IDS,
    LIMITS,
    LOGPROBS,
    PROMPT,
    chat,
    choice,
    completions,
    encode,
    generate,
)
from trajpack.agent.servers.engine_response import ResponseLimits, read_vllm_response
from trajpack.agent.servers.responses import vllm as vllm_json
from trajpack.packing import TrajectoryBuffer
from trajpack.packing.types import Trajectory, Turn

RECORDED = Path(__file__).parents[4] / "shared" / "contracts"


@pytest.fixture(params=["msgspec", "json"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read with and without the fast library."""
    if request.param == "msgspec":
        pytest.importorskip("msgspec", exc_type=ImportError)
    else:
        monkeypatch.setitem(sys.modules, "msgspec", None)
    vllm_json._msgspec_decoder.cache_clear()
    yield read_vllm_response
    vllm_json._msgspec_decoder.cache_clear()


@pytest.mark.parametrize("shape", [generate, completions, chat])
def test_each_shape_becomes_arrays(reader: Any, shape: Any) -> None:
    response = reader(encode(shape()), LIMITS)
    assert response.output_ids.dtype == np.int32
    assert response.output_ids.tolist() == IDS
    assert response.output_logprobs.dtype == np.float32
    assert response.output_logprobs.tolist() == np.float32(LOGPROBS).tolist()
    assert response.finish_reason == "length"
    if shape is generate:
        assert response.prompt_ids is None
        assert response.weight_versions == (("7", 0, 1), ("8", 1, 3))
    else:
        assert response.prompt_ids.dtype == np.int32
        assert response.prompt_ids.tolist() == PROMPT
        assert response.weight_versions is None


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded responses are not here")
def test_recorded_responses_are_read(reader: Any) -> None:
    for name, num_tokens in (
        ("vllm_inference_v1_generate", 3),
        ("vllm_v1_completions", 3),
        ("vllm_v1_chat_completions", 2),
    ):
        body = (RECORDED / f"{name}.json").read_bytes()
        recorded = json.loads(body)
        response = reader(body, LIMITS)
        assert response.output_ids.tolist() == recorded["choices"][0]["token_ids"]
        assert response.output_logprobs.shape == (num_tokens,)


@pytest.mark.parametrize("shape", [generate, completions, chat])
def test_msgspec_reads_each_shape_by_itself(monkeypatch: pytest.MonkeyPatch, shape: Any) -> None:
    pytest.importorskip("msgspec", exc_type=ImportError)
    vllm_json._msgspec_decoder.cache_clear()
    expected = vllm_json.read_with_json(encode(shape()))

    def refuse(body: bytes) -> Any:
        raise AssertionError("a well-formed body was left to json")

    monkeypatch.setattr(vllm_json, "read_with_json", refuse)
    assert vllm_json.read_sample(encode(shape())) == expected


def test_an_empty_completion_is_read(reader: Any) -> None:
    response = reader(encode(generate(token_ids=[], logprobs={"content": []})), LIMITS)
    assert response.output_ids.shape == response.output_logprobs.shape == (0,)


def test_whole_numbers_are_log_probabilities(reader: Any) -> None:
    body = encode(generate(token_ids=[1, 2], logprobs={"token_logprobs": [0, -3]}))
    assert reader(body, LIMITS).output_logprobs.tolist() == [0.0, -3.0]


def test_broken_characters_in_a_text_do_not_matter(reader: Any) -> None:
    body = encode(completions(text="MARK")).replace(b"MARK", b"\xff\xfe")
    assert reader(body, LIMITS).output_ids.tolist() == IDS


def test_the_limits_themselves_are_accepted(reader: Any) -> None:
    body = encode(completions(token_ids=[999, 0, 1]))
    limits = ResponseLimits(max_tokens=3, vocab_size=1000, max_bytes=len(body))
    assert reader(body, limits).output_ids.tolist() == [999, 0, 1]


def logprobs(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"token_logprobs": [*values]}}


def entries(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [*values]}}


GOOD = {"logprob": -0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "'token_ids' to be an array in choices[0], got null"),
        ({"token_ids": "207"}, "'token_ids' to be an array in choices[0], got a string"),
        ({"token_ids": [1, True, 2]}, "integers in token_ids, got a boolean at index 1"),
        ({"token_ids": [1, 2.0, 3]}, "integers in token_ids, got a fraction at index 1"),
        ({"token_ids": [1, 2, None]}, "integers in token_ids, got null at index 2"),
        ({"token_ids": [[1], 2, 3]}, "integers in token_ids, got an array at index 0"),
        ({"token_ids": [1, -1, 2]}, "token_ids must be 0 or more, got -1 at index 1"),
        ({"token_ids": [1, 2, 1000]}, "ids below 1000 in token_ids, got 1000 at index 2"),
        ({"token_ids": [1, 2, 2**31]}, f"token_ids must be in [0, {2**31 - 1}], got {2**31} at"),
        ({"token_ids": [1, 2, 10**40]}, f"token_ids must be in [0, {2**31 - 1}], got 1000"),
        (
            {"token_ids": [1, 2]},
            "2 log-probabilities, one for each of token_ids in logprobs, got 3",
        ),
        ({"token_ids": [1] * 65}, "at most 64 tokens in token_ids, got 65"),
        ({"prompt_token_ids": [5, 1000]}, "ids below 1000 in prompt_token_ids, got 1000 at index"),
        ({"prompt_token_ids": [5, "6"]}, "integers in prompt_token_ids, got a string at index 1"),
        (
            {"prompt_token_ids": 5},
            "'prompt_token_ids' to be an array or null in choices[0], got an",
        ),
        ({"finish_reason": None}, "'finish_reason' to be a string in choices[0], got null"),
        ({"finish_reason": 3}, "'finish_reason' to be a string in choices[0], got an integer"),
        ({"logprobs": None}, "'logprobs' to be an object in choices[0], got null"),
        ({"logprobs": [-1.0]}, "'logprobs' to be an object in choices[0], got an array"),
        ({"logprobs": {}}, "'token_logprobs' to be an array in logprobs, got nothing"),
        (logprobs(-1, None, -2), "numbers in token_logprobs, got null at index 1"),
        (logprobs(-1, "x", -2), "numbers in token_logprobs, got a string at index 1"),
        (logprobs(-1, False, -2), "numbers in token_logprobs, got a boolean at index 1"),
        (logprobs(-1, -2), "3 log-probabilities, one for each of token_ids in logprobs, got 2"),
        (logprobs(-1, -2, float("nan")), "logprobs must be finite float32, got nan at index 2"),
        (logprobs(-float("inf"), -2, -3), "logprobs must be finite float32, got -inf at index 0"),
        (logprobs(-1, -1e39, -3), "logprobs must be finite float32, got -"),
        (logprobs(-1, -(10**400), -3), "logprobs must be finite float32, got -1000"),
        (
            logprobs(-1, -2, -9999.0),
            "a log-probability above -9999 at index 2 in logprobs, got -99",
        ),
        (
            entries(GOOD, {}, GOOD),
            "'logprob' to be an integer or a fraction in logprobs.content[1]",
        ),
        (entries(GOOD, None, GOOD), "an object in logprobs.content[1], got null"),
        (
            entries(GOOD, GOOD, {"logprob": None}),
            "numbers in logprobs.content, got null at index 2",
        ),
        (entries(GOOD), "3 log-probabilities, one for each of token_ids in logprobs, got 1"),
        ({"weight_versions": [{"version": 7, "start": 0, "end": 3}]}, "'version' to be a string"),
        ({"weight_versions": [{"version": "7", "end": 3}]}, "'start' to be an integer in weight_v"),
        ({"weight_versions": ["7"]}, "an object in weight_versions[0], got a string"),
        ({"weight_versions": "7"}, "'weight_versions' to be an array or null in choices[0], got a"),
    ],
)
def test_a_wrong_part_is_refused_by_name(reader: Any, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^vLLM response: ") as caught:
        reader(encode(completions(**changes)), LIMITS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b'{"choices": [1, 2', "expected JSON"),
        (encode(generate()) + b"x", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"text": ' + b"[" * 100_000, "expected JSON"),
        (b'{"choices": 1' + b"0" * 5000 + b"}", "expected JSON"),
        (b"null", "an object in the body, got null"),
        (b"[]", "an object in the body, got an array"),
        (b"{}", "'choices' to be an array in the body, got nothing"),
        (b'{"choices": []}', "one sample in choices, got 0"),
        (encode({"choices": [choice(), choice()]}), "one sample in choices, got 2"),
        (b'{"choices": [5]}', "an object in choices[0], got an integer"),
        (
            b'{"error": {"message": "Token id 21999 is out of vocabulary", "code": 400}}',
            "a sample in the body, got the error {'message': 'Token id 21999 is out of vocabulary'",
        ),
        (b" " * (LIMITS.max_bytes + 1), f"at most {LIMITS.max_bytes} bytes in body, got 671088"),
    ],
    ids=range(15),
)
def test_a_wrong_body_is_refused(reader: Any, body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"^vLLM response: ") as caught:
        reader(body, LIMITS)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_body_over_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(body: bytes) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr("trajpack.agent.servers.engine_response.read_sample", refuse)
    with pytest.raises(ValueError, match="at most 10 bytes"):
        read_vllm_response(b" " * 11, ResponseLimits(max_tokens=1, max_bytes=10))


@pytest.mark.parametrize("name", ["max_tokens", "vocab_size", "max_bytes"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ResponseLimits(**({"max_tokens": 1} | {name: 0}))


def test_a_reply_holds_the_arrays_themselves() -> None:
    response = read_vllm_response(encode(completions(finish_reason="stop")), LIMITS)
    output = response.to_output("q1", [0], version_start=3, version_end=4)
    assert output.prompt_ids is response.prompt_ids
    assert output.output_ids is response.output_ids
    assert output.output_logprobs is response.output_logprobs
    assert (output.qid, output.no_eos) == ("q1", False)
    assert (output.version_start, output.version_end, output.version_spans) == (3, 4, None)


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_reply_without_prompt_ids_takes_what_was_sent(reason: str) -> None:
    response = read_vllm_response(encode(generate(finish_reason=reason)), LIMITS)
    sent = np.int32(PROMPT)
    output = response.to_output("q1", sent, 7, 8, version_spans=[(7, 0, 1), (8, 1, 3)])
    assert output.prompt_ids is sent
    assert output.no_eos
    assert output.version_spans == [(7, 0, 1), (8, 1, 3)]


def test_the_arrays_are_packed() -> None:
    output = read_vllm_response(encode(completions()), LIMITS).to_output("q1", [], 0, 0)
    turn = Turn(output.prompt_ids, output.output_ids, output.output_logprobs)
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(Trajectory("q1", [turn]))
    assert buffer.pack().input_ids.tolist() == PROMPT + IDS
