"""The work of ``trajpack inspect``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line, load_tokenizer
from trajpack.agent.models.hub import model_folder
from trajpack.agent.rollout.places import tokenizer_folder
from trajpack.commands.terminal import make_console, results, say, tell
from trajpack.packing.batch import inspection
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.tree.inspection import break_rows, describe_tree
from trajpack.packing.tree.merged import tree_of
from trajpack.packing.tree.statistics import TreeStatistics


def inspect_file(
    file: Path, tokenizer: str | None, num_sequences: int, width: int | None, *, full: bool
) -> int:
    """Show a summary of a batch and its first sequences; return the exit status."""
    batch = _load(file)
    beside = tokenizer_folder(file)
    folder = beside if tokenizer is None and beside.is_dir() else None
    if tokenizer is not None:
        folder = model_folder(tokenizer, say, weights=False)
    num_shown = min(num_sequences, len(batch))
    rows = inspection.describe(batch)
    tree = _tree(batch)
    if tree is not None:
        rows += describe_tree(tree)
    num_breaks = 0 if tree is None else len(tree.breaks)
    decode = None
    if folder is not None and (num_sequences or num_breaks):
        try:
            decode = _decoder(folder, batch)
        except ModuleNotFoundError as error:
            if tokenizer is not None:
                raise
            say(f"token ids in place of text: {error}")
    with results():
        console = make_console(width=width)
        console.print(inspection.summary(rows, file.name, console.width))
        if tree is not None and num_breaks:
            broken = break_rows(tree, batch.ids, decode, full=full)
            console.print(inspection.summary(broken, "prefix breaks", console.width))
        if num_shown:
            console.print(inspection.legend(decoded=decode is not None))
        for sequence in range(num_shown):
            console.print(inspection.sequence_panel(batch, sequence, decode, full=full))
        if num_shown < len(batch):
            hidden = inspection.counted(len(batch) - num_shown, "more sequence")
            tell(console, f"{hidden}; --sequences {len(batch)} shows all", "dim")
    return 0


def _load(file: Path) -> PackedBatch:
    try:
        return PackedBatch.load(file)
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
    except ValueError as error:
        raise SetupError(str(error)) from error


def _tree(batch: PackedBatch) -> TreeStatistics | None:
    """Return the statistics of the batch's tree, unless its layout has none or it is empty."""
    if batch.layout != "merged" or batch.is_padded or not batch.num_turns:
        return None
    return tree_of(batch, ("once", "shared")).statistics()


def _decoder(folder: Path, batch: PackedBatch) -> inspection.Decode:
    tokenizer = load_tokenizer(folder)
    num_unknown = int((batch.input_ids >= len(tokenizer)).sum())
    if num_unknown:
        unknown = inspection.counted(num_unknown, "token")
        say(f"{unknown} not in the vocabulary of {folder}: is it the batch's tokenizer?")
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)
