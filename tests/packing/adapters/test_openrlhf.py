import torch

from tests.packing.adapters.cases import forked_batch, plain_batch
from trajpack import GRPO, Trajectory, Turn, pack
from trajpack.packing.adapters.openrlhf import to_experience, to_experience_dict

PAD = 99
NO_MORE = ["images", "mm_train_inputs", "index", "kl", "values"]
NO_MORE += ["action_log_probs", "base_action_log_probs"]


def test_rows_have_their_rewards_and_labels():
    found = to_experience_dict(forked_batch())
    assert found["scores"].tolist() == [15.0, 15.0, 16.0, 6.0]
    assert found["info"]["reward"].tolist() == [15.0, 15.0, 16.0, 6.0]
    assert found["total_length"].tolist() == [7.0, 3.0, 3.0, 12.0]
    assert found["response_length"].tolist() == [5, 1, 0, 10]
    assert found["prompts"] == ["task", "task", "task", "long"]


def test_an_empty_last_turn_does_not_lengthen_the_response():
    turns = [Turn([1], [2], [-1.0]), Turn([1, 2, 3, 4], [], [])]
    found = to_experience_dict(pack([Trajectory("a", turns)]))
    assert found["response_length"].tolist() == [1]
    assert found["total_length"].tolist() == [4.0]


def test_the_real_experience_takes_it_and_splits_and_joins(openrlhf):
    module = openrlhf.load("openrlhf.trainer.ppo_utils.experience")
    batch = forked_batch().with_advantages(GRPO())
    experience = to_experience(batch, pad_token_id=PAD)
    assert isinstance(experience, module.Experience)
    items = module.split_experience_batch(experience)
    assert [item.prompts for item in items] == [["task"], ["task"], ["task"], ["long"]]
    again = module.make_experience_batch(items)
    for name, value in to_experience_dict(batch, pad_token_id=PAD).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(again, name), value), name
    assert again.info["reward"] == experience.info["reward"].tolist()


def test_openrlhfs_sample_generator_makes_the_same_of_a_trajectory(openrlhf):
    generator = openrlhf.load("openrlhf.trainer.ppo_utils.samples_generator").SamplesGenerator
    batch = plain_batch()
    found = to_experience_dict(batch)
    mask = batch.loss_mask[: batch.seqlens[0]].long().diff(prepend=torch.zeros(1).long())
    mask = torch.nn.functional.pad(mask, (0, 1), value=-1)
    starts, stops = (mask == 1).nonzero()[:, 0], (mask == -1).nonzero()[:, 0]
    response = {
        "observation_tokens": batch.input_ids[: batch.seqlens[0]].tolist(),
        "action_ranges": list(zip(starts.tolist(), stops.tolist(), strict=True)),
        "rollout_log_probs": batch.rollout_logprobs[: batch.seqlens[0]].tolist(),
        "reward": 3.0,
        "scores": 3.0,
        "prompt": "task",
        "label": "",
    }
    theirs = generator._process_response_into_experience(None, response, max_len=100)
    width = batch.seqlens[0]
    for name in ("sequences", "attention_mask", "action_mask", "rollout_log_probs"):
        ours, expected = found[name][:1], getattr(theirs, name)
        assert ours.dtype == expected.dtype, name
        assert torch.equal(ours[:, : expected.shape[1]], expected), name
        assert not ours[:, width:].any(), name
    for name in ("rewards", "scores", "response_length", "truncated", "total_length"):
        ours, expected = found[name][:1], getattr(theirs, name)
        assert (ours.dtype, ours.tolist()) == (expected.dtype, expected.tolist()), name
    assert set(found) == set(vars(theirs)) - {"advantages", "returns", *NO_MORE}


def test_openrlhfs_policy_loss_of_the_rows_is_that_of_the_batch(openrlhf):
    """Unclipped at the rollout's own log-probabilities: minus the mean advantage of tokens."""
    loss = openrlhf.load("openrlhf.models.loss").PolicyLoss()
    batch = forked_batch().with_advantages(GRPO())
    found = to_experience_dict(batch)
    logprobs = found["rollout_log_probs"]
    result = loss(logprobs, logprobs.clone(), found["advantages"], found["action_mask"])
    result = result[0] if isinstance(result, tuple) else result
    expected = -batch.advantages[batch.loss_mask].mean()
    torch.testing.assert_close(result, expected)
    assert expected.abs() > 0.01
