"""Rows for TRL: each generated token of each episode once, and what it saw before it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from trajpack.agent.environments.questions import Question
from trajpack.agent.trl.rollout import (
    Row,
    episode_reward,
    questions_by_text,
    rows_of_episodes,
    text_of,
)
from trajpack.packing.types import Trajectory, Turn
from trajpack.testing import trajectory_lists


def generated_by(turn: Turn) -> list[tuple[tuple[int, ...], float]]:
    """Each token with all before it, and its log-probability."""
    ids, sampled = [*turn.prompt_ids, *turn.completion_ids], list(turn.completion_logprobs)
    begin = len(turn.prompt_ids)
    return [(tuple(ids[: begin + j + 1]), float(sampled[j])) for j in range(len(sampled))]


def generated_in(row: Row) -> list[tuple[tuple[int, ...], float]]:
    ids, begin = [*row.prompt_ids, *row.completion_ids], len(row.prompt_ids)
    return [
        (tuple(ids[: begin + j + 1]), row.logprobs[j])
        for j, is_generated in enumerate(row.env_mask)
        if is_generated
    ]


@settings(max_examples=50)
@given(st.lists(trajectory_lists(max_size=3), max_size=4))
def test_each_generated_token_is_in_one_row_of_its_episode(
    episodes: list[list[Trajectory]],
) -> None:
    found = rows_of_episodes(episodes)
    assert len(found) == len(episodes)
    for rows, paths in zip(found, episodes, strict=True):
        expected = [token for path in paths for turn in path.turns for token in generated_by(turn)]
        got = [token for row in rows for token in generated_in(row)]
        assert sorted(prefix for prefix, _ in got) == sorted(prefix for prefix, _ in expected)
        assert sorted(value for _, value in got) == pytest.approx(
            sorted(value for _, value in expected), rel=1e-6
        )
        for row in rows:
            sizes = {len(row.completion_ids), len(row.env_mask), len(row.logprobs)}
            assert len(sizes) == 1
            assert row.prompt_ids
            assert row.env_mask[0] == row.env_mask[-1] == 1
            assert not any(p for p, m in zip(row.logprobs, row.env_mask, strict=True) if not m)


def test_extra_fields_are_dropped_and_numbers_are_pythons() -> None:
    turn = Turn([1, 2], [3], [-0.5], fields={"values": [0.25]})
    ((row,),) = rows_of_episodes([[Trajectory("a", [turn])]])
    assert row == ([1, 2], [3], [1], [-0.5], None)
    assert {type(value) for column in row[:3] for value in column} == {int}


def test_the_reward_function_logs_the_share_of_masked_episodes() -> None:
    logged = {}
    rewards = episode_reward(
        episode_reward=[1.0, None, 2.0, 0.0],
        episode_turns=[2, 0, 3, 1],
        log_metric=logged.__setitem__,
        prompts=["of no interest"],
    )
    assert rewards == [1.0, None, 2.0, 0.0]
    assert logged == {"episode/turns": 1.5, "episode/left_out": 0.25}


def test_a_question_is_found_by_its_text() -> None:
    question = Question("a", ({"role": "user", "content": "2 + 3?"},), ("5",))
    again = Question("b", ({"role": "user", "content": "2 + 3?"},), ("5",))
    known = questions_by_text([question, again])
    assert known == {"2 + 3?": question}
    assert text_of([*question.messages, {"content": "Well?"}]) == "2 + 3?\n\nWell?"
