"""What a rollout writes: the batch and, beside it, the tokenizer that decodes it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trajpack.agent.causal_model import save_tokenizer
from trajpack.packing.batch import PackedBatch


def tokenizer_folder(batch_file: Path) -> Path:
    """Return where the tokenizer that belongs to a batch is kept.

    Example:
        >>> tokenizer_folder(Path("demo/batch.safetensors")).as_posix()
        'demo/batch.tokenizer'
    """
    return batch_file.with_suffix(".tokenizer")


def check_writable(folder: Path) -> None:
    """Make ``folder`` if need be, and raise unless files can be made in it.

    Raises:
        OSError: If they cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"trajpack")


def save_rollout(batch: PackedBatch, tokenizer: Any, batch_file: Path) -> None:
    """Write a batch, and beside it the tokenizer that decodes it.

    Raises:
        OSError: If either cannot be written; what was there stays as it was.
    """
    folder = tokenizer_folder(batch_file)
    prefix = f".{folder.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=batch_file.parent) as unfinished:
        written, replaced = Path(unfinished, "written"), Path(unfinished, "replaced")
        save_tokenizer(tokenizer, written)
        batch.save(batch_file)
        if folder.exists():
            folder.rename(replaced)
        written.rename(folder)
