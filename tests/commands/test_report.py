"""The tables of the commands' results."""

from __future__ import annotations

import pytest

from trajpack import Trajectory, Turn
from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.rollout.rollout import RolloutOutcome
from trajpack.agent.runner.runner import EpisodeResult, Progress
from trajpack.agent.training.grpo import StepRecord
from trajpack.agent.training.policy_trainer import StepOutcome
from trajpack.commands import rollout, train
from trajpack.commands.train import rise
from trajpack.packing.buffer.buffer import TrajectoryBuffer

LAST = Progress(num_finished=3, num_tokens=5000, elapsed_s=2.0)


def test_the_report_compares_layouts_and_counts_failures() -> None:
    long = Trajectory("a", [Turn([1, 2], [3], [-1.0]), Turn([1, 2, 3, 4], [5], [-1.0], reward=1.0)])
    short = Trajectory("b", [Turn([1], [2], [-1.0])])
    prompt = Prompt("q", [1])
    outcome = RolloutOutcome(
        (
            EpisodeResult(prompt, (long,)),
            EpisodeResult(prompt, (short,), sample=1),
            *(EpisodeResult(prompt, (), EpisodeError("q", f"reason {k}")) for k in range(7)),
            EpisodeResult(prompt, (), EpisodeError("q", "reason 6")),
        )
    )
    buffer = TrajectoryBuffer()
    buffer.extend(outcome.trajectories)
    rows = rollout.report(outcome, LAST, buffer.pack(), num_merged=buffer.num_tokens)
    named = dict(rows)
    assert named["right answers"] == "1 of 3 (33.3%)"
    # as turns 3 + 5 + 2, merged 5 + 2
    assert named["packing saves"] == "30% of the tokens: 7 in place of 10, turn by turn"
    assert named["padding adds"] == "43%: 10 tokens in place of 7"
    assert "100%" not in "".join(value for _, value in rows)
    failures = [row for row in rows if row[0].startswith("failed")]
    assert failures[0] == ("failed 2", "reason 6")
    assert failures[-1] == ("failed", "2 more reasons")
    assert len(failures) == 6


def record(step: int, success: float) -> StepRecord:
    return StepRecord(
        step=step, success=success, solved=min(2 * success, 1.0), reward=4 * success - 3,
        num_tokens=1000, num_generated=300, seconds=1.5,
        outcome=StepOutcome(
            loss=0.25, gradient_norm=1.0, clip_fraction=0.05, num_micro_batches=2, fill=0.8,
            mean_staleness=0.5 * (step > 1), max_staleness=step % 3, num_on_policy=100 * step,
            logprob_gap=step * 1e-7,
        ),
    )  # fmt: skip


RECORDS = [record(step, step / 10) for step in range(1, 9)]


def test_the_rise_is_from_the_first_step_to_the_last_five() -> None:
    assert rise(RECORDS) == (0.1, pytest.approx(0.6))
    assert rise(RECORDS[:1]) == (0.1, 0.1)


def test_the_report_of_a_training() -> None:
    rows = dict(train.report(RECORDS))
    assert rows["right answers"] == "10% in the first step, 60% in the last 5"
    assert rows["solved"] == "20% of the first questions, 100% of the last"
    assert rows["speed"] == "200 generated tokens/s, 12.0 s"
    assert rows["tokens"] == "8,000 in the batches, 2,400 generated"
    assert rows["fill"] == "80% of the micro-batches' capacity"
    assert rows["staleness"] == "0.44 versions on average, 2 at most"
    expected = "3,600 of trainer and engine differ by 8.0e-07 at most"
    assert rows["log-probabilities"] == expected
