"""The work of ``trajpack inspect``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from trajpack.agent.models.causal_model import load_tokenizer, model_folder, refused
from trajpack.commands.terminal import say
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.breaks import Decode
from trajpack.packing.files.storage import load
from trajpack.packing.report.figures import figures_of
from trajpack.packing.text import counted


def inspect_file(file: Path, tokenizer: str | None, most: int, **chosen: Any) -> None:
    """Print what `PackedBatch.show` prints of a saved batch."""
    batch, decode = load_batch(file), None
    if (most and len(batch)) or batch.num_prefix_breaks:
        decode = decoder_of(batch, file.with_suffix(".tokenizer"), tokenizer)
    with refused(""):
        batch.show(most, decode=decode, title=file.name, **chosen)


def inspect_as_json(file: Path) -> None:
    """Print the numbers of ``trajpack report``."""
    print(json.dumps(figures_of(load_batch(file)), indent=1))  # noqa: T201


def load_batch(file: Path) -> PackedBatch:
    """Read a batch, or raise `SetupError`."""
    with refused(""):
        return load(file)


def decoder_of(batch: PackedBatch, beside: Path, tokenizer: str | None) -> Decode | None:
    """Return the decoding of the tokenizer asked for, or of the one beside, if there is one."""
    if tokenizer is not None:
        loaded = load_tokenizer(model_folder(tokenizer, say, weights=False))
    elif not beside.is_dir():
        return None
    else:
        try:
            loaded = load_tokenizer(beside)
        except ModuleNotFoundError as error:
            say(f"token ids in place of text: {error}")
            return None
    num_unknown = int((batch.input_ids >= len(loaded)).sum())
    if num_unknown:
        unknown = counted(num_unknown, "token")
        say(f"{unknown} not in the vocabulary: is {tokenizer or beside} the batch's tokenizer?")
    return partial(loaded.decode, clean_up_tokenization_spaces=False)
