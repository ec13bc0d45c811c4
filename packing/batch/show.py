"""What a packed batch holds, printed for a person: counts, sequences by role, broken prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from trajpack.kernels.validation import check_choice, check_integer
from trajpack.packing.batch.breaks import Decode, break_rows, describe_breaks
from trajpack.packing.batch.description import (
    Kind,
    Span,
    describe,
    saved_rows,
    sequence_spans,
    shared_prefixes,
    token_counts,
    turn_words,
)
from trajpack.packing.optional import require
from trajpack.packing.text import counted, one_line, printable

if TYPE_CHECKING:
    from rich.panel import Panel

    from trajpack.packing.batch.batch import PackedBatch

Order: TypeAlias = Literal["batch", "best", "worst"]
"""Order of sequences: that of the batch, or by the summed rewards of their trajectories."""
STYLES: dict[Kind, str] = {"prompt": "cyan", "observation": "yellow", "generated": "bold green"}
_HEAD_TOKENS, _TAIL_TOKENS, _MAX_SPANS = 96, 32, 24


def show(  # noqa: D417 - a method of batches
    batch: PackedBatch,
    sequences: int = 2,
    *,
    decode: Decode | None = None,
    name: str | None = None,
    group: str | None = None,
    order: Order = "batch",
    full: bool = False,
    title: str = "PackedBatch",
) -> None:
    """Print counts, some sequences by role, and broken prefixes, as ``trajpack inspect`` does.

    Args:
        sequences: Sequences to print, with rewards, returns and mean advantages of their turns.
        decode: Function from token ids to text, such as ``tokenizer.decode``; ``None`` prints
            the ids.
        name: Only those of the trajectory with this name.
        group: Only those of this group.
        order: ``"batch"``, or ``"best"`` or ``"worst"`` summed rewards first.
        full: Whether to print all tokens and all breaks; else long spans are cut short.
        title: Line above the counts.

    Raises:
        ModuleNotFoundError: If rich, of ``trajpack[cli]``, is not installed.
        ValueError: If there is no such trajectory, group or order.
    """
    require("rich")
    check_integer("show", "sequences", sequences)
    check_choice("show", "order", order, get_args(Order))
    host = batch.to("cpu")
    chosen, breaks = chosen_sequences(host, name, group, order), host.prefix_breaks()
    rows = [*describe(host), *saved_rows(token_counts(host, shared_prefixes(host)))]
    if num_continuations := host.num_turns - len(host.ids):
        rows.append(("prefix breaks", describe_breaks(breaks, num_continuations)))
    panels = [sequence_panel(host, one, decode, full=full) for one in chosen[:sequences]]
    num_left = len(chosen) - len(panels)
    rest = [f"{counted(num_left, 'more sequence')}, of {len(chosen):,}"] if num_left else []
    print_table(title, rows, *panels, *rest)
    if breaks:
        print_table("prefix breaks", break_rows(breaks, host.ids, decode, full=full))


def print_table(title: str, rows: Iterable[tuple[str, str]], *others: Panel | str) -> None:
    """Print pairs of a name and a value as a table; then panels, and lines of text."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    console = Console(highlight=False, emoji=False)
    console.width = min(console.width, 1000)  # that of the terminal may be anything
    console.print(table)
    for other in others:
        if isinstance(other, str):  # not wrapped, so that paths can be copied
            console.print(Text(printable(other)), soft_wrap=True)
        else:
            console.print(other)


def chosen_sequences(
    batch: PackedBatch, name: str | None = None, group: str | None = None, order: Order = "batch"
) -> list[int]:
    """Return the sequences of a trajectory, of a group, or of all, in order."""
    for what, wanted, known in (
        ("is called", name, batch.ids),
        ("has the group", group, [label for label in batch.groups if label is not None]),
    ):
        if wanted is not None and wanted not in known:
            first = ", ".join(repr(one_line(label, 40)) for label in [*dict.fromkeys(known)][:5])
            raise ValueError(f"no trajectory {what} {wanted!r}; the first are {first}")
    sequences, rewards = batch.turn_sequence.tolist(), batch.turn_rewards.tolist()
    scored: list[tuple[float, int]] = []
    for index, (begin, end) in enumerate(pairwise(batch.cu_turns.tolist())):
        if name in (None, batch.ids[index]) and group in (None, batch.groups[index]):
            score = sum(rewards[begin:end])
            scored += [(score, sequence) for sequence in dict.fromkeys(sequences[begin:end])]
    if order != "batch":
        scored.sort(key=lambda pair: pair[0], reverse=order == "best")
    return [sequence for _, sequence in scored]


def sequence_panel(
    batch: PackedBatch, sequence: int, decode: Decode | None = None, *, full: bool = False
) -> Panel:
    """Return one sequence as a panel: a line for each span, above it one of the turn it is from.

    Long spans are shortened, and only the first of many are shown, unless ``full``.
    """
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, justify="right", style="dim")
    grid.add_column(overflow="fold")
    turns = np.flatnonzero(batch.turn_sequence.cpu().numpy() == sequence).tolist()
    trajectory = int(np.searchsorted(batch.cu_turns.cpu().numpy(), turns[0], side="right")) - 1
    first_turn = int(batch.cu_turns[trajectory])
    spans = sequence_spans(batch, sequence)
    for turn in turns:
        begin, end = batch.turn_spans[turn].tolist()
        if begin == end:
            spans.append(Span("generated", begin, end, turn))
    spans.sort(key=lambda span: (span.start, span.end))
    most = len(spans) if full else _MAX_SPANS
    for span in spans[:most]:
        style = STYLES[span.kind]
        if span.turn >= 0:
            number = Text(f"turn {span.turn - first_turn}", "bold")
            grid.add_row(number, "", Text(turn_words(batch, span), "dim"))
        text = Text(_span_text(batch, span, decode, full), style)
        grid.add_row(Text(span.kind, style), f"{span.end - span.start:,}", text)
    if len(spans) > most:
        grid.add_row("", "", Text(f"... and {len(spans) - most:,} more spans", "dim"))
    group = batch.groups[trajectory]
    of_group = "" if group is None else f" of group {group}"
    length = counted(batch.seqlens[sequence], "token")
    title = f"sequence {sequence}: {batch.ids[trajectory]}{of_group}, {length}"
    return Panel(grid, title=Text(printable(title)), title_align="left")


def _span_text(batch: PackedBatch, span: Span, decode: Decode | None, full: bool) -> str:
    def text_of(ids: list[int]) -> str:
        if decode is None:
            return " ".join(map(str, ids))
        return printable(decode(ids).replace("\n", "↵\n").removesuffix("\n"), keep="\n")

    ids = batch.input_ids[span.start : span.end].tolist()
    num_hidden = len(ids) - _HEAD_TOKENS - _TAIL_TOKENS
    if full or num_hidden <= 0:
        return text_of(ids)
    between = f" [... {counted(num_hidden, 'token')} ...] "
    return between.join([text_of(ids[:_HEAD_TOKENS]), text_of(ids[-_TAIL_TOKENS:])])
