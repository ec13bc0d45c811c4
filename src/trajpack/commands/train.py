"""The work of ``trajpack train``: the training, its report and its page of curves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from trajpack.agent.rollout.places import writable
from trajpack.agent.training.grpo import StepRecord, Training
from trajpack.agent.training.settings import TrainSettings
from trajpack.commands.interruption import Interruption
from trajpack.commands.progress import TrainBoard
from trajpack.commands.terminal import (
    make_console,
    results,
    say,
    silence_transformers,
    tell,
    writing,
)
from trajpack.packing.batch.inspection import summary
from trajpack.packing.optional import require

_SAVING = "writing what there is; Ctrl-C again to give it up"


def train(settings: TrainSettings, out: Path) -> int:
    """Train, report and write the page; return the exit status.

    The first Ctrl-C or SIGTERM ends the training after the current step, and its results are
    reported and written. The second one ends the command at once, and so does the first one
    during the warm-up.
    """
    with Interruption() as interruption:
        try:
            _train(settings, out, interruption)
        except KeyboardInterrupt:
            say("interrupted: no page was written")
            interruption.status = interruption.status or 130
    return interruption.status or 0


def _train(settings: TrainSettings, out: Path, interruption: Interruption) -> None:
    require("plotly")  # before the training, not after it
    silence_transformers()
    with writable(out.parent):
        _train_and_write(settings, out, interruption)


def _train_and_write(settings: TrainSettings, out: Path, interruption: Interruption) -> None:
    records: list[StepRecord] = []
    with _single_threaded(), TrainBoard(settings, make_console(stderr=True), say) as board:

        def keep(record: StepRecord) -> None:
            records.append(record)
            board.update(record)

        def on_stop() -> None:
            board.say("stopping after this step; Ctrl-C again to give up")

        training = Training(settings)
        for step, loss in enumerate(training.warm_up(), start=1):
            board.show("warm-up", step, f"loss {loss:.2f}")
        asyncio.run(interruption.run(training.learn(keep), on_stop=on_stop, saving=_SAVING))
    if not records:
        raise KeyboardInterrupt
    with writing(out):
        out.write_text(write_page(records, "trajpack train: sums, by GRPO"), encoding="utf-8")
    with results():
        console = make_console()
        title = f"{len(records):,} of {settings.num_steps:,} steps"
        console.print(summary(report(records), title, console.width))
        tell(console, f"curves     {out}")


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Use one thread of torch each for engine and trainer, whose tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_NUM_LAST = 5


def rise(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Return the success of the first step, by the initial weights, and the mean of the last 5."""
    last = records[-_NUM_LAST:]
    return records[0].success, sum(record.success for record in last) / len(last)


def report(records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    """Return the results of a training as pairs of a name and a formatted value."""
    outcomes = [record.outcome for record in records]
    first, last = rise(records)
    num_last, solved = min(_NUM_LAST, len(records)), records[-1].solved
    seconds = sum(record.seconds for record in records)
    num_generated = sum(record.num_generated for record in records)
    num_tokens = sum(record.num_tokens for record in records)
    num_on_policy = sum(outcome.num_on_policy for outcome in outcomes)
    gap = max(outcome.logprob_gap for outcome in outcomes)
    oldest = max(outcome.max_staleness for outcome in outcomes)
    staleness = sum(outcome.mean_staleness for outcome in outcomes) / len(outcomes)
    fill = sum(outcome.fill for outcome in outcomes) / len(outcomes)
    return [
        ("right answers", f"{first:.0%} in the first step, {last:.0%} in the last {num_last}"),
        ("solved", f"{records[0].solved:.0%} of the first questions, {solved:.0%} of the last"),
        ("speed", f"{num_generated / seconds:,.0f} generated tokens/s, {seconds:.1f} s"),
        ("tokens", f"{num_tokens:,} in the batches, {num_generated:,} generated"),
        ("fill", f"{fill:.0%} of the micro-batches' capacity"),
        ("staleness", f"{staleness:.2f} versions on average, {oldest} at most"),
        (
            "log-probabilities",
            f"{num_on_policy:,} of trainer and engine differ by {gap:.1e} at most",
        ),
    ]


_Curve = Callable[[StepRecord], float]
_PANELS: dict[str, dict[str, _Curve]] = {
    "Success and reward": {
        "right answers": lambda record: record.success,
        "solved episodes": lambda record: record.solved,
        "reward of an episode": lambda record: record.reward,
    },
    "Generated tokens per second": {"tokens/s": lambda record: record.tokens_per_s},
    "Fill and clip": {
        "fill of micro-batches": lambda record: record.outcome.fill,
        "clipped tokens": lambda record: record.outcome.clip_fraction,
    },
    "Staleness in versions": {
        "mean": lambda record: record.outcome.mean_staleness,
        "most": lambda record: record.outcome.max_staleness,
    },
}


def write_page(records: Sequence[StepRecord], title: str) -> str:
    """Return an HTML page with the curves; it holds plotly's script, 5 MB, and loads nothing."""
    require("plotly")
    from plotly.subplots import make_subplots

    figure: Any = make_subplots(rows=2, cols=2, subplot_titles=list(_PANELS))
    steps = [record.step for record in records]
    for index, curves in enumerate(_PANELS.values()):
        cell = {"row": index // 2 + 1, "col": index % 2 + 1}
        for name, curve in curves.items():
            values = [curve(record) for record in records]
            figure.add_scatter(
                x=steps, y=values, name=name, mode="lines", legendgroup=index, **cell
            )
        figure.update_yaxes(rangemode="tozero", **cell)
        figure.update_xaxes(title_text="step", **cell)
    figure.update_layout(height=800, template="plotly_white", hovermode="x unified")
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in report(records)
    )
    plot = figure.to_html(full_html=False, include_plotlyjs=True)
    return _PAGE.format(title=escape(title), rows=rows, plot=plot)


_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }}
th {{ text-align: left; padding: 0.2rem 1.5rem 0.2rem 0; font-weight: 600; }}
</style></head>
<body><h1>{title}</h1><table>{rows}</table>{plot}</body>
</html>
"""
