"""The work of ``trajpack rollout``: the episodes, their log and files, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trajpack.agent.errors import SetupError
from trajpack.agent.models.hub import model_folder
from trajpack.agent.rollout.files import save_rollout
from trajpack.agent.rollout.log import RolloutLog
from trajpack.agent.rollout.places import tokenizer_folder, writable
from trajpack.agent.rollout.rollout import Rollout, RolloutOutcome, prepare_rollout
from trajpack.agent.rollout.settings import LayoutName, RolloutSettings
from trajpack.agent.runner import watchdog
from trajpack.agent.runner.runner import EpisodeResult, Progress
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
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.inspection import counted, describe, summary
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.tree.pack_tree import tree_of
from trajpack.packing.tree.statistics import describe_tree

if TYPE_CHECKING:
    from trajpack.agent.observability.metrics import RolloutMetrics

_NOTHING = "no batch was written"
_SAVING = "saving what has finished; Ctrl-C again to give it up"


def roll_out(settings: RolloutSettings, layout: LayoutName, out: Path) -> int:
    """Roll out, pack, save and report; return the exit status.

    The first Ctrl-C or SIGTERM stops the episodes, or, once they have ended, waits for the batch
    to be saved. The second one ends the command at once. A SetupError names the batch if it was
    written.
    """

    def stamp() -> tuple[int, int] | None:
        """Return inode and modification time, which change when the file is replaced."""
        try:
            return (status := out.stat()).st_ino, status.st_mtime_ns
        except OSError:
            return None

    before = stamp()
    with Interruption() as interruption:
        try:
            _roll_out(settings, layout, out, interruption)
        except KeyboardInterrupt:
            kept = "" if settings.log is None else f"; {settings.log} has what has finished"
            say(f"interrupted: {_NOTHING if stamp() == before else f'the batch is in {out}'}{kept}")
            interruption.status = interruption.status or 130
        except SetupError as error:
            if stamp() == before:
                raise
            raise SetupError(f"{error}; the batch is in {out}") from error
    return interruption.status or 0


def _roll_out(
    settings: RolloutSettings, layout: LayoutName, out: Path, interruption: Interruption
) -> None:
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
        board, episodes = _run_episodes(prepared, log, observers, interruption=interruption)
        outcome = prepared.outcome(episodes)
        failures, ended = outcome.failures, ""
        if outcome.engine_failure is not None:
            num_failed = f"{failures.total():,} of {prepared.num_episodes:,} episodes failed"
            num_left = f"{board.total - board.progress.num_started:,} were never started"
            ended = f"{outcome.engine_failure}: {num_failed} and {num_left}"
        if not outcome.trajectories:
            if interruption.status is not None:
                raise KeyboardInterrupt
            [(reason, _)] = failures.most_common(1)
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
        rows = report(outcome, board.progress, batch, num_merged=buffer.num_tokens)
        rows += tree_rows(batch, layout)
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
    interruption.check()
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
