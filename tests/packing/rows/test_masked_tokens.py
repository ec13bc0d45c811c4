import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.packing.adapters.cases import told_of
from trajpack import pack
from trajpack.packing.rows.reading import trajectory_of
from trajpack.packing.types import VersionSpan
from trajpack.testing import trajectories

LOGPROBS = (0, -1.0, -2.0, 0, -4.0)


def masked(ids=(1, 2, 3, 4, 5), mask=(0, 1, 1, 0, 1), logprobs=LOGPROBS, group=None, **more):
    row = {"input_ids": list(ids), "mask": list(mask), "logprobs": list(logprobs)}
    return trajectory_of("a", group, [row | more])


def completions(trajectory):
    return [turn.completion_ids.tolist() for turn in trajectory.turns]


def versions(trajectory):
    return [(turn.version_start, turn.version_end) for turn in trajectory.turns]


def test_each_run_of_generated_tokens_is_a_turn():
    trajectory = masked(reward=2.0, truncated=True, group="g")
    assert told_of(trajectory) == [
        ([1], [2, 3], [-1.0, -2.0], 0.0, False),
        ([1, 2, 3, 4], [5], [-4.0], 2.0, True),
    ]
    assert (trajectory.id, trajectory.group) == ("a", "g")


def test_a_reward_at_a_token_goes_to_the_turn_that_ends_there_or_next():
    rewards = [0.5, 1.0, 2.0, 4.0, 8.0]
    assert [turn.reward for turn in masked(token_rewards=rewards).turns] == [3.5, 12.0]
    behind = masked(mask=(0, 1, 0, 0, 0), token_rewards=rewards)
    assert [turn.reward for turn in behind.turns] == [15.5]


def test_turn_ids_separate_turns_without_a_token_between():
    assert completions(masked(turn_ids=[-1, 0, 1, -1, 1])) == [[2], [3], [5]]


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_decreasing_versions_separate_turns(dtype):
    parted = masked(versions=np.array([0, 4, 3, 0, 4], dtype))
    assert completions(parted) == [[2], [3], [5]]
    assert versions(parted) == [(4, 4), (3, 3), (4, 4)]


def test_versions_are_of_tokens_or_of_turns_or_of_the_whole():
    by_token = masked(versions=[-1, 3, 4, -1, 4])
    assert versions(by_token) == [(3, 4), (4, 4)]
    spans = [turn.version_spans for turn in by_token.turns]
    assert spans == [[VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)], None]
    assert versions(masked(turn_versions=[5, 6])) == [(5, 5), (6, 6)]
    assert versions(masked(turn_versions=[6, 7, 5])) == [(5, 7), (5, 7)]
    assert versions(masked(turn_versions=[])) == [(0, 0), (0, 0)]
    assert versions(masked(version_range=(2, 3))) == [(2, 3), (2, 3)]


def test_without_a_generated_token_it_is_one_turn_with_an_empty_completion():
    silent = masked(mask=[0] * 5, reward=1.0, versions=[-1] * 5)
    assert told_of(silent) == [([1, 2, 3, 4, 5], [], [], 1.0, False)]
    assert versions(silent) == [(0, 0)]


def test_logprobs_are_ignored_where_nothing_was_generated():
    trajectory = masked(logprobs=[math.nan, -1.0, -2.0, math.inf, -4.0])
    assert pack([trajectory]).rollout_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, -4.0]


@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
def test_arrays_of_any_kind_are_taken(container):
    whole = {
        "input_ids": container([1, 2]),
        "mask": container([False, True]),
        "logprobs": container([0.0, -1.0]),
        "token_rewards": container([0.0, 0.5]),
        "versions": container([-1, 2]),
    }
    response = {name: values[1:] for name, values in whole.items()}
    for row in (whole, response | {"prompt_ids": container([1])}):
        assert told_of(trajectory_of("a", None, [row])) == [([1], [2], [-1.0], 0.5, False)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask": (1, 1, 1, 0, 1)}, ValueError, "'a': the first token must not be a generated"),
        ({"mask": (0, 1)}, ValueError, r"mask must have shape \[5\] as input_ids have, got \[2\]"),
        ({"mask": (0, 1, 1, 0, 2)}, ValueError, "'a': mask must be 0 or 1, got 2 at index 4"),
        ({"mask": (math.nan, 1, 1, 0, 1)}, ValueError, "'a': mask must be 0 or 1, got nan at"),
        ({"mask": (-100, 1, 1, 0, 1)}, ValueError, "'a': mask must be 0 or 1, got -100 at"),
        ({"logprobs": (0.0,)}, ValueError, r"logprobs must have shape \[5\]"),
        ({"versions": [1]}, ValueError, r"versions must have shape \[5\]"),
        ({"logprobs": ("a",) * 5}, TypeError, "'a': logprobs must be numbers"),
        ({"ids": ()}, ValueError, "there must be tokens, got none"),
        ({"ids": (1, 2, 3, 4, -5)}, ValueError, "'a': input_ids must be 0 or more, got -5"),
        ({"prompt_ids": [0.5]}, TypeError, "'a': prompt_ids must be integers"),
        ({"prompt_ids": [9], "ids": [0.5]}, TypeError, "response_ids must be integers"),
        ({"prompt_ids": [9], "mask": [[1]] * 5}, ValueError, r"mask must .* got \[5, 1\]"),
        ({"prompt_ids": [9], "token_rewards": 1.0}, ValueError, r"rewards must .* got \[\]"),
    ],
)
def test_tokens_that_are_no_conversation_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        masked(**changes)


@settings(max_examples=15)
@given(trajectories())
def test_any_sequence_of_a_batch_comes_back_up_to_its_last_generated_token(trajectory):
    batch = pack([trajectory])
    names = ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    pieces = (getattr(batch, name).split(batch.seqlens) for name in names)
    for columns in zip(*pieces, strict=True):
        ids, mask, logprobs, of_tokens = columns
        row = {"input_ids": ids, "mask": mask, "logprobs": logprobs, "versions": of_tokens}
        again = pack([trajectory_of("again", None, [row])])
        known = int(mask.nonzero().max()) + 1 if mask.any() else len(ids)
        for name, column in zip(names, columns, strict=True):
            assert torch.equal(getattr(again, name), column[:known]), name
