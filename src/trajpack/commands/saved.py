"""The work of ``trajpack replay`` and ``trajpack report``, on what a rollout has saved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line, load_tokenizer
from trajpack.agent.rollout.files import save_rollout
from trajpack.agent.rollout.settings import LayoutName, tokenizer_folder
from trajpack.commands.inspect import decoder_of, load_batch
from trajpack.commands.rollout import failure_rows, tree_rows
from trajpack.commands.terminal import make_console, show, tell, writing
from trajpack.packing.batch.description import describe
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.files.storage import save
from trajpack.packing.report.page import write_report
from trajpack.packing.trajectory_log.log import TrajectoryLog


def replay_log(folder: Path, out: Path | None, layout: LayoutName, device: str) -> None:
    """Read a log, pack it, save the batch if asked to, and report."""
    try:
        with TrajectoryLog.open(folder, mode="read") as log:
            rows = [("episodes", f"{len(log):,}, {len(log.failed):,} of them failed")]
            if log.failed:
                reasons = Counter(logged.error for logged in log.replay() if logged.error)
                rows += failure_rows(reasons.most_common(5))
            buffer = TrajectoryBuffer(fields=log.fields, device=device)
            log.fill(buffer)
        batch = buffer.pack("merged" if layout == "tree" else layout) if len(buffer) else None
    except (AssertionError, ValueError) as error:  # torch raises both for a device
        raise SetupError(first_line(error)) from error
    if batch is not None:
        rows += [*describe(batch), *tree_rows(batch, layout)]
    elif out is not None:
        raise SetupError(f"{folder} has no trajectories; no batch was written")
    if batch is not None and out is not None:
        kept, beside = folder / "tokenizer", tokenizer_folder(out)
        tokenizer = load_tokenizer(kept) if kept.is_dir() else None
        if tokenizer is None and beside.exists():
            raise SetupError(f"{folder} has no tokenizer, and {beside} is that of another batch")
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            save(batch, out) if tokenizer is None else save_rollout(batch, tokenizer, out)
    console = make_console()
    show(console, folder.name, rows)
    if out is not None:
        tell(console, f"batch      {out}")
        tell(console, f"Look at it with: trajpack inspect {out}")


def report_source(source: Path, out: Path, tokenizer: str | None, **options: Any) -> None:
    """Write the page of a batch's file or of a log's folder."""
    try:
        if source.is_dir():
            with TrajectoryLog.open(source, mode="read") as log:
                buffer = TrajectoryBuffer(fields=log.fields)
                log.fill(buffer)
            batch, beside = buffer.pack(), source / "tokenizer"
        else:
            batch, beside = load_batch(source), tokenizer_folder(source)
        decode = decoder_of(batch, beside, tokenizer)
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            figures = write_report(batch, out, **options, decode=decode, title=source.name)
    except ValueError as error:
        raise SetupError(first_line(error)) from error
    console = make_console()
    show(console, source.name, figures["saved"])
    tell(console, f"page       {out}")
    tell(console, f"numbers    {out.with_suffix('.json')}")
