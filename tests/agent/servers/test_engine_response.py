"""Reading responses of vLLM: every shape, every limit, and the wording of refusals."""

import base64
import io
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.agent.servers.loopback import encode, sglang_body
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.engine_response import (
    ResponseLimits,
    read_response,
    read_sglang_response,
    read_vllm_response,
)
from trajpack.agent.servers.options import ServerOptions

SAMPLING = SamplingParams(64)
OPTIONS = ServerOptions(vocab_size=1000)
IDS = [207, 129, 350]
LOGPROBS = [-6.238356590270996, -5.727456569671631, -5.730677604675293]
PROMPT = [369, 349, 198, 20, 21]


def choice(**changes: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": IDS} | changes


def generate(**changes: Any) -> dict[str, Any]:
    """``/inference/v1/generate``."""
    content = [
        {"token_id": i, "logprob": v, "rank": 3, "top_logprobs": [{"token_id": i, "logprob": v}]}
        for i, v in zip(IDS, LOGPROBS, strict=True)
    ]
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    defaults = {"logprobs": {"content": content}, "weight_versions": spans}
    return {"prompt_token_ids": None, "choices": [choice(**(defaults | changes))]}


def completions(**changes: Any) -> dict[str, Any]:
    """``/v1/completions``."""
    logprobs = {
        "text_offset": [0, 1, 1],
        "token_logprobs": LOGPROBS,
        "tokens": ["\x13", "", "ant"],
        "top_logprobs": [{"\x13": -6.2}, {"": -5.7}, {"ant": -5.7}],
    }
    defaults = {"text": "\x13\ufffdant", "logprobs": logprobs, "prompt_token_ids": PROMPT}
    return {"object": "text_completion", "choices": [choice(**(defaults | changes))]}


def read(response: Any) -> Any:
    return read_response("vLLM", encode(response), SAMPLING, options=OPTIONS)


@pytest.mark.parametrize("shape", [generate, completions])
def test_each_shape_becomes_arrays(shape: Any) -> None:
    response = read(shape())
    assert response.output_ids.dtype == np.int32
    assert response.output_ids.tolist() == IDS
    assert response.output_logprobs.dtype == np.float32
    assert response.output_logprobs.tolist() == np.float32(LOGPROBS).tolist()
    assert response.finish_reason == "length"
    if shape is generate:
        assert response.weight_versions == [("7", 0, 1), ("8", 1, 3)]
    else:
        assert response.weight_versions == [("", 0, 3)]


def test_odd_answers_that_are_well_are_read() -> None:
    response = read(generate(token_ids=[], logprobs={"content": []}))
    assert response.output_ids.shape == response.output_logprobs.shape == (0,)
    response = read(generate(token_ids=[1, 2], logprobs={"token_logprobs": [0, -3]}))
    assert response.output_logprobs.tolist() == [0.0, -3.0]
    body = encode(completions(text="MARK")).replace(b"MARK", b"\xff\xfe")
    assert read_response("vLLM", body, SAMPLING, options=OPTIONS).output_ids.tolist() == IDS
    body = encode(completions(token_ids=[999, 0, 1]))
    assert read_response("vLLM", body, SamplingParams(3), options=OPTIONS).output_ids.tolist() == [
        999,
        0,
        1,
    ]


def logprobs(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"token_logprobs": [*values]}}


def test_log_probabilities_are_of_the_tokens_beside_them() -> None:
    for tokens in (
        {"content": [{"logprob": -1, "token_id": i} for i in (207, 130, 350)]},
        {"content": [{"logprob": -1, "token": f"token_id:{i}"} for i in (207, 130, 350)]},
        {"token_logprobs": [-1] * 3, "tokens": ["token_id:207", "token_id:130", "token_id:350"]},
    ):
        with pytest.raises(ValueError, match="the token 129 at index 1 in logprobs, got 130"):
            read(generate(logprobs=tokens))


