"""The work of ``trajpack rollout``: the episodes, their log and files, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trajpack.agent.errors import SetupError
from trajpack.agent.models.hub import model_folder
from trajpack.agent.rollout.files import save_rollout
from trajpack.agent.rollout.log import RolloutLog
from trajpack.agent.rollout.places import tokenizer_folder, writable
from trajpack.agent.rollout.rollout import Rollout, RolloutOutcome, prepare_rollout
from trajpack.agent.rollout.settings import LayoutName, RolloutSettings
from trajpack.agent.runner import silence
from trajpack.agent.runner.runner import EpisodeResult, Progress
from trajpack.commands.panels import summary
from trajpack.commands.progress import EpisodeBoard
from trajpack.commands.terminal import make_console, say, silence_transformers, tell, writing
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.description import counted, describe
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.tree.pack_tree import tree_of
from trajpack.packing.tree.statistics import describe_tree

if TYPE_CHECKING:
    from trajpack.agent.observability.metrics import RolloutMetrics

_NOTHING = "no batch was written"


def roll_out(settings: RolloutSettings, layout: LayoutName, out: Path) -> int:
    """Roll out, pack, save and report; return the exit status.

    The first Ctrl-C or SIGTERM stops the episodes, and what has finished is packed and saved. A
    second one, and one outside the episodes, ends the command at once. A SetupError names the
    batch if it was written.
    """
    saved: list[Path] = []
    try:
        with _sigterm_as_interrupt():
            return _roll_out(settings, layout, out, saved=saved)
    except KeyboardInterrupt:
        kept = "" if settings.log is None else f"; {settings.log} has what has finished"
        say(f"interrupted: {f'the batch is in {out}' if saved else _NOTHING}{kept}")
        return 130
    except SetupError as error:
        if not saved:
            raise
        raise SetupError(f"{error}; the batch is in {out}") from error


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C is handled at that moment."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _roll_out(
    settings: RolloutSettings, layout: LayoutName, out: Path, *, saved: list[Path]
) -> int:
    """Roll out; add ``out`` to ``saved`` once the batch is written."""
    silence_transformers()
    if settings.model is not None:
        settings = replace(
            settings, model=model_folder(settings.model, say, weights=not settings.has_servers)
        )
    say("loading model and questions")
    prepared = prepare_rollout(settings)
    if len(prepared.prompts) < settings.num_prompts:
        num_there = counted(len(prepared.prompts), "question")
        say(f"{settings.dataset} has {num_there}, fewer than {settings.num_prompts:,}: all asked")
    with contextlib.ExitStack() as stack:
        for folder in filter(None, (out.parent, settings.answers)):
            stack.enter_context(writable(folder))
        log = None
        if settings.log is not None:
            log = stack.enter_context(RolloutLog(settings.log, prepared))
        observers = stack.enter_context(_metrics(settings))
        board, episodes, status = _run_episodes(prepared, log, observers)
        outcome = prepared.outcome(episodes)
        ended = _engine_end(prepared, outcome, board)
        if not outcome.trajectories:
            if status:
                raise KeyboardInterrupt
            [(reason, _)] = outcome.failures.most_common(1)
            common = f"all {len(outcome.results)} episodes failed, most of them so: {reason}"
            raise SetupError(f"{ended or common}; {_NOTHING}")
        buffer = TrajectoryBuffer(device=settings.device)
        buffer.extend(outcome.trajectories)
        began = time.perf_counter()
        batch = buffer.pack("merged" if layout == "tree" else layout)
        for metrics in observers:
            metrics.pack_ended(batch, time.perf_counter() - began)
        with writing(out):
            save_rollout(batch, prepared.tokenizer, out)
        saved.append(out)
        rows = report(outcome, board.progress, batch, num_merged=buffer.num_tokens)
        rows += tree_rows(batch, layout)
        title = f"{len(outcome.results):,} of {prepared.num_episodes:,} episodes"
        _show(settings, out, rows, title)
        if ended:
            raise SetupError(ended)
    return status


def _engine_end(prepared: Rollout, outcome: RolloutOutcome, board: EpisodeBoard) -> str:
    """Return what an engine left undone that ended before the episodes; else an empty text."""
    if outcome.engine_failure is None:
        return ""
    num_failed = f"{outcome.failures.total():,} of {prepared.num_episodes:,} episodes failed"
    num_left = f"{board.total - board.progress.num_started:,} were never started"
    return f"{outcome.engine_failure}: {num_failed} and {num_left}"


def _run_episodes(
    prepared: Rollout, log: RolloutLog | None, observers: tuple[RolloutMetrics, ...]
) -> tuple[EpisodeBoard, list[EpisodeResult], int]:
    """Run the episodes that the log does not have; return the board, all results and the status.

    The status is 130 if a signal stopped the episodes.
    """
    episodes: list[EpisodeResult] = []
    finished = frozenset[str]() if log is None else log.finished
    num_left = prepared.num_episodes - len(finished)
    if log is not None and finished:
        there = f"{len(finished):,} of {prepared.num_episodes:,} episodes"
        say(f"{log.folder} has {there}: going on from there")
        episodes += log.earlier(prepared.prompts, prepared.settings.group_size)
    board, status = EpisodeBoard(num_left, make_console(stderr=True)), 0

    async def gather() -> None:
        running = prepared.episodes(board.update, observers=observers, finished=finished)
        async with running as stream:
            async for result in stream:
                episodes.append(result)
                if log is not None:
                    log.record(result)

    try:
        with _summarised_warnings(), board:
            if num_left:
                asyncio.run(gather())  # the first Ctrl-C cancels it, and it ends in order
    except KeyboardInterrupt:
        status = 130
        say("stopped; saving what has finished; Ctrl-C again to give it up")
    return board, episodes, status


@contextlib.contextmanager
def _metrics(settings: RolloutSettings) -> Iterator[tuple[RolloutMetrics, ...]]:
    """Serve metrics if they are asked for, and return their observer."""
    if settings.metrics_port is None:
        yield ()
        return
    from trajpack.agent.observability.metrics import RolloutMetrics
    from trajpack.packing.optional import require

    require("prometheus_client")
    import prometheus_client

    metrics = RolloutMetrics()
    address = "127.0.0.1"
    try:
        server, thread = prometheus_client.start_http_server(
            settings.metrics_port, address, metrics.registry
        )
    except OSError as error:
        reason = error.strerror or error
        where = f"port {settings.metrics_port}"
        raise SetupError(f"cannot serve metrics at {where}: {reason}") from error
    say(f"metrics at http://{address}:{server.server_port}/metrics")
    try:
        yield (metrics,)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _show(settings: RolloutSettings, out: Path, rows: list[tuple[str, str]], title: str) -> None:
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
    """Counts warnings by kind and keeps the first of each; prints those of silence at once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.firsts: dict[str, str] = {}
        self.counts = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == silence.__name__:
            say(record.getMessage())
        elif record.levelno == logging.WARNING:  # errors come with the episodes
            self.firsts.setdefault(record.msg, record.getMessage())
            self.counts[record.msg] += 1


