"""Tables of a batch: where each of its tokens comes from, and what its turns belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, Run
from trajpack.packing.batch.tables import Longest
from trajpack.packing.buffer.stored import Columns, Ints, Labels
from trajpack.packing.layout import LAYOUTS, Layout
from trajpack.packing.token_fields import TokenField
from trajpack.packing.turn_fields import TURN_FIELDS

Words: TypeAlias = npt.NDArray[np.int32]

ATTRIBUTES = {field.attribute: field for field in TURN_FIELDS}
VERSION_START, TRUNCATED = map(list(ATTRIBUTES).index, ("version_start", "truncated"))
GROUP_ORDER = {
    "trajectories": "order_of_trajectories",
    "owners": "turn_trajectory",
    "cu_trajectories": "cu_group_trajectories",
}
"""Table of each field of `GroupOrder`."""
BESIDE = frozenset(("runs", "field_sources", "turn_discounts", "cu_new", *GROUP_ORDER.values()))
"""Tables that are no fields of a batch."""


class Spans(NamedTuple):
    """What one policy version generated in a turn; a turn has at least one, which may be empty."""

    turn: Ints
    """Turn that generated it."""
    chain: Ints
    """Chain that holds it."""
    begin: Ints
    """Index of its first token in the chain."""
    end: Ints
    """Index past its last token in the chain."""
    version: Ints
    """Policy version that sampled it."""
    logprob: Ints
    """Position of its first log-probability in the word stream."""
    source: Ints
    """Position of its chain's first token in the word stream."""

    def ordered(self, order: slice | Ints) -> Spans:
        """Return the spans in another order."""
        return Spans(*(column[order] for column in self))


def spans_of(columns: Columns) -> Spans:
    """Return the spans of all turns, in the order of the turns."""
    turn, version = np.arange(len(columns.sizes)), columns.numbers[VERSION_START].astype(np.int64)
    start, stop = np.zeros_like(turn), columns.sizes
    of: slice | Ints = slice(None)
    if len(columns.spans):
        is_plain = np.ones(len(turn), np.bool_)
        is_plain[columns.spans[:, 0]] = False
        plain = np.stack([turn, version, start, stop], 1)[is_plain]
        rows = np.concatenate([plain, columns.spans])
        of, version, start, stop = rows[rows[:, 0].argsort(kind="stable")].T
    chains, begins = columns.chains[of], columns.begins[of]
    return Spans(
        turn[of], chains, begins + start, begins + stop, version,
        columns.logprobs[of] + start, columns.sources[chains],
    )  # fmt: skip


class Tables(NamedTuple):
    """Tables of a batch, and what the host knows of it."""

    arrays: dict[str, npt.NDArray[Any]]
    """What the device needs, by name."""
    spans: Spans
    rows: tuple[Ints, ...]
    """Byte of the first row of each extra field: of each span, or of its chain."""
    seqlens: Ints
    """Tokens of the sequences."""
    generated_lens: Ints
    """Generated tokens of the sequences."""
    value_lens: Ints
    """``[sequences, 2 * ragged fields]``: `Columns.values` of the sequences."""
    num_tokens: int
    num_groups: int
    most_turns: int
    """Turns of the longest trajectory."""
    longest: Longest


