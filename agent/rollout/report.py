"""What people see of a rollout: how far it is, and what it came to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from trajpack.agent.rollout.outcome import RolloutOutcome
from trajpack.agent.runner.runner import Progress
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.inspection import counted, describe

if TYPE_CHECKING:
    from rich.console import Console

_MAX_REASONS = 5
_LINE_INTERVAL_S = 5.0
_RATE_WINDOW_S = 10.0


class ProgressBoard:
    """Shows how far the episodes are: a live bar on a terminal, a line now and then elsewhere.

    Use it as a context manager, and hand `update` to a `RolloutRunner`.

    Args:
        num_episodes: Episodes of the whole rollout.
        console: Where the bar is drawn, if it is a terminal.
        say: Writes a line, if it is not.
    """

    def __init__(self, num_episodes: int, console: Console, say: Callable[[str], None]) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress as Bar,
            TextColumn,
            TimeElapsedColumn,
        )

        self._is_live = console.is_terminal and not console.is_dumb_terminal
        columns = (
            TextColumn("episodes"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=console, disable=not self._is_live)
        self._task = self._bar.add_task("", total=num_episodes, words="")
        self.num_episodes = num_episodes
        """As given."""
        self._say = say
        self._next_line_at = 0.0
        self._recent = deque([(0.0, 0)])
        self.progress = Progress()
        """The latest."""

    def __enter__(self) -> ProgressBoard:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show ``progress``, and keep it as the latest."""
        is_first_finished = progress.num_finished > 0 == self.progress.num_finished
        self.progress = progress
        words = (
            f"{progress.num_turns:,} turns, {self._rate(progress):,.0f} tokens/s, "
            f"{_success_rate(progress):.0%} right"
        )
        words += f", {progress.num_failed:,} failed" if progress.num_failed else ""
        self._bar.update(self._task, completed=progress.num_finished, words=words)
        is_last = progress.num_finished == self.num_episodes
        is_due = is_first_finished or is_last or time.monotonic() >= self._next_line_at
        if is_due and not self._is_live:
            self._next_line_at = time.monotonic() + _LINE_INTERVAL_S
            minutes, seconds = divmod(int(progress.elapsed_s), 60)
            done = f"episodes {progress.num_finished:,} of {self.num_episodes:,}"
            self._say(f"{done}, {words}, {minutes}:{seconds:02}")

    def _rate(self, progress: Progress) -> float:
        """Return tokens per second of about the last ten seconds."""
        now = (progress.elapsed_s, progress.num_tokens)
        self._recent.append(now)
        while len(self._recent) > 2 and self._recent[1][0] <= now[0] - _RATE_WINDOW_S:
            self._recent.popleft()
        begin = self._recent[0]
        return (now[1] - begin[1]) / (now[0] - begin[0]) if now[0] > begin[0] else 0.0

    def say(self, text: str) -> None:
        """Show a line of text, above the bar if there is one."""
        if self._is_live:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._say(text)


def _success_rate(progress: Progress) -> float:
    return progress.num_rewarded_turns / max(progress.num_kept_turns, 1)


def report(
    outcome: RolloutOutcome, progress: Progress, batch: PackedBatch, num_merged: int
) -> list[tuple[str, str]]:
    """Return what a rollout came to as pairs of a name and its value in words.

    The fill is the share that the batch's tokens would take of a padded rectangle, as many
    rows as sequences and as wide as the longest. The packed batch itself has no padding.

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
    turns = [turn for result in outcome.results for turn in result.turns]
    num_right = sum(turn.reward > 0 for turn in turns)
    num_finished, num_failed = len(outcome.results), sum(outcome.failures.values())
    num_earlier = num_finished - progress.num_finished
    earlier = f", {num_earlier:,} earlier" if num_earlier > 0 else ""
    rows = [
        ("episodes", f"{num_finished:,} finished, {num_failed:,} of them failed{earlier}"),
        (
            "right answers",
            f"{num_right:,} of {len(turns):,} ({num_right / max(len(turns), 1):.1%})",
        ),
        ("speed", f"{progress.tokens_per_s:,.0f} generated tokens/s, {progress.elapsed_s:.1f} s"),
        (
            "tokens as turns, merged",
            f"{num_as_turns:,} against {num_merged:,}, a ratio of {num_as_turns / num_merged:.2f}",
        ),
    ]
    capacity = len(batch) * batch.max_seqlen
    share = f"{batch.num_tokens:,} of {capacity:,} tokens ({batch.num_tokens / capacity:.0%})"
    rows.append(("fill, if padded", share))
    rows += describe(batch)
    reasons = outcome.failures.most_common()
    rows += [(f"failed {number:,}", reason) for reason, number in reasons[:_MAX_REASONS]]
    if len(reasons) > _MAX_REASONS:
        rows.append(("failed", counted(len(reasons) - _MAX_REASONS, "more reason")))
    return rows
