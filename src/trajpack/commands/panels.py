"""Rich panels that show a packed batch in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.description import Decode, Kind, Span, counted, sequence_spans
from trajpack.packing.text import one_line, printable

STYLES: dict[Kind, str] = {"prompt": "cyan", "observation": "yellow", "generated": "bold green"}
_HEAD_TOKENS, _TAIL_TOKENS = 96, 32
_MAX_SPANS = 24
_NEWLINE = "↵"
_NARROW = 50


def chosen_sequences(
    batch: PackedBatch,
    *,
    name: str | None = None,
    group: str | None = None,
    order: Literal["batch", "best", "worst"] = "batch",
) -> list[int]:
    """Return the sequences of some trajectories.

    Args:
        batch: Batch on any device.
        name: Name of a trajectory; ``None`` is any.
        group: Group of trajectories; ``None`` is any.
        order: Order of the batch, or by the trajectory's summed rewards.

    Raises:
        ValueError: If no trajectory has that name or group.
    """
    for what, wanted, known in (
        ("is called", name, batch.ids),
        ("has the group", group, [one for one in batch.groups if one is not None]),
    ):
        if wanted is not None and wanted not in known:
            first = ", ".join(repr(one_line(one, 40)) for one in [*dict.fromkeys(known)][:5])
            raise ValueError(f"no trajectory {what} {wanted!r}; the first are {first}")
    bounds, sequences = batch.cu_turns.tolist(), batch.turn_sequence.tolist()
    rewards = batch.turn_rewards.tolist()
    found: list[tuple[float, int]] = []
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if name in (None, batch.ids[index]) and group in (None, batch.groups[index]):
            score = sum(rewards[begin:end])
            found += [(score, one) for one in dict.fromkeys(sequences[begin:end])]
    if order != "batch":
        found.sort(key=lambda one: one[0], reverse=order == "best")
    return [sequence for _, sequence in found]


def summary(rows: Iterable[tuple[str, str]], title: str, width: int) -> Table | Text:
    """Return pairs of a name and a value as a table, or as lines where ``width`` is below 50."""
    shown = [(name, printable(value)) for name, value in rows]
    if width < _NARROW:
        lines = [Text.assemble((name, "bold"), f": {value}") for name, value in shown]
        return Text("\n").join([Text(printable(title), "italic"), *lines])
    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in shown:
        table.add_row(Text(name), Text(value))
    return table


def legend(decoded: bool) -> Text:
    """Return the legend of the styles."""
    return Text.assemble(
        ("prompt", STYLES["prompt"]),
        ", ",
        ("observation", STYLES["observation"]),
        " (from the environment) and ",
        ("generated", STYLES["generated"]),
        " tokens" if decoded else " token ids",
    )


def sequence_panel(
    batch: PackedBatch, sequence: int, decode: Decode | None = None, *, full: bool = False
) -> Panel:
    """Return one sequence with its turns and its text as a panel for a rich console.

    Each span has a line that begins with its kind. A line about the turn is above the span that it
    generated. A long span is shortened in the middle, and only the first spans of a long sequence
    are shown. Control characters and markup of the text are escaped.

    Args:
        batch: Batch on any device.
        sequence: Index of the sequence.
        decode: Function from token ids to text; ``None`` shows the ids.
        full: Whether to show all tokens of all spans.
    """
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, justify="right", style="dim")
    grid.add_column(overflow="fold")
    turns = np.flatnonzero(batch.turn_sequence.cpu().numpy() == sequence).tolist()
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
            number = Text(f"turn {_number_in_trajectory(batch, span.turn)}", "bold")
            grid.add_row(number, "", Text(_turn_line(batch, span.turn), "dim"))
        label = Text(span.kind, style)
        text = _span_text(batch, span, decode, full)
        grid.add_row(label, f"{span.end - span.start:,}", Text(text, style))
    if len(spans) > most:
        grid.add_row("", "", Text(f"... and {len(spans) - most:,} more spans", "dim"))
    title = Text(printable(_title(batch, sequence, turns)))
    return Panel(grid, title=title, title_align="left")


def _title(batch: PackedBatch, sequence: int, turns: Sequence[int]) -> str:
    length = counted(batch.seqlens[sequence], "token")
    trajectory = _trajectory_of(batch, turns[0])
    group = batch.groups[trajectory]
    of_group = "" if group is None else f" of group {group}"
    return f"sequence {sequence}: {batch.ids[trajectory]}{of_group}, {length}"


def _trajectory_of(batch: PackedBatch, turn: int) -> int:
    return int(np.searchsorted(batch.cu_turns.cpu().numpy(), turn, side="right")) - 1


def _number_in_trajectory(batch: PackedBatch, turn: int) -> int:
    return turn - int(batch.cu_turns[_trajectory_of(batch, turn)])


def _turn_line(batch: PackedBatch, turn: int) -> str:
    low, high = int(batch.turn_version_start[turn]), int(batch.turn_version_end[turn])
    begin, end = batch.turn_spans[turn].tolist()
    parts = [
        f"reward {float(batch.turn_rewards[turn]):.4g}",
        f"return {float(batch.turn_returns[turn]):.4g}",
    ]
    if end > begin and batch.advantages is not None:
        parts.append(f"mean advantage {_mean(batch.advantages[begin:end])}")
    if end > begin:
        parts.append(f"mean log-probability {_mean(batch.rollout_logprobs[begin:end])}")
    parts.append(f"version {low}" if low == high else f"versions {low} to {high}")
    if bool(batch.turn_truncated[turn]):
        parts.append("cut off")
    return ", ".join(parts)


def _mean(values: torch.Tensor) -> str:
    return f"{float(values.double().mean()):.4g}"


def _span_text(batch: PackedBatch, span: Span, decode: Decode | None, full: bool) -> str:
    def shown(start: int, end: int) -> str:
        ids = batch.input_ids[start:end].tolist()
        if decode is None:
            return " ".join(map(str, ids))
        text = decode(ids).replace("\n", f"{_NEWLINE}\n").removesuffix("\n")
        return printable(text, keep="\n")

    num_hidden = span.end - span.start - _HEAD_TOKENS - _TAIL_TOKENS
    if full or num_hidden <= 0:
        return shown(span.start, span.end)
    head = shown(span.start, span.start + _HEAD_TOKENS)
    tail = shown(span.end - _TAIL_TOKENS, span.end)
    return f"{head} [... {counted(num_hidden, 'token')} ...] {tail}"