def test_a_repeated_prompt_is_the_one_that_was_sent() -> None:
    for body in (completions(), generate() | {"prompt_token_ids": PROMPT}):
        for sent, message in (
            (PROMPT, None),
            ([369, 349, 198, 20, 22], "the token 22 at index 4 in prompt_token_ids, got 21"),
            (PROMPT[:4], "4 tokens in prompt_token_ids, got 5"),
        ):
            with nullcontext() if message is None else pytest.raises(ValueError, match=message):
                read_response("vLLM", encode(body), SAMPLING, options=OPTIONS, prompt=sent)
    body = sglang_body([4, 5]) | {"prompt_token_ids": [1]}
    with pytest.raises(ValueError, match="the token 2 at index 0 in prompt_token_ids, got 1"):
        read_response("SGLang", encode(body), SAMPLING, prompt=[2])


def entries(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [*values]}}


def masks(*rows: Any) -> dict[str, Any]:
    return {"sampling_mask": [*rows]}


def npy(routes: Any) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def test_masks_and_routes_are_read() -> None:
    routes, asking = np.arange(42).reshape(7, 2, 3), replace(OPTIONS, routed_experts=(2, 3))
    for shape in (generate, completions):
        body = encode(shape(sampling_mask=[[5, 207], [], [350]], routed_experts=npy(routes)))
        response = read_response("vLLM", body, SAMPLING, options=asking)
        mask = response.fields["sampling_mask"]
        assert mask.cu.tolist() == [0, 2, 2, 3]
        assert mask.values.tolist() == [5, 207, 350]
        assert np.array_equal(response.fields["routed_experts"], routes)
        assert "routed_experts" not in read_response("vLLM", body, SAMPLING, options=OPTIONS).fields


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "--enable-return-routed-experts, got none"),
        ("*", "routed_experts: "),
        (base64.b64encode(b"\0" * 28).decode(), "routed_experts: cannot reshape"),
        (base64.b64encode(b"\x93NUMPY\1\0").decode(), "routed_experts: "),
        (
            npy(np.zeros((7, 3, 2), np.int32)),
            r"integers \[tokens, 2, 3\] in routed_experts, got int32",
        ),
        (npy(np.zeros((7, 2, 3), np.float32)), "got float32"),
        (npy(np.array([{}])), "routed_experts: Object arrays cannot be loaded"),
    ],
)
def test_wrong_routes_are_refused(given: Any, message: str) -> None:
    asking = replace(OPTIONS, routed_experts=(2, 3))
    with pytest.raises(ValueError, match=f"vLLM response: .*{message}"):
        read_response("vLLM", encode(generate(routed_experts=given)), SAMPLING, options=asking)


GOOD = {"logprob": -0.5}
CHOICE = "at `$.choices[0]"
AT_1 = "a log-probability at index 1 in logprobs, got"


MISSING: list[Any] = [
    {"logprobs": {"token_logprobs": [-1.0, None, -2.0]}},
    {"logprobs": {"token_logprobs": [-1.0, math.nan, -2.0]}},
    {"logprobs": {"token_logprobs": [-1.0, -9999.0, -2.0]}},
    {"logprobs": {"content": [{"logprob": -1.0}, {"logprob": None}, {"logprob": -2.0}]}},
    {"logprobs": {"content": [{"logprob": -1.0}, {"logprob": math.nan}, {"logprob": -2.0}]}},
]


