"""Text and rich panels that show a packed batch in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from trajpack.packing.text import one_line, printable

if TYPE_CHECKING:
    import torch
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from trajpack.packing.batch.batch import PackedBatch

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Function from token ids to text."""
Kind: TypeAlias = Literal["prompt", "observation", "generated"]

STYLES: dict[Kind, str] = {"prompt": "cyan", "observation": "yellow", "generated": "bold green"}
_HEAD_TOKENS, _TAIL_TOKENS = 96, 32
_MAX_SPANS = 24
_NEWLINE = "↵"
_NARROW = 50


class Span(NamedTuple):
    """Tokens of a sequence of one kind."""

    kind: Kind
    """``"prompt"``, ``"generated"``, or ``"observation"``: context after a generated token."""
    start: int
    """Index of its first token in the batch."""
    end: int
    """Index past its last token in the batch."""
    turn: int
    """Turn that generated the tokens, an index of the batch's turn tensors, or -1."""


def sequence_spans(batch: PackedBatch, sequence: int) -> list[Span]:
    """Return the spans of prompt, observations and completions of a sequence.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> turns = [Turn([1, 2], [3], [-0.1]), Turn([1, 2, 3, 4], [5, 6], [-0.2, -0.3])]
        >>> for span in sequence_spans(pack([Trajectory("a", turns)]), 0):
        ...     print(*span)
        prompt 0 2 -1
        generated 2 3 0
        observation 3 4 -1
        generated 4 6 1
    """
    start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
    if start == end:
        return []
    turn_ids = batch.turn_ids[start:end].cpu().numpy()
    bounds = [0, *(np.flatnonzero(np.diff(turn_ids)) + 1).tolist(), end - start]
    spans = []
    context: Kind = "prompt"
    for begin, stop in pairwise(bounds):
        turn = int(turn_ids[begin])
        kind: Kind = context if turn < 0 else "generated"
        if turn >= 0:
            context = "observation"
        spans.append(Span(kind, start + begin, start + stop, turn))
    return spans


def _visible(text: str) -> str:
    """Return printable text with marked line ends."""
    return printable(text.replace("\n", f"{_NEWLINE}\n").removesuffix("\n"), keep="\n")


def chosen_sequences(
    batch: PackedBatch,
    *,
    name: str | None = None,
    group: str | None = None,
    order: Literal["batch", "best", "worst"] = "batch",
) -> list[int]:
    """Return the sequences of some trajectories; padding is none of theirs.

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


def describe(batch: PackedBatch) -> list[tuple[str, str]]:
    """Return the content of a batch as pairs of a name and a value in words.

    Cost: copies the turn tensors to the host (synchronises).

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> for name, value in describe(pack([Trajectory("a", [Turn([1, 2], [3], [-0.1])])])):
        ...     print(name, "=", value)
        trajectories = 1
        turns = 1, longest trajectory 1
        sequences = 1 in layout merged, longest 3 tokens
        tokens = 3, of them 1 generated (33.3%)
        returns = mean 0, min 0, max 0
        policy versions = 0
    """
    groups = {group for group in batch.groups if group is not None}
    in_groups = f" in {counted(len(groups), 'group')}" if groups else ""
    num_truncated = int(batch.turn_truncated.sum())
    truncated = f", {num_truncated:,} cut off by the length limit" if num_truncated else ""
    turns_each = int(batch.cu_turns.diff().max()) if batch.ids else 0
    share = batch.num_generated / batch.num_tokens if batch.num_tokens else 0.0
    rows = [
        ("trajectories", f"{len(batch.ids):,}{in_groups}"),
        ("turns", f"{batch.num_turns:,}, longest trajectory {turns_each:,}{truncated}"),
        (
            "sequences",
            f"{len(batch):,} in layout {batch.layout}, longest {batch.max_seqlen:,} tokens",
        ),
        (
            "tokens",
            f"{batch.num_tokens:,}, of them {batch.num_generated:,} generated ({share:.1%})",
        ),
    ]
    if batch.num_turns:
        returns = batch.turn_returns.double().cpu()
        rows.append(
            (
                "returns",
                f"mean {returns.mean():.4g}, min {returns.min():.4g}, max {returns.max():.4g}",
            )
        )
        low, high = int(batch.turn_version_start.min()), int(batch.turn_version_end.max())
        rows.append(("policy versions", f"{low}" if low == high else f"{low} to {high}"))
    return rows


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "turn"), counted(1200, "turn")
        ('1 turn', '1,200 turns')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def as_table(rows: Iterable[tuple[str, str]], title: str) -> Table:
    """Return pairs of a name and a value as a rich table; markup in the text is shown as text."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(Text(name), Text(printable(value)))
    return table


def as_lines(rows: Iterable[tuple[str, str]], title: str) -> Text:
    """Return pairs of a name and a value as lines, for terminals too narrow for a table."""
    from rich.text import Text

    lines = [Text(printable(title), "italic")]
    lines += [Text.assemble((name, "bold"), Text(f": {printable(value)}")) for name, value in rows]
    return Text("\n").join(lines)


def summary(rows: Iterable[tuple[str, str]], title: str, width: int) -> Table | Text:
    """Return `as_table`, or `as_lines` where ``width`` columns leave no room for a table."""
    return as_lines(rows, title) if width < _NARROW else as_table(rows, title)


def legend(decoded: bool) -> Text:
    """Return the legend of the styles."""
    from rich.text import Text

    parts = [
        Text("prompt", STYLES["prompt"]),
        Text(", "),
        Text("observation", STYLES["observation"]),
        Text(" (from the environment) and "),
        Text("generated", STYLES["generated"]),
        Text(" tokens" if decoded else " token ids"),
    ]
    return Text.assemble(*parts)


def sequence_panel(
    batch: PackedBatch, sequence: int, decode: Decode | None = None, *, full: bool = False
) -> Panel:
    """Return one sequence with its turns and its text as a panel for a rich console.

    Each span has a line that begins with its kind. A line about the turn is above the span that it
    generated. A long span is shortened in the middle, and
    only the first spans of a long sequence are shown. Control characters and markup of the text
    are escaped.

    Args:
        batch: Batch on any device.
        sequence: Index of the sequence.
        decode: Function from token ids to text; ``None`` shows the ids.
        full: Whether to show all tokens of all spans.

    Raises:
        IndexError: If there is no such sequence.
    """
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    if not 0 <= sequence < len(batch):
        raise IndexError(f"sequence {sequence} of {len(batch)}")
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
    if not turns:
        return f"sequence {sequence}: padding, {length}"
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
        return " ".join(map(str, ids)) if decode is None else _visible(decode(ids))

    num_hidden = span.end - span.start - _HEAD_TOKENS - _TAIL_TOKENS
    if full or num_hidden <= 0:
        return shown(span.start, span.end)
    head = shown(span.start, span.start + _HEAD_TOKENS)
    tail = shown(span.end - _TAIL_TOKENS, span.end)
    return f"{head} [... {counted(num_hidden, 'token')} ...] {tail}"
