"""The tables of the commands' results."""

from __future__ import annotations

from trajpack import Trajectory, Turn
from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.rollout.rollout import RolloutOutcome
from trajpack.agent.runner.runner import EpisodeResult, Progress
from trajpack.commands import rollout
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
