"""NeMo-RL's package on the index is empty: its published keys and shapes are written here."""

import torch
from hypothesis import given, settings, strategies as st

from tests.packing.adapters.cases import forked_batch, plain_batch
from trajpack import GRPO, TokenField, Trajectory, Turn, pack
from trajpack.packing.adapters.nemo_rl import to_loss_inputs, to_message_logs
from trajpack.testing import trajectory_lists

LOSS_KEYS = {
    "input_ids": torch.int64,
    "input_lengths": torch.int32,
    "generation_logprobs": torch.float32,
    "prev_logprobs": torch.float32,
    "advantages": torch.float32,
    "token_mask": torch.float32,
    "sample_mask": torch.float32,
}


def test_keys_and_dtypes_are_the_published_ones():
    found = to_loss_inputs(plain_batch().with_advantages(GRPO()))
    assert {key: value.dtype for key, value in found.items()} == LOSS_KEYS
    assert {len(value) for value in found.values()} == {3}
    assert not found["token_mask"][:, 0].any()  # column 0, which the loss leaves out


def test_logprobs_of_other_policies_come_from_extra_fields():
    names = ["prev_logprobs", "reference_policy_logprobs"]
    fields = [TokenField(name, torch.float32) for name in names]
    turn = Turn([1], [2], [-1.0], fields=dict(zip(names, [[-2.0], [-3.0]], strict=True)))
    batch = pack([Trajectory("a", [turn])], fields=fields).with_advantages(GRPO())
    found = to_loss_inputs(batch)
    assert found["generation_logprobs"].tolist() == [[0.0, -1.0]]
    assert found["prev_logprobs"].tolist() == [[0.0, -2.0]]
    assert found["reference_policy_logprobs"].tolist() == [[0.0, -3.0]]


def flattened(log, key):
    return torch.cat([message[key] for message in log])


@settings(max_examples=25)
@given(trajectory_lists(), st.sampled_from(["merged", "turns"]))
def test_messages_of_a_log_are_the_sequence_in_order(trajectories, layout):
    batch = pack(trajectories, layout=layout)
    logs = to_message_logs(batch)["message_log"]
    assert len(logs) == len(batch)
    for log, ids, mask, logprobs in zip(
        logs,
        batch.input_ids.split(batch.seqlens),
        batch.loss_mask.split(batch.seqlens),
        batch.rollout_logprobs.split(batch.seqlens),
        strict=True,
    ):
        assert torch.equal(flattened(log, "token_ids"), ids)
        assert torch.equal(flattened(log, "token_loss_mask"), mask.long())
        assert torch.equal(flattened(log, "generation_logprobs"), logprobs)
        for message in log:
            assert len(message["token_ids"]) > 0
            generated = message["role"] == "assistant"
            assert (message["token_loss_mask"] == int(generated)).all()


def test_a_log_has_roles_and_rewards():
    found = to_message_logs(forked_batch())
    roles = [[message["role"] for message in log] for log in found["message_log"]]
    assert roles[0] == ["user", "assistant", "user", "user", "assistant"]
    assert roles[1] == ["user", "assistant"]
    assert roles[2] == ["user"]
    assert roles[3] == ["user", "assistant"] * 3
    assert found["length"].tolist() == [2, 2, 3, 2]
    assert found["idx"] == [0, 0, 1, 2]
    assert found["loss_multiplier"].tolist() == [1.0] * 4
