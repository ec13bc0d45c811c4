"""Recorded calls become the trajectories that were sampled, in every dialect, or an error."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.prefix_merge import Call, merge
from trajpack import Trajectory, Turn, pack, trajectories_from_calls
from trajpack.packing.captured_calls import DIALECTS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl.experimental warns that it may change
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord


def sampled(draw: random.Random, name: str) -> Trajectory:
    """A session: calls that continue, branch from, or have nothing of an earlier one."""
    turns: list[Turn] = []
    for _ in range(draw.randint(1, 6)):
        prompt = [draw.randrange(9) for _ in range(draw.randint(1, 5))]
        if turns and draw.random() < 0.7:
            earlier = draw.choice(turns)
            prompt = [*earlier.prompt_ids, *earlier.completion_ids, *prompt]
        completion = [draw.randrange(9) for _ in range(draw.randint(1, 4))]
        logprobs = [float(np.float32(-draw.random())) for _ in completion]
        reason = draw.choice(["stop", "length"])
        turns.append(
            Turn(
                prompt,
                completion,
                logprobs,
                truncated=reason == "length",
                version_start=3,
                version_end=3,
                stop_reason=reason,
            )
        )
    return Trajectory(name, turns)


def vllm(turn: Turn) -> dict[str, Any]:
    content = [
        {"token": f"t{n}", "logprob": value} for n, value in enumerate(turn.completion_logprobs)
    ]
    choice = {"token_ids": turn.completion_ids, "logprobs": {"content": content}}
    choice["finish_reason"] = turn.stop_reason
    return {"prompt_token_ids": turn.prompt_ids, "choices": [choice], "created": 1}


def sglang(turn: Turn) -> dict[str, Any]:
    rows = zip(turn.completion_logprobs, turn.completion_ids, strict=True)
    meta = {
        "output_token_logprobs": [[value, token, "text"] for value, token in rows],
        "finish_reason": {"type": turn.stop_reason, "length": 5},
        "weight_version": "3",
    }
    answer = {"output_ids": turn.completion_ids, "meta_info": meta}
    return {"request": {"input_ids": turn.prompt_ids}, "response": answer}


def gym(turn: Turn) -> dict[str, Any]:
    item = {
        "type": "message",
        "prompt_token_ids": turn.prompt_ids,
        "generation_token_ids": turn.completion_ids,
        "generation_log_probs": turn.completion_logprobs,
    }
    others = [{"type": "reasoning", "id": "r"}, {"type": "function_call_output", "output": "5"}]
    return {"response": {"output": [others[0], item, others[1]]}}


def triplet(turn: Turn) -> Any:
    content = [{"logprob": value} for value in turn.completion_logprobs]
    answer = {"token_ids": turn.completion_ids, "logprobs": content}
    return SimpleNamespace(prompt={"token_ids": turn.prompt_ids}, response=answer, reward=None)


def transition(turn: Turn) -> Any:
    action = SimpleNamespace(tokens=turn.completion_ids, maybe_logprobs=turn.completion_logprobs)
    action.stop_reason = turn.stop_reason
    return SimpleNamespace(ob=SimpleNamespace(to_ints=lambda: turn.prompt_ids), ac=action)


def record(turn: Turn) -> TurnRecord:
    return TurnRecord(turn.prompt_ids, turn.completion_ids, turn.completion_logprobs)


def flat(dialect: Any) -> Any:
    names = dialect.prompt, dialect.completion, dialect.logprobs

    def write(turn: Turn) -> dict[str, Any]:
        values = turn.prompt_ids, turn.completion_ids, turn.completion_logprobs
        told = {"finish_reason": turn.stop_reason, "policy_version": 3}
        return dict(zip(names, map(np.array, values), strict=True)) | told

    return write


WRITERS = [vllm, sglang, gym, triplet, transition, record]
WRITERS += [flat(dialect) for dialect in DIALECTS if "." not in dialect.logprobs]


@pytest.mark.parametrize("write", WRITERS)
def test_calls_of_a_session_are_the_sampled_trajectory(write: Any) -> None:
    draw = random.Random(0)
    for _ in range(30):
        originals = [sampled(draw, name) for name in "ab"]
        calls = [call for one in originals for call in map(write, one.turns)]
        names = {id(call): "a" for call in calls[: len(originals[0].turns)]}
        made = trajectories_from_calls(calls, session=partial(name_of, names))
        expected = [
            replace(
                one,
                turns=[unsaid(turn, like) for turn, like in zip(one.turns, of.turns, strict=True)],
            )
            for one, of in zip(originals, made, strict=True)
        ]
        assert made == expected


def name_of(names: dict[int, str], call: Any) -> str:
    return names.get(id(call), "b")


def unsaid(turn: Turn, made: Turn) -> Turn:
    """The sampled turn, without what a dialect has no key for."""
    if made.stop_reason is None:
        turn = replace(turn, truncated=False, stop_reason=None)
    return turn if made.version_end else replace(turn, version_start=0, version_end=0)


CALL = {"session_id": "a", "prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -0.25]}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"response_ids": None},
            ValueError,
            r"records\[1\]: no token ids .*: expected .* got the keys",
        ),
        ({"response_ids": []}, ValueError, "response_ids is empty: no model sampled this call"),
        ({"prompt_ids": []}, ValueError, "prompt_ids is empty"),
        ({"logprobs": [-0.5]}, ValueError, "logprobs must be 2, one for each sampled id, got 1"),
        ({"logprobs": None}, ValueError, "logprobs must be 2, .* got none"),
        (
            {"logprobs": [-0.5, None]},
            ValueError,
            r"logprobs\[1\] must be that of token 4, got None",
        ),
        (
            {
                "logprobs": {
                    "content": [{"logprob": -1, "token_id": 3}, {"logprob": -1, "token_id": 5}]
                }
            },
            ValueError,
            "must be that of token 4, got one of token 5",
        ),
        ({"logprobs": [-0.5, float("nan")]}, ValueError, "must be finite"),
        ({"prompt_ids": ["a"]}, TypeError, "prompt_ids must be integers"),
        ({"prompt_ids": [0], "response_ids": [0], "logprobs": [0.0]}, ValueError, "a placeholder"),
        ({"session_id": None}, ValueError, "no session: session='session_id' must be the key"),
        ({}, ValueError, r"records\[1\]: is the call of records\[0\] again"),
        ({"output_mask": [1]}, ValueError, "output_mask must be 0 or 1 for each of 2 tokens"),
        ({"reward": "much", "prompt_ids": [9]}, TypeError, "reward must be a number"),
    ],
)
def test_what_a_record_lacks_is_named(change: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trajectories_from_calls([CALL, CALL | change])


def test_rewards_groups_and_order_of_sessions() -> None:
    late = CALL | {
        "session_id": "b",
        "prompt_ids": [1, 2, 3, 4, 9],
        "at": 2,
        "task": "t",
        "reward": 2,
    }
    early = CALL | {"session_id": "b", "at": 1, "task": "t", "reward": 0.5}
    records = [late, early, CALL]

    own = trajectories_from_calls(records)
    assert [[turn.reward for turn in one.turns] for one in own] == [[2, 0.5], [0]]
    ordered = trajectories_from_calls([late, early], time="at", reward=1, group="task")
    assert [turn.reward for turn in ordered[0].turns] == [0, 1]
    assert (ordered[0].id, ordered[0].group) == ("b", "t")
    assert len(pack(ordered).seqlens) == 1  # the later call continues the earlier one
    computed = trajectories_from_calls(
        records, reward=lambda name, calls: len(calls), group=lambda name, calls: f"of {name}"
    )
    assert [(one.turns[-1].reward, one.group) for one in computed] == [(2, "of b"), (1, "of a")]
    with pytest.raises(ValueError, match="reward has no session 'a'"):
        trajectories_from_calls(records, reward={"b": 1.0})
    with pytest.raises(ValueError, match="session 'a': task must be one value, got"):
        trajectories_from_calls(records, group="task")
    with pytest.raises(ValueError, match=r"records\[2\]: at must be the time"):
        trajectories_from_calls([late, early, CALL | {"session_id": "b"}], time="at")


def test_what_is_not_trained_is_context() -> None:
    frozen = CALL | {"trainable": False}
    later = CALL | {"prompt_ids": [1, 2, 3, 4, 9], "response_ids": [5, 6, 7], "logprobs": [-1] * 3}
    masked = later | {"output_mask": [0, 1, 0]}

    [one] = trajectories_from_calls([frozen, masked])
    batch = pack([one])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 9, 5, 6]
    assert batch.loss_mask.tolist() == [False] * 6 + [True]
    for no in (False, np.False_, 0):
        assert trajectories_from_calls([CALL | {"trainable": no}]) == []
    with pytest.raises(TypeError, match=r"records\[0\]: trainable must be true or false, got"):
        trajectories_from_calls([CALL | {"trainable": "false"}])
    with pytest.raises(ValueError, match="expected one trained call, got 0"):
        Turn.from_call(frozen)


def test_choices_of_one_answer_are_branches() -> None:
    choices = [{"token_ids": [token], "logprobs": {"token_logprobs": [-1.0]}} for token in (7, 8)]
    answer = {"id": "chatcmpl-1", "prompt_token_ids": [1], "choices": choices}

    [one] = trajectories_from_calls([answer], session=None)
    assert [turn.completion_ids.tolist() for turn in one.turns] == [[7], [8]]
    with pytest.raises(ValueError, match="is the call of"):
        trajectories_from_calls([answer, answer], session=None)
    with pytest.raises(ValueError, match="expected one trained call, got 2"):
        Turn.from_call(answer)


def test_only_the_same_call_is_refused_as_logged_twice() -> None:
    def calls(*records: Any) -> int:
        [one] = trajectories_from_calls(records, session=None)
        return len(one.turns)

    turns = [Turn([1, *[2] * size], [3], [-1.0]) for size in range(3)]
    tools = [gym(turn) for turn in turns]  # a tool's id may be the same in each call
    for answer in tools:
        answer["response"]["output"][1] |= {"type": "function_call", "call_id": "functions.add:0"}
    assert calls(*tools) == 3
    of_session = [CALL | {"request_id": "a", "prompt_ids": turn.prompt_ids} for turn in turns]
    assert calls(*of_session) == 3
    named = [sglang(turns[0]) for _ in "xy"]
    for answer, name in zip(named, "xy", strict=True):
        answer["response"]["meta_info"]["id"] = name
    assert calls(*named) == 2
    for twice in (tools, of_session, named):
        with pytest.raises(ValueError, match="is the call of"):
            calls(*twice, twice[0])


def test_answers_of_servers_in_all_their_forms() -> None:
    turn = Turn([1, 2], [3], [-0.5])
    several = sglang(turn)
    several["response"] = [several["response"]] * 2  # n=2, both the same
    [one] = trajectories_from_calls([several], session=None)
    assert one.turns[0] == one.turns[1]

    cut = gym(turn)
    later = gym(Turn([1, 2, 3, 4], [5], [-0.5]))
    cut["response"]["output"] += later["response"]["output"]
    cut["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    [one] = trajectories_from_calls([cut], session=None)
    assert [turn.truncated for turn in one.turns] == [False, True]
    assert Turn.from_call(CALL | {"finish_reason": "abort"}).truncated

    answer = vllm(turn)
    [token] = answer["choices"][0]["logprobs"]["content"]
    token["token"] = "token_id:3"
    assert Turn.from_call(answer) == turn
    token["token"] = "token_id:4"
    with pytest.raises(ValueError, match="must be that of token 3, got one of token 4"):
        Turn.from_call(answer)


def test_extra_fields_of_a_record() -> None:
    rows = torch.zeros(4, 2, dtype=torch.uint8)
    turn = Turn.from_call(CALL | {"routed_experts": rows}, fields=["routed_experts"])
    assert turn.fields == {"routed_experts": rows}
    with pytest.raises(ValueError, match="record: the field routed_experts is missing"):
        Turn.from_call(CALL, fields=["routed_experts"])


def test_the_merge_of_a_gateway_makes_the_rows_of_a_pack() -> None:
    draw = random.Random(1)
    for _ in range(300):
        session = sampled(draw, "a")
        calls = [Call(*parts(turn)) for turn in session.turns]
        rows, batch = merge(calls), pack([session])
        bounds = batch.cu_seqlens.tolist()
        assert [len(row.input_ids) for row in rows] == list(batch.seqlens)
        for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
            assert row.input_ids.tolist() == batch.input_ids[start:end].tolist()
            assert row.loss_mask.tolist() == batch.loss_mask[start:end].tolist()
            assert row.logprobs.tolist() == batch.rollout_logprobs[start:end].tolist()
            assert row.call_index.tolist() == batch.turn_ids[start:end].tolist()
    with pytest.raises(ValueError, match=r"call 0: .* \(1, 1, 0\)"):
        merge([Call([1], [2], [])])
    for ids in ([1.5], ["3"], [-1], [2**31]):
        for wrong in (Call(ids, [2], [-1.0]), Call([2], ids, [-1.0])):
            with pytest.raises(ValueError, match="call 0: token ids must be integers from 0"):
                merge([wrong])


def parts(turn: Turn) -> tuple[Any, Any, Any]:
    return turn.prompt_ids, turn.completion_ids, turn.completion_logprobs
