"""What people see of a rollout."""

from __future__ import annotations

import io

from rich.console import Console

from trajpack import Trajectory, Turn
from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.rollout.outcome import RolloutOutcome
from trajpack.agent.rollout.report import ProgressBoard, report
from trajpack.agent.runner.runner import EpisodeResult, Progress

FIRST = Progress(num_finished=1, num_turns=2, num_tokens=50, elapsed_s=1.0)
LAST = Progress(
    num_finished=3,
    num_failed=1,
    num_turns=5,
    num_kept_turns=4,
    num_rewarded_turns=1,
    num_tokens=5000,
    elapsed_s=2.0,
)


def show(*, force_terminal: bool) -> tuple[str, list[str]]:
    lines: list[str] = []
    console = Console(file=io.StringIO(), force_terminal=force_terminal, width=100)
    with ProgressBoard(3, console, lines.append) as board:
        for progress in (FIRST, FIRST, LAST):
            board.update(progress)
        board.say("[bold] a word")
    assert board.progress is LAST
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), lines


def test_the_board_writes_first_and_last_progress_where_there_is_no_terminal() -> None:
    drawn, lines = show(force_terminal=False)
    assert not drawn
    assert lines == [
        "episodes 1 of 3, 2 turns, 50 tokens/s, 0% right, 0:01",
        "episodes 3 of 3, 5 turns, 2,500 tokens/s, 25% right, 1 failed, 0:02",
        "[bold] a word",
    ]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    lines: list[str] = []
    board = ProgressBoard(2, Console(file=io.StringIO()), lines.append)
    for second in range(1, 101):
        num_tokens = min(second, 50) * 1000
        is_last = second == 100
        board.update(
            Progress(num_finished=2 * is_last, num_tokens=num_tokens, elapsed_s=float(second))
        )
    assert "0 turns, 0 tokens/s" in lines[-1]
    assert lines[-1].endswith("1:40")


def test_the_board_draws_a_bar_on_a_terminal() -> None:
    drawn, lines = show(force_terminal=True)
    assert not lines
    assert "3/3" in drawn
    assert "5 turns, 2,500 tokens/s, 25% right, 1 failed" in drawn
    assert "0:00:00" in drawn
    assert "[bold] a word" in drawn


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
    buffer = outcome.fill_buffer("cpu")
    rows = report(outcome, LAST, buffer.pack(), buffer.num_tokens)
    named = dict(rows)
    assert named["right answers"] == "1 of 3 (33.3%)"
    # as turns 3 + 5 + 2, merged 5 + 2
    assert named["tokens as turns, merged"] == "10 against 7, a ratio of 1.43"
    assert named["fill, if padded"] == "7 of 10 tokens (70%)"
    assert "100%" not in "".join(value for _, value in rows)
    failures = [row for row in rows if row[0].startswith("failed")]
    assert failures[0] == ("failed 2", "reason 6")
    assert failures[-1] == ("failed", "2 more reasons")
    assert len(failures) == 6