@pytest.mark.parametrize("changes", MISSING)
@pytest.mark.parametrize("dialect", ["vLLM", "SGLang"])
def test_a_missing_logprob_is_0_and_marked_or_refused(changes: Any, dialect: Any) -> None:
    given = changes["logprobs"]
    values = given.get("token_logprobs") or [one["logprob"] for one in given["content"]]
    if dialect == "vLLM":
        body = encode(generate(**changes))
    else:
        pairs = [[value, token, "a NaN, too"] for value, token in zip(values, IDS, strict=True)]
        answer = sglang_body(IDS)
        answer["meta_info"]["output_token_logprobs"] = pairs
        body = encode(answer)
    for how in ("zero", "mark"):
        marking = replace(OPTIONS, missing_logprobs=how)
        response = read_response(dialect, body, SAMPLING, options=marking)
        assert response.output_logprobs.tolist() == [-1.0, 0.0, -2.0]
        assert response.fields["logprob_missing"].tolist() == [False, True, False]
    refusing = replace(OPTIONS, missing_logprobs="refuse")
    with pytest.raises(ValueError, match=f"{dialect} response: expected {AT_1}"):
        read_response(dialect, body, SAMPLING, options=refusing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, f"Expected `array`, got `null` - {CHOICE}.token_ids`"),
        ({"token_ids": [1, True, 2]}, f"Expected `int`, got `bool` - {CHOICE}.token_ids[1]`"),
        ({"token_ids": [1, -1, 2]}, "token_ids must be 0 or more, got -1 at index 1"),
        ({"token_ids": [1, 2, 1000]}, "ids below 1000 in token_ids, got 1000 at index 2"),
        ({"token_ids": [1, 2, 2**31]}, f"token_ids must be in [0, {2**31 - 1}], got {2**31} at"),
        ({"token_ids": [1, 2]}, "2 rows, one for each of token_ids in logprobs, got "),
        ({"token_ids": [1] * 65}, "at most 64 tokens in token_ids, got 65"),
        ({"finish_reason": "error"}, "stop, length or abort as finish reason, got 'error'"),
        ({"logprobs": {}}, "content or token_logprobs in logprobs, got neither"),
        (logprobs(-1, -2), "3 rows, one for each of token_ids in logprobs, got 2"),
        (logprobs(-1, -1e39, -3), "logprobs must be finite float32, got -"),
        (logprobs(-1, -(10**400), -3), f"out of range - {CHOICE}.logprobs.token_logprobs[1]`"),
        (logprobs(-1, 0.02, None), "0 or less in logprobs, got 0.0199"),
        (entries(GOOD), "3 rows, one for each of token_ids in logprobs, got 1"),
        (masks([207], [129]), "3 rows, one for each of token_ids in sampling_mask, got 2"),
        (masks([207], [129], [350, 1000]), "ids below 1000 in sampling_mask, got 1000 at index 3"),
        (masks([207], [129, -1], [350]), "sampling_mask must be 0 or more, got -1 at index 2"),
    ],
)
def test_a_wrong_part_is_refused_by_name(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^vLLM response: ") as caught:
        read(completions(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "expected JSON"),
        (encode(generate()) + b"x", "expected JSON"),
        (b'{"text": ' + b"[" * 100_000, "expected JSON"),
        (b"null", "Expected `object`, got `null`"),
        (b"{}", "Object missing required field `choices`"),
        (b'{"choices": []}', "one sample in choices, got 0"),
        (encode({"choices": [choice(**logprobs())] * 2}), "one sample in choices, got 2"),
        (
            b'{"error": {"message": "Token id 21999 is out of vocabulary", "code": 400}}',
            'field `choices`, in {"error": {"message": "Token id 21999 is out of vocabulary"',
        ),
    ],
    ids=range(8),
)
def test_a_wrong_body_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"^vLLM response: ") as caught:
        read_response("vLLM", body, SAMPLING, options=OPTIONS)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 700


def sglang(**changes: Any) -> bytes:
    body = sglang_body([4, 5])
    body["meta_info"] |= changes
    return encode(body)


def stop(matched: Any) -> bytes:
    return sglang(finish_reason={"type": "stop", "matched": matched})


