"""Rules that all formats share: refused batches, empty ones, no host reads, missing rewards."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import field_batch, forked_batch, some_batch
from trajpack import Trajectory, TrajectoryBuffer, Turn, TurnReturns, pack, pack_tree
from trajpack.packing.adapters import (
    areal,
    flash_attention,
    huggingface,
    megatron,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    tinker,
    torchtitan,
    trl,
    verl,
)

GRPO_INPUTS = partial(trl.to_grpo_inputs, pad_token_id=0)
TRAINED = [torchtitan.to_training_microbatch, torchtitan.to_training_samples, GRPO_INPUTS]
TRAINED += [trl.to_async_samples, trl.to_async_row, tinker.to_datum_kwargs]
TRAINED += [prime_rl.to_tensor_micro_batch, prime_rl.to_micro_batch, areal.to_update_dict]
TRAINED += [nemo_rl.to_loss_inputs]
"""Formats with advantages."""
UNTRAINED = [areal.to_padded_dict, areal.to_sequence_sample, nemo_rl.to_message_logs]
UNTRAINED += [openrlhf.to_experience_dict, skyrl.to_generator_output, skyrl.to_training_input]
UNTRAINED += [slime.to_samples, slime.to_train_data, verl.to_data_proto_dict, verl.to_tensordict]
UNTRAINED += [prime_rl.to_training_samples, partial(huggingface.to_padding_free, labels="all")]


@pytest.mark.parametrize("convert", TRAINED)
def test_a_batch_without_advantages_is_refused(convert: Any) -> None:
    bare = dataclasses.replace(some_batch(), advantages=None)
    with pytest.raises(ValueError, match="batch has no advantages, call with_advantages first"):
        convert(bare)


PACKED = [torchtitan.to_training_microbatch, trl.to_async_row]
PACKED += [prime_rl.to_tensor_micro_batch, prime_rl.to_micro_batch, UNTRAINED[-1]]
"""Formats of packed tokens, which take micro-batches."""


@pytest.mark.parametrize("convert", [one for one in TRAINED + UNTRAINED if one not in PACKED])
def test_a_micro_batch_is_refused(convert: Any) -> None:
    with pytest.raises(TypeError, match="batch must be a PackedBatch, got MicroBatch"):
        convert(some_batch().select([0]))


OF_BOUNDARIES = [flash_attention.to_varlen, megatron.packed_seq_params_kwargs]


@pytest.mark.parametrize("convert", [*TRAINED, *UNTRAINED, *OF_BOUNDARIES])
def test_trees_and_their_entries_are_no_sequences(convert: Any) -> None:
    turns = [Turn([1, 2], [3], [-1.0]), Turn([1, 2], [4], [-1.0])]
    tree = pack_tree([Trajectory("a", turns)], boundary="duplicate").with_advantages(TurnReturns())
    (one,) = tree.micro_batches(tree.plan_micro_batches(8))
    takes_trees = convert is trl.to_async_row
    for given in (tree.entries, one.entries, *(() if takes_trees else (tree, one))):
        name = type(given).__name__
        with pytest.raises(TypeError, match=f"sequences, got {name}; formats of trees are in"):
            convert(given)


NO_READS = {
    openrlhf.to_experience_dict: {"action_mask": (6, 18), "response_length": (6,)},
    partial(skyrl.to_training_input, max_response_length=20): {
        "rewards": (6, 20),
        "sequences": (6, 19),
    },
}
"""Beside those of `tests/packing/test_no_waits.py`."""


@pytest.mark.parametrize(("convert", "shapes"), NO_READS.items())
def test_no_value_is_read_back_to_the_host(convert: Any, shapes: dict[str, Any]) -> None:
    # a row for each trajectory: OpenRLHF would read back which rows are one
    batch = dataclasses.replace(some_batch(), fields={}, ids=tuple("abcdef"), groups=("g",) * 6)
    found = convert(batch.to("meta"))
    assert {key: tuple(found[key].shape) for key in shapes} == shapes


EMPTY = {
    areal.to_padded_dict: ("input_ids", (0, 0)),
    areal.to_update_dict: ("loss_mask", (0, 0)),
    huggingface.to_padding_free: ("labels", (1, 0)),
    nemo_rl.to_loss_inputs: ("input_ids", (0, 0)),
    nemo_rl.to_message_logs: ("message_log", []),
    openrlhf.to_experience_dict: ("truncated", (0,)),
    skyrl.to_generator_output: ("response_ids", []),
    skyrl.to_training_input: ("sequences", (0, 0)),
    slime.to_samples: (None, []),
    slime.to_train_data: ("tokens", []),
    tinker.to_datum_kwargs: (None, []),
}


@pytest.mark.parametrize(("convert", "expected"), EMPTY.items())
def test_an_empty_batch_gives_empty_rows_and_lists(convert: Any, expected: Any) -> None:
    key, value = expected
    found = convert(TrajectoryBuffer().pack().with_advantages(TurnReturns()))
    found = found if key is None else found[key]
    assert (tuple(found.shape) if isinstance(found, torch.Tensor) else found) == value


@pytest.mark.parametrize(
    ("convert", "name"),
    [
        (areal.to_padded_dict, "rewards"),
        (areal.to_update_dict, "tot_rewards"),
        (nemo_rl.to_loss_inputs, "token_mask"),
        (skyrl.to_training_input, "rewards"),
        *((verl.to_data_proto_dict, name) for name in ("attention_mask", "rm_scores", "prompts")),
        *((verl.to_tensordict, name) for name in ("attention_mask", "rm_scores", "prompts")),
    ],
)
def test_extra_fields_named_as_keys_are_refused(convert: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"not be named as other keys, got \\['{name}'\\]"):
        convert(field_batch(name, advantages=True))


TURNS = [Turn([1, 2], [3], [-1.0]), Turn([1, 2, 3, 4], [5], [-1.0], 2.5)]
REWARDED = pack([Trajectory(name, TURNS, group="g") for name in "ab"])
PADDED = areal.to_padded_dict(REWARDED)
PROTO = verl.to_data_proto_dict(REWARDED)
SAMPLES = slime.to_samples(REWARDED)
GENERATED = skyrl.to_generator_output(REWARDED, rewards="rows")
PRIME = prime_rl.to_training_samples(REWARDED)
OUTPUT = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5],
    "response_mask": [1, 0, 1],
    "response_logprobs": [-1.0, 0.0, -1.0],
}
OUTPUTS = [OUTPUT | {"reward_score": 1.0}]


def without(given: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in keys}


def proto(**scores: Any) -> dict[str, Any]:
    return PROTO | {"tensors": without(PROTO["tensors"], "rm_scores") | scores}


MISSING = {
    "areal": (areal.from_padded_dict, without(PADDED, "rewards"), "rewards"),
    "areal, one of two": (areal.from_padded_dict, [PADDED, PADDED | {"rewards": None}], "rewards"),
    "areal, one row": (areal.from_padded_dict, PADDED | {"rewards": [1.0, None]}, r"rewards \[B\]"),
    "areal, one row of objects": (
        areal.from_padded_dict,
        PADDED | {"rewards": np.array([1.0, None], dtype=object)},
        r"rewards \[B\]",
    ),
    "verl": (verl.from_data_proto, proto(), "token_level_scores or rm_scores"),
    "verl, None": (verl.from_data_proto, proto(rm_scores=None), "token_level_scores or rm_scores"),
    "agent loop": (verl.from_agent_loop_outputs, [OUTPUT], "reward_score"),
    "agent loop, one of two": (
        verl.from_agent_loop_outputs,
        [*OUTPUTS, OUTPUT | {"reward_score": None}],
        "reward_score",
    ),
    "slime": (slime.from_samples, [SAMPLES[0], without(SAMPLES[1], "reward")], "reward"),
    "slime, None": (slime.from_samples, [SAMPLES[0] | {"reward": None}], "reward"),
    "skyrl": (skyrl.from_generator_output, GENERATED | {"rewards": [1.0, None]}, r"rewards\[1\]"),
    "skyrl, no key": (skyrl.from_generator_output, without(GENERATED, "rewards"), r"rewards\[0\]"),
    "skyrl, None": (skyrl.from_generator_output, GENERATED | {"rewards": None}, r"rewards\[0\]"),
    "skyrl, one token": (
        skyrl.from_generator_output,
        GENERATED | {"rewards": [[0.0] * 3, [0.0, 0.0, None]]},
        r"rewards\[1\]\[2\]",
    ),
    "prime-rl": (prime_rl.from_training_samples, PRIME, "the argument rewards"),
    "prime-rl, one": (
        partial(prime_rl.from_training_samples, rewards=[1.0, None]),
        PRIME,
        r"rewards\[1\]",
    ),
}


@pytest.mark.parametrize(("read", "given", "expected"), MISSING.values(), ids=MISSING)
def test_missing_rewards_are_refused_unless_the_caller_gives_one(
    read: Any, given: Any, expected: str
) -> None:
    named = rf"is missing, expected .*{expected}.*missing_reward=0\.0"
    with pytest.raises(ValueError, match=named):
        read(given)
    for reward in (-0.5, 0.0):
        *_, last = read(given, missing_reward=reward)
        assert [turn.reward for turn in last.turns] == [0.0, reward]


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (areal.from_padded_dict, PADDED),
        (verl.from_data_proto, PROTO),
        (verl.from_agent_loop_outputs, [OUTPUT | {"reward_score": 0.0}]),
        (slime.from_samples, SAMPLES),
        (skyrl.from_generator_output, GENERATED),
        (prime_rl.from_training_samples, []),
    ],
)
def test_present_rewards_are_not_replaced(read: Any, given: Any) -> None:
    assert read(given, missing_reward=9.0) == read(given)


def test_a_missing_reward_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="missing_reward must be a number"):
        verl.from_agent_loop_outputs([OUTPUT], missing_reward="0")  # type: ignore[arg-type]


READ = {
    "areal": lambda reward: areal.from_padded_dict(PADDED | {"rewards": [1.0, reward]}),
    "verl": lambda reward: verl.from_data_proto(
        proto(rm_scores=torch.tensor([[0.0] * 3, [0.0, 0.0, reward]], dtype=torch.float64))
    ),
    "agent loop": lambda reward: verl.from_agent_loop_outputs([OUTPUT | {"reward_score": reward}]),
    "slime": lambda reward: slime.from_samples([SAMPLES[0] | {"reward": reward}]),
    "skyrl": lambda reward: skyrl.from_generator_output(GENERATED | {"rewards": [1.0, reward]}),
    "skyrl, token": lambda reward: skyrl.from_generator_output(
        GENERATED | {"rewards": [[0.0] * 3, [0.0, reward, 0.0]]}
    ),
    "prime-rl": lambda reward: prime_rl.from_training_samples(PRIME, rewards=[1.0, reward]),
}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_a_reward_that_is_not_finite_is_refused(read: Any, reward: float) -> None:
    with pytest.raises(ValueError, match=r"^trajectory '.*rewards? must be finite float32, got"):
        read(reward)


def test_the_dictionary_with_a_fault_is_named() -> None:
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
        (verl.from_agent_loop_outputs, [*OUTPUTS, None], "'1' must be a map"),
    ):
        with pytest.raises(TypeError, match=error):
            read(given)  # type: ignore[operator]
    for empty in (
        SimpleNamespace(batch=None, non_tensor_batch={}),
        {"tensors": None, "non_tensors": {}},
    ):
        with pytest.raises(ValueError, match="from_data_proto: the proto's batch is None"):
            verl.from_data_proto(empty)
    found = verl.from_data_proto(PROTO | {"non_tensors": None})
    assert [one.group for one in found] == [None, None]


SAMPLE = {
    "group_index": 4,
    "tokens": [1, 2, 3, 4],
    "response_length": 2,
    "rollout_log_probs": [-1.0, -2.0],
    "reward": 0.5,
}
TITLED = {"token_ids": [1, 2], "mask": [False, True], "logprobs": [0.0, -1.0]}
MASK = {"ids": b"", "counts": bytes(8), "logprobs": b""}
TEACHER = OUTPUT | {"reward_score": 1.0, "extra_fields": {"teacher_ids": [[1, 2]]}}
ROUTED = {"fields": ["routed_experts"]}
MASKED = {"fields": ["sampling_mask"]}
TAUGHT = {"fields": ["teacher_ids"]}
VALUES = {"fields": ["values"]}
UNEVEN = {"rollout_top_p_token_ids": [1, 2, 3], "rollout_top_p_token_offsets": [0, 1, 2]}
STOPPED = GENERATED | {"rollout_sample_support": [[1]] * 2}


def shorter(given: dict[str, Any], key: str) -> dict[str, Any]:
    """Leave out a column or an entry of one key."""
    values = given[key]
    return given | {key: values[:, 1:] if isinstance(values, torch.Tensor) else values[1:]}


def of_proto(**tensors: Any) -> dict[str, Any]:
    return PROTO | {"tensors": PROTO["tensors"] | tensors}


REFUSED: dict[Any, list[tuple[Any, dict[str, Any], str]]] = {
    areal.from_padded_dict: [
        (without(PADDED, "logprobs"), {}, r"\['logprobs'\] are missing"),
        *(
            (shorter(PADDED, key), {}, r"must have shape \[2, [45]\], got \[2, [45]\]")
            for key in ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
        ),
        (shorter(PADDED, "turn_ids"), {}, r"turn_ids must have shape \[2, 5\], got \[2, 4\]"),
        (PADDED | {"rewards": torch.zeros(2, 1)}, {}, r"rewards must have shape \[2\], got"),
        (PADDED, {"groups": ["one"]}, "groups must be 2, one a row, got 1"),
        (
            PADDED | {"loss_mask": torch.ones(2, 5)},
            {},
            "the first token must not be a generated one",
        ),
    ],
    slime.from_samples: [
        ([SAMPLE | {"multimodal_inputs": {"x": 1}}], {}, "'4_0': multimodal_inputs are"),
        (
            [SAMPLE | {"rollout_routed_experts": [[0, 1]] * 3}],
            ROUTED,
            r"'4_0': routes must be \[tokens, layers, k\], got shape",
        ),
        ([SAMPLE], ROUTED, "'4_0': rollout_routed_experts are missing"),
        ([SAMPLE], VALUES, r"fields must be of .*, got \['values'\]"),
        ([SAMPLE | UNEVEN], MASKED, "has 3 tokens, but counts of 2"),
        ([without(SAMPLE, "rollout_log_probs")], {}, "'4_0': rollout_log_probs are missing"),
        ([{"reward": 1.0}], {}, "trajectory '0': tokens are missing"),
        *(
            ([SAMPLE | {"status": status}], {}, f"'4_0': status must be .*, got '{status}'")
            for status in ("aborted", "failed", "pending")
        ),
        (
            [SAMPLE | {"rollout_id": 0}, SAMPLE | {"rollout_id": 0, "reward": 1.0}],
            {},
            r"the rows of trajectory '4_0' must have one reward, got \[0.5, 1.0\]",
        ),
        ([SAMPLE | {"response_length": 5}], {}, r"response_length must be in \[0, 4\], got 5"),
        ([SAMPLE | {"reward": {"acc": 1}}], {}, "'4_0': reward must be a number, got dict"),
        ([SAMPLE | {"reward": "1"}], {}, "'4_0': reward must be a number, got str"),
        ([SAMPLE | {"rollout_log_probs": [-1.0]}], {}, r"logprobs must have shape \[2\]"),
    ],
    partial(prime_rl.from_training_samples, missing_reward=0.0): [
        *(
            ([TITLED | {key: {"images": []}}], {}, f"'0': {key} are there, which are not carried")
            for key in prime_rl.REFUSED
        ),
        *(([without(TITLED, key)], {}, f"'0': {key} are missing") for key in TITLED),
        ([TITLED | {"sampling_mask": MASK}], MASKED, "logprobs of a sampling_mask are not carried"),
        ([TITLED | {"sampling_mask": MASK}], {}, "name sampling_mask in fields, or take them out"),
        ([TITLED], {"fields": ["temperatures"]}, "'0': temperatures are missing"),
        (
            [TITLED | {"temperatures": [1.0]}],
            {"fields": ["temperatures"]},
            "'0': temperatures must have 2 rows, one for each token",
        ),
        ([TITLED], {"rewards": [1.0, 2.0]}, "rewards must be 1, one a row, got 2"),
        ([TITLED | {"mask": [True] * 2}], {"ids": ["a"]}, "'a': the first token must not be a gen"),
        ([TITLED | {"mask": [True]}], {}, "trajectory '0': mask must have shape"),
    ],
    skyrl.from_generator_output: [
        *((without(GENERATED, key), {}, rf"{key}'.* missing") for key in skyrl.COLUMNS.values()),
        *(
            (shorter(GENERATED, key), {}, r"must be [12], one for each of response_ids, got [12]")
            for key in (*skyrl.COLUMNS.values(), "rewards", "trajectory_ids", "stop_reasons")
        ),
        (
            GENERATED | {"trajectory_ids": [("a", 0)] * 2},
            {},
            r"trajectory_ids must be of class TrajectoryID, got \('a', 0\)",
        ),
        (STOPPED, {}, "name sampling_mask in fields, or take them out"),
        (GENERATED, VALUES, r"fields must be of \['routed_experts', .*\['values'\]"),
        (GENERATED, ROUTED, "rollout_expert_indices are missing"),
        (GENERATED | {"pixel_values": [torch.zeros(1)] * 2}, {}, "pixel_values are there"),
    ],
    verl.from_data_proto: [
        *(
            (of_proto(**{key: PROTO["tensors"][key][:, 1:]}), {}, r"\w+ must have shape \[2, ")
            for key in verl.NEEDED
        ),
        *(
            (of_proto(**{key: PROTO["tensors"][key][0]}), {}, r"\w+ must have shape")
            for key in verl.NEEDED
        ),
        (of_proto(rollout_log_probs=None), {}, r"\['rollout_log_probs'\] are missing"),
        (PROTO, {"ids": ["a"]}, "ids must be 2, one a row, got 1"),
        (of_proto(responses=-torch.ones(2, 3).long()), {}, "'g_0': response_ids must be 0 or more"),
        (PROTO["tensors"], {}, "must be a padded DataProto or its dictionary, got dict"),
        (verl.to_tensordict(REWARDED), {}, "got TensorDict"),
        (PROTO | {"non_tensors": {"uid": ["a"]}}, {}, "uid must be 2, one a row, got 1"),
    ],
    verl.from_agent_loop_outputs: [
        *(
            ([without(OUTPUTS[0], key)], {}, f"'0' has no {key}")
            for key in verl.OUTPUT_KEYS.values()
        ),
        ([], {"groups": ["task"]}, "groups must be 0, one a row, got 1"),
        ([[]], {"groups": ["task"]}, "'task_0' is an empty list of outputs"),
        (
            [OUTPUTS[0] | {"multi_modal_data": {"images": ["one"], "videos": None}}],
            {},
            "'0': images are there, which are not carried",
        ),
        ([TEACHER], {}, "'0': teacher_ids are there: name teacher_ids in fields"),
        (OUTPUTS, ROUTED, "'0': routed_experts are missing"),
        ([TEACHER], VALUES, r"fields must be of \['routed_experts', .*\['values'\]"),
        ([TEACHER], TAUGHT, "teacher_ids must have 5 rows, one for each token"),
    ],
}
CASES = [(read, *case) for read, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("read", "given", "options", "message"), CASES)
def test_rollouts_that_cannot_be_read_are_refused(
    read: Any, given: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        read(given, **options)


def test_absent_images_are_no_images() -> None:
    assert len(slime.from_samples([SAMPLE | {"multimodal_inputs": {}}])) == 1
    for key in prime_rl.REFUSED:
        assert prime_rl.from_training_samples([TITLED | {key: None}], rewards=[1.0])
    assert verl.from_agent_loop_outputs([OUTPUTS[0] | {"multi_modal_data": {"images": []}}])


def test_trajectories_without_a_group_share_their_name_with_no_other() -> None:
    turn = Turn([1], [2], [-1.0])
    given = [("x", None), ("y", None), ("x", None), ("b", "y"), ("c", "y")]
    batch = pack([Trajectory(name, [turn], group) for name, group in given])
    expected = ["x#0", "y#1", "x#2", "y", "y"]
    assert verl.to_data_proto_dict(batch)["non_tensors"]["uid"].tolist() == expected
    assert openrlhf.to_experience_dict(batch)["prompts"] == expected
    output = skyrl.to_generator_output(batch)
    labels = [("x#0", 0), ("y#1", 0), ("x#2", 0), ("y", 0), ("y", 1)]
    assert output["trajectory_ids"] == labels
    assert len(skyrl.from_generator_output(output)) == 5


@pytest.mark.parametrize("name", ["prox_logp", "ref_logp", "kl"])
def test_other_fields_of_a_forward_pass_are_one_token_early_too(name: str) -> None:
    batch = field_batch(name, advantages=True)
    if name in areal.EARLY:
        for convert in (areal.to_padded_dict, areal.to_update_dict):
            assert convert(batch)[name].tolist() == [[0.5, 0.25, 0.0]]
    if name in openrlhf.FIELDS:
        assert openrlhf.to_experience_dict(batch)[name].tolist() == [[0.5, 0.25]]


def test_rewards_of_rows_are_sums_or_discounted_returns() -> None:
    batch = forked_batch()
    for key, found in (
        ("rewards", openrlhf.to_experience_dict(batch)),
        ("total_reward", nemo_rl.to_message_logs(batch)),
        ("rewards", areal.to_padded_dict(batch, rewards="rewards")),
    ):
        assert found[key].tolist() == [15.0, 15.0, 16.0, 6.0]
    for key, found in (
        ("rewards", openrlhf.to_experience_dict(batch, rewards="returns")),
        ("total_reward", nemo_rl.to_message_logs(batch, rewards="returns")),
        ("rewards", areal.to_padded_dict(batch)),
    ):
        assert found[key].tolist() == [15.0, 12.0, 16.0, 6.0]
    with pytest.raises(ValueError, match="must be 'rewards' or 'returns', got 'last'"):
        areal.to_padded_dict(batch, rewards="last")
