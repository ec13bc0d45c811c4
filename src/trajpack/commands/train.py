"""What ``trajpack train`` does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from trajpack.agent.errors import SetupError
from trajpack.agent.rollout.files import check_writable
from trajpack.agent.training.grpo import StepRecord, Training, TrainSettings
from trajpack.agent.training.report import report, write_page
from trajpack.commands.interruption import Interruption
from trajpack.commands.progress import TrainBoard
from trajpack.commands.terminal import make_console, results, say, tell
from trajpack.packing.batch.inspection import summary
from trajpack.packing.optional import require

_TITLE = "trajpack train: sums, by GRPO"
_NOTHING = "no page was written"


def train(settings: TrainSettings, out: Path) -> int:
    """Train, report and write the page; return the exit status.

    The first Ctrl-C or SIGTERM ends the training after the step it is in, and what it came to is
    reported and written as if it were over. The second one ends all at once. Until the first
    episode has begun there is nothing to keep, and the first one ends all.

    Raises:
        SetupError: With one line for the user.
        ModuleNotFoundError: If an optional package is missing; before anything is trained.
    """
    with Interruption() as interruption:
        try:
            _train(settings, out, interruption)
        except KeyboardInterrupt:
            say(f"interrupted: {_NOTHING}")
            interruption.status = interruption.status or 130
    return interruption.status or 0


def _train(settings: TrainSettings, out: Path, interruption: Interruption) -> None:
    if out.suffix != ".html" or out.is_dir():
        raise SetupError(f"--out must be an .html file, got {out}")
    with _writing(out.parent):
        check_writable(out.parent)
    require("plotly")  # rather now than when all is done
    _silence_transformers()
    records: list[StepRecord] = []
    with _single_threaded(), TrainBoard(settings, make_console(stderr=True), say) as board:
        training = Training(settings)
        for step, loss in enumerate(training.warm_up(), start=1):
            board.show("warm-up", step, f"loss {loss:.2f}")
        asyncio.run(_learn(training, records, board, interruption))
    if not records:
        raise KeyboardInterrupt
    with _writing(out):
        out.write_text(write_page(records, _TITLE), encoding="utf-8")
    _show(settings, records, out)


def _silence_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


async def _learn(
    training: Training, records: list[StepRecord], board: TrainBoard, interruption: Interruption
) -> None:
    """Gather records until the training is over or the first signal came."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        board.say("stopping after this step; Ctrl-C again to give up")
        if task is not None:
            task.cancel()

    def keep(record: StepRecord) -> None:
        records.append(record)
        board.update(record)

    interruption.stop_by(lambda: loop.call_soon_threadsafe(stop))
    try:
        await training.learn(keep)
    except asyncio.CancelledError:
        pass  # by the signal
    finally:
        interruption.stop_by(_defer)


def _defer() -> None:
    say("writing what there is; Ctrl-C again to give it up")


def _show(settings: TrainSettings, records: list[StepRecord], out: Path) -> None:
    with results():
        console = make_console()
        title = f"{len(records):,} of {settings.num_steps:,} steps"
        console.print(summary(report(records), title, console.width))
        tell(console, f"curves     {out}")


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Leave a core each to engine and trainer: their tensors are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error
