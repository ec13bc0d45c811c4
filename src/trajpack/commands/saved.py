"""The work of ``trajpack replay`` and ``trajpack report``, on what a rollout has saved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import load_tokenizer, refused
from trajpack.agent.rollout.files import save_rollout
from trajpack.agent.rollout.settings import LayoutName
from trajpack.commands.inspect import decoder_of, load_batch
from trajpack.commands.rollout import batch_rows
from trajpack.commands.terminal import writing
from trajpack.packing.batch.show import print_table
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.files.storage import save
from trajpack.packing.report.page import write_report
from trajpack.packing.trajectory_log.log import TrajectoryLog


def replay_log(folder: Path, out: Path | None, layout: LayoutName, device: str) -> None:
    """Read a log, pack it, save the batch if asked to, and report."""
    with refused("", AssertionError), TrajectoryLog.open(folder, mode="read") as log:
        rows = [("episodes", f"{len(log):,}, {len(log.failed):,} of them failed")]
        failures = Counter(one.error for one in log.replay() if log.failed and one.error)
        buffer = TrajectoryBuffer(fields=log.fields, device=device)
        log.fill(buffer)
        batch = buffer.pack("merged" if layout == "tree" else layout) if len(buffer) else None
    if batch is not None:
        rows += batch_rows(batch, layout)
    elif out is not None:
        raise SetupError(f"{folder} has no trajectories; no batch was written")
    if batch is not None and out is not None:
        kept, beside = folder / "tokenizer", out.with_suffix(".tokenizer")
        tokenizer = load_tokenizer(kept) if kept.is_dir() else None
        if tokenizer is None and beside.exists():
            raise SetupError(f"{folder} has no tokenizer, and {beside} is that of another batch")
        with writing(out):
            save(batch, out) if tokenizer is None else save_rollout(batch, tokenizer, out)
    rows += [(f"failed {count:,}", reason) for reason, count in failures.most_common(5)]
    lines = [f"batch      {out}", f"Look at it with: trajpack inspect {out}"]
    print_table(folder.name, rows, *(lines if out is not None else []))


def report_source(source: Path, out: Path, tokenizer: str | None, **options: Any) -> None:
    """Write the page of a batch's file or of a log's folder."""
    with refused(""):
        if source.is_dir():
            with TrajectoryLog.open(source, mode="read") as log:
                buffer = TrajectoryBuffer(fields=log.fields)
                log.fill(buffer)
            batch, beside = buffer.pack(), source / "tokenizer"
        else:
            batch, beside = load_batch(source), source.with_suffix(".tokenizer")
        decode = decoder_of(batch, beside, tokenizer)
        with writing(out):
            figures = write_report(batch, out, **options, decode=decode, title=source.name)
    page, numbers = f"page       {out}", f"numbers    {out.with_suffix('.json')}"
    print_table(source.name, figures["saved"], page, numbers)
