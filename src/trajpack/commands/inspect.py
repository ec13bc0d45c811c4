"""The work of ``trajpack inspect``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line, load_tokenizer
from trajpack.agent.models.hub import model_folder
from trajpack.agent.rollout.places import tokenizer_folder
from trajpack.commands.panels import chosen_sequences, legend, sequence_panel, summary
from trajpack.commands.terminal import make_console, say, tell
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.description import Decode, counted, describe
from trajpack.packing.files.storage import load
from trajpack.packing.report.figures import figures_of
from trajpack.packing.report.page import without_texts
from trajpack.packing.tree.pack_tree import tree_of
from trajpack.packing.tree.statistics import TreeStatistics, break_rows, describe_tree


class Chosen(NamedTuple):
    """Sequences to show."""

    name: str | None = None
    group: str | None = None
    order: Literal["batch", "best", "worst"] = "batch"
    most: int = 3


def inspect_file(
    file: Path, tokenizer: str | None, chosen: Chosen, *, width: int | None, full: bool
) -> int:
    """Show a summary of a batch and some of its sequences; return the exit status."""
    batch = load_batch(file)
    try:
        found = chosen_sequences(batch, name=chosen.name, group=chosen.group, order=chosen.order)
    except ValueError as error:
        raise SetupError(first_line(error)) from error
    shown = found[: chosen.most]
    rows = describe(batch)
    tree = _tree(batch)
    if tree is not None:
        rows += describe_tree(tree)
    num_breaks = 0 if tree is None else len(tree.breaks)
    decode = None
    if shown or num_breaks:
        decode = decoder_of(batch, tokenizer_folder(file), tokenizer)
    console = make_console(width=width)
    console.print(summary(rows, file.name, console.width))
    if tree is not None and num_breaks:
        broken = break_rows(tree, batch.ids, decode, full=full)
        console.print(summary(broken, "prefix breaks", console.width))
    if shown:
        console.print(legend(decoded=decode is not None))
    for sequence in shown:
        console.print(sequence_panel(batch, sequence, decode, full=full))
    if len(shown) < len(found):
        hidden = counted(len(found) - len(shown), "more sequence")
        tell(console, f"{hidden}; --sequences {len(found)} shows all", "dim")
    return 0


def inspect_as_json(file: Path) -> int:
    """Print the numbers of ``trajpack report``; return the exit status."""
    print(json.dumps(without_texts(figures_of(load_batch(file))), indent=1))  # noqa: T201
    return 0


def load_batch(file: Path) -> PackedBatch:
    """Read a batch, or raise `SetupError`."""
    try:
        return load(file)
    except ValueError as error:
        raise SetupError(str(error)) from error


def _tree(batch: PackedBatch) -> TreeStatistics | None:
    """Return the statistics of the batch's tree, unless its layout has none or it is empty."""
    if batch.layout != "merged" or not batch.num_turns:
        return None
    return tree_of(batch).statistics()


def decoder_of(batch: PackedBatch, beside: Path, tokenizer: str | None) -> Decode | None:
    """Return the decoding of a tokenizer, or ``None`` if there is none.

    Args:
        batch: Batch whose tokens are decoded.
        beside: Folder of the tokenizer, if there is one and no other is asked for.
        tokenizer: Folder, or name on the hub, that was asked for.
    """
    folder = beside if tokenizer is None and beside.is_dir() else None
    if tokenizer is not None:
        folder = model_folder(tokenizer, say, weights=False)
    if folder is None:
        return None
    try:
        loaded = load_tokenizer(folder)
    except ModuleNotFoundError as error:
        if tokenizer is not None:
            raise
        say(f"token ids in place of text: {error}")
        return None
    num_unknown = int((batch.input_ids >= len(loaded)).sum())
    if num_unknown:
        unknown = counted(num_unknown, "token")
        say(f"{unknown} not in the vocabulary of {folder}: is it the batch's tokenizer?")
    return partial(loaded.decode, clean_up_tokenization_spaces=False)
