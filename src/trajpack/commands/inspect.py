"""The work of ``trajpack inspect``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line, load_tokenizer
from trajpack.agent.models.hub import model_folder
from trajpack.agent.rollout.settings import tokenizer_folder
from trajpack.commands.panels import chosen_sequences, sequence_panel
from trajpack.commands.terminal import make_console, say, show, tell
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.description import Decode, counted, describe
from trajpack.packing.files.storage import load
from trajpack.packing.report.figures import figures_of
from trajpack.packing.report.page import without_texts
from trajpack.packing.tree.pack_tree import tree_of
from trajpack.packing.tree.statistics import break_rows, describe_tree


def inspect_file(
    file: Path,
    tokenizer: str | None,
    chosen: dict[str, Any],
    *,
    most: int,
    full: bool,
) -> None:
    """Show a summary of a batch and ``most`` sequences of those of `chosen_sequences`."""
    batch = load_batch(file)
    try:
        sequences = chosen_sequences(batch, **chosen)
    except ValueError as error:
        raise SetupError(first_line(error)) from error
    has_tree = batch.layout == "merged" and batch.num_turns
    tree = tree_of(batch).statistics() if has_tree else None
    has_breaks = tree is not None and len(tree.breaks) > 0
    decode = None
    if sequences[:most] or has_breaks:
        decode = decoder_of(batch, tokenizer_folder(file), tokenizer)
    console = make_console()
    show(console, file.name, [*describe(batch), *(describe_tree(tree) if tree else [])])
    if tree is not None and has_breaks:
        show(console, "prefix breaks", break_rows(tree, batch.ids, decode, full=full))
    for sequence in sequences[:most]:
        console.print(sequence_panel(batch, sequence, decode, full=full))
    if most < len(sequences):
        hidden = counted(len(sequences) - most, "more sequence")
        tell(console, f"{hidden}; --sequences {len(sequences)} shows all")


def inspect_as_json(file: Path) -> None:
    """Print the numbers of ``trajpack report``."""
    print(json.dumps(without_texts(figures_of(load_batch(file))), indent=1))  # noqa: T201


def load_batch(file: Path) -> PackedBatch:
    """Read a batch, or raise `SetupError`."""
    try:
        return load(file)
    except ValueError as error:
        raise SetupError(str(error)) from error


def decoder_of(batch: PackedBatch, beside: Path, tokenizer: str | None) -> Decode | None:
    """Return the decoding of a tokenizer, or ``None`` if there is none.

    Args:
        batch: Batch whose tokens are decoded.
        beside: Folder of the tokenizer, if there is one and no other is asked for.
        tokenizer: Folder, or name on the hub, that was asked for.
    """
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
