"""Progress of a rollout: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
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


def show(*, force_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=force_terminal, width=100)
    with EpisodeBoard(3, console) as board:
        for progress in (FIRST, FIRST, LAST):
            board.update(progress)
    assert board.progress is LAST
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_first_and_last_progress_are_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not show(force_terminal=False)
    assert capsys.readouterr().err.splitlines() == [
        "trajpack: episodes 1 of 3, 2 turns, 50 tokens/s, 0% right, 0:01",
        "trajpack: episodes 3 of 3, 5 turns, 2,500 tokens/s, 25% right, 1 failed, 0:02",
    ]


def test_a_terminal_has_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = show(force_terminal=True)
    assert not capsys.readouterr().err
    assert "3/3" in drawn
    assert "5 turns, 2,500 tokens/s, 25% right, 1 failed" in drawn
