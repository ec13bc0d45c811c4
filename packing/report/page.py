"""A page of one file without scripts: figures as pictures, and the texts of trajectories."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trajpack.packing.batch.breaks import Decode, break_rows
from trajpack.packing.batch.description import sequence_spans, turn_words
from trajpack.packing.durable_files import write_durably
from trajpack.packing.report.figures import KINDS, MOST_BREAKS, PADDING, figures_of
from trajpack.packing.text import counted, one_line, printable

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.batch.description import Span
    from trajpack.packing.tree.tree_batch import TreeBatch

MOST_BYTES = 600_000
"""Bytes that the texts of trajectories take on the page."""
MOST_SPAN_TOKENS = 1_000
"""Tokens of a span whose text is on the page."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body><main><h1>{title}</h1>{body}</main></body>
</html>
"""


def write_report(
    batch: PackedBatch | TreeBatch,
    path: str | os.PathLike[str],
    *,
    capacity: int | None = None,
    num_ranks: int = 8,
    align: int = 1,
    decode: Decode | None = None,
    title: str = "",
) -> dict[str, Any]:
    """Write a page that shows a batch in a browser, and its numbers as JSON beside it.

    The page is one file that loads and runs nothing. It shows micro-batches by kind of token and
    cause of padding, attention cost by rank, lengths, rewards by group, prefix breaks, and the text
    of trajectories. A large batch is shown in part: the page says what is left out.

    Args:
        batch: Batch of any layout; a tree is shown as its rows of layout ``"merged"``.
        path: File that ends with ``.html``; the numbers go to the same name with ``.json``.
        capacity: Tokens of a micro-batch; ``None``: twice the longest sequence, or more where that
            would make hundreds of micro-batches.
        num_ranks: Number of data-parallel ranks.
        align: Each sequence takes a multiple of this many tokens.
        decode: Function from token ids to text, such as ``tokenizer.decode``; ``None`` shows the
            ids.
        title: Title of the page; the name of the file by default.

    Returns:
        The numbers.

    Raises:
        OSError: If a file cannot be written.
        TypeError: If a number is not an integer.
        ValueError: If the path does not end with ``.html``, a number is below 1, or the capacity is
            below the longest sequence.
    """
    path = Path(path)
    if path.suffix != ".html":
        raise ValueError(f"report: path must end with .html, got {path}")
    rows: PackedBatch = batch.merged() if hasattr(batch, "merged") else batch.to("cpu")
    figures = figures_of(rows, capacity=capacity, num_ranks=num_ranks, align=align)
    parts = [*_pictures(figures), *_breaks(rows, decode), *_texts(rows, figures, decode)]
    page = _PAGE.format(
        title=escape(one_line(title or path.stem)),
        style=files("trajpack.packing.report").joinpath("page.css").read_text("utf-8"),
        body="".join(parts),
    )
    write_durably(path, page.encode())
    write_durably(path.with_suffix(".json"), json.dumps(figures).encode())
    return figures


def _section(title: str, note: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2><p>{escape(note)}</p>{''.join(parts)}</section>"


def _bars(columns: Iterable[dict[str, int]], names: Sequence[object]) -> str:
    """Return a bar for each column, of parts by kind, as high as its sum."""
    columns = list(columns)
    most = max([sum(column.values()) for column in columns], default=0) or 1
    bars = []
    for name, column in zip(names, columns, strict=True):
        words = ", ".join(f"{kind} {value:,}" for kind, value in column.items() if value)
        parts = [
            f'<i class="{kind}" style="height:{100 * value / most:.2f}%"></i>'
            for kind, value in column.items()
            if value
        ]
        bars.append(f'<div title="{name}: {words}">{"".join(parts)}</div>')
    return f'<div class="bars" data-most="{most:,}">{"".join(bars)}</div>'


def _pictures(figures: dict[str, Any]) -> Iterator[str]:
    rows = [*figures["summary"], *figures["saved"]]
    tiles = [f"<div><small>{name}</small>{escape(value)}</div>" for name, value in rows]
    yield f'<div class="tiles">{"".join(tiles)}</div>'
    if plan := figures["plan"]:
        kinds = [*KINDS, *PADDING]
        bars = [dict(zip(kinds, bar, strict=True)) for bar in zip(*plan["bars"], strict=True)]
        several = f" A bar is {plan['at_once']} of them." if plan["at_once"] > 1 else ""
        note = (
            f"{plan['micro_batches']:,} micro-batches of up to {plan['capacity']:,} tokens, at "
            f"least {plan['lower_bound']:,} are needed; fill {plan['fill']:.1%}, the fullest has "
            f"{plan['token_imbalance']:.2f} times the mean.{several}"
        )
        names = [f"micro-batch {number * plan['at_once']}" for number in range(len(bars))]
        legend = "".join(f'<i class="{kind}"></i>{kind} ' for kind in kinds)
        yield _section("Micro-batches", note, f"<p>{legend}</p>", _bars(bars, names))
    pairs = {name: figures["ranks"][name]["pairs"] for name in ("planned", "in_order")}
    ranks = [f"rank {rank}" for rank in range(figures["ranks"]["num_ranks"])]
    charts = [_bars([{"generated": one} for one in each], ranks) for each in pairs.values()]
    note = "Pairs of a query and a key: by plan_ranks, and if ranks take sequences in order."
    yield _section("Attention cost by rank", note, *charts)
    names = [f"from {edge} tokens" for edge in figures["lengths"]["edges"][:-1]]
    colours = {"sequences": "prompt", "completions": "generated"}
    counts = [[{kind: n} for n in figures["lengths"][name]] for name, kind in colours.items()]
    note = "Number of sequences, and of completions, by their tokens."
    yield _section("Lengths", note, *[_bars(one, names) for one in counts])
    groups = figures["groups"]
    left = f" {counted(groups['left_out'], 'more group')} left out." if groups["left_out"] else ""
    keys = {"scores": "summed rewards", "advantages": "mean advantages"}
    strips = [_strips(groups["shown"], key, words) for key, words in keys.items()]
    yield _section("Rewards by group", f"A point is a trajectory.{left}", *strips)


def _strips(groups: Sequence[dict[str, Any]], key: str, title: str) -> str:
    """Return a line of points for each group, all on one axis; nothing if there are no points."""
    finite = [one for group in groups for one in group[key] if isinstance(one, float)]
    if not finite:
        return ""
    low, high, lines = min(finite), max(finite), []
    for group in groups:
        points = [
            f'<b style="left:{100 * (one - low) / (high - low or 1):.1f}%" title="{one}"></b>'
            for one in group[key]
            if isinstance(one, float)
        ]
        lines.append(f"<span>{escape(group['name'])}</span><div>{''.join(points)}</div>")
    lines.append(f"<span></span><small>{low} to {high}</small>")
    return f'<p>{title}</p><div class="strips">{"".join(lines)}</div>'


def _breaks(batch: PackedBatch, decode: Decode | None) -> Iterator[str]:
    breaks = batch.prefix_breaks()
    rows = break_rows(breaks[:MOST_BREAKS], batch.ids, decode, full=True)
    lines = [f"<tr><td>{name}</td><td>{escape(words)}</td></tr>" for name, words in rows]
    note = f"Turns whose prompt does not begin with the conversation so far: {len(breaks):,}."
    yield _section("Prefix breaks", note, f"<table>{''.join(lines)}</table>")


def _texts(batch: PackedBatch, figures: dict[str, Any], decode: Decode | None) -> Iterator[str]:
    """Yield the trajectories, with their text as far as there is room for it."""
    room, parts, known = MOST_BYTES, list[str](), dict[int, str]()
    bounds = pairwise(batch.cu_turns.tolist())
    for row, (begin, end) in zip(figures["trajectories"]["rows"], bounds, strict=False):
        text = "<p>The text was left out.</p>"
        if room > 0:
            sequences = dict.fromkeys(batch.turn_sequence[begin:end].tolist())
            spans = [(each, one) for each in sequences for one in sequence_spans(batch, each)]
            text = "".join(_span(batch, one, decode, known, begin) for _, one in spans)
            room -= len(text.encode())
        numbers = [("group", row["group"]), ("score", row["score"]), ("turns", row["turns"])]
        numbers += [("mean advantage", row["advantage"]), ("generated", row["generated"])]
        words = ", ".join(f"{name} {value}" for name, value in numbers if value is not None)
        head = f"<summary>{escape(row['id'])} <small>{escape(words)}</small></summary>"
        parts.append(f"<details{'' if parts else ' open'}>{head}{text}</details>")
    left = figures["trajectories"]["left_out"]
    note = f"{left:,} more left out." if left else "Colours are advantages, if there are."
    yield _section("Trajectories", note, *parts)


def _span(
    batch: PackedBatch, span: Span, decode: Decode | None, known: dict[int, str], first_turn: int
) -> str:
    end = min(span.end, span.start + MOST_SPAN_TOKENS)
    ids, title = batch.input_ids[span.start : end].tolist(), str(span.kind)
    if span.kind == "generated":
        title += f", turn {span.turn - first_turn}: {turn_words(batch, span)}"
        text = "".join(_tokens(batch, span.start, ids, decode, known))
    else:
        text = _shown(decode(ids) if decode is not None else " ".join(map(str, ids)))
    left = f" <em>{counted(span.end - end, 'token')} left out</em>" if span.end > end else ""
    small = f"<small>{counted(span.end - span.start, 'token')}, {escape(title)}</small>"
    return f'<div class="span {span.kind}">{small}<pre>{text}{left}</pre></div>'


def _tokens(
    batch: PackedBatch, start: int, ids: list[int], decode: Decode | None, known: dict[int, str]
) -> Iterator[str]:
    """Yield generated tokens; those that are parts of one character are one piece."""
    columns = {"log-probability": batch.rollout_logprobs.numpy()[start : start + len(ids)]}
    if batch.advantages is not None:
        columns["advantage"] = batch.advantages.numpy()[start : start + len(ids)]
    coloured = [*columns.values()][-1]
    most = float(np.abs(coloured[np.isfinite(coloured)]).max(initial=0)) or 1.0
    at = 0
    while at < len(ids):
        text, size = _piece(ids, at, decode, known)
        means = {name: float(values[at : at + size].mean()) for name, values in columns.items()}
        words = ", ".join(f"{name} {mean:.4g}" for name, mean in means.items())
        mean = [*means.values()][-1]
        side, share = "low" if mean < 0 else "high", 55 * abs(mean) / most
        style = f"--share:{share if share <= 55 else 0:.0f}%"  # neither infinite nor NaN
        yield f'<i class="{side}" style="{style}" title="{words}">{_shown(text)}</i>'
        at += size


def _piece(
    ids: list[int], at: int, decode: Decode | None, known: dict[int, str]
) -> tuple[str, int]:
    if decode is None:
        return f"{ids[at]} ", 1
    text = known.setdefault(ids[at], known.get(ids[at]) or decode([ids[at]]))
    for size in range(2, min(5, len(ids) - at + 1)) if "\ufffd" in text else ():
        joined = decode(ids[at : at + size])
        if "\ufffd" not in joined:
            return joined, size
    return text, 1


def _shown(text: str) -> str:
    return escape(printable(text, keep="\n"))
