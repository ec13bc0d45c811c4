"""The results of a training: rows of a table, and an HTML page of curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from trajpack.agent.training.grpo import StepRecord
from trajpack.packing.optional import require

_NUM_LAST = 5


def rise(records: Sequence[StepRecord]) -> tuple[float, float]:
    """Return the success of the first step, and the mean of the last five.

    All answers of the first step come from the initial weights.
    """
    last = records[-_NUM_LAST:]
    return records[0].success, sum(record.success for record in last) / len(last)


def report(records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    """Return the results of a training as pairs of a name and a formatted value."""
    outcomes = [record.outcome for record in records]
    first, last = rise(records)
    num_last, solved = min(_NUM_LAST, len(records)), records[-1].solved
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
    """Return an HTML page with the curves of a training; it loads nothing over the network.

    Raises:
        ModuleNotFoundError: If plotly is not installed.

    Cost: about 5 MB, nearly all of it plotly's script.
    """
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
