"""Progress of a rollout: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trajpack.agent.runner.runner import Progress as Episodes
from trajpack.commands.terminal import say

_LINE_INTERVAL_S = 5.0


class EpisodeBoard:
    """Progress of episodes; `update` is the ``on_progress`` of a `RolloutRunner`."""

    def __init__(self, num_episodes: int, console: Console) -> None:
        self.total = num_episodes
        self.progress = Episodes()
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._next_line_at = 0.0
        self._bar = Progress(
            TextColumn("episodes"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("episodes", total=num_episodes, words="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def update(self, progress: Episodes) -> None:
        """Move the bar; or print a line for the first and the last episode, and between."""
        is_new = progress.num_finished != self.progress.num_finished
        is_mark = is_new and progress.num_finished in (1, self.total)
        self.progress = progress
        success = progress.num_rewarded_turns / max(progress.num_kept_turns, 1)
        words = (
            f"{progress.num_turns:,} turns, {progress.tokens_per_s:,.0f} tokens/s, "
            f"{success:.0%} right"
        )
        words += f", {progress.num_failed:,} failed" if progress.num_failed else ""
        self._bar.update(self._task, completed=progress.num_finished, words=words)
        if not self._is_live and (is_mark or time.monotonic() >= self._next_line_at):
            self._next_line_at = time.monotonic() + _LINE_INTERVAL_S
            minutes, seconds = divmod(int(progress.elapsed_s), 60)
            count = f"{progress.num_finished:,} of {self.total:,}"
            say(f"episodes {count}, {words}, {minutes}:{seconds:02}")