def tables_of(
    columns: Columns,
    labels: Labels,
    fields: Sequence[TokenField],
    layout: Layout,
) -> Tables:
    """Return the tables of all turns in a layout.

    A sequence is a chain (``"merged"``) or a turn (``"turns"``): a prefix of one chain either way.
    A run is a span and its context: the tokens of the sequence between the span before it and the
    span. The spans of a trajectory follow each other, so the sequences of later trajectories follow
    those of earlier ones.

    Raises:
        ValueError: If the batch would pass 2³¹ tokens.
    """
    of_turns = spans_of(columns)
    order: slice | Ints = slice(None)
    if (np.diff(of_turns.chain) < 0).any():
        order = of_turns.chain.argsort(kind="stable")
    stored = np.empty_like(of_turns.end)  # tokens of the chain before each span
    stored[order] = _contexts(of_turns.ordered(order), of_turns.chain[order])
    context, num_sequences = stored, len(columns.chain_sizes)
    if layout == "turns":
        order, num_sequences = slice(None), len(columns.sizes)
        context = _contexts(of_turns, of_turns.turn)
    spans, context, stored = of_turns.ordered(order), context[order], stored[order]
    runs = _runs_of(spans, context, layout)
    starts, sequence = runs[:, Run.START], runs[:-1, Run.SEQUENCE]
    cu_turns, cu_generated = cumulative(columns.num_turns), cumulative(columns.sizes)
    turn_spans = np.empty((len(columns.sizes), 2), np.int32)
    turn_begin, turn_sequence = np.empty((2, len(columns.sizes)), np.int32)
    first = spans.turn[::-1]  # written in reverse, a turn's first span is written last
    turn_sequence[spans.turn] = sequence
    turn_spans[first, 0] = (starts[1:] - spans.end + spans.begin)[::-1]
    turn_spans[spans.turn, 1] = starts[1:]
    turn_begin[first] = (starts[:-1] - context + stored)[::-1]
    arrays = {
        "runs": runs,
        "cu_turns": cu_turns,
        "cu_seqlens": starts[cumulative(np.bincount(sequence, minlength=num_sequences))],
        "cu_generated": cu_generated,
        "cu_new": cumulative(turn_spans[:, 1] - turn_begin),
        "turn_sequence": turn_sequence,
        "turn_spans": turn_spans,
        "turn_begin": turn_begin,
        **{field.name: of for field, of in zip(TURN_FIELDS, columns.numbers, strict=True)},
        **_of_labels(labels, columns, cu_turns),
    }
    rows = rows_of(of_turns, columns, fields)
    if fields:
        arrays["field_sources"] = _sources_of([of[order] for of in rows], fields, context)
    values = [np.bincount(turn_sequence, of, num_sequences) for of in columns.values]
    return Tables(
        arrays=arrays,
        spans=of_turns,
        rows=rows,
        seqlens=np.diff(arrays["cu_seqlens"]),
        generated_lens=np.bincount(turn_sequence, columns.sizes, num_sequences).astype(np.int64),
        value_lens=np.array(values, np.int64).reshape(len(values), num_sequences).T,
        num_tokens=int(starts[-1]),
        num_groups=len(arrays["cu_group_trajectories"]) - 1,
        most_turns=int(columns.num_turns.max(initial=0)),
        longest=Longest(
            generated=_most(cu_generated[cu_turns]),
            new=_most(arrays["cu_new"][cu_turns]),
            group=_most(arrays["cu_group_trajectories"]),
        ),
    )


def _runs_of(spans: Spans, context: Ints, layout: Layout) -> npt.NDArray[np.int32]:
    """Return the run table of spans whose contexts begin at ``context`` of their chains."""
    ends = (spans.end - context).cumsum()
    num_tokens = int(ends[-1]) if ends.size else 0
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"a batch holds at most {MAX_TOKENS} tokens, layout {layout!r} needs {num_tokens}"
        )
    runs = np.zeros((len(ends) + 1, RUN_WIDTH), np.int32)
    runs[1:, Run.START] = ends
    for column, numbers in {
        Run.SOURCE: spans.source + context,
        Run.GENERATED: spans.begin - context,
        Run.LOGPROB: spans.logprob,
        Run.POSITION: context,
        Run.SEQUENCE: spans.chain if layout == "merged" else spans.turn,
        Run.TURN: spans.turn,
        Run.VERSION: spans.version,
    }.items():
        runs[:-1, column] = numbers
    return runs


def rows_of(spans: Spans, columns: Columns, fields: Sequence[TokenField]) -> tuple[Ints, ...]:
    """Return the byte of the first row of each extra field: of each span, or of its chain."""
    skipped = spans.logprob - columns.logprobs[spans.turn]
    return tuple(
        first[spans.turn] + skipped * field.row_bytes
        if field.generated_only
        else first[spans.chain]
        for field, first in zip(fields, columns.rows, strict=True)
    )


