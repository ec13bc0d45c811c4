"""Progress of a command: live bars on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trajpack.agent.runner.runner import Progress as Episodes

_LINE_INTERVAL_S = 5.0
_RATE_WINDOW_S = 10.0


class Board:
    """Progress bars of a command; a context manager.

    ``totals`` are the steps of each bar by name. Without a terminal, ``say`` prints lines instead.
    """

    def __init__(
        self, totals: Mapping[str, int], console: Console, say: Callable[[str], None]
    ) -> None:
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        self._totals = totals
        self._say = say
        self._next_line_at = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self.is_live,
        )
        self._tasks = {
            name: self._bar.add_task(name, total=total, words="", start=False)
            for name, total in totals.items()
        }
        self._bar.start_task(next(iter(self._tasks.values())))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def show(
        self, name: str, completed: int, words: str, *, after: str = "", is_due: bool = False
    ) -> None:
        """Update a bar, or print a line every five seconds, at the end, or if one ``is_due``.

        A line ends with ``after``, which a bar shows otherwise.
        """
        self._bar.start_task(self._tasks[name])
        self._bar.update(self._tasks[name], completed=completed, words=words)
        total, now = self._totals[name], time.monotonic()
        if not self.is_live and (is_due or completed == total or now >= self._next_line_at):
            self._next_line_at = now + _LINE_INTERVAL_S
            self._say(f"{name} {completed:,} of {total:,}, {words}{after}")

    def say(self, text: str) -> None:
        """Print a line, above the bars if there are any."""
        if self.is_live:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._say(text)


class EpisodeBoard(Board):
    """Progress of a rollout; `update` is the ``on_progress`` of a `RolloutRunner`."""

    def __init__(self, num_episodes: int, console: Console, say: Callable[[str], None]) -> None:
        super().__init__({"episodes": num_episodes}, console, say)
        self.total = num_episodes
        self.progress = Episodes()
        self._recent = deque([(0.0, 0)])

    def update(self, progress: Episodes) -> None:
        """Show ``progress``."""
        is_first = progress.num_finished > 0 == self.progress.num_finished
        self.progress = progress
        success = progress.num_rewarded_turns / max(progress.num_kept_turns, 1)
        words = (
            f"{progress.num_turns:,} turns, {self._rate(progress):,.0f} tokens/s, "
            f"{success:.0%} right"
        )
        words += f", {progress.num_failed:,} failed" if progress.num_failed else ""
        minutes, seconds = divmod(int(progress.elapsed_s), 60)
        clock = f", {minutes}:{seconds:02}"
        self.show("episodes", progress.num_finished, words, after=clock, is_due=is_first)

    def _rate(self, progress: Episodes) -> float:
        """Return the tokens per second of the last ten seconds."""
        now = (progress.elapsed_s, progress.num_tokens)
        self._recent.append(now)
        while len(self._recent) > 2 and self._recent[1][0] <= now[0] - _RATE_WINDOW_S:
            self._recent.popleft()
        begin = self._recent[0]
        return (now[1] - begin[1]) / (now[0] - begin[0]) if now[0] > begin[0] else 0.0
