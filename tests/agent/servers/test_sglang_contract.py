"""`SGLangEngine` against the types that SGLang publishes: its own decoder stands in the server."""

import ast
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.agent.servers.loopback import Answer, Asked, generate, options, serving
from tests.packing.adapters.peers import find_peer
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.engine_response import read_response
from trajpack.agent.servers.sglang import SGLangEngine

SAMPLING = SamplingParams(64)
CONTROL_TYPES = {
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
}
few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's description of its HTTP interface, which needs nothing of SGLang itself."""
    peer = find_peer("sglang", monkeypatch)
    peer.without_init("sglang")
    return peer.load("sglang.api.v1.api_types")


def control_types(api: ModuleType) -> dict[str, Any]:
    """Return what the server's orders are decoded into, cut out of a module that needs a GPU."""
    source = Path(str(api.__file__)).parents[2] / "srt" / "managers" / "io_struct.py"
    wanted = {"BaseReq", *CONTROL_TYPES.values()}
    classes = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in wanted
    ]
    names: dict[str, Any] = {"msgspec": msgspec}
    exec("from typing import *", names)
    exec(compile(ast.Module(classes, []), str(source), "exec"), names)
    return {path: names[name] for path, name in CONTROL_TYPES.items()}


def unread_keys(sent: Any, kept: Any) -> set[str]:
    """Return the keys of ``sent``, at any depth, that a decoder has not kept with their values."""
    lost = set()
    for key, value in sent.items():
        if isinstance(value, dict):
            lost |= unread_keys(value, getattr(kept, key))
        elif getattr(kept, key, object()) != value:
            lost.add(key)
    return lost


def response(api: ModuleType, ids: list[int], **changes: Any) -> bytes:
    """Return a response as SGLang's own encoder writes it."""
    meta: dict[str, Any] = {
        "id": "r",
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "finish_reason": api.FinishLength(length=len(ids)),
        "output_token_logprobs": [
            api.LogprobEntry(logprob=-0.25 * (k + 1), token_id=i, text=None)
            for k, i in enumerate(ids)
        ],
        "output_token_logprobs_length": len(ids),
        "weight_version": "7",
        "weight_versions": [api.WeightVersionSpan(version="7", start=0, end=len(ids))],
    }
    whole = {
        name: changes.pop(name) for name in ("output_ids", "prompt_token_ids") if name in changes
    }
    info = api.GenerateMetaInfo(**(meta | changes))
    answer = api.GenerateResponse(**({"text": "é", "output_ids": ids, "meta_info": info} | whole))
    return json.dumps(answer.to_json_value()).encode()


async def test_every_request_is_taken_whole_by_the_published_types(api: ModuleType) -> None:
    async def say(asked: Asked) -> Answer:
        if asked.path != "/generate":
            return Answer(body={"success": True} if asked.path.startswith("/update") else b"")
        request = api.GenerateRequest.from_json_value(asked.payload)
        assert unread_keys(asked.payload, request) == set()
        return Answer(
            body=response(api, [request.input_ids[-1] + 1], prompt_token_ids=request.input_ids)
        )

    async with serving(SGLangEngine, say, options=options(seed=5)) as ((server,), engine):
        await generate(engine, "a", [1, 2], SamplingParams(8, temperature=0.5))
        await generate(engine, "b", [3], SamplingParams(8, stop=("a",), stop_token_ids=(9, 4)))
        await engine.set_version(8)
        for interrupt in (False, True):
            await engine.pause(interrupt=interrupt)
            await engine.resume()
        await engine.update_weights_from_disk("weights", 9)
    draws = [one.payload for one in server.asked if one.path == "/generate"]
    params = draws[-1]["sampling_params"]
    assert (params["stop"], params["stop_token_ids"]) == (["a"], [9, 4])
    assert {draw["input_ids"][-1] for draw in draws[-2:]} == {2, 3}
    types = control_types(api)
    ordered = [one for one in server.asked if one.path in types]
    assert {one.path for one in ordered} == set(types)
    for one in ordered:
        kind = types[one.path]
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        assert set(one.payload) <= set(fields), one.path
        for name, value in one.payload.items():
            msgspec.convert(value, fields[name], strict=True)


def test_the_published_types_do_refuse_what_they_do_not_know(api: ModuleType) -> None:
    with pytest.raises(api.JsonContractError, match="max_tokens"):
        api.GenerateRequest.from_json_value({"sampling_params": {"max_tokens": 3}})
    order = {"rid": "a"}
    assert unread_keys(order, api.AbortRequest.from_json_value(order)) == set()
    assert unread_keys({"rib": "a"}, api.AbortRequest.from_json_value({"rib": "a"})) == {"rib"}


@few
@given(
    ids=st.lists(st.integers(0, 999), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=3),
    kind=st.sampled_from(["stop", "length", "abort"]),
    has_prompt=st.booleans(),
    has_list=st.booleans(),
)
def test_responses_of_the_published_types_become_arrays(
    api: ModuleType, ids: list[int], cuts: list[int], kind: str, has_prompt: bool, has_list: bool
) -> None:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    spans = [(str(k), *edges[k : k + 2]) for k in range(len(edges) - 1)]
    finish = {
        "stop": api.FinishStop(matched=[7, ids[-1]] if has_list else ids[-1]),
        "length": api.FinishLength(length=len(ids)),
        "abort": api.FinishAbort(message="paused", status_code=None, err_type=None),
    }[kind]
    changes: dict[str, Any] = {"prompt_token_ids": [4, 5]} if has_prompt else {}
    changes["weight_versions"] = [
        api.WeightVersionSpan(version=name, start=start, end=end) for name, start, end in spans
    ]
    got = read_response("SGLang", response(api, ids, finish_reason=finish, **changes), SAMPLING)
    assert got.output_ids.tolist() == ids
    assert got.output_logprobs.tolist() == [np.float32(-0.25 * (k + 1)) for k in range(len(ids))]
    assert got.finish_reason == kind
    assert got.weight_versions == spans


def test_a_response_without_spans_has_one_version(api: ModuleType) -> None:
    got = read_response("SGLang", response(api, [5, 6], weight_versions=[]), SAMPLING)
    assert got.weight_versions == [("7", 0, 2)]
