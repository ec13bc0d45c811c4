"""Files of a rollout: the packed batch and its tokenizer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import save_tokenizer
from trajpack.packing.batch.batch import PackedBatch

_TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)


def tokenizer_folder(batch_file: Path) -> Path:
    """Return the folder of a batch's tokenizer, such as ``demo/batch.tokenizer``."""
    return batch_file.with_suffix(".tokenizer")


def answers_folder(batch_file: Path) -> Path:
    """Return the default folder of the answers of a batch, such as ``demo/batch.answers``."""
    return batch_file.with_suffix(".answers")


def check_places(batch_file: Path, answers: Path | None, *, option: str = "--out") -> None:
    """Check that a rollout overwrites only files of an earlier one.

    Raises:
        SetupError: If ``batch_file`` is no ``.safetensors`` file, the folder of its tokenizer
            has other files, or ``answers`` is inside either.
    """
    if batch_file.suffix != ".safetensors" or batch_file.is_dir():
        raise SetupError(f"{option} must be a .safetensors file, got {batch_file}")
    folder = tokenizer_folder(batch_file)
    for place in (batch_file, folder):
        if answers is not None and answers.resolve().is_relative_to(place.resolve()):
            raise SetupError(f"--answers must not be {place} or in it, got {answers}")
    foreign = _foreign_entry(folder)
    if foreign is not None:
        raise SetupError(
            f"{folder} is not the tokenizer of a batch and will not be replaced: {foreign}"
        )


def check_writable(folder: Path) -> None:
    """Create ``folder`` if it is missing, and a temporary file in it, or raise OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"trajpack")


def save_rollout(batch: PackedBatch, tokenizer: Any, batch_file: Path) -> None:
    """Write a batch and its tokenizer, replacing earlier ones; the batch last.

    Raises:
        OSError: If either cannot be written; earlier files do not change then.
    """
    folder = tokenizer_folder(batch_file)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=batch_file.parent))
    written, replaced = unfinished / "written", unfinished / "replaced"
    is_written = False
    try:
        save_tokenizer(tokenizer, written)
        is_written = True
        if folder.exists():
            folder.rename(replaced)
        written.rename(folder)
        batch.save(batch_file)
    except BaseException:
        if is_written and not written.exists():
            folder.rename(written)
        if replaced.exists():
            replaced.rename(folder)
        raise
    finally:
        if folder.exists() or not replaced.exists():
            shutil.rmtree(unfinished, ignore_errors=True)


def _foreign_entry(folder: Path) -> str | None:
    """Return the reason why a folder is not a saved tokenizer, or ``None``."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return "it is not a folder"
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    foreign = sorted(names - _TOKENIZER_FILES)
    if foreign:
        return f"it holds {foreign[0]}"
    if names and "tokenizer_config.json" not in names:
        return "it has no tokenizer_config.json"
    return None
