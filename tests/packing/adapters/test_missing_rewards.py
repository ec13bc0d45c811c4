"""A rollout that comes without rewards is refused, unless the caller names the reward it gets."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trajpack import Trajectory, Turn, pack
from trajpack.packing.adapters import areal, prime_rl, skyrl, slime, verl

TURNS = [Turn([1, 2], [3], [-1.0]), Turn([1, 2, 3, 4], [5], [-1.0], 2.5)]


def batch() -> Any:
    turns = TURNS
    return pack([Trajectory("a", turns, group="g"), Trajectory("b", turns, group="g")])


def without(given: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in keys}


def proto(*keys: str) -> dict[str, Any]:
    found = verl.to_data_proto_dict(batch())
    return found | {"tensors": without(found["tensors"], *keys)}


def with_scores(scores: Any) -> dict[str, Any]:
    found = verl.to_data_proto_dict(batch())
    return found | {"tensors": found["tensors"] | {"rm_scores": scores}}


PADDED = areal.to_padded_dict(batch())
OUTPUT = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5],
    "response_mask": [1, 0, 1],
    "response_logprobs": [-1.0, 0.0, -1.0],
}
SAMPLES = slime.to_samples(batch())
TRAIN = slime.to_train_data(batch())
GENERATED = skyrl.to_generator_output(batch(), rewards="rows")
PRIME = prime_rl.to_training_samples(batch())
MISSING = [
    pytest.param(
        areal.from_padded_dict, without(areal.to_padded_dict(batch()), "rewards"), "rewards",
        id="areal",
    ),
    pytest.param(
        areal.from_padded_dict,
        [areal.to_padded_dict(batch()), areal.to_padded_dict(batch()) | {"rewards": None}],
        "rewards", id="areal, one of two",
    ),
    pytest.param(
        verl.from_data_proto, proto("rm_scores"), "token_level_scores or rm_scores", id="verl"
    ),
    pytest.param(verl.from_agent_loop_outputs, [OUTPUT], "reward_score", id="agent loop"),
    pytest.param(
        verl.from_agent_loop_outputs,
        [OUTPUT | {"reward_score": 1.0}, OUTPUT | {"reward_score": None}],
        "reward_score", id="agent loop, one of two",
    ),
    pytest.param(
        slime.from_samples, [SAMPLES[0], without(SAMPLES[1], "reward")], "reward", id="slime"
    ),
    pytest.param(
        slime.from_samples, [SAMPLES[0] | {"reward": None}], "reward", id="slime, none"
    ),
    pytest.param(
        slime.from_train_data, TRAIN | {"raw_reward": [1.0, None]}, "raw_reward", id="slime, train"
    ),
    pytest.param(
        slime.from_train_data, without(TRAIN, "raw_reward"), "raw_reward", id="slime, no key"
    ),
    pytest.param(
        slime.from_train_data, TRAIN | {"raw_reward": None}, "raw_reward", id="slime, key is None"
    ),
    pytest.param(
        verl.from_data_proto, with_scores(None), "token_level_scores or rm_scores",
        id="verl, key is None",
    ),
    pytest.param(
        areal.from_padded_dict, PADDED | {"rewards": [1.0, None]}, r"rewards \[B\]",
        id="areal, one row",
    ),
    pytest.param(
        areal.from_padded_dict, PADDED | {"rewards": np.array([1.0, None], dtype=object)},
        r"rewards \[B\]", id="areal, one row of objects",
    ),
    pytest.param(
        partial(prime_rl.from_training_samples, rewards=[1.0, None]), PRIME, r"rewards\[1\]",
        id="prime-rl, one",
    ),
    pytest.param(
        skyrl.from_generator_output, without(GENERATED, "rewards"), r"rewards\[0\]",
        id="skyrl, no key",
    ),
    pytest.param(
        skyrl.from_generator_output, GENERATED | {"rewards": None}, r"rewards\[0\]",
        id="skyrl, key is None",
    ),
    pytest.param(
        skyrl.from_generator_output,
        GENERATED | {"rewards": [[0.0] * 3, [0.0, 0.0, None]]}, r"rewards\[1\]\[2\]",
        id="skyrl, one token",
    ),
    pytest.param(prime_rl.from_training_samples, PRIME, "the argument rewards", id="prime-rl"),
    pytest.param(
        skyrl.from_generator_output, GENERATED | {"rewards": [1.0, None]}, r"rewards\[1\]",
        id="skyrl",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("read", "given", "expected"), MISSING)
def test_missing_rewards_are_refused_and_what_is_expected_is_named(
    read: Any, given: Any, expected: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"is missing, expected .*{expected}.*missing_reward=0\.0"
    ):
        read(given)


@pytest.mark.parametrize(("read", "given", "expected"), MISSING)
def test_a_caller_may_say_what_a_missing_reward_is(read: Any, given: Any, expected: str) -> None:
    *_, last = read(given, missing_reward=-0.5)
    assert [turn.reward for turn in last.turns] == [0.0, -0.5]
    *_, last = read(given, missing_reward=0.0)
    assert [turn.reward for turn in last.turns] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("read", "given"),
    [
        pytest.param(areal.from_padded_dict, areal.to_padded_dict(batch()), id="areal"),
        pytest.param(verl.from_data_proto, proto(), id="verl"),
        pytest.param(verl.from_agent_loop_outputs, [OUTPUT | {"reward_score": 0.0}], id="loop"),
        pytest.param(slime.from_samples, SAMPLES, id="slime"),
        pytest.param(slime.from_train_data, TRAIN, id="slime, train"),
        pytest.param(skyrl.from_generator_output, GENERATED, id="skyrl"),
        pytest.param(prime_rl.from_training_samples, [], id="prime-rl, none"),
    ],
)
def test_rewards_that_are_there_are_not_replaced(read: Any, given: Any) -> None:
    assert read(given, missing_reward=9.0) == read(given)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="missing_reward must be a number"):
        verl.from_agent_loop_outputs([OUTPUT], missing_reward="0")  # type: ignore[arg-type]


NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 1e39]
READ = {
    "areal": lambda reward: areal.from_padded_dict(PADDED | {"rewards": [1.0, reward]}),
    "verl": lambda reward: verl.from_data_proto(
        with_scores(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, reward]], dtype=torch.float64))
    ),
    "agent loop": lambda reward: verl.from_agent_loop_outputs([OUTPUT | {"reward_score": reward}]),
    "slime": lambda reward: slime.from_samples([SAMPLES[0] | {"reward": reward}]),
    "slime, train": lambda reward: slime.from_train_data(TRAIN | {"raw_reward": [1.0, reward]}),
    "skyrl": lambda reward: skyrl.from_generator_output(GENERATED | {"rewards": [1.0, reward]}),
    "skyrl, token": lambda reward: skyrl.from_generator_output(
        GENERATED | {"rewards": [[0.0] * 3, [0.0, reward, 0.0]]}
    ),
    "prime-rl": lambda reward: prime_rl.from_training_samples(PRIME, rewards=[1.0, reward]),
}


@pytest.mark.parametrize("reward", NOT_FINITE)
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_a_reward_that_is_not_finite_is_refused(read: Any, reward: float) -> None:
    with pytest.raises(ValueError, match=r"^trajectory '.*rewards? must be finite float32, got"):
        read(reward)


def test_the_dictionary_is_named_that_has_a_fault() -> None:
    for second, fault in (
        (without(PADDED, "rewards"), "the reward is missing"),
        (without(PADDED, "logprobs"), r"\['logprobs'\] are missing"),
        (PADDED | {"logprobs": None}, r"\['logprobs'\] are missing"),
        (PADDED | {"rewards": torch.zeros(3)}, r"rewards must have shape \[2\], got \[3\]"),
        (PADDED | {"rewards": [None, 1.0]}, "the reward of row 0 is missing"),
    ):
        with pytest.raises(ValueError, match=rf"from_padded_dict: dicts\[1\]: {fault}"):
            areal.from_padded_dict([PADDED, second])


def test_none_in_the_place_of_a_rollout_is_refused_by_name() -> None:
    for read, given, error in (
        (areal.from_padded_dict, [PADDED, None], r"dicts\[1\]: expected a dict.* got NoneType"),
        (areal.from_padded_dict, None, "from_padded_dict: expected a dict.* got NoneType"),
        (slime.from_samples, [None], r"samples\[0\] must be a mapping .*, got NoneType"),
        (verl.from_agent_loop_outputs, [OUTPUT | {"reward_score": 1.0}, None], "'1' must be a map"),
    ):
        with pytest.raises(TypeError, match=error):
            read(given)  # type: ignore[operator]
    for empty in (
        SimpleNamespace(batch=None, non_tensor_batch={}), {"tensors": None, "non_tensors": {}}
    ):  # fmt: skip
        with pytest.raises(ValueError, match="from_data_proto: the proto's batch is None"):
            verl.from_data_proto(empty)
    with pytest.raises(ValueError, match=r"\['tokens'\] are missing"):
        slime.from_train_data(TRAIN | {"tokens": None})
    found = verl.from_data_proto(proto() | {"non_tensors": None})
    assert [one.group for one in found] == [None, None]
