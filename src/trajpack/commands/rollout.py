"""The work of ``trajpack rollout``: the episodes, their log and files, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bar

from trajpack.agent.errors import SetupError, has_engine_ended
from trajpack.agent.models.causal_model import model_folder
from trajpack.agent.rollout.files import RolloutLog, save_rollout
from trajpack.agent.rollout.rollout import Rollout, prepare_rollout
from trajpack.agent.rollout.settings import LayoutName, RolloutSettings
from trajpack.agent.runner import run
from trajpack.agent.runner.runner import EpisodeResult, Progress
from trajpack.commands.terminal import say, writing
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.description import describe, shared_prefixes, token_counts
from trajpack.packing.batch.show import print_table
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.text import counted

if TYPE_CHECKING:
    from trajpack.agent.observability.metrics import RolloutMetrics


def roll_out(settings: RolloutSettings, layout: LayoutName, out: Path) -> int:
    """Roll out, pack, save and report; return the exit status.

    A second Ctrl-C or SIGTERM, and one outside the episodes, ends the command at once.
    """
    saved: list[Path] = []

    def interrupt(*_: object) -> None:
        """Handle SIGTERM as Ctrl-C is handled at that moment."""
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, None)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return _roll_out(_prepare(settings, out), layout, out, saved=saved)
    except KeyboardInterrupt:
        written = f"the batch is in {out}" if saved else "no batch was written"
        kept = "" if settings.log is None else f"; {settings.log} has what has finished"
        say(f"interrupted: {written}{kept}")
        return 130
    except SetupError as error:
        if not saved:
            raise
        raise SetupError(f"{error}; the batch is in {out}") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare(settings: RolloutSettings, out: Path) -> Rollout:
    """Load model and questions, and see whether the folders can be written."""
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    if settings.model is not None:
        folder = model_folder(settings.model, say, weights=not settings.servers)
        settings = replace(settings, model=folder)
    say("loading model and questions")
    prepared = prepare_rollout(settings)
    if len(prepared.prompts) < settings.num_prompts:
        there = f"{settings.dataset} has {counted(len(prepared.prompts), 'question')}"
        say(f"{there}, fewer than {settings.num_prompts:,}: all asked")
    for folder in filter(None, (out.parent, settings.answers)):
        for place in (folder, *folder.parents):
            with contextlib.suppress(FileNotFoundError):
                tempfile.TemporaryFile(dir=place).close()  # refused now, not after the episodes
                break
    return prepared


def _roll_out(prepared: Rollout, layout: LayoutName, out: Path, *, saved: list[Path]) -> int:
    """Roll out; add ``out`` to ``saved`` once the batch is written."""
    settings = prepared.settings
    total = len(prepared.prompts) * settings.group_size
    port = settings.metrics_port
    with RolloutLog(settings.log, prepared) if settings.log else contextlib.nullcontext() as log:
        observers = [] if port is None else [_served_metrics(port)]
        progress, results, status = _run_episodes(prepared, total, log, observers)
        places = {prompt.id: index for index, prompt in enumerate(prepared.prompts)}
        results.sort(key=lambda result: (places[result.prompt.id], result.sample))
        errors = [result.error for result in results if result.error is not None]
        failures = Counter(error.reason for error in errors).most_common(5)
        ended = next((error.reason for error in errors if has_engine_ended(error)), "")
        if ended:
            ended += f": {len(errors):,} of {total:,} episodes failed and "
            ended += f"{total - len(results):,} were never started"
        if len(errors) == len(results):
            if status:
                raise KeyboardInterrupt
            common = f"all {len(results)} episodes failed, most of them so: {failures[0][0]}"
            raise SetupError(f"{ended or common}; no batch was written")
        buffer = TrajectoryBuffer(device=settings.device)
        buffer.extend(path for result in results for path in result.trajectories)
        began = time.perf_counter()
        batch = buffer.pack("merged" if layout == "tree" else layout)
        for metrics in observers:
            metrics.pack_ended(batch, time.perf_counter() - began)
        with writing(out):
            save_rollout(batch, prepared.tokenizer, out)
        saved.append(out)
        rows = report(results, progress, batch, num_merged=buffer.num_tokens)
        rows += [*batch_rows(batch, layout), *((f"failed {n:,}", text) for text, n in failures)]
        lines = [f"batch      {out}", f"tokenizer  {out.with_suffix('.tokenizer')}"]
        lines += [f"answers    {settings.answers}"] if settings.answers else []
        lines += [f"log        {settings.log}"] if settings.log else []
        if settings.model is None:
            lines.append("The tiny model has random weights: a right answer is luck.")
        lines.append(f"Look at it with: trajpack inspect {out}")
        print_table(f"{len(results):,} of {total:,} episodes", rows, *lines)
        if ended:
            raise SetupError(ended)
    return status


def _run_episodes(
    prepared: Rollout, total: int, log: RolloutLog | None, observers: Sequence[RolloutMetrics]
) -> tuple[Progress, list[EpisodeResult], int]:
    """Run the episodes that the log does not have; return progress, all results and the status."""
    results: list[EpisodeResult] = []
    finished = frozenset[str]() if log is None else log.finished
    if log is not None and finished:
        say(f"{log.folder} has {len(finished):,} of {total:,} episodes: going on from there")
        results += log.earlier()
    board, status = EpisodeBoard(total - len(finished), Console(stderr=True)), 0

    async def gather() -> None:
        options = {"on_progress": board.update, "observers": observers, "finished": finished}
        async with prepared.episodes(**options) as stream:
            async for result in stream:
                results.append(result)
                if log is not None:
                    log.record(result)

    handler = _FirstOfEachKind()
    logging.getLogger("trajpack.agent").addHandler(handler)
    try:
        with board.bar:
            if board.total:
                asyncio.run(gather())  # the first Ctrl-C cancels it, and it ends in order
    except KeyboardInterrupt:
        status = 130
        say("stopped; saving what has finished; Ctrl-C again to give it up")
    finally:
        logging.getLogger("trajpack.agent").removeHandler(handler)
    return board.progress, results, status


class EpisodeBoard:
    """Progress of episodes: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, total: int, console: Console) -> None:
        self.total, self.progress = total, Progress()
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._next_line_at = 0.0
        self.bar = Bar(console=console, disable=not self._is_live)
        self._task = self.bar.add_task("episodes", total=total)

    def update(self, progress: Progress) -> None:
        """Move the bar; or print a line for the first and the last progress, and between."""
        self.progress, num = progress, progress.num_finished
        success = progress.num_rewarded_turns / max(progress.num_kept_turns, 1)
        words = (
            f"episodes {num:,} of {self.total:,}, {progress.num_turns:,} turns, "
            f"{progress.tokens_per_s:,.0f} tokens/s, {success:.0%} right"
        )
        words += f", {progress.num_failed:,} failed" if progress.num_failed else ""
        self.bar.update(self._task, completed=num, description=words)
        if not self._is_live and (num == self.total or time.monotonic() >= self._next_line_at):
            self._next_line_at = time.monotonic() + 5
            minutes, seconds = divmod(int(progress.elapsed_s), 60)
            say(f"{words}, {minutes}:{seconds:02}")


