import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import forked_batch, plain_batch, random_batch, told_of
from trajpack import GRPO, TokenField, pack
from trajpack.packing.adapters.skyrl import (
    TrajectoryID,
    from_generator_output,
    to_generator_output,
    to_training_input,
)
from trajpack.testing import assert_same_bits

PAD = 99


def test_sequences_of_one_trajectory_are_its_steps():
    found = to_generator_output(forked_batch())
    assert found["trajectory_ids"] == [("task", 0), ("task", 0), ("task", 1), ("long", 0)]
    assert found["trajectory_ids"][2].to_string() == "task_1"
    assert found["is_last_step"] == [False, True, True, True]
    # of a trajectory's entries SkyRL counts the rewards of the last one
    assert found["rewards"] == [[0.0] * 5, [15.0], [], [1.0, 0, 0, 0, 2.0, 0, 0, 0, 0, 3.0]]
    rows = to_generator_output(forked_batch(), rewards="rows")["rewards"]
    assert rows == [0.0, 15.0, 16.0, 6.0]
    with pytest.raises(ValueError, match="must be 'tokens' or 'rows', got 'turns'"):
        to_generator_output(forked_batch(), rewards="turns")


def test_skyrls_checks_accept_the_output(skyrl):
    validate = skyrl.load("skyrl.train.utils.trainer_utils").validate_generator_output
    validate(3, to_generator_output(plain_batch()))
    validate(3, to_generator_output(plain_batch(), rewards="rows"))
    validate(3, to_generator_output(forked_batch()), step_wise=True)
    validate(3, to_generator_output(plain_batch(layout="turns")), step_wise=True)
    short = to_generator_output(plain_batch())
    short["loss_masks"][0].pop()
    with pytest.raises(AssertionError, match="must have the same length"):
        validate(3, short)


def test_skyrls_own_merging_of_turns_gives_the_merged_layout(skyrl):
    merge = skyrl.load("skyrl.train.generators.utils").merge_stepwise_output
    merged = merge(to_generator_output(plain_batch(layout="turns")))
    ours = to_generator_output(plain_batch())
    for key in (
        "prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "is_last_step",
        "trajectory_ids", "stop_reasons",
    ):  # fmt: skip
        assert list(ours[key]) == list(merged[key]), key
    assert [sum(of) for of in ours["rewards"]] == [sum(of) for of in merged["rewards"]]


@pytest.mark.parametrize("make", [plain_batch, forked_batch])
def test_skyrls_own_tensors_of_the_lists_are_the_training_input(skyrl, make):
    convert = skyrl.load(
        "skyrl.train.dataset.preprocess"
    ).convert_prompts_responses_to_batch_tensors
    batch = make()
    lists = to_generator_output(batch)
    expected = convert(
        PAD, lists["prompt_token_ids"], lists["response_ids"],
        lists["rewards"], lists["loss_masks"], lists["rollout_logprobs"],
    )  # fmt: skip
    found = to_training_input(batch, pad_token_id=PAD)
    keys = ["sequences", "attention_mask", "response_mask", "rewards", "loss_mask"]
    for key, tensor in zip([*keys, "rollout_logprobs"], expected, strict=False):
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def test_skyrls_batch_takes_the_training_input(skyrl):
    batches = skyrl.load("skyrl.backends.skyrl_train.training_batch")
    tensors = to_training_input(plain_batch().with_advantages(GRPO()))
    batch = batches.TrainingInputBatch(tensors)
    assert batch.batch_size == 3
    assert set(tensors) <= set(batches.TrainingInput.__annotations__)
    bigger = batches.pad_training_input_batch(batch, 1)
    assert bigger["advantages"].shape == (4, 10)
    assert not bigger["loss_mask"][3].any()


FIELDS = [
    TokenField("routed_experts", torch.uint8, (2, 3), generated_only=False),
    TokenField("sampling_mask", torch.int32, ragged=True),
    TokenField("values", torch.float32),
]


def test_a_generator_output_has_every_key_of_skyrls(skyrl):
    base = skyrl.load("skyrl.train.generators.base")
    for batch in (plain_batch(), random_batch(np.random.default_rng(1), fields=FIELDS)):
        assert set(to_generator_output(batch)) == set(base.GeneratorOutput.__annotations__)


