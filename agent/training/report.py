"""What people see of a training: how far it is, and what it came to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from trajpack.agent.training.records import StepRecord
from trajpack.agent.training.settings import TrainSettings
from trajpack.packing.optional import require

if TYPE_CHECKING:
    from rich.console import Console

NUM_LAST = 5
"""Steps whose success together is that of the trained policy."""
_LINE_INTERVAL_S = 5.0


class TrainBoard:
    """Shows how far a training is: a live bar on a terminal, a line now and then elsewhere.

    Use it as a context manager.

    Args:
        settings: Of the training.
        console: Where the bar is drawn, if it is a terminal.
        say: Writes a line, if it is not.
    """

    def __init__(
        self, settings: TrainSettings, console: Console, say: Callable[[str], None]
    ) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn as Elapsed,
        )

        self._is_live = console.is_terminal and not console.is_dumb_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            Elapsed(),
        )
        self._bar = Progress(*columns, console=console, disable=not self._is_live)
        self._warm_up = self._bar.add_task("warm-up", total=settings.warm_up_steps, words="")
        self._steps = self._bar.add_task("steps", total=settings.num_steps, words="", start=False)
        self._num_warm_up_steps = settings.warm_up_steps
        self._num_steps = settings.num_steps
        self._say = say
        self._next_line_at = 0.0

    def __enter__(self) -> TrainBoard:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def warm_up(self, step: int, loss: float) -> None:
        """Show that ``step`` supervised steps are over, the last of them with ``loss``."""
        self._bar.update(self._warm_up, completed=step, words=f"loss {loss:.2f}")
        is_last = step == self._num_warm_up_steps
        self._line(f"warm-up {step:,} of {self._num_warm_up_steps:,}, loss {loss:.2f}", is_last)

    def update(self, record: StepRecord) -> None:
        """Show a step that is over."""
        words = (
            f"{record.success:.0%} right, {record.tokens_per_s:,.0f} tokens/s, "
            f"fill {record.outcome.fill:.0%}, staleness {record.outcome.mean_staleness:.2f}"
        )
        self._bar.start_task(self._steps)
        self._bar.update(self._steps, completed=record.step, words=words)
        is_last = record.step == self._num_steps
        self._line(f"step {record.step:,} of {self._num_steps:,}, {words}", is_last)

    def _line(self, text: str, is_last: bool) -> None:
        if self._is_live or not (is_last or time.monotonic() >= self._next_line_at):
            return
        self._next_line_at = time.monotonic() + _LINE_INTERVAL_S
        self._say(text)

    def say(self, text: str) -> None:
        """Show a line of text, above the bars if there are any."""
        if self._is_live:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._say(text)


def rise(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Return the success of the first step, and the mean of the last ones, five at most.

    All of the first step's answers come from the weights that the training began with.

    Args:
        records: At least one.
    """
    last = records[-NUM_LAST:]
    return records[0].success, sum(record.success for record in last) / len(last)


def report(records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    """Return what a training came to as pairs of a name and its value in words.

    Args:
        records: At least one.
    """
    outcomes = [record.outcome for record in records]
    first, last = rise(records)
    num_last, solved = min(NUM_LAST, len(records)), records[-1].solved
    seconds = sum(record.seconds for record in records)
    num_generated = sum(record.num_generated for record in records)
    num_on_policy = sum(outcome.num_on_policy for outcome in outcomes)
    gap = max(outcome.logprob_gap for outcome in outcomes)
    oldest = max(outcome.max_staleness for outcome in outcomes)
    staleness = sum(outcome.mean_staleness for outcome in outcomes) / len(outcomes)
    fill = sum(outcome.fill for outcome in outcomes) / len(outcomes)
    return [
        ("right answers", f"{first:.0%} in the first step, {last:.0%} in the last {num_last}"),
        ("solved", f"{records[0].solved:.0%} of the first questions, {solved:.0%} of the last"),
        ("speed", f"{num_generated / seconds:,.0f} generated tokens/s, {seconds:.1f} s"),
        ("fill", f"{fill:.0%} of the micro-batches' capacity"),
        ("staleness", f"{staleness:.2f} versions on average, {oldest} at most"),
        (
            "log-probabilities",
            f"{num_on_policy:,} of trainer and engine differ by {gap:.1e} at most",
        ),
    ]


def write_page(records: Sequence[StepRecord], title: str) -> str:
    """Return an HTML page with the curves of a training; it loads nothing from elsewhere.

    Args:
        records: At least one.
        title: Heading of the page.

    Raises:
        ModuleNotFoundError: If plotly is not installed.

    Cost: about 5 MB, nearly all of it the code that draws.
    """
    require("plotly")
    from plotly.subplots import make_subplots

    panels = _panels(records)
    figure: Any = make_subplots(rows=2, cols=2, subplot_titles=[name for name, _ in panels])
    steps = [record.step for record in records]
    for index, (_, curves) in enumerate(panels):
        row, column = index // 2 + 1, index % 2 + 1
        for name, values in curves.items():
            figure.add_scatter(
                x=steps, y=values, name=name, mode="lines", row=row, col=column, legendgroup=index
            )
        figure.update_yaxes(rangemode="tozero", row=row, col=column)
        figure.update_xaxes(title_text="step", row=row, col=column)
    figure.update_layout(height=800, template="plotly_white", hovermode="x unified")
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in report(records)
    )
    plot = figure.to_html(full_html=False, include_plotlyjs=True)
    return _PAGE.format(title=escape(title), rows=rows, plot=plot)


def _panels(records: Sequence[StepRecord]) -> list[tuple[str, dict[str, list[float]]]]:
    outcomes = [record.outcome for record in records]
    return [
        (
            "Success and reward",
            {
                "right answers": [record.success for record in records],
                "solved episodes": [record.solved for record in records],
                "reward of an episode": [record.reward for record in records],
            },
        ),
        ("Generated tokens per second", {"tokens/s": [record.tokens_per_s for record in records]}),
        (
            "Fill and clip",
            {
                "fill of micro-batches": [outcome.fill for outcome in outcomes],
                "clipped tokens": [outcome.clip_fraction for outcome in outcomes],
            },
        ),
        (
            "Staleness in versions",
            {
                "mean": [outcome.mean_staleness for outcome in outcomes],
                "most": [float(outcome.max_staleness) for outcome in outcomes],
            },
        ),
    ]


_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }}
th {{ text-align: left; padding: 0.2rem 1.5rem 0.2rem 0; font-weight: 600; }}
</style></head>
<body><h1>{title}</h1><table>{rows}</table>{plot}</body>
</html>
"""
