"""The work of ``trajpack train``: the training, its report and its page of curves."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import trajpack
from trajpack.agent.rollout.files import save_rollout
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
from trajpack.packing.batch.inspection import Decode, summary
from trajpack.packing.report.page import page_of
from trajpack.packing.text import one_line, printable
from trajpack.packing.tree.tree_batch import TreeBatch
from trajpack.packing.types import Trajectory

_SAVING = "writing what there is; Ctrl-C again to give it up"


def train(settings: TrainSettings, out: Path, batch_file: Path | None) -> int:
    """Train, report, and write the page and the last batch; return the exit status.

    The first Ctrl-C or SIGTERM ends the training after the current step, and its results are
    reported and written. The second one ends the command at once, and so does the first one
    during the warm-up.
    """
    with Interruption() as interruption:
        try:
            _train(settings, out, batch_file, interruption)
        except KeyboardInterrupt:
            say("interrupted: no page was written")
            interruption.status = interruption.status or 130
    return interruption.status or 0


def _train(
    settings: TrainSettings, out: Path, batch_file: Path | None, interruption: Interruption
) -> None:
    silence_transformers()
    with writable(out.parent), writable((batch_file or out).parent):
        _train_and_write(settings, out, batch_file, interruption)


def _train_and_write(
    settings: TrainSettings, out: Path, batch_file: Path | None, interruption: Interruption
) -> None:
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
            interruption.check()
        asyncio.run(interruption.run(training.learn(keep), on_stop=on_stop, saving=_SAVING))
    if not records:
        raise KeyboardInterrupt
    with writing(out):
        page = write_page(
            records,
            "trajpack train: sums, by GRPO",
            decode=partial(training.tokenizer.decode, clean_up_tokenization_spaces=False),
            run=_what_was_run(settings),
        )
        out.write_text(page, encoding="utf-8")
    if batch_file is not None and training.last_batch is not None:
        batch = training.last_batch
        with writing(batch_file):
            packed = batch.merged() if isinstance(batch, TreeBatch) else batch
            save_rollout(packed, training.tokenizer, batch_file)
    with results():
        console = make_console()
        title = f"{len(records):,} of {settings.num_steps:,} steps"
        console.print(summary(report(records), title, console.width))
        tell(console, f"curves     {out}")
        if batch_file is not None:
            tell(console, f"batch      {batch_file}, of the last step")


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
    "Right answers": {
        "of all answers": lambda record: record.success,
        "of the questions": lambda record: record.solved,
    },
    "Reward of an episode": {"mean": lambda record: record.reward},
    "Generated tokens per second": {"tokens": lambda record: record.tokens_per_s},
    "Fill of micro-batches": {"mean": lambda record: record.outcome.fill},
    "Clipped tokens": {"of the trained tokens": lambda record: record.outcome.clip_fraction},
    "Staleness in versions": {
        "mean": lambda record: record.outcome.mean_staleness,
        "most": lambda record: record.outcome.max_staleness,
    },
}
_SHARES = ("Right answers", "Fill of micro-batches", "Clipped tokens")
_COLOURS = ("accent", "generated")
_SMOOTH = 5


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to four before it.

    Example:
        >>> smoothed([1.0, 3.0, 2.0])
        [1.0, 2.0, 2.0]
    """
    found = []
    for end in range(1, len(values) + 1):
        some = values[max(end - _SMOOTH, 0) : end]
        found.append(sum(some) / len(some))
    return found


def write_page(
    records: Sequence[StepRecord], title: str, *, decode: Decode, run: list[tuple[str, str]]
) -> str:
    """Return an HTML page with curves and conversations; it loads nothing.

    Args:
        records: Steps of a training, one or more.
        title: Title of the page.
        decode: Function from token ids to text.
        run: Names and values that say what was run.
    """
    first, last = rise(records)
    panels = []
    for name, curves in _PANELS.items():
        lines = []
        for colour, (label, curve) in zip(_COLOURS, curves.items(), strict=False):
            values = [float(curve(record)) for record in records]
            lines.append(
                {"name": colour, "label": label, "values": values, "smooth": smoothed(values)}
            )
        panels.append({"title": name, "percent": name in _SHARES, "curves": lines})
    figures = {
        "lead": f"{first:.0%} of the answers were right in the first step, {last:.0%} in the last "
        f"{min(_NUM_LAST, len(records))}.",
        "steps": [record.step for record in records],
        "rows": report(records),
        "panels": panels,
        "before": [_conversation(one, decode) for one in records[0].examples],
        "after": [_conversation(one, decode) for one in records[-1].examples],
        "run": run,
    }
    return page_of(title, figures, ("charts.js", "train.js"))


def _conversation(trajectory: Trajectory, decode: Decode) -> list[dict[str, Any]]:
    """Return the texts of a conversation whose prompts extend each other."""
    spans, seen = list[dict[str, Any]](), 0
    for turn in trajectory.turns:
        context = decode(list(turn.prompt_ids)[seen:])
        kind = "observation" if seen else "prompt"
        spans.append({"kind": kind, "text": printable(context, keep="\n"), "reward": None})
        answer = printable(decode(list(turn.completion_ids)), keep="\n")
        spans.append({"kind": "generated", "text": answer, "reward": turn.reward})
        seen = len(turn.prompt_ids) + len(turn.completion_ids)
    return spans


def _what_was_run(settings: TrainSettings) -> list[tuple[str, str]]:
    """Return command, settings, versions and time."""
    options = ", ".join(f"{name} {value}" for name, value in asdict(settings).items())
    return [
        ("command", one_line(" ".join(["trajpack", *sys.argv[1:]]))),
        ("settings", options),
        (
            "versions",
            f"trajpack {trajpack.__version__}, Python {platform.python_version()}, torch "
            f"{torch.__version__}, transformers {version('transformers')}",
        ),
        ("finished", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    ]
