import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from trajpack import VersionSpan, pack
from trajpack.packing.rows.masked_tokens import MaskedTokens
from trajpack.testing import trajectories


def masked(ids=(1, 2, 3, 4, 5), mask=(0, 1, 1, 0, 1), logprobs=(0, -1.0, -2.0, 0, -4.0), **more):
    return MaskedTokens(list(ids), list(mask), list(logprobs), **more)


def told_of(trajectory):
    return [
        ([*turn.prompt_ids], [*turn.completion_ids], [*turn.completion_logprobs], turn.reward)
        for turn in trajectory.turns
    ]


def test_each_run_of_generated_tokens_is_a_turn():
    trajectory = masked(reward=2.0, truncated=True).trajectory("a", group="g", task_id=3)
    assert told_of(trajectory) == [
        ([1], [2, 3], [-1.0, -2.0], 0.0),
        ([1, 2, 3, 4], [5], [-4.0], 2.0),
    ]
    assert [turn.truncated for turn in trajectory.turns] == [False, True]
    assert (trajectory.group, trajectory.task_id) == ("g", 3)


def test_rewards_of_tokens_go_to_the_turns_before_which_they_stand():
    rewards = [0.5, 1.0, 2.0, 4.0, 8.0]
    assert [turn[3] for turn in told_of(masked(token_rewards=rewards).trajectory("a"))] == [
        3.5, 12.0
    ]  # fmt: skip
    behind = masked(mask=(0, 1, 0, 0, 0), token_rewards=rewards)
    assert [turn[3] for turn in told_of(behind.trajectory("a"))] == [15.5]


def test_turn_ids_part_turns_with_nothing_between():
    parted = masked(turn_ids=[-1, 0, 1, -1, 1])
    completions = [turn[1] for turn in told_of(parted.trajectory("a"))]
    assert completions == [[2], [3], [5]]


def test_a_run_is_parted_where_versions_run_backwards():
    parted = masked(versions=[-1, 4, 3, -1, 4]).trajectory("a")
    assert [turn[1] for turn in told_of(parted)] == [[2], [3], [5]]
    assert [turn.version_start for turn in parted.turns] == [4, 3, 4]
    unsigned = masked(versions=np.array([0, 4, 3, 0, 4], np.uint8)).trajectory("a")
    assert [turn.version_start for turn in unsigned.turns] == [4, 3, 4]


def test_versions_are_of_tokens_or_of_turns_or_of_the_whole():
    first, second = masked(versions=[-1, 3, 4, -1, 4]).trajectory("a").turns
    assert first.version_spans == [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)]
    assert (first.version_start, first.version_end) == (3, 4)
    assert (second.version_start, second.version_end, second.version_spans) == (4, 4, None)
    by_turn = masked().with_turn_versions([5, 6]).trajectory("a").turns
    assert [(turn.version_start, turn.version_end) for turn in by_turn] == [(5, 5), (6, 6)]
    whole = masked().with_turn_versions([5, 6, 7]).trajectory("a").turns
    assert [(turn.version_start, turn.version_end) for turn in whole] == [(5, 7), (5, 7)]
    assert masked().with_turn_versions([]).trajectory("a").turns[0].version_end == 0


def test_where_nothing_was_generated_it_is_one_turn_of_nothing():
    (turn,) = masked(mask=[0] * 5, reward=1.0, versions=[-1] * 5).trajectory("a").turns
    assert [*turn.prompt_ids] == [1, 2, 3, 4, 5]
    assert (len(turn.completion_ids), turn.reward, turn.version_start) == (0, 1.0, 0)


def test_what_stands_where_nothing_was_generated_is_not_looked_at():
    trajectory = masked(logprobs=[math.nan, -1.0, -2.0, math.inf, -4.0]).trajectory("a")
    assert pack([trajectory]).rollout_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, -4.0]


@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
def test_arrays_of_any_kind_are_taken(container):
    given_in = MaskedTokens(
        container([1, 2]), container([False, True]), container([0.0, -1.0]),
        token_rewards=container([0.0, 0.5]), versions=container([-1, 2]),
    )  # fmt: skip
    assert told_of(given_in.trajectory("a")) == [([1], [2], [-1.0], 0.5)]
    response = MaskedTokens.of_response(
        container([1]), container([2]), container([1]), container([-1.0]), container([0.5])
    )
    assert told_of(response.trajectory("a")) == [([1], [2], [-1.0], 0.5)]


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
    ],
)
def test_what_is_no_conversation_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        masked(**changes).trajectory("a")


@settings(max_examples=25)
@given(trajectories())
def test_any_sequence_of_a_batch_comes_back_up_to_its_last_generated_token(trajectory):
    batch = pack([trajectory])
    columns = (batch.input_ids, batch.loss_mask, batch.rollout_logprobs, batch.policy_versions)
    for ids, mask, logprobs, versions in zip(
        *(column.split(batch.seqlens) for column in columns), strict=True
    ):
        back = MaskedTokens(ids, mask, logprobs, versions=versions)
        again = pack([back.trajectory("again")])
        known = int(mask.nonzero().max()) + 1 if mask.any() else len(ids)  # the rest is unseen
        assert torch.equal(again.input_ids, ids[:known])
        assert torch.equal(again.loss_mask, mask[:known])
        assert torch.equal(again.rollout_logprobs, logprobs[:known])
        assert torch.equal(again.policy_versions, versions[:known])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"response_ids": [0.5]}, TypeError, "response_ids must be integers"),
        ({"mask": [[1]]}, ValueError, r"mask must have one dimension, got \[1, 1\]"),
        ({"mask": None}, ValueError, r"mask must have one dimension, got \[\]"),
        ({"logprobs": ["no"]}, TypeError, "logprobs must be numbers"),
        ({"token_rewards": 1.0}, ValueError, r"rewards must have one dimension, got \[\]"),
    ],
)
def test_what_is_no_response_is_refused(changes, error, message):
    given_in = {"prompt_ids": [1], "response_ids": [2], "mask": [1], "logprobs": [-1.0]}
    with pytest.raises(error, match=message):
        MaskedTokens.of_response(**{**given_in, **changes})
