import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.packing.adapters.cases import conversation, forked_batch, plain_batch
from tests.packing.adapters.peers import stand_in, stand_ins
from trajpack import TokenField, Trajectory, Turn, TurnReturns, pack
from trajpack.packing.adapters.areal import (
    from_padded_dict,
    to_padded_dict,
    to_sequence_sample,
    to_update_dict,
)
from trajpack.testing import assert_same_bits

ORACLE = Path(__file__).parents[4] / "shared" / "oracles" / "multi_turn_agent.json.gz"
PAD = 99


def test_turns_are_counted_in_their_row():
    """AReaL refuses a number that is not below the length of the row."""
    turns = to_padded_dict(forked_batch())["turn_ids"].tolist()
    assert turns[0] == [-1, -1, 0, 0, -1, -1, 1, *[-1] * 5]
    assert turns[1][:3] == [-1, -1, 0]
    assert turns[2] == [-1] * 12
    assert turns[3] == [-1, -1, 0, -1, -1, 1, 1, -1, -1, 2, 2, 2]


def test_a_row_has_the_return_of_its_first_turn_or_the_rewards_of_its_trajectory():
    discounted = pack([conversation("a", 3, turn_discount=0.5)])
    assert to_padded_dict(discounted)["rewards"].tolist() == [1 + 0.5 * (2 + 0.5 * 3)]
    assert to_padded_dict(discounted, rewards="rewards")["rewards"].tolist() == [6.0]
    turns = pack([conversation("a", 3, turn_discount=0.5)], layout="turns")
    assert to_padded_dict(turns)["rewards"].tolist() == [2.75, 3.5, 3.0]
    assert to_padded_dict(turns, rewards="rewards")["rewards"].tolist() == [6.0, 6.0, 6.0]


def test_areals_gae_reads_values_at_their_tokens(areal, monkeypatch):
    """By hand, with a discount of 1 and a lambda of one half: deltas -0.25, 0.5, 0.25."""
    controller = stand_in("TrainController")
    monkeypatch.setattr(sys.modules["areal.infra"], "TrainController", controller, raising=False)
    with stand_ins("areal.experimental.training_service"):
        actor = areal.load("areal.trainer.ppo.actor").PPOActor
    settings_of = SimpleNamespace(
        overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=False
    )
    named = SimpleNamespace(
        config=settings_of, reward_bias=0.0, reward_scaling=1.0, reward_clip=9.0, reward_norm=None,
        adv_norm=None, kl_ctl=0.0, kl_estimator=torch.sub, mask_no_eos_with_zero=False,
        discount=1.0, gae_lambda=0.5,
    )  # fmt: skip
    field = TokenField("values", torch.float32)
    turn = Turn([1, 2], [3, 4, 5], [-1.0] * 3, 1.0, fields={"values": [0.5, 0.25, 0.75]})
    batch = pack([Trajectory("a", [turn])], fields=[field])
    found = actor._compute_advantages(named, to_padded_dict(batch))
    assert found["advantages"][0, 1:4].tolist() == [0.0625, 0.625, 0.25]
    assert found["loss_mask"].tolist() == [[0.0, 1.0, 1.0, 1.0, 0.0]]


def test_areal_packs_its_rows_to_the_batch_again(areal):
    arrays = areal.load("areal.utils.data")
    batch = forked_batch()
    packed = arrays.pack_tensor_dict(to_padded_dict(batch))
    assert_same_bits(packed["cu_seqlens"], batch.cu_seqlens)
    assert packed["max_seqlen"] == batch.max_seqlen
    assert_same_bits(packed["input_ids"], batch.input_ids.int())
    assert_same_bits(packed["logprobs"], batch.rollout_logprobs)
    assert_same_bits(packed["versions"], batch.policy_versions)


def test_an_update_has_the_rewards_of_all_turns_of_a_row():
    found = to_update_dict(forked_batch().with_advantages(TurnReturns()))
    assert found["tot_rewards"].sum(1).tolist() == [11.0, 4.0, 0.0, 6.0]


def test_areal_joins_rows_of_several_batches_as_one_batch_has_them(areal):
    arrays = areal.load("areal.utils.data")
    one, other = conversation("a", 1), conversation("b", 3)
    joined = arrays.concat_padded_tensors([to_padded_dict(pack([of])) for of in (one, other)])
    expected = to_padded_dict(pack([one, other]))
    there = expected["attention_mask"]
    assert set(joined) == set(expected)
    for key, values in expected.items():
        assert joined[key].dtype == values.dtype, key
        same = joined[key] == values
        assert (same if key == "rewards" else same[there]).all(), key


def test_an_interaction_exports_the_row_that_the_batch_has(areal):
    """Its own export of a two-turn conversation, in which the child continues the parent."""
    types = areal.load("areal.experimental.openai.types")
    response = areal.load("areal.api.io_struct").ModelResponse
    given = conversation("a", 2)
    parent = None
    for turn in given.turns:
        interaction = types.InteractionWithTokenLogpReward(
            model_response=response(
                input_tokens=[*turn.prompt_ids],
                output_tokens=[*turn.completion_ids],
                output_logprobs=[*turn.completion_logprobs],
                output_versions=[turn.version_start] * len(turn.completion_ids),
            ),
            reward=turn.reward,
            parent=parent,
            chat_template_type="concat",
        )
        parent = interaction
    exported = parent.to_tensor_dict()
    ours = to_padded_dict(pack([given]))
    for key in ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask"):
        assert ours[key].tolist() == exported[key].tolist(), key
    back = from_padded_dict(exported)
    assert pack(back).input_ids.tolist() == pack([given]).input_ids.tolist()