@contextlib.contextmanager
def _summarised_warnings() -> Iterator[None]:
    """Print one line for each kind of warning at the end."""
    logger = logging.getLogger("trajpack.agent")
    warnings, was_propagating = _Warnings(), logger.propagate
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


def tree_rows(batch: PackedBatch, layout: LayoutName) -> list[tuple[str, str]]:
    """Return what a report says of the tree of a batch, if the layout asked for is that."""
    return describe_tree(tree_of(batch).statistics()) if layout == "tree" else []


def failure_rows(failures: Counter[str]) -> list[tuple[str, str]]:
    """Return a row for each of the most common reasons of failure."""
    rows = [(f"failed {count:,}", reason) for reason, count in failures.most_common(5)]
    if len(failures) > 5:
        rows.append(("failed", counted(len(failures) - 5, "more reason")))
    return rows


def report(
    outcome: RolloutOutcome, progress: Progress, batch: PackedBatch, *, num_merged: int
) -> list[tuple[str, str]]:
    """Return the results of a rollout as pairs of a name and a formatted value.

    ``num_merged`` counts the tokens of the trajectories, each once. Padding would make a rectangle
    as wide as the longest sequence.
    """
    turns = [turn for path in outcome.trajectories for turn in path.turns]
    num_as_turns = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    num_right = sum(turn.reward > 0 for turn in turns)
    num_finished, num_failed = len(outcome.results), outcome.failures.total()
    num_earlier = num_finished - progress.num_finished
    earlier = f", {num_earlier:,} earlier" if num_earlier > 0 else ""
    capacity = len(batch) * batch.max_seqlen
    return [
        ("episodes", f"{num_finished:,} finished, {num_failed:,} of them failed{earlier}"),
        (
            "right answers",
            f"{num_right:,} of {len(turns):,} ({num_right / max(len(turns), 1):.1%})",
        ),
        ("speed", f"{progress.tokens_per_s:,.0f} generated tokens/s, {progress.elapsed_s:.1f} s"),
        (
            "packing saves",
            f"{1 - num_merged / num_as_turns:.0%} of the tokens: {num_merged:,} in place of "
            f"{num_as_turns:,}, turn by turn",
        ),
        (
            "padding adds",
            f"{capacity / batch.num_tokens - 1:.0%}: {capacity:,} tokens in place of "
            f"{batch.num_tokens:,}",
        ),
        *describe(batch),
        *failure_rows(outcome.failures),
    ]
