"""The fast reader and the standard one tell the same of whatever a body may hold."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.agent.servers.responses.vllm_bodies import LIMITS, chat, completions, encode, generate
from trajpack.agent.servers.engine_response import EngineResponse, read_vllm_response
from trajpack.agent.servers.responses import vllm as vllm_json


def same_array(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and np.array_equal(left, right)


def same(left: EngineResponse, right: EngineResponse) -> bool:
    return (
        same_array(left.prompt_ids, right.prompt_ids)
        and same_array(left.output_ids, right.output_ids)
        and same_array(left.output_logprobs, right.output_logprobs)
        and left.finish_reason == right.finish_reason
        and left.weight_versions == right.weight_versions
    )


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
    ("prompt_token_ids",),
    ("choices", 0),
    *(("choices", 0, name) for name in completions()["choices"][0]),
    ("choices", 0, "weight_versions"),
    ("choices", 0, "token_ids", 1),
    ("choices", 0, "prompt_token_ids", 1),
    ("choices", 0, "logprobs", "token_logprobs"),
    ("choices", 0, "logprobs", "token_logprobs", 1),
    ("choices", 0, "logprobs", "content"),
    ("choices", 0, "logprobs", "content", 1),
    ("choices", 0, "logprobs", "content", 1, "logprob"),
]


def outcome(body: bytes, sample: Any) -> EngineResponse | str:
    """What reading gives when the fast path gives ``sample``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_json, "_msgspec_decoder", lambda: sample)
        try:
            return read_vllm_response(body, LIMITS)
        except ValueError as error:
            return str(error)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.sampled_from([generate, completions, chat]),
    place=st.sampled_from(PLACES),
    value=VALUES,
    cut=st.one_of(st.none(), st.integers(0, 600)),
)
def test_both_readers_tell_the_same(shape: Any, place: Any, value: Any, cut: int | None) -> None:
    pytest.importorskip("msgspec", exc_type=ImportError)
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
    slow, fast = outcome(body, None), outcome(body, vllm_json._msgspec_decoder())
    if isinstance(slow, str) or isinstance(fast, str):
        assert slow == fast
    else:
        assert same(slow, fast)
