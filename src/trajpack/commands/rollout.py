"""The work of ``trajpack rollout``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trajpack.agent.errors import SetupError
from trajpack.agent.observability.pack_watch import watch_pack
from trajpack.agent.rollout.files import (
    check_places,
    check_writable,
    save_rollout,
    tokenizer_folder,
)
from trajpack.agent.rollout.log import RolloutLog
from trajpack.agent.rollout.report import RolloutOutcome, report
from trajpack.agent.rollout.rollout import Rollout, prepare_rollout
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner import watchdog
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.commands.interruption import Interruption
from trajpack.commands.progress import EpisodeBoard
from trajpack.commands.terminal import (
    make_console,
    results,
    say,
    silence_transformers,
    tell,
    writing,
)
from trajpack.packing.batch.inspection import counted, summary
from trajpack.packing.types import Layout

if TYPE_CHECKING:
    from trajpack.agent.observability.metrics import RolloutMetrics

_NOTHING = "no batch was written"
_SAVING = "saving what has finished; Ctrl-C again to give it up"


def roll_out(settings: RolloutSettings, layout: Layout, out: Path) -> int:
    """Roll out, pack, save and report; return the exit status.

    The first Ctrl-C or SIGTERM stops the episodes, or, once they have ended, waits for the batch
    to be saved. The second one ends the command at once.

    Raises:
        SetupError: With one line for the user, which names the files that were written if the
            episodes had begun.
    """
    before = _stamp(out)
    with Interruption() as interruption:
        try:
            _roll_out(settings, layout, out, interruption)
        except KeyboardInterrupt:
            is_written = _stamp(out) != before
            kept = "" if settings.log is None else f"; {settings.log} has what has finished"
            say(f"interrupted: {f'the batch is in {out}' if is_written else _NOTHING}{kept}")
            interruption.status = interruption.status or 130
        except SetupError as error:
            if _stamp(out) == before:
                raise
            raise SetupError(f"{error}; the batch is in {out}") from error
    return interruption.status or 0


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time, which change when the file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _roll_out(
    settings: RolloutSettings, layout: Layout, out: Path, interruption: Interruption
) -> None:
    check_places(out, settings.answers)
    say("loading model and questions")
    silence_transformers()
    prepared = prepare_rollout(settings)
    if len(prepared.prompts) < settings.num_prompts:
        num_there = counted(len(prepared.prompts), "question")
        say(f"{settings.dataset} has {num_there}, fewer than {settings.num_prompts:,}: all asked")
    for folder in filter(None, (out.parent, settings.answers)):
        with writing(folder):
            check_writable(folder)
    with contextlib.ExitStack() as stack:
        log = None
        if settings.log is not None:
            log = stack.enter_context(RolloutLog(settings.log, prepared))
        observers = stack.enter_context(_metrics(settings))
        board, episodes = _run_episodes(prepared, log, observers, interruption=interruption)
        outcome = prepared.outcome(episodes)
        ended = _engine_failure(outcome, board, prepared.num_episodes)
        if not outcome.trajectories:
            if interruption.status is not None:
                raise KeyboardInterrupt
            raise SetupError(f"{ended or _most_common_failure(outcome)}; {_NOTHING}")
        buffer = outcome.fill_buffer(settings.device)
        with watch_pack(*observers) as watched:
            watched.batch = batch = buffer.pack(layout=layout)
        with writing(out):
            save_rollout(batch, prepared.tokenizer, out)
        rows = report(outcome, board.progress, batch, num_merged=buffer.num_tokens)
        title = f"{len(outcome.results):,} of {prepared.num_episodes:,} episodes"
        _show(settings, out, rows, title)
        if ended:
            raise SetupError(ended)


def _run_episodes(
    prepared: Rollout,
    log: RolloutLog | None,
    observers: tuple[RolloutMetrics, ...],
    *,
    interruption: Interruption,
) -> tuple[EpisodeBoard, list[EpisodeResult]]:
    """Run the episodes that the log does not have; return the board and all results."""
    episodes: list[EpisodeResult] = []
    finished = frozenset[str]() if log is None else log.finished
    num_left = prepared.num_episodes - len(finished)
    if log is not None and finished:
        there = f"{len(finished):,} of {prepared.num_episodes:,} episodes"
        say(f"{log.folder} has {there}: going on from there")
    board = EpisodeBoard(num_left, make_console(stderr=True), say)

    async def gather() -> None:
        running = prepared.episodes(board.update, observers=observers, finished=finished)
        async with running as stream:
            async for result in stream:
                episodes.append(result)
                if log is not None:
                    log.record(result)
            interruption.save(_SAVING)  # the engine still has to end

    def on_stop() -> None:
        board.say("stopping; Ctrl-C again to give up what has finished")

    with _summarised_warnings(board.say), board:
        if num_left:
            asyncio.run(interruption.run(gather(), on_stop=on_stop, saving=_SAVING))
    if log is None:
        return board, episodes
    return board, [*log.earlier(prepared.prompts, prepared.settings.group_size), *episodes]


def _engine_failure(outcome: RolloutOutcome, board: EpisodeBoard, num_episodes: int) -> str:
    """Return why the engine ended before the episodes did; empty if it did not."""
    if outcome.engine_failure is None:
        return ""
    num_failed = sum(outcome.failures.values())
    return (
        f"{outcome.engine_failure}: {num_failed:,} of {num_episodes:,} episodes failed "
        f"and {board.total - board.progress.num_started:,} were never started"
    )


def _most_common_failure(outcome: RolloutOutcome) -> str:
    reason, _ = outcome.failures.most_common(1)[0]
    return f"all {len(outcome.results)} episodes failed, most of them so: {reason}"


@contextlib.contextmanager
def _metrics(settings: RolloutSettings) -> Iterator[tuple[RolloutMetrics, ...]]:
    """Serve metrics if they are asked for, and return their observer."""
    if settings.metrics_port is None:
        yield ()
        return
    from trajpack.agent.observability.metrics import RolloutMetrics
    from trajpack.agent.observability.server import serve_metrics

    metrics = RolloutMetrics()
    try:
        server = serve_metrics(metrics.registry, port=settings.metrics_port)
    except OSError as error:
        reason = error.strerror or error
        where = f"port {settings.metrics_port}"
        raise SetupError(f"cannot serve metrics at {where}: {reason}") from error
    with server:
        say(f"metrics at {server.url}")
        yield (metrics,)


def _show(settings: RolloutSettings, out: Path, rows: list[tuple[str, str]], title: str) -> None:
    with results():
        console = make_console()
        console.print(summary(rows, title, console.width))
        if settings.model is None:
            tell(console, "The tiny model has random weights: a right answer is luck.", "dim")
        tell(console, f"batch      {out}")
        tell(console, f"tokenizer  {tokenizer_folder(out)}")
        tell(console, f"answers    {settings.answers}")
        if settings.log is not None:
            tell(console, f"log        {settings.log}")
        tell(console, f"Look at it with: trajpack inspect {out}", "dim")


class _Warnings(logging.Handler):
    """Counts warnings by kind and keeps the first of each; prints those of the watchdog at once."""

    def __init__(self, say_now: Callable[[str], None]) -> None:
        super().__init__()
        self.say_now = say_now
        self.firsts: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == watchdog.__name__:
            self.say_now(record.getMessage())
            return
        self.firsts.setdefault(record.msg, record.getMessage())
        self.counts[record.msg] = self.counts.get(record.msg, 0) + 1


@contextlib.contextmanager
def _summarised_warnings(say_now: Callable[[str], None]) -> Iterator[None]:
    """Print one line for each kind of warning at the end; errors come with the episodes."""
    logger = logging.getLogger("trajpack.agent")
    warnings, was_propagating = _Warnings(say_now), logger.propagate
    warnings.addFilter(lambda record: record.levelno == logging.WARNING)
    logger.addHandler(warnings)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(warnings)
        logger.propagate = was_propagating
        for kind, first in warnings.firsts.items():
            num_more = warnings.counts[kind] - 1
            say(first + (f" (and {num_more:,} more like it)" if num_more else ""))
