"""The work of ``trajpack train``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from trajpack.agent.errors import SetupError
from trajpack.agent.rollout.files import check_writable
from trajpack.agent.training.grpo import StepRecord, Training
from trajpack.agent.training.report import report, write_page
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

    Raises:
        SetupError: With one line for the user.
        ModuleNotFoundError: If an optional package is missing; before the training.
    """
    with Interruption() as interruption:
        try:
            _train(settings, out, interruption)
        except KeyboardInterrupt:
            say("interrupted: no page was written")
            interruption.status = interruption.status or 130
    return interruption.status or 0


def _train(settings: TrainSettings, out: Path, interruption: Interruption) -> None:
    if out.suffix != ".html" or out.is_dir():
        raise SetupError(f"--out must be an .html file, got {out}")
    with writing(out.parent):
        check_writable(out.parent)
    require("plotly")  # before the training, not after it
    silence_transformers()
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
