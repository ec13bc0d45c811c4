from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import (
    clipped_loss,
    conversation,
    forked_batch,
    plain_batch,
    random_batch,
    told_of,
)
from tests.packing.adapters.peers import stand_ins
from trajpack import GRPO, TokenField, Trajectory, Turn, pack
from trajpack.packing.adapters.verl import (
    from_agent_loop_outputs,
    from_data_proto,
    to_agent_loop_outputs,
    to_data_proto,
    to_data_proto_dict,
    to_tensordict,
)

PAD = 99


def test_rows_are_labelled_with_groups_turns_and_versions():
    labels = to_data_proto_dict(forked_batch())["non_tensors"]
    assert labels["uid"].tolist() == ["task", "task", "task", "long"]
    assert labels["uid"].dtype == object
    assert labels["__num_turns__"].tolist() == [6, 2, 2, 6]
    assert labels["min_global_steps"].tolist() == [3, 5, 0, 0]
    assert labels["max_global_steps"].tolist() == [6, 5, 0, 2]


def test_extra_fields_are_of_responses_and_routed_experts_of_rows():
    fields = [
        TokenField("values", torch.float32),
        TokenField("routed_experts", torch.int16, (2, 1), generated_only=False),
    ]
    routed = np.arange(6, dtype=np.int16).reshape(3, 2, 1)
    turn = Turn([1, 2], [3], [-1.0], fields={"values": [0.5], "routed_experts": routed})
    tensors = to_data_proto_dict(
        pack([Trajectory("a", [turn])], fields=fields), max_prompt_length=3, max_response_length=2
    )["tensors"]
    assert tensors["values"].tolist() == [[0.5, 0.0]]
    assert tensors["routed_experts"].shape == (1, 5, 2, 1)
    assert tensors["routed_experts"][0, 1:4].flatten().tolist() == list(range(6))


def test_the_real_data_proto_passes_its_checks(verl):
    protocol = verl.load("verl.protocol")
    proto = to_data_proto(plain_batch(), pad_token_id=PAD, meta_info={"temperature": 0.7})
    assert isinstance(proto, protocol.DataProto)
    proto.check_consistency()
    assert len(proto) == 3
    assert proto.meta_info == {"temperature": 0.7}
    halves = protocol.DataProto.concat(proto[[2, 0]].chunk(2))
    assert halves.non_tensor_batch["uid"].tolist() == ["c", "task"]
    assert halves.batch["responses"][1].tolist() == [100, 7, 8, 110, 111, *[PAD] * 5]


def test_positions_are_those_that_verl_computes(verl):
    verl.load("verl")
    compute = verl.load("verl.utils.model").compute_position_id_with_mask
    tensors = to_data_proto_dict(forked_batch(), max_prompt_length=8)["tensors"]
    assert torch.equal(tensors["position_ids"], compute(tensors["attention_mask"]))


def test_verls_own_grpo_on_its_rows_gives_the_advantages_of_the_batch(verl):
    algorithms = verl.load("verl.trainer.ppo.core_algos")
    batch = plain_batch().with_advantages(GRPO())
    found = to_data_proto_dict(batch)
    tensors = found["tensors"]
    advantages, _ = algorithms.compute_grpo_outcome_advantage(
        tensors["token_level_rewards"], tensors["response_mask"], found["non_tensors"]["uid"]
    )
    torch.testing.assert_close(tensors["advantages"], advantages)
    assert advantages.abs().max() > 0.5


def test_verls_token_mean_over_its_rows_is_the_mean_over_the_batch(verl):
    algorithms = verl.load("verl.trainer.ppo.core_algos")
    batch = forked_batch()
    tensors = to_data_proto_dict(batch)["tensors"]
    mean = algorithms.agg_loss(
        tensors["rollout_log_probs"], tensors["response_mask"], "token-mean", dp_size=1
    )
    torch.testing.assert_close(mean, batch.rollout_logprobs[batch.loss_mask].mean())


def test_the_jagged_form_equals_the_padded_one_without_padding(verl):
    padding = verl.load("verl.workers.utils.padding")
    from tensordict import TensorDict

    batch = forked_batch()
    jagged = to_tensordict(batch)
    rows = TensorDict(to_data_proto_dict(batch)["tensors"], batch_size=[len(batch)])
    expected = padding.left_right_2_no_padding(rows)
    for key in ("input_ids", "position_ids"):
        assert torch.equal(jagged[key].offsets(), expected[key].offsets()), key
        assert torch.equal(jagged[key].values(), expected[key].values()), key


