"""The work of ``trajpack inspect``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from trajpack.agent.models.causal_model import load_tokenizer, model_folder, refused
from trajpack.commands.panels import chosen_sequences, sequence_panel
from trajpack.commands.terminal import say, show
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.breaks import Decode
from trajpack.packing.batch.description import describe
from trajpack.packing.files.storage import load
from trajpack.packing.report.figures import figures_of
from trajpack.packing.report.page import without_texts
from trajpack.packing.text import counted
from trajpack.packing.tree.pack_tree import tree_of
from trajpack.packing.tree.statistics import break_rows, describe_tree


def inspect_file(
    file: Path, tokenizer: str | None, chosen: dict[str, Any], *, most: int, full: bool
) -> None:
    """Show a summary of a batch and ``most`` sequences of those of `chosen_sequences`."""
    batch = load_batch(file)
    with refused(""):
        sequences = chosen_sequences(batch, **chosen)
    has_tree = batch.layout == "merged" and batch.num_turns
    tree = tree_of(batch).statistics() if has_tree else None
    has_breaks = tree is not None and len(tree.breaks) > 0
    decode = None
    if sequences[:most] or has_breaks:
        decode = decoder_of(batch, file.with_suffix(".tokenizer"), tokenizer)
    panels = [sequence_panel(batch, one, decode, full=full) for one in sequences[:most]]
    rest = counted(len(sequences) - most, "more sequence")
    lines = [f"{rest}; --sequences {len(sequences)} shows all"] * (most < len(sequences))
    rows = [*describe(batch), *(describe_tree(tree) if tree else [])]
    show(file.name, rows, *panels, *lines)
    if tree is not None and has_breaks:
        show("prefix breaks", break_rows(tree, batch.ids, decode, full=full))


def inspect_as_json(file: Path) -> None:
    """Print the numbers of ``trajpack report``."""
    print(json.dumps(without_texts(figures_of(load_batch(file))), indent=1))  # noqa: T201


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
