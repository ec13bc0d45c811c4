"""slime's package on the index is empty: its published fields and shapes are written here."""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.packing.adapters.cases import (
    conversation,
    forked_batch,
    plain_batch,
    random_batch,
    rows_by_loop,
    told_of,
)
from trajpack import TokenField, Trajectory, Turn, pack
from trajpack.kernels import group_advantages
from trajpack.packing.adapters.slime import from_samples, to_samples, to_train_data
from trajpack.testing import assert_same_bits, trajectory_lists

SAMPLE_FIELDS = {
    **dict.fromkeys(("group_index", "index", "response_length", "rollout_id"), int),
    **dict.fromkeys(("tokens", "loss_mask", "weight_versions", "rollout_log_probs"), list),
    **{"reward": float, "status": str},
}
TRAIN_KEYS = {
    **dict.fromkeys(("response_lengths", "truncated", "sample_indices", "rollout_ids"), int),
    **dict.fromkeys(("tokens", "loss_masks", "rollout_log_probs"), list),
    **{"rollout_mask_sums": int, "rewards": float, "raw_reward": float, "source_names": str},
}
FIELDS = [
    TokenField("routed_experts", torch.int32, (2, 3), generated_only=False),
    TokenField("teacher_log_probs", torch.float32),
    TokenField("sampling_mask", torch.int32, ragged=True),
]


def test_samples_have_the_published_fields_in_their_types():
    for sample in to_samples(forked_batch()):
        assert {key: type(value) for key, value in sample.items()} == SAMPLE_FIELDS
        assert sample["response_length"] == len(sample["loss_mask"])
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"])
        assert {type(value) for value in sample["tokens"]} == {int}
        assert all(type(version) is str for version in sample["weight_versions"])


@settings(max_examples=25)
@given(trajectory_lists())
def test_a_sample_is_a_sequence_and_its_response(trajectories):
    batch = pack(trajectories)
    for sample, row in zip(to_samples(batch), rows_by_loop(batch), strict=True):
        prompt, response, mask, logprobs = row
        assert sample["tokens"] == prompt + response
        masked = not response and len(prompt) > 1  # of no tokens, slime would slice all of them
        assert sample["response_length"] == len(response) + masked
        assert sample["loss_mask"] == [int(value) for value in mask] + [0] * masked
        assert sample["rollout_log_probs"] == logprobs + [0.0] * masked


def test_sequences_of_one_trajectory_are_siblings():
    samples = to_samples(forked_batch())
    assert [sample["rollout_id"] for sample in samples] == [0, 0, 1, 2]
    assert [sample["index"] for sample in samples] == [0, 1, 2, 3]
    assert [sample["group_index"] for sample in samples] == [0, 0, 0, 1]
    assert [sample["reward"] for sample in samples] == [15.0, 15.0, 16.0, 6.0]
    assert samples[0]["weight_versions"] == ["4", "4", "6"]


def test_train_data_is_a_list_for_each_key():
    batch = forked_batch()
    found = to_train_data(batch)
    kinds = {key: {type(value) for value in values} for key, values in found.items()}
    assert kinds == {key: {kind} for key, kind in TRAIN_KEYS.items()}
    assert all(len(values) == 4 for values in found.values())
    assert found["rollout_ids"] == [0, 0, 1, 2]
    assert found["rollout_mask_sums"] == [4, 4, 0, 6]
    assert found["rewards"] == found["raw_reward"] == [15.0, 15.0, 16.0, 6.0]
    by_rollout = sum(map(sum, found["loss_masks"]))
    assert by_rollout == batch.num_generated


def test_rewards_compared_in_groups_go_beside_the_raw_ones():
    batch = plain_batch()
    compared = group_advantages(torch.tensor([3.0, 1.0, 6.0]), batch.group_ids, num_groups=2)
    found = to_train_data(batch, rewards=compared)
    assert found["rewards"] == compared.tolist()
    assert found["raw_reward"] == [3.0, 1.0, 6.0]
    assert to_train_data(forked_batch(), rewards=[0.5, -0.5, 0.0])["rewards"] == [0.5, 0.5, -0.5, 0]
    with pytest.raises(ValueError, match="rewards must be 3, one a trajectory, got 2"):
        to_train_data(batch, rewards=[1.0, 2.0])


def test_routes_are_of_all_tokens_but_the_last():
    """slime's routing replay asserts one row less than tokens, and fills the last one up."""
    rng = np.random.default_rng(23)
    batch = random_batch(rng, fields=FIELDS)
    routes = batch.fields["routed_experts"].split(batch.seqlens)
    for found in (
        [sample["rollout_routed_experts"] for sample in to_samples(batch)],
        to_train_data(batch)["rollout_routed_experts"],
    ):
        for rows, expected in zip(found, routes, strict=True):
            assert_same_bits(rows, expected[:-1])