def test_verl_slices_responses_out_of_the_jagged_form(verl):
    """Log-probabilities of a model stand one token early; verl cuts and shifts them."""
    padding = verl.load("verl.workers.utils.padding")
    batch = plain_batch()
    jagged = to_tensordict(batch)
    early = torch.nested.nested_tensor_from_jagged(
        batch.rollout_logprobs.roll(-1), batch.cu_seqlens.long()
    )
    responses = padding.no_padding_2_padding(early, jagged)
    expected = to_data_proto_dict(batch)["tensors"]["rollout_log_probs"]
    assert torch.equal(responses, expected)
    again = padding.response_from_nested(early, jagged["response_mask"])
    assert torch.equal(again.values(), jagged["rollout_log_probs"].values())


def test_the_jagged_form_has_its_labels_and_lengths():
    jagged = to_tensordict(forked_batch().with_advantages(GRPO()))
    assert jagged["max_seq_len"] == 12
    assert jagged["max_response_len"] == 10
    assert list(jagged["uid"]) == ["task", "task", "task", "long"]
    assert list(jagged["num_turns"]) == [6, 2, 2, 6]
    assert jagged["prompts"].offsets().diff().tolist() == [2, 2, 3, 2]
    assert jagged["responses"].offsets().diff().tolist() == [5, 1, 0, 10]
    assert torch.equal(jagged["loss_mask"].values(), jagged["response_mask"].values())
    assert jagged["advantages"].shape[0] == 4


def actor_settings():
    """Settings of verl's actor as its loss reads them: by name, and by ``get``."""
    settings = {
        "global_batch_info": {}, "loss_scale_factor": None, "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"}, "use_kl_loss": False, "clip_ratio": 0.2,
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9,
    }  # fmt: skip
    return SimpleNamespace(get=settings.get, **settings)


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_verls_own_loss_of_the_jagged_form_is_that_of_the_packed_tokens(verl, layout):
    from tensordict import NonTensorData

    losses = verl.load("verl.workers.utils.losses")
    rng = np.random.default_rng(20)
    for number in range(15):
        batch = random_batch(
            rng, layout=layout, fields=[TokenField("old_log_probs", torch.float32)]
        )
        now = (
            batch.rollout_logprobs + torch.from_numpy(rng.normal(0, 0.3, batch.num_tokens)).float()
        )
        jagged = to_tensordict(batch)
        assert jagged["response_mask"].to_padded_tensor(0).shape[1] == jagged["max_response_len"]
        for key in ("dp_size", "batch_num_tokens", "global_batch_size"):
            jagged[key] = NonTensorData(1 if key == "dp_size" else None)
        early = torch.nested.nested_tensor_from_jagged(now.roll(-1), batch.cu_seqlens.long())
        loss, _ = losses.ppo_loss(actor_settings(), {"log_probs": early}, jagged)
        expected = clipped_loss(
            now, batch.fields["old_log_probs"], batch.advantages, batch.loss_mask
        )
        torch.testing.assert_close(loss, expected, msg=lambda text: f"batch {number}: {text}")  # noqa: B023


def test_trajectories_of_the_real_data_proto_are_those_of_its_dictionary(verl):
    verl.load("verl")
    batch = pack([conversation("a", 2, group="task"), conversation("b", 3, group="task")])
    back = from_data_proto(to_data_proto(batch, max_prompt_length=4))
    assert back == from_data_proto(to_data_proto_dict(batch))
    assert [(turn.version_start, turn.version_end) for turn in back[1].turns] == [(0, 2)] * 3


def test_outputs_of_agent_loops_are_trajectories():
    output = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5, 6],
        "response_mask": [1, 0, 1, 1],
        "response_logprobs": [-0.5, 0.0, -0.25, -1.0],
        "reward_score": 2.0,
        "extra_fields": {"min_global_steps": 3, "max_global_steps": 4},
    }
    (trajectory,) = from_agent_loop_outputs([output], groups=["task"])
    assert told_of(trajectory) == [
        ([1, 2], [3], [-0.5], 0.0, False),
        ([1, 2, 3, 4], [5, 6], [-0.25, -1.0], 2.0, False),
    ]
    assert trajectory.id == "task_0"
    assert trajectory.turns[0].version_end == 4


def test_the_real_output_of_an_agent_loop_equals_the_row(verl):
    """Its fields as verl itself makes them into tensors, without the engines beside it."""
    verl.load("verl")
    verl.without_init("verl.experimental.agent_loop")
    with stand_ins("verl.workers.rollout", "verl.utils.dataset", "verl.utils.rollout_trace"):
        loops = verl.load("verl.experimental.agent_loop.agent_loop")
    output = loops.AgentLoopOutput(
        prompt_ids=[10, 11],
        response_ids=[100, 7, 8, 110, 111],
        response_mask=[1, 0, 0, 1, 1],
        response_logprobs=[-0.5, 0.0, 0.0, -1.5, -1.625],
        reward_score=3.0,
        num_turns=4,
        metrics=loops.AgentLoopMetrics(),
    )
    batch = pack([conversation("a", 2)])
    found = to_data_proto_dict(batch, scores="last")
    told = output.as_dict()
    for key in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"):
        assert found["tensors"][key].dtype == told[key].dtype, key
        assert torch.equal(found["tensors"][key][0], told[key]), key
    assert found["non_tensors"]["__num_turns__"].tolist() == [told["num_turns"]]
    (trajectory,) = from_agent_loop_outputs([output])
    assert [turn.reward for turn in trajectory.turns] == [0.0, 3.0]


