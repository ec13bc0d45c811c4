import gzip
import json
from pathlib import Path

import pytest
import torch

from trajpack import Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.adapters.areal import to_sequence_sample

ORACLE = Path(__file__).parents[4] / "shared" / "oracles" / "multi_turn_agent.json.gz"


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


def make_trajectory(name, num_turns=2, **labels):
    turns, prompt = [], [5, 6]
    for turn in range(num_turns):
        turns.append(Turn(prompt, [7, turn], [-0.5, -1.0 - turn], reward=1.0))
        prompt = [*prompt, 7, turn, 9]
    return Trajectory(name, turns, **labels)


def test_a_batch_of_trajectories_is_their_samples_side_by_side():
    first, second = make_trajectory("a", 2), make_trajectory("b", 3)
    sample = to_sequence_sample(pack([first, second], layout="turns"))
    alone = [to_sequence_sample(pack([t], layout="turns")) for t in (first, second)]
    assert sample["ids"] == ["a", "b"]
    for key in sample["keys"]:
        assert sample["seqlens"][key] == alone[0]["seqlens"][key] + alone[1]["seqlens"][key]
        pieces = [piece["data"][key] for piece in alone]
        assert torch.equal(sample["data"][key], torch.cat(pieces)), key


def test_logprobs_are_shifted_by_one_in_each_sequence():
    sample = to_sequence_sample(pack([make_trajectory("a", 1)], layout="turns"))
    assert sample["data"]["packed_logprobs"].tolist() == [0.0, -0.5, -1.0]


def test_a_sequence_of_one_token_has_no_shifted_logprob():
    batch = pack([Trajectory("a", [Turn([1], [], [])])], layout="turns")
    sample = to_sequence_sample(batch)
    assert sample["seqlens"]["packed_logprobs"] == [[0]]
    assert sample["data"]["packed_logprobs"].shape == (0,)


def test_an_empty_batch_is_an_empty_sample():
    sample = to_sequence_sample(TrajectoryBuffer().pack(layout="turns"))
    assert sample["ids"] == []
    assert sample["data"]["packed_prompts"].dtype == torch.int64


def test_another_layout_is_refused():
    with pytest.raises(ValueError, match="needs layout 'turns', got 'merged'"):
        to_sequence_sample(pack([make_trajectory("a")]))


def test_repeated_ids_are_refused():
    batch = pack([make_trajectory("a"), make_trajectory("a")], layout="turns")
    with pytest.raises(ValueError, match=r"repeated: \['a'\]"):
        to_sequence_sample(batch)


def test_a_label_that_only_some_trajectories_have_is_refused():
    batch = pack([make_trajectory("a", task_id=1), make_trajectory("b")], layout="turns")
    with pytest.raises(ValueError, match=r"task_ids must be given for all .* 'b' has none"):
        to_sequence_sample(batch)
