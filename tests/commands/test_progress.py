"""Progress of the commands: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from trajpack.agent.runner.runner import Progress
from trajpack.commands.progress import EpisodeBoard

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
    with EpisodeBoard(3, console, lines.append) as board:
        for progress in (FIRST, FIRST, LAST):
            board.update(progress)
        board.say("[bold] a word")
    assert board.progress is LAST
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), lines


def test_a_rollout_prints_first_and_last_progress_without_a_terminal() -> None:
    drawn, lines = show(force_terminal=False)
    assert not drawn
    assert lines == [
        "episodes 1 of 3, 2 turns, 50 tokens/s, 0% right, 0:01",
        "episodes 3 of 3, 5 turns, 2,500 tokens/s, 25% right, 1 failed, 0:02",
        "[bold] a word",
    ]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    lines: list[str] = []
    board = EpisodeBoard(2, Console(file=io.StringIO()), lines.append)
    for second in range(1, 101):
        num_tokens = min(second, 50) * 1000
        is_last = second == 100
        board.update(
            Progress(num_finished=2 * is_last, num_tokens=num_tokens, elapsed_s=float(second))
        )
    assert "0 turns, 0 tokens/s" in lines[-1]
    assert lines[-1].endswith("1:40")


def test_a_rollout_has_a_bar_on_a_terminal() -> None:
    drawn, lines = show(force_terminal=True)
    assert not lines
    assert "3/3" in drawn
    assert "5 turns, 2,500 tokens/s, 25% right, 1 failed" in drawn
    assert "0:00:00" in drawn
    assert "[bold] a word" in drawn