def agent_output(prompt, response, **changes):
    output = {
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": [1] * len(response),
        "response_logprobs": [-0.5] * len(response),
        "reward_score": 2.0,
    }
    return output | changes


def test_a_session_of_several_outputs_is_one_trajectory_with_one_reward():
    """verl writes the last reward to every output of a session; it is that of the session."""
    session = [agent_output([1, 2], [3, 4]), agent_output([1, 9], [5])]
    alone = agent_output([7], [8], reward_score=1.0)
    first, second = from_agent_loop_outputs([session, alone], groups=["task", "task"])
    assert told_of(first) == [
        ([1, 2], [3, 4], [-0.5, -0.5], 0.0, False),
        ([1, 9], [5], [-0.5], 2.0, False),
    ]
    assert [trajectory.id for trajectory in (first, second)] == ["task_0", "task_1"]
    batch = pack([first, second])
    assert batch.seqlens == (4, 3, 2)
    assert to_data_proto_dict(batch)["tensors"]["rm_scores"].sum().item() == 3.0


def test_fields_of_outputs_are_carried_where_they_are_named():
    teacher = {
        "teacher_ids": [[1, 2], [3, 4], [5, 6]],
        "teacher_logprobs": [[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]],
    }
    output = agent_output([1], [2, 3], extra_fields=teacher, routed_experts=[[[0, 1]], [[2, 3]]])
    fields = [
        TokenField("teacher_ids", torch.int64, (2,), generated_only=False),
        TokenField("teacher_logprobs", torch.float32, (2,), generated_only=False),
        TokenField("routed_experts", torch.uint8, (1, 2), generated_only=False),
    ]
    names = [field.name for field in fields]
    tensors = to_data_proto_dict(
        pack(from_agent_loop_outputs([output], fields=names), fields=fields)
    )["tensors"]
    assert tensors["teacher_ids"][0].tolist() == teacher["teacher_ids"]
    assert tensors["teacher_logprobs"][0].tolist() == teacher["teacher_logprobs"]
    assert tensors["routed_experts"][0].tolist() == [[[0, 1]], [[2, 3]], [[0, 0]]]  # as verl


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_sequences_of_a_trajectory_are_the_outputs_of_one_session(verl, layout):
    verl.load("verl")
    verl.without_init("verl.experimental.agent_loop")
    with stand_ins("verl.workers.rollout", "verl.utils.dataset", "verl.utils.rollout_trace"):
        loops = verl.load("verl.experimental.agent_loop.agent_loop")
    fields = [TokenField("routed_experts", torch.int16, (2, 3), generated_only=False)]
    rng = np.random.default_rng(4)
    for _ in range(20):
        batch = random_batch(rng, layout=layout, fields=fields)
        sessions = [
            [
                loops.AgentLoopOutput(**output, metrics=loops.AgentLoopMetrics())
                for output in outputs
            ]
            for outputs in to_agent_loop_outputs(batch)
        ]
        # verl's V1 trainer copies it from the last output of a session
        assert all(one.extra_fields["reward_extra_info"] == {} for of in sessions for one in of)
        tensors = to_data_proto_dict(batch, scores="last")["tensors"]
        rows = [output.as_dict() for outputs in sessions for output in outputs]
        for index, row in enumerate(rows):
            length = len(row["responses"])
            for key in ("responses", "response_mask", "rollout_log_probs", "rm_scores"):
                assert torch.equal(tensors[key][index, :length], row[key]), key
            mask = tensors["attention_mask"][index].bool()
            assert torch.equal(tensors["routed_experts"][index][mask], row["routed_experts"])
        back = from_agent_loop_outputs(sessions, batch.ids, batch.groups, fields=["routed_experts"])
        again = pack(back, fields=fields, layout=layout)
        assert [sum(turn.reward for turn in one.turns) for one in back] == pytest.approx(
            [sum(turn.reward for turn in one.turns) for one in batch.unpack()]
        )
        if layout == "merged":
            for name in ("input_ids", "loss_mask", "rollout_logprobs", "cu_seqlens"):
                assert torch.equal(getattr(again, name), getattr(batch, name)), name
