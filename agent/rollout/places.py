"""Places where a rollout writes: which files it may replace, and which folders it makes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trajpack.agent.errors import SetupError

SETTINGS_FILE = "rollout.json"
"""File in the folder of a rollout's log that has the rollout's settings."""


def tokenizer_folder(batch_file: Path) -> Path:
    """Return the folder of a batch's tokenizer, such as ``demo/batch.tokenizer``."""
    return batch_file.with_suffix(".tokenizer")


def answers_folder(batch_file: Path) -> Path:
    """Return the default folder of the answers of a batch, such as ``demo/batch.answers``."""
    return batch_file.with_suffix(".answers")


def is_continued(log: Path | None) -> bool:
    """Return whether a rollout with this log continues an earlier one."""
    return log is not None and (log / SETTINGS_FILE).exists()


def check_places(
    batch_file: Path, answers: Path | None, *, replace: bool, option: str = "--out"
) -> None:
    """Check that a rollout overwrites only files of an earlier one, if it may ``replace`` them.

    Raises:
        SetupError: If ``batch_file`` is no ``.safetensors`` file, or exists and is not to be
            replaced, the folder of its tokenizer has no tokenizer, or ``answers`` is inside either.
    """
    if batch_file.suffix != ".safetensors" or batch_file.is_dir():
        raise SetupError(f"{option} must be a .safetensors file, got {batch_file}")
    if batch_file.exists() and not replace:
        raise SetupError(f"{batch_file} exists; --force replaces it")
    folder = tokenizer_folder(batch_file)
    for place in (batch_file, folder):
        if answers is not None and answers.resolve().is_relative_to(place.resolve()):
            raise SetupError(f"--answers must not be {place} or in it, got {answers}")
    is_tokenizer = (folder / "tokenizer_config.json").is_file() and not folder.is_symlink()
    if os.path.lexists(folder) and not is_tokenizer:
        raise SetupError(f"{folder} is not the tokenizer of a batch and will not be replaced")


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Create ``folder`` if it is missing; after the context, remove what was created and is empty.

    Raises:
        SetupError: If the folder cannot be created, or no file in it.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"trajpack")
        except OSError as error:
            raise SetupError(f"cannot write {folder}: {error.strerror or error}") from error
        yield
    finally:
        for place in missing:
            with contextlib.suppress(OSError):  # it is not empty, or was not made
                place.rmdir()