def test_skyrls_own_tensors_of_routes_and_support_are_those_of_the_training_input(skyrl):
    preprocess = skyrl.load("skyrl.train.dataset.preprocess")
    batches = skyrl.load("skyrl.backends.skyrl_train.training_batch")
    validate = skyrl.load("skyrl.train.utils.trainer_utils").validate_generator_output
    check_support = skyrl.load("skyrl.backends.skyrl_train.utils.sample_support")
    rng = np.random.default_rng(22)
    for _ in range(20):
        batch = random_batch(rng, fields=FIELDS, layout="merged")
        lists = to_generator_output(batch)
        validate(len(batch), lists, step_wise=True, routes_expected=True)
        *_, routes, support = preprocess.convert_prompts_responses_to_batch_tensors(
            PAD, lists["prompt_token_ids"], lists["response_ids"], lists["rewards"],
            lists["loss_masks"], lists["rollout_logprobs"], lists["rollout_expert_indices"],
            lists["rollout_sample_support"],
        )  # fmt: skip
        found = to_training_input(batch, pad_token_id=PAD)
        for key, tensor in (
            ("rollout_expert_indices", routes),
            ("rollout_sample_support", support),
        ):
            assert type(found[key]) is type(tensor)
            assert_same_bits(found[key].values, tensor.values, key)
            assert_same_bits(found[key].cu_seqlens, tensor.cu_seqlens, key)
        captured = [len(rows) for rows in lists["rollout_expert_indices"]]
        mask = preprocess.make_router_padding_mask(found["attention_mask"], captured)
        assert_same_bits(found["router_padding_mask"], mask)
        for rows in lists["rollout_sample_support"]:
            check_support.validate_sample_support(rows)
        whole = batches.TrainingInputBatch(found)
        bigger = batches.pad_training_input_batch(whole, 2)
        assert len(bigger["rollout_expert_indices"]) == len(batch) + 2
        assert set(found) <= {*batches.TrainingInput.__annotations__, "values"}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            TokenField("routed_experts", torch.int64, (2, 3), generated_only=False),
            "got torch.int64",
        ),
        (TokenField("routed_experts", torch.uint8, (3,), generated_only=False), r"shape \[3\]"),
    ],
    ids=str,
)
def test_fields_that_skyrl_does_not_take_are_refused(skyrl, field, message):
    batch = random_batch(np.random.default_rng(6), fields=[field])
    for convert in (to_generator_output, to_training_input):
        with pytest.raises(ValueError, match=f"{field.name} .*{message}"):
            convert(batch)


def test_an_empty_batch_with_routes_is_refused(skyrl):
    with pytest.raises(ValueError, match="the batch is empty, which no PackedTensor can be"):
        to_training_input(pack([], fields=FIELDS))
    assert to_generator_output(pack([], fields=FIELDS))["rollout_expert_indices"] == []


def test_entries_without_ids_are_trajectories_of_their_own():
    output = {
        "prompt_token_ids": [[1], [1, 2]],
        "response_ids": [[2, 3], [4]],
        "rewards": [0.5, 1.0],
        "loss_masks": [[1, 0], [1]],
        "rollout_logprobs": [[-1.0, 0.0], [-2.0]],
        "stop_reasons": ["stop", "length"],
    }
    back = from_generator_output(output)
    assert [told_of(one) for one in back] == [
        [([1], [2], [-1.0], 0.5, False)],
        [([1, 2], [4], [-2.0], 1.0, True)],
    ]
    labelled = from_generator_output(output | {"trajectory_ids": [TrajectoryID("t", 0)] * 2})
    assert [turn.reward for one in labelled for turn in one.turns] == [0.0, 1.0]


def test_rewards_of_tokens_may_be_arrays():
    output = to_generator_output(plain_batch())
    arrays = output | {"rewards": [torch.tensor(rewards) for rewards in output["rewards"]]}
    expected = from_generator_output(output)
    assert [told_of(one) for one in from_generator_output(arrays)] == [
        told_of(one) for one in expected
    ]
