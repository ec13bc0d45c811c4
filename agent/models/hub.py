"""Models by their names on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.packing.optional import require

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["*.safetensors"]


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
    if folder.exists() or not _NAME.fullmatch(str(model)):
        return folder
    require("huggingface_hub")
    from huggingface_hub import snapshot_download

    say(f"fetching {model} from the Hugging Face hub, if it is not kept already")
    wanted = _TOKENIZER + _WEIGHTS * weights
    try:
        return Path(snapshot_download(str(model), allow_patterns=wanted))
    except Exception as error:  # errors of the hub, of HTTP and of the system have no common base
        raise SetupError(
            f"cannot fetch {model}: it is no folder on this machine, and the Hugging Face hub "
            f"says: {first_line(error)}; --model also takes the folder of a model"
        ) from error
