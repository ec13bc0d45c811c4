"""The work of ``trajpack report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.agent.rollout.log import logged_tokenizer
from trajpack.agent.rollout.places import tokenizer_folder
from trajpack.commands.inspect import decoder_of, load_batch
from trajpack.commands.panels import summary
from trajpack.commands.terminal import make_console, tell, writing
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.report.page import write_report
from trajpack.packing.trajectory_log.log import TrajectoryLog


def report_source(source: Path, out: Path, tokenizer: str | None, **options: Any) -> int:
    """Write the page of a batch's file or of a log's folder; return the exit status."""
    is_log = source.is_dir()
    batch = _pack_log(source) if is_log else load_batch(source)
    beside = logged_tokenizer(source) if is_log else tokenizer_folder(source)
    decode = decoder_of(batch, beside, tokenizer)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            figures = write_report(batch, out, **options, decode=decode, title=source.name)
        except ValueError as error:
            raise SetupError(first_line(error)) from error
    console = make_console()
    if figures["saved"]:
        console.print(summary(figures["saved"], source.name, console.width))
    tell(console, f"page       {out}")
    tell(console, f"numbers    {out.with_suffix('.json')}")
    return 0


def _pack_log(folder: Path) -> PackedBatch:
    try:
        with TrajectoryLog.open(folder, mode="read") as log:
            buffer = TrajectoryBuffer(fields=log.fields)
            log.fill(buffer)
    except ValueError as error:
        raise SetupError(first_line(error)) from error
    return buffer.pack()
