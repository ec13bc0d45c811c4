from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent.agents.chat_cases import END, Characters, collect
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.packing.types import Trajectory

RIGHT = f"\n<user>Congratulations! You are correct!{END}\n<assistant>"
WRONG = f"\n<user>Unfortunately your answer is wrong. Let's try again.{END}\n<assistant>"
PROMPT = Prompt("q0@0", [ord(char) for char in "1+1?"])


class Judge:
    """An environment that has made up its mind."""

    def __init__(self, *successes: Any, terminated_at: int = -1) -> None:
        self.successes = list(successes)
        self.actions: list[Any] = []
        self.num_resets = 0
        self.terminated_at = terminated_at

    async def reset(self) -> None:
        assert not self.actions
        self.num_resets += 1

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        turn = len(self.actions) - 1
        return None, [self.successes[turn]], turn == self.terminated_at, False, {}


def make(**options: Any) -> MathMultiTurnAgent:
    defaults: dict[str, Any] = {
        "gconfig": SamplingParams(max_new_tokens=8),
        "tokenizer": Characters(),
        "answer_save_path": None,
    }
    return MathMultiTurnAgent(**(defaults | options))


def run(agent: MathMultiTurnAgent, env: Any, *texts: Any) -> tuple[Trajectory, list[str]]:
    return collect(agent, env, texts, prompt=PROMPT)


def says(*texts: str) -> list[str]:
    return [text + END for text in texts]


def text_of(ids: Any) -> str:
    return "".join(map(chr, ids))


def test_each_prompt_is_the_conversation_so_far_and_the_feedback() -> None:
    env = Judge(False, True, True)
    trajectory, texts = run(make(num_turns=3), env, *says("3", "2", "2."))
    assert texts == ["1+1?", f"1+1?3{END}{WRONG}", f"1+1?3{END}{WRONG}2{END}{RIGHT}"]
    assert [text_of(turn.prompt_ids) for turn in trajectory.turns] == texts
    assert env.actions == [("q0@0", ["3"]), ("q0@0", ["2"]), ("q0@0", ["2."])]


def test_a_trajectory_carries_what_the_engine_and_the_prompt_said() -> None:
    agent = make(num_turns=1, turn_level_discount=0.5)
    spans = [(3, 0, 1), (4, 1, 2)]
    reply: dict[str, Any] = {"output_ids": [50, 0], "output_logprobs": [-0.5] * 2, "no_eos": True}
    reply |= {"version_start": 3, "version_end": 4, "version_spans": spans}
    before = time.time() * 1000
    trajectory, _ = run(agent, Judge(1), reply)
    (turn,) = trajectory.turns
    assert (turn.truncated, turn.version_start, turn.version_end) == (True, 3, 4)
    assert turn.version_spans == spans
    assert (trajectory.turn_discount, trajectory.task_id) == (0.5, None)
    assert trajectory.birth_time_ms is not None
    assert before - 1 <= trajectory.birth_time_ms <= time.time() * 1000


def test_an_empty_completion_is_a_turn() -> None:
    trajectory, _ = run(make(num_turns=2), Judge(False, False), "", *says("2"))
    assert len(trajectory.turns[0].completion_ids) == 0
    assert text_of(trajectory.turns[1].prompt_ids) == f"1+1?{WRONG}"


@pytest.mark.parametrize(
    ("judge", "option"),
    [
        (lambda: Judge(0, 1, 1), "stop_on_success"),
        (lambda: Judge(0, 0, 0, terminated_at=1), "stop_on_terminated"),
    ],
)
def test_the_episode_goes_on_unless_told_to_stop(judge: Any, option: str) -> None:
    replies = says("1", "2", "3")
    assert len(run(make(num_turns=3), judge(), *replies)[0].turns) == 3
    assert len(run(make(num_turns=3, **{option: True}), judge(), *replies)[0].turns) == 2


class _FailsOnTheLog(Characters):
    def decode(self, ids: list[int], **options: Any) -> str:
        if not options["skip_special_tokens"]:
            raise ZeroDivisionError("oh")
        return super().decode(ids, **options)


@pytest.mark.parametrize("tokenizer", [Characters(), _FailsOnTheLog()])
def test_a_log_that_cannot_be_written_costs_a_warning_not_the_trajectory(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "answers"
    if type(tokenizer) is Characters:
        folder.write_text("a file where a folder should be")
    agent = make(num_turns=1, answer_save_path=folder, tokenizer=tokenizer)
    with caplog.at_level(logging.WARNING, "trajpack"):
        trajectory, _ = run(agent, Judge(1), *says("2"))
    assert len(trajectory.turns) == 1
    assert "episode 'q0@0': its answers were not logged" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gconfig": SimpleNamespace(n=2)}, r"gconfig\.n must be 1, got 2"),
        ({"gconfig": {"n_samples": 4}}, r"gconfig\.n_samples must be 1, got 4"),
        ({"tokenizer": "no/such-folder"}, "cannot load a tokenizer from no/such-folder"),
        ({"num_turns": 0}, "num_turns must be at least 1, got 0"),
        ({"reward_scaling": float("inf")}, "reward_scaling must be finite, got inf"),
        ({"reward_bias": float("nan")}, "reward_bias must be finite, got nan"),
        ({"turn_level_discount": float("-inf")}, "turn_discount must be finite, got -inf"),
        ({"max_total_tokens": 0}, "max_total_tokens must be positive, got 0"),
        ({"max_total_tokens": 9, "gconfig": None}, "needs a gconfig with max_new_tokens"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    "options",
    [
        *[{"num_turns": value} for value in (2.5, "2", True)],
        *[{"max_total_tokens": 9.5}, {"max_total_tokens": 9, "gconfig": {"max_new_tokens": "8"}}],
    ],
)
def test_numbers_of_turns_and_tokens_are_integers(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        make(**options)


def test_a_reward_beyond_float32_ends_the_episode() -> None:
    with pytest.raises(ValueError, match="reward must be finite float32"):
        run(make(reward_scaling=1e300), Judge(1), *says("2"))