PAIR = [-1, 5, None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"choices": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "recursion"),
        (sglang(output_token_logprobs=[[-1], PAIR]), "at least length 2"),
        (
            sglang(output_token_logprobs=[[-1, 4], [-1, 6]]),
            "the token 5 at index 1 in logprobs, got 6",
        ),
        (sglang(output_token_logprobs=[[-1, 4]]), "2 rows, one"),
        (stop(6), "one of the stop tokens [6]"),
        (stop([6, 7]), "one of the stop tokens [6, 7] at the end in output_ids, got 5"),
        (
            sglang(finish_reason={"type": "tool_calls"}),
            "stop, length or abort as finish reason, got 'tool_calls'",
        ),
        (stop([5, "x"]), "Expected `int`, got `str` - at `$.meta_info.finish_reason.matched[1]`"),
        (stop("NaN happened"), "a text of the request in matched, got 'NaN happened'"),
        (encode(sglang_body([4, 1000])), "ids below 1000"),
        (encode({"output_ids": [5]}), "meta_info"),
        (b'{"error": {"message": "no"}}', "Object missing required field `output_ids`"),
    ],
    ids=range(12),
)
def test_a_wrong_part_of_sglangs_is_refused_by_name(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"^SGLang response: ") as caught:
        read_response("SGLang", body, SAMPLING, options=OPTIONS)
    assert message in str(caught.value)


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 1200),
        st.integers(2**31 - 1, 2**64),
        st.floats(),
        st.text(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["logprob", "content", "version"]), inner, max_size=2),
    ),
    max_leaves=4,
)
PLACES = [
    ("choices",),
    ("choices", 0),
    *(("choices", 0, name) for name in completions()["choices"][0]),
    ("choices", 0, "weight_versions"),
    ("choices", 0, "token_ids", 1),
    ("choices", 0, "logprobs", "token_logprobs"),
    ("choices", 0, "logprobs", "token_logprobs", 1),
    ("choices", 0, "logprobs", "content"),
    ("choices", 0, "logprobs", "content", 1),
    ("choices", 0, "logprobs", "content", 1, "logprob"),
]


@settings(max_examples=100, deadline=None)
@given(
    shape=st.sampled_from([generate, completions]),
    place=st.sampled_from(PLACES),
    value=VALUES,
    cut=st.one_of(st.none(), st.integers(0, 600)),
)
def test_any_body_is_read_as_it_says_or_refused(
    shape: Any, place: Any, value: Any, cut: int | None
) -> None:
    response = json.loads(encode(shape()))
    parent = response
    for step in place[:-1]:
        if isinstance(parent, dict):
            parent = parent.setdefault(step, {})
        elif isinstance(parent, list) and len(parent) > step:
            parent = parent[step]
    if isinstance(parent, dict) or (isinstance(parent, list) and place[-1] < len(parent)):
        parent[place[-1]] = value
    body = encode(response)[:cut]
    try:
        got = read_response("vLLM", body, SAMPLING, options=OPTIONS)
    except ValueError as error:
        assert str(error).startswith("vLLM response: ")  # noqa: PT017 - both outcomes are fine
        return
    (said,) = json.loads(body)["choices"]
    numbers = said["logprobs"].get("content")
    if numbers is None:
        numbers = [{"logprob": one} for one in said["logprobs"]["token_logprobs"]]
    assert all(type(one) is int and 0 <= one < 1000 for one in said["token_ids"])
    assert got.output_ids.tolist() == said["token_ids"]
    given_values = [one["logprob"] for one in numbers]
    wanted = [None if one in (None, -9999) or math.isnan(one) else one for one in given_values]
    assert got.fields["logprob_missing"].tolist() == [one is None for one in wanted]
    assert got.output_logprobs.tolist() == [float(np.float32(one or 0)) for one in wanted]
    assert np.isfinite(got.output_logprobs).all()
    assert got.finish_reason == said["finish_reason"]


def test_a_response_is_read_for_a_request_that_is_known_by_its_limits() -> None:
    vllm = (
        b'{"choices": [{"token_ids": [7, 2], "finish_reason": "stop",'
        b' "logprobs": {"token_logprobs": [-0.5, null]}}]}'
    )
    sglang = (
        b'{"output_ids": [7], "meta_info": {"finish_reason": {"type": "stop", "matched": "x"},'
        b' "output_token_logprobs": [[-0.5, 7, null]]}}'
    )
    assert read_vllm_response(vllm, ResponseLimits(8)).output_logprobs.tolist() == [-0.5, 0.0]
    assert read_sglang_response(sglang, ResponseLimits(8, ("x",))).output_ids.tolist() == [7]
    with pytest.raises(ValueError, match="at most 1 tokens in token_ids, got 2"):
        read_vllm_response(vllm, ResponseLimits(1))
