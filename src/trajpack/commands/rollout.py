"""What ``trajpack rollout`` does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
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
from trajpack.agent.rollout.outcome import RolloutOutcome
from trajpack.agent.rollout.report import report
from trajpack.agent.rollout.rollout import Rollout, prepare_rollout
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner import watchdog
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.commands.interruption import Interruption
from trajpack.commands.progress import EpisodeBoard
from trajpack.commands.terminal import make_console, results, say, tell
from trajpack.packing.batch.inspection import counted, summary
from trajpack.packing.layout import Layout

if TYPE_CHECKING:
    from trajpack.agent.observability.metrics import RolloutMetrics

_NOTHING = "no batch was written"


def roll_out(settings: RolloutSettings, layout: Layout, out: Path) -> int:
    """Roll out, pack, save and report; return the exit status.

    The first Ctrl-C or SIGTERM stops the episodes, or waits for the batch to be saved if they
    have ended by themselves. The second one ends all at once.

    Raises:
        SetupError: With one line for the user, which says what was written if the episodes
            had begun.
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
    """Return what changes when a file is replaced."""
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
    prepared = _prepare(settings)
    for folder in filter(None, (out.parent, settings.answers)):
        with _writing(folder):
            check_writable(folder)
    with contextlib.ExitStack() as stack:
        log = None
        if settings.log is not None:
            log = stack.enter_context(RolloutLog(settings.log, prepared))
        observers = stack.enter_context(_metrics(settings))
        _go_on(prepared, log, observers, (layout, out), interruption)


def _go_on(
    prepared: Rollout,
    log: RolloutLog | None,
    observers: Collection[RolloutMetrics],
    goal: tuple[Layout, Path],
    interruption: Interruption,
) -> None:
    """Roll out what the log has not yet, pack it all, save and report."""
    settings, (layout, out) = prepared.settings, goal
    collected = _Collected(prepared, log, observers)
    num_left = prepared.num_episodes - len(collected.earlier)
    if log is not None and collected.earlier:
        there = f"{len(collected.earlier):,} of {prepared.num_episodes:,} episodes"
        say(f"{log.folder} has {there}: going on from there")
    console = make_console(stderr=True)
    with _summarised_warnings() as warnings, EpisodeBoard(num_left, console, say) as board:
        warnings.say_now = board.say
        if num_left:
            asyncio.run(collected.gather(board, interruption))
    outcome = prepared.outcome(collected.results())
    _check_any(prepared, outcome, board, interruption)
    buffer = outcome.fill_buffer(settings.device)
    with watch_pack(*observers) as watched:
        watched.batch = batch = buffer.pack(layout=layout)
    with _writing(out):
        save_rollout(batch, prepared.tokenizer, out)
    title = f"{len(outcome.results):,} of {prepared.num_episodes:,} episodes"
    _show(settings, out, report(outcome, board.progress, batch, buffer.num_tokens), title)
    if outcome.engine_failure is not None:
        raise SetupError(_engine_failure(prepared, outcome, board))


@contextlib.contextmanager
def _metrics(settings: RolloutSettings) -> Iterator[tuple[RolloutMetrics, ...]]:
    """Give what counts the rollout and serve its figures, if they are asked for."""
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


def _prepare(settings: RolloutSettings) -> Rollout:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    prepared = prepare_rollout(settings)
    if len(prepared.prompts) < settings.num_prompts:
        num_there = counted(len(prepared.prompts), "question")
        say(f"{settings.dataset} has {num_there}, fewer than {settings.num_prompts:,}: all asked")
    return prepared


class _Collected:
    """What has come of the episodes, this time and before."""

    def __init__(
        self, prepared: Rollout, log: RolloutLog | None, observers: Collection[RolloutMetrics]
    ) -> None:
        self._prepared = prepared
        self._log = log
        self._observers = tuple(observers)
        self._new: list[EpisodeResult] = []
        self.earlier: frozenset[str] = frozenset() if log is None else log.finished

    def results(self) -> list[EpisodeResult]:
        """Return all results; the log is read for those of before."""
        earlier: list[EpisodeResult] = []
        if self._log is not None:
            settings = self._prepared.settings
            earlier = list(self._log.earlier(self._prepared.prompts, settings.group_size))
        return earlier + self._new

    async def gather(self, board: EpisodeBoard, interruption: Interruption) -> None:
        """Gather results until all are there or the first signal came, and make it wait then."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop() -> None:
            board.say("stopping; Ctrl-C again to give up what has finished")
            if task is not None:
                task.cancel()

        interruption.stop_by(lambda: loop.call_soon_threadsafe(stop))
        episodes = self._prepared.episodes(
            board.update, observers=self._observers, finished=self.earlier
        )
        try:
            async with episodes as stream:
                async for result in stream:
                    self._keep(result)
                interruption.stop_by(_defer)
        except asyncio.CancelledError:
            pass  # by the signal
        finally:
            interruption.stop_by(_defer)

    def _keep(self, result: EpisodeResult) -> None:
        self._new.append(result)
        if self._log is not None:
            self._log.record(result)


def _defer() -> None:
    say("saving what has finished; Ctrl-C again to give it up")


def _check_any(
    prepared: Rollout, outcome: RolloutOutcome, board: EpisodeBoard, interruption: Interruption
) -> None:
    """Raise if no episode gave anything to pack."""
    if outcome.trajectories:
        return
    if interruption.status is not None:
        raise KeyboardInterrupt
    if outcome.engine_failure is not None:
        raise SetupError(f"{_engine_failure(prepared, outcome, board)}; {_NOTHING}")
    reason, _ = outcome.failures.most_common(1)[0]
    num_failed = len(outcome.results)
    raise SetupError(f"all {num_failed} episodes failed, most of them so: {reason}; {_NOTHING}")


def _engine_failure(prepared: Rollout, outcome: RolloutOutcome, board: EpisodeBoard) -> str:
    num_left = prepared.num_episodes - len(outcome.results)
    num_failed = sum(outcome.failures.values())
    return (
        f"{outcome.engine_failure}: {num_failed:,} of {prepared.num_episodes:,} episodes failed "
        f"and {num_left:,} were never started"
    )


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


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error


class _Warnings(logging.Handler):
    """Keeps the first warning of each kind and counts the others; says at once what is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.say_now: Callable[[str], None] = say
        self.firsts: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == watchdog.__name__:
            self.say_now(record.getMessage())
            return
        self.firsts.setdefault(record.msg, record.getMessage())
        self.counts[record.msg] = self.counts.get(record.msg, 0) + 1


@contextlib.contextmanager
def _summarised_warnings() -> Iterator[_Warnings]:
    """Say one line at the end for each kind of warning; errors come with the episodes."""
    logger = logging.getLogger("trajpack.agent")
    warnings, was_propagating = _Warnings(), logger.propagate
    warnings.addFilter(lambda record: record.levelno == logging.WARNING)
    logger.addHandler(warnings)
    logger.propagate = False
    try:
        yield warnings
    finally:
        logger.removeHandler(warnings)
        logger.propagate = was_propagating
        for kind, first in warnings.firsts.items():
            num_more = warnings.counts[kind] - 1
            say(first + (f" (and {num_more:,} more like it)" if num_more else ""))