def test_areals_workflow_executor_accepts_its_rows(areal):
    check = areal.load("areal.infra.workflow_executor").check_trajectory_format
    found = to_padded_dict(plain_batch())
    complaints = []

    class Listener:
        info = warning = complaints.append

    assert check(found, batch_size=3, expected_keys=set(found), logger=Listener)
    assert complaints == []


def test_turn_ids_separate_turns_without_a_token_between():
    found = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 1, 1, 1, 0]]),
        "logprobs": torch.tensor([[0.0, -1.0, -2.0, -3.0, 0.0]]),
        "versions": torch.tensor([[-1, 5, 5, 6, 0]]),
        "rewards": torch.tensor([0.5]),
    }
    (joined,) = from_padded_dict(found, groups=["task"])
    assert [turn.completion_ids.tolist() for turn in joined.turns] == [[2, 3, 4]]
    assert joined.turns[0].version_spans == [(5, 0, 2), (6, 2, 3)]
    assert (joined.id, joined.group) == ("task_0", "task")
    (apart,) = from_padded_dict([found | {"turn_ids": torch.tensor([[-1, 0, 1, 1, -1]])}], ["x"])
    assert [turn.completion_ids.tolist() for turn in apart.turns] == [[2], [3, 4]]
    assert [turn.reward for turn in apart.turns] == [0.0, 0.5]
    assert (apart.turns[1].version_start, apart.turns[1].version_end) == (5, 6)


def recorded_cases():
    if not ORACLE.exists():
        return []
    with gzip.open(ORACLE) as file:
        return json.load(file)


def recorded_trajectory(case):
    """Shape rewards and prompts as the recorded agent did; the agent's own test drives ours."""
    turns = []
    for prompt, output, success in zip(
        case["observations"], case["turns"], case["success"], strict=True
    ):
        turns.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=output["output_ids"],
                completion_logprobs=output["output_logprobs"],
                reward=((float(success) - 0.5) * 2 - case["reward_bias"]) * case["reward_scaling"],
                truncated=output["no_eos"],
                version_start=output["version_start"],
                version_end=output["version_end"],
            )
        )
    return Trajectory(
        case["qid"], turns, None, case["turn_level_discount"], case["task_id"], birth_time_ms=1
    )


def assert_matches(sample, case):
    expected = case["expected"]
    assert sample["ids"] == expected["ids"]
    assert sample["keys"] == set(expected["seqlens"])
    assert sample["seqlens"] == expected["seqlens"]
    assert {key: str(dtype) for key, dtype in sample["dtypes"].items()} == expected["dtypes"]
    for key, values in expected["data"].items():
        wanted = torch.tensor(values, dtype=sample["dtypes"][key])
        assert torch.equal(sample["data"][key], wanted), key


@pytest.mark.skipif(not ORACLE.exists(), reason=f"{ORACLE} is absent")
@pytest.mark.parametrize("case", recorded_cases(), ids=lambda case: case["qid"])
def test_a_recorded_episode_gives_the_recorded_sample_exactly(case):
    batch = pack([recorded_trajectory(case)], layout="turns")
    assert_matches(to_sequence_sample(batch), case)


def test_a_batch_of_trajectories_is_their_samples_side_by_side():
    first, second = conversation("a", 2), conversation("b", 3)
    sample = to_sequence_sample(pack([first, second], layout="turns"))
    alone = [to_sequence_sample(pack([t], layout="turns")) for t in (first, second)]
    assert sample["ids"] == ["a", "b"]
    for key in sample["keys"]:
        assert sample["seqlens"][key] == alone[0]["seqlens"][key] + alone[1]["seqlens"][key]
        pieces = [piece["data"][key] for piece in alone]
        assert torch.equal(sample["data"][key], torch.cat(pieces)), key


def test_logprobs_are_shifted_by_one_in_each_sequence():
    sample = to_sequence_sample(pack([conversation("a", 2)], layout="turns"))
    expected = [0.0, -0.5, 0.0, 0.0, 0.0, 0.0, -1.5, -1.625]
    assert sample["data"]["packed_logprobs"].tolist() == expected


def test_a_sequence_of_one_token_has_no_shifted_logprob():
    batch = pack([Trajectory("a", [Turn([1], [], [])])], layout="turns")
    sample = to_sequence_sample(batch)
    assert sample["seqlens"]["packed_logprobs"] == [[0]]
    assert sample["data"]["packed_logprobs"].shape == (0,)


def test_an_empty_batch_is_an_empty_sample():
    sample = to_sequence_sample(pack([], layout="turns"))
    assert sample["ids"] == []
    assert sample["data"]["packed_prompts"].dtype == torch.int64


@pytest.mark.parametrize(
    ("trajectories", "layout", "message"),
    [
        ([conversation("a")], "merged", "needs layout 'turns', got 'merged'"),
        ([conversation("a"), conversation("a")], "turns", r"repeated: \['a'\]"),
        (
            [conversation("a", task_id=1), conversation("b")],
            "turns",
            r"task_ids must be given for all .* 'b' has none",
        ),
    ],
)
def test_batches_that_are_no_sequence_sample_are_refused(trajectories, layout, message):
    with pytest.raises(ValueError, match=message):
        to_sequence_sample(pack(trajectories, layout=layout))
