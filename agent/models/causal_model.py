"""Causal language models and tokenizers in folders, and their folders on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.packing.optional import require
from trajpack.packing.text import counted

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


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


def model_folder(
    model: str | os.PathLike[str], say: Callable[[str], None], *, weights: bool = True
) -> Path:
    """Return the folder of a model, fetched from the hub if ``model`` is a name ``owner/name``.

    A folder of that name on this machine comes first. Neither code that comes with a model nor
    weights in another form than safetensors are fetched; a tokenizer needs no ``weights``.
    ``say`` is called with a line before anything is fetched.

    Raises:
        SetupError: If the hub cannot be reached, or has no such model for this user.
        ModuleNotFoundError: If huggingface_hub, which comes with transformers, is not installed.
    """
    folder = Path(model)
    if folder.exists() or not _HUB_NAME.fullmatch(str(model)):
        return folder
    require("huggingface_hub")
    from huggingface_hub import snapshot_download

    say(f"fetching {model} from the Hugging Face hub, if it is not kept already")
    files = [*_TOKENIZER_FILES, *["*.safetensors"] * weights]
    try:
        return Path(snapshot_download(str(model), allow_patterns=files))
    except Exception as error:  # errors of the hub, of HTTP and of the system have no common base
        raise SetupError(
            f"cannot fetch {model}: it is no folder on this machine, and the Hugging Face hub "
            f"says: {first_line(error)}; --model also takes the folder of a model"
        ) from error


def load_model(folder: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a local folder.

    Nothing is downloaded, and code that comes with the folder is not run.

    Raises:
        SetupError: If the folder cannot be read, or lacks weights of the model.
        ModuleNotFoundError: If transformers is not installed.
    """
    model, report = _load("AutoModelForCausalLM", folder, "model", output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        lacking = f"it lacks {counted(len(missing), 'weight')}, the first is {missing[0]}"
        raise SetupError(f"cannot load a model from {folder}: {lacking}")
    return model.eval(), load_tokenizer(folder)


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """Load a tokenizer from a local folder; raises as `load_model`."""
    return _load("AutoTokenizer", folder, "tokenizer")


def load_config(folder: str | os.PathLike[str]) -> Any:
    """Load a model's configuration from a local folder; None if it has a tokenizer alone."""
    has_model = (Path(folder) / "config.json").is_file()
    return _load("AutoConfig", folder, "model") if has_model else None


def _load(auto: str, folder: str | os.PathLike[str], what: str, **options: Any) -> Any:
    """Load from a folder, which from_pretrained might take for the name of a model on a hub."""
    require("transformers")
    import transformers

    problem = f"cannot load a {what} from {folder}: "
    if not Path(folder).is_dir():
        remedy = "huggingface_hub.snapshot_download fetches a model of the Hugging Face hub"
        raise SetupError(f"{problem}it is not a folder; {remedy}")
    file = "config.json" if what == "model" else "tokenizer_config.json"
    if not (Path(folder) / file).is_file():
        raise SetupError(f"{problem}it has no {file}")
    with refused(problem, Exception):  # a broken folder shows as any kind of exception
        load = getattr(transformers, auto).from_pretrained
        return load(folder, local_files_only=True, trust_remote_code=False, **options)


def save_tokenizer(tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write a tokenizer to a folder, which is created if it is missing; may raise OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The Rust tokenizers report an error of the system as a plain Exception.
        if "os error" in str(error):
            raise OSError(first_line(error)) from error
        raise
