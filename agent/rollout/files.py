"""Files of a rollout: the packed batch and its tokenizer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from trajpack.agent.models.causal_model import save_tokenizer
from trajpack.agent.rollout.places import tokenizer_folder
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.durable_files import remove_leftovers
from trajpack.packing.files.storage import save


def save_rollout(batch: PackedBatch, tokenizer: Any, batch_file: Path) -> None:
    """Write a batch and its tokenizer, replacing earlier ones; the batch last.

    Raises:
        OSError: If either cannot be written; earlier files do not change then.
    """
    folder = tokenizer_folder(batch_file)
    unfinished = Path(tempfile.mkdtemp(".tmp", f".{folder.name}.", batch_file.parent))
    written, replaced = unfinished / "written", unfinished / "replaced"
    is_written = False
    try:
        save_tokenizer(tokenizer, written)
        is_written = True
        if folder.exists():
            folder.rename(replaced)
        written.rename(folder)
        save(batch, batch_file)
        remove_leftovers(folder)
    except BaseException:
        if is_written and not written.exists():
            folder.rename(written)
        if replaced.exists():
            replaced.rename(folder)
        raise
    finally:
        if folder.exists() or not replaced.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
