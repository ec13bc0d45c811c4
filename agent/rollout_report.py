"""What people see of a rollout: how far it is, and what it came to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from trajpack.agent.rollout import RolloutOutcome
from trajpack.agent.runner import Progress
from trajpack.packing.batch import PackedBatch
from trajpack.packing.inspection import counted, describe

if TYPE_CHECKING:
    from rich.console import Console

_MAX_REASONS = 5
_LINE_INTERVAL_S = 5.0


class ProgressBoard:
    """Shows how far the episodes are: a live bar on a terminal, a line now and then elsewhere.

    Use it as a context manager, and hand `update` to a `RolloutRunner`.

    Args:
        num_episodes: Episodes of the whole rollout.
        console: Where the bar is drawn, if it is a terminal.
        say: Writes a line, if it is not.

    Raises:
        ModuleNotFoundError: If rich is not installed.
    """

    def __init__(self, num_episodes: int, console: Console, say: Callable[[str], None]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._is_live = console.is_terminal and not console.is_dumb_terminal
        columns = (
            TextColumn("episodes"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
        )
        self._bar = Bar(*columns, console=console, disable=not self._is_live)
        self._task = self._bar.add_task("", total=num_episodes, words="")
        self._num_episodes = num_episodes
        self._say = say
        self._next_line_at = 0.0
        self.progress = Progress()

    def __enter__(self) -> ProgressBoard:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show ``progress``, and keep it as the latest."""
        self.progress = progress
        words = (
            f"{progress.num_turns:,} turns, {progress.tokens_per_s:,.0f} tokens/s, "
            f"{_success_rate(progress):.0%} right"
        )
        words += f", {progress.num_failed:,} failed" if progress.num_failed else ""
        self._bar.update(self._task, completed=progress.num_finished, words=words)
        is_last = progress.num_finished == self._num_episodes
        if not self._is_live and (is_last or time.monotonic() >= self._next_line_at):
            self._next_line_at = time.monotonic() + _LINE_INTERVAL_S
            self._say(f"episodes {progress.num_finished:,} of {self._num_episodes:,}, {words}")

    def say(self, text: str) -> None:
        """Show a line of text, above the bar if there is one."""
        if self._is_live:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._say(text)


def _success_rate(progress: Progress) -> float:
    return progress.num_rewarded_turns / progress.num_turns if progress.num_turns else 0.0


def report(
    outcome: RolloutOutcome, progress: Progress, batch: PackedBatch, num_merged: int
) -> list[tuple[str, str]]:
    """Return what a rollout came to as pairs of a name and its value in words.

    ``fill`` is the share of a padded rectangle, as many rows as sequences and as wide as the
    longest, that the batch's tokens would take. The packed batch itself has no padding.

    Args:
        outcome: What came of the episodes.
        progress: The runner's last word.
        batch: What the trajectories were packed to.
        num_merged: Tokens of the trajectories, each counted once.
    """
    num_as_turns = sum(
        len(turn.prompt_ids) + len(turn.completion_ids)
        for trajectory in outcome.trajectories
        for turn in trajectory.turns
    )
    right = f"{progress.num_rewarded_turns:,} of {progress.num_turns:,}"
    rows = [
        ("episodes", f"{progress.num_finished:,} finished, {progress.num_failed:,} of them failed"),
        (
            "right answers",
            f"{right} ({_success_rate(progress):.1%})",
        ),
        ("speed", f"{progress.tokens_per_s:,.0f} generated tokens/s, {progress.elapsed_s:.1f} s"),
        (
            "tokens as turns, merged",
            f"{num_as_turns:,} against {num_merged:,}, a ratio of {num_as_turns / num_merged:.2f}",
        ),
    ]
    padded_fill = batch.num_tokens / (len(batch) * batch.max_seqlen)
    rows.append(("fill", f"100%; padded to the longest sequence it would be {padded_fill:.0%}"))
    rows += describe(batch)
    reasons = outcome.failures.most_common()
    rows += [(f"failed {number:,}", reason) for reason, number in reasons[:_MAX_REASONS]]
    if len(reasons) > _MAX_REASONS:
        rows.append(("failed", counted(len(reasons) - _MAX_REASONS, "more reason")))
    return rows