class _FirstOfEachKind(logging.Handler):
    """Prints the first warning of each kind, and all of silence; errors come with the episodes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kinds: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        is_new = record.levelno == logging.WARNING and record.msg not in self._kinds
        if is_new or record.name == run.__name__:
            self._kinds.add(record.msg)
            say(record.getMessage())


def _served_metrics(port: int) -> RolloutMetrics:
    """Serve metrics on this machine until the program ends, and return their observer."""
    from trajpack.agent.observability.metrics import RolloutMetrics

    metrics, address = RolloutMetrics(), "127.0.0.1"
    import prometheus_client

    try:
        server, _ = prometheus_client.start_http_server(port, address, metrics.registry)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"port {port} of metrics") from error
    say(f"metrics at http://{address}:{server.server_port}/metrics")
    return metrics


def batch_rows(batch: PackedBatch, layout: LayoutName) -> list[tuple[str, str]]:
    """Return what a report says of a batch, and of its tree if the layout asked for is that."""
    rows = describe(batch)
    if layout == "tree":
        tokens = token_counts(batch, shared_prefixes(batch))
        nodes = counted(tokens["tree"], "node")
        others = f"{tokens['merged']:,} tokens merged or {tokens['turns']:,} as turns"
        rows.append(("tree", f"{nodes}, for {others}"))
    return rows


def report(
    results: Sequence[EpisodeResult], progress: Progress, batch: PackedBatch, *, num_merged: int
) -> list[tuple[str, str]]:
    """Return rows of a rollout's results; ``num_merged`` tokens have all turns, each once."""
    turns = [turn for result in results for turn in result.turns]
    num_as_turns = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    num_right = sum(turn.reward > 0 for turn in turns)
    num_failed = sum(result.error is not None for result in results)
    num_earlier = len(results) - progress.num_finished
    earlier = f", {num_earlier:,} earlier" if num_earlier > 0 else ""
    rectangle = len(batch) * batch.max_seqlen
    rows = {
        "episodes": f"{len(results):,} finished, {num_failed:,} of them failed{earlier}",
        "right answers": f"{num_right:,} of {len(turns):,} ({num_right / len(turns):.1%})",
        "speed": f"{progress.tokens_per_s:,.0f} generated tokens/s, {progress.elapsed_s:.1f} s",
        "packing saves": f"{1 - num_merged / num_as_turns:.0%} of the tokens: {num_merged:,} in "
        f"place of {num_as_turns:,}, turn by turn",
        "padding adds": f"{rectangle / batch.num_tokens - 1:.0%}: {rectangle:,} tokens in place of "
        f"{batch.num_tokens:,}",
    }
    return list(rows.items())