def _sources_of(rows: Sequence[Ints], fields: Sequence[TokenField], context: Ints) -> Ints:
    """Return the byte of the first row of each extra field of each run."""
    sources = np.zeros((len(context) + 1, len(fields)), np.int64)
    for number, field in enumerate(fields):
        skipped = 0 if field.generated_only else context * field.row_bytes
        sources[:-1, number] = rows[number] + skipped
    return sources


def _of_labels(labels: Labels, columns: Columns, cu_turns: Words) -> dict[str, npt.NDArray[Any]]:
    """Return the tables of trajectories, and the order of their groups."""
    count = len(columns.num_turns)  # an interrupted call may have left more labels
    group_ids, num_groups = number_groups(labels.groups[:count])
    truncated = columns.numbers[TRUNCATED][cu_turns[1:] - 1]
    given = labels.truncated_as_given[:count]
    if given.count(None) < count:
        chosen = np.array(given, np.float64)  # None becomes NaN
        truncated = np.where(np.isnan(chosen), truncated, chosen == 1)
    return {
        "turn_discounts": np.array(labels.turn_discounts[:count], np.float64),
        "truncated": truncated,
        "group_ids": group_ids,
        **_by_group(group_ids, num_groups, columns.num_turns),
    }


def _most(bounds: Words) -> int:
    """Return the largest difference between neighbours."""
    return int(np.diff(bounds).max(initial=0))


def _contexts(spans: Spans, unit: Ints) -> Ints:
    """Return where the context of each span begins: at the span before it, at 0 in a new unit."""
    context = np.zeros_like(spans.end)
    context[1:] = np.where(unit[1:] == unit[:-1], spans.end[:-1], 0)
    return context


def _by_group(group_ids: Words, num_groups: int, num_turns: Ints) -> dict[str, Words]:
    """Return trajectories in the order of their groups, stable within a group."""
    owners = np.arange(len(num_turns), dtype=np.int32).repeat(num_turns)
    narrow: Any = group_ids.astype(np.uint16) if num_groups <= 1 << 16 else group_ids
    order = np.arange(len(group_ids))
    if (np.diff(group_ids) < 0).any():
        order = narrow.argsort(kind="stable")
    bounds = cumulative(np.bincount(group_ids, minlength=num_groups))
    tables: dict[str, npt.NDArray[Any]] = {
        "order_of_trajectories": order,
        "turn_trajectory": owners,
        "cu_group_trajectories": bounds,
    }
    return {name: table.astype(np.int32) for name, table in tables.items()}


def cumulative(lengths: npt.NDArray[np.integer[Any]]) -> Words:
    """Return int32 boundaries."""
    return np.append(0, lengths.cumsum()).astype(np.int32)


def check_layout(layout: str) -> None:
    """Raise unless ``layout`` is known."""
    if layout not in LAYOUTS:
        known = " or ".join(repr(name) for name in LAYOUTS)
        remedy = "; trajpack.pack_tree packs trees" if layout == "tree" else ""
        raise ValueError(f"layout must be {known}, got {layout!r}{remedy}")


def by_field(fields: Sequence[TokenField], lengths: Ints) -> dict[str, Ints]:
    """Return `Tables.value_lens` as `PackedBatch.value_lens` has them."""
    ragged = [field.name for field in fields if field.ragged]
    return {name: lengths[:, 2 * number : 2 * number + 2] for number, name in enumerate(ragged)}


def number_groups(groups: Sequence[str | None]) -> tuple[npt.NDArray[np.int32], int]:
    """Number groups in order of first appearance; ``None`` is always a group of its own.

    Returns:
        The number of each trajectory's group, and how many groups there are.

    Example:
        >>> number_groups(["b", None, "a", "b", None])
        (array([0, 1, 2, 0, 3], dtype=int32), 4)
    """
    if groups.count(None) == len(groups):
        return np.arange(len(groups), dtype=np.int32), len(groups)
    known: dict[Any, int] = {}
    names = [place if name is None else name for place, name in enumerate(groups)]
    numbers = [known.setdefault(name, len(known)) for name in names]
    return np.array(numbers, np.int32), len(known)
