"""Causal language models and tokenizers, read from and written to folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.packing.batch.description import counted
from trajpack.packing.optional import require

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty, or its type's name."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


@contextmanager
def refused(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds, or of values, into a `SetupError` of one line."""
    caught: tuple[type[Exception], ...] = (ValueError, *kinds)
    try:
        yield
    except SetupError:
        raise
    except caught as error:
        raise SetupError(f"{problem}{first_line(error)}") from error


def load_model(folder: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a local folder.

    Nothing is downloaded, and code that comes with the folder is not run.

    Raises:
        SetupError: If the folder cannot be read, or lacks weights of the model.
        ModuleNotFoundError: If transformers is not installed.
    """
    require("transformers")
    from transformers import AutoModelForCausalLM

    model, report = _load(
        AutoModelForCausalLM, folder, "config.json", "model", output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        lacking = f"it lacks {counted(len(missing), 'weight')}, the first is {missing[0]}"
        raise SetupError(f"cannot load a model from {folder}: {lacking}")
    return model.eval(), load_tokenizer(folder)


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """Load a tokenizer from a local folder; raises as `load_model`."""
    require("transformers")
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, folder, "tokenizer_config.json", "tokenizer")


def load_config(folder: str | os.PathLike[str]) -> Any:
    """Load a model's configuration from a local folder; None if it has a tokenizer alone."""
    require("transformers")
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        return None
    return _load(AutoConfig, folder, "config.json", "model")


def save_tokenizer(tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write a tokenizer to a folder, which is created if it is missing; may raise OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The Rust tokenizers report an error of the system as a plain Exception.
        if "os error" in str(error):
            raise OSError(first_line(error)) from error
        raise


def _load(auto: Any, folder: str | os.PathLike[str], file: str, what: str, **options: Any) -> Any:
    """Load from a folder, which from_pretrained might take for the name of a model on a hub."""
    remedy = "huggingface_hub.snapshot_download fetches a model of the Hugging Face hub"
    if not Path(folder).is_dir():
        raise SetupError(f"cannot load a {what} from {folder}: it is not a folder; {remedy}")
    if not (Path(folder) / file).is_file():
        raise SetupError(f"cannot load a {what} from {folder}: it has no {file}")
    # a broken folder shows as any kind of exception
    with refused(f"cannot load a {what} from {folder}: ", Exception):
        return auto.from_pretrained(folder, **_LOCAL, **options)
