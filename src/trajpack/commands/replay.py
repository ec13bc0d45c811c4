"""The work of ``trajpack replay``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line, load_tokenizer
from trajpack.agent.rollout.files import save_rollout
from trajpack.agent.rollout.log import logged_tokenizer
from trajpack.agent.rollout.places import tokenizer_folder
from trajpack.agent.rollout.settings import LayoutName
from trajpack.commands.panels import summary
from trajpack.commands.rollout import failure_rows, tree_rows
from trajpack.commands.terminal import make_console, tell, writing
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.description import describe
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.files.storage import save
from trajpack.packing.trajectory_log.log import TrajectoryLog


def replay_log(folder: Path, out: Path | None, layout: LayoutName, device: str) -> int:
    """Read a log, pack it, save the batch if asked to, and report; return the exit status."""
    try:
        with TrajectoryLog.open(folder, mode="read") as log:
            rows = [("episodes", f"{len(log):,}, {len(log.failed):,} of them failed")]
            if log.failed:
                reasons = (logged.error for logged in log.replay())
                rows += failure_rows(Counter(reason for reason in reasons if reason is not None))
            buffer = TrajectoryBuffer(fields=log.fields, device=device)
            log.fill(buffer)
        batch = buffer.pack("merged" if layout == "tree" else layout) if len(buffer) else None
    except (AssertionError, ValueError) as error:  # torch raises both for a device
        raise SetupError(first_line(error)) from error
    if batch is None and out is not None:
        raise SetupError(f"{folder} has no trajectories; no batch was written")
    if batch is not None and out is not None:
        _save(folder, batch, out)
    console = make_console()
    rows += [] if batch is None else [*describe(batch), *tree_rows(batch, layout)]
    console.print(summary(rows, folder.name, console.width))
    if out is not None:
        tell(console, f"batch      {out}")
        tell(console, f"Look at it with: trajpack inspect {out}", "dim")
    return 0


def _save(folder: Path, batch: PackedBatch, out: Path) -> None:
    """Write the batch, and its tokenizer if the log has one."""
    kept = logged_tokenizer(folder)
    tokenizer = load_tokenizer(kept) if kept.is_dir() else None
    if tokenizer is None and tokenizer_folder(out).exists():
        raise SetupError(
            f"{folder} has no tokenizer, and {tokenizer_folder(out)} is that of another batch"
        )
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if tokenizer is None:
            save(batch, out)
        else:
            save_rollout(batch, tokenizer, out)