def test_teacher_logprobs_and_sampling_masks_are_of_responses():
    batch = random_batch(np.random.default_rng(24), fields=FIELDS)
    found = to_train_data(batch)
    cu, values = batch.generated["sampling_mask"]
    kept = iter(values.split(cu.diff().tolist()))  # of the generated tokens
    teachers = batch.fields["teacher_log_probs"].split(batch.seqlens)
    rows = zip(rows_by_loop(batch), teachers, strict=True)
    for number, ((prompt, response, mask, _), teacher) in enumerate(rows):
        length = found["response_lengths"][number]
        assert length == len(response)
        assert found["teacher_log_probs"][number] == teacher[len(prompt) :].tolist()
        ids = found["rollout_top_p_token_ids"][number]
        offsets = found["rollout_top_p_token_offsets"][number]
        assert ids.dtype == offsets.dtype == torch.int32
        assert len(offsets) == length + 1
        for token, generated in enumerate(mask):
            of = ids[offsets[token] : offsets[token + 1]].tolist()
            assert of == (next(kept).tolist() if generated else [])


def test_source_names_are_those_that_are_given():
    batch = plain_batch()
    assert to_train_data(batch)["source_names"] == ["unknown"] * 3
    assert to_train_data(batch, source_names="sums")["source_names"] == ["sums"] * 3
    assert to_train_data(batch, source_names=["a", "b", "c"])["source_names"] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="source_names must be 3, one a row, got 1"):
        to_train_data(batch, source_names=["a"])


def test_samples_of_conversations_are_the_same_again_with_versions():
    samples = to_samples(pack([conversation("a", 2, group="task"), conversation("b", 3)]))
    back = from_samples(samples, ids=["a", "b"])
    assert [turn.version_start for turn in back[1].turns] == [0, 1, 2]
    assert to_samples(pack(back)) == samples


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


def sample_object(**changes):
    """An object with the attributes of a ``Sample`` that a single-turn rollout has filled."""
    filled = {
        "group_index": 4,
        "tokens": [1, 2, 3, 4],
        "response_length": 2,
        "loss_mask": None,
        "rollout_log_probs": [-1.0, -2.0],
        "reward": 0.5,
        "status": Status.TRUNCATED,
        "weight_versions": ["7", "8"],
    }
    return SimpleNamespace(**filled | changes)


def test_objects_are_read_too_and_all_of_a_response_without_a_mask_is_one_turn():
    (trajectory,) = from_samples([sample_object()])
    (turn,) = trajectory.turns
    assert told_of(trajectory) == [([1, 2], [3, 4], [-1.0, -2.0], 0.5, True)]
    assert (turn.version_start, turn.version_end, turn.reward) == (7, 8, 0.5)
    assert (trajectory.id, trajectory.group) == ("4_0", "4")
    (unnumbered,) = from_samples([sample_object(weight_versions=["default"])])
    assert unnumbered.turns[0].version_end == 0


def test_a_sequence_without_generated_tokens_has_a_masked_response():
    silent = Trajectory("silent", [Turn([1, 2, 3], [], [], 2.0)])
    (sample,) = to_samples(pack([silent]))
    assert (sample["response_length"], sample["loss_mask"]) == (1, [0])
    assert sample["rollout_log_probs"] == [0.0]
    (back,) = from_samples([sample])
    (turn,) = back.turns
    assert ([*turn.prompt_ids], len(turn.completion_ids), turn.reward) == ([1, 2, 3], 0, 2.0)
    alone = to_samples(pack([Trajectory("alone", [Turn([1], [], [])])]))
    assert alone[0]["response_length"] == 0  # the one token there is no model predicts


def test_no_token_of_a_removed_sample_is_trained():
    (trajectory,) = from_samples([sample_object(remove_sample=True)])
    assert pack([trajectory]).loss_mask.tolist() == [False] * 4
    assert trajectory.turns[-1].reward == 0.5


@pytest.mark.parametrize("container", [list, torch.tensor])
def test_samples_of_tensors_are_taken(container):
    sample = sample_object(
        tokens=container([1, 2, 3, 4]), loss_mask=container([1, 1]),
        rollout_log_probs=container([-1.0, -2.0]),
    )  # fmt: skip
    (trajectory,) = from_samples([sample])
    assert told_of(trajectory) == [([1, 2], [3, 4], [-1.0, -2.0], 0.5, True)]


def test_samples_like_the_one_of_a_rollout_keep_its_task_and_are_siblings():
    forked = pack(forked_batch().unpack()[:1])
    task = {"prompt": "1 + 1?", "label": "2", "index": 12, "group_index": 3, "metadata": {"a": 1}}
    for task_of, rollout in ((task, 12), (task | {"rollout_id": 7}, 7), ({"label": "2"}, 0)):
        samples = to_samples(forked, like=SimpleNamespace(**task_of, tokens=[], status="pending"))
        assert len(samples) == 2
        for plain, sample in zip(to_samples(forked), samples, strict=True):
            assert sample == plain | task_of | {"rollout_id": rollout}
        (back,) = from_samples(samples)
        assert [turn.completion_ids.tolist() for turn in back.turns] == [[3, 4], [7], [6]]
    with pytest.raises(ValueError, match="must be of one trajectory, got 3"):
        to_samples(plain_batch(), like=task)
    with pytest.raises(TypeError, match="like must be a mapping or have attributes, got int"):
        to_samples(forked, like=3)
