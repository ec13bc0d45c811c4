"""Tables of a batch, updated with each call of `extend`, so that `pack` only sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, Run
from trajpack.packing.buffer.chains import ValidatedTurns
from trajpack.packing.buffer.staging import Column
from trajpack.packing.layout import LAYOUTS, Layout
from trajpack.packing.token_fields import TokenField
from trajpack.packing.turn_fields import TURN_FIELDS

Ints: TypeAlias = npt.NDArray[np.int64]

I32, F64 = np.dtype(np.int32), np.dtype(np.float64)
COLUMNS = {
    "runs": Column(I32, RUN_WIDTH),
    "turn_spans": Column(I32, 2),
    "turn_discounts": Column(F64),
    "cu_turns": Column(I32),
    "cu_seqlens": Column(I32),
    "turn_sequence": Column(I32),
    "turn_begin": Column(I32),
    "cu_generated": Column(I32),
    "cu_new": Column(I32),
    "group_ids": Column(I32),
    "order_of_trajectories": Column(I32),
    "order_of_turns": Column(I32),
    "cu_group_trajectories": Column(I32),
    "cu_group_turns": Column(I32),
    "turn_trajectory": Column(I32),
    "truncated": Column(np.dtype(np.bool_)),
    **{field.name: Column(field.numpy_dtype) for field in TURN_FIELDS},
}
"""Tables that are sent with the stream. Each has one row more than entries."""
TABLE_ROWS = {
    **{field.name: ("turns", 0) for field in TURN_FIELDS},
    "turn_sequence": ("turns", 0),
    "turn_spans": ("turns", 0),
    "turn_begin": ("turns", 0),
    "cu_generated": ("turns", 1),
    "cu_new": ("turns", 1),
    "cu_turns": ("trajectories", 1),
    "cu_seqlens": ("sequences", 1),
    "group_ids": ("trajectories", 0),
    "truncated": ("trajectories", 0),
    "order_of_trajectories": ("trajectories", 0),
    "order_of_turns": ("turns", 0),
    "cu_group_trajectories": ("groups", 1),
    "cu_group_turns": ("groups", 1),
    "turn_trajectory": ("turns", 0),
}
"""Tables that are tensors of a batch. Their numbers of rows: a number of `Counts` and an addend."""


def columns_for(fields: Sequence[TokenField]) -> dict[str, Column]:
    """Return the tables of a buffer with these extra fields."""
    sources = {"field_sources": Column(np.dtype(np.int64), len(fields))} if fields else {}
    return sources | COLUMNS


class StoredTurns(NamedTuple):
    """Validated turns of one call, and their positions in the stream."""

    intake: ValidatedTurns
    ids: int
    """Word of its first token."""
    logprobs: int
    """Word of its first log-probability."""
    rows: tuple[int, ...]
    """Byte of the first row of each extra field."""
    cu_values: tuple[Ints, ...] = ()
    """Two counts of each ragged field before each generated token of the call: values, and tokens
    without values."""


ReserveRows: TypeAlias = Callable[[int], Mapping[str, npt.NDArray[Any]]]
"""Reserves a number of rows in every table and returns the tables."""


class Span(IntEnum):
    """Columns of the table of spans: a row for each policy version in each turn's completion.

    A turn has at least one span; the span of an empty completion is empty.
    """

    TURN = 0
    """Turn that generated the span."""
    CHAIN = 1
    """Chain that holds it."""
    BEGIN = 2
    """Index of its first token in the chain."""
    END = 3
    """Index past its last token in the chain."""
    VERSION = 4
    """Policy version that sampled it."""
    LOGPROB = 5
    """Position of its first log-probability in the word stream."""
    SOURCE = 6
    """Position of its chain's first token in the word stream."""


class Longest(NamedTuple):
    """Maxima over the trajectories and groups."""

    generated: int = 0
    """Generated tokens of a trajectory."""
    new: int = 0
    """Tokens that are new with the turns of a trajectory, from `PackedBatch.turn_begin` on."""
    group: int = 0
    """Turns of a group."""


class Counts(NamedTuple):
    """Number of entries in the tables."""

    trajectories: int = 0
    turns: int = 0
    chains: int = 0
    spans: int = 0
    most_turns: int = 0
    """Turns of the longest trajectory."""
    sequences: int = 0
    tokens: int = 0
    """Tokens of the current layout."""
    generated: int = 0
    groups: int = 0
    """Distinct groups; a trajectory without a group counts as one."""
    longest: Longest = Longest()


class GrowingArray:
    """Array with appended rows; its memory doubles when full."""

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self.rows: npt.NDArray[Any] = np.empty((0,) if width is None else (0, width), dtype)
        """The memory; a later write may replace it."""

    def write(self, begin: int, block: npt.NDArray[Any]) -> None:
        """Write ``block`` after the first ``begin`` rows."""
        end = begin + len(block)
        if end > len(self.rows):
            shape = (max(end, 2 * len(self.rows)), *self.rows.shape[1:])
            larger = np.empty(shape, self.rows.dtype)
            larger[:begin] = self.rows[:begin]
            self.rows = larger
        self.rows[begin:end] = block


class BatchTables:
    """Fills the tables of a staging region, for one layout at a time.

    Rows are appended. They count when the caller keeps the returned counts, so a call that fails
    has no effect.
    """

    def __init__(self, fields: tuple[TokenField, ...] = ()) -> None:
        self._fields = fields
        self.spans = GrowingArray(np.int64, len(Span))
        """Rows of `Span`."""
        self.rows = GrowingArray(np.int64, len(fields))
        """Byte of the first row of each extra field of the spans, or of their chains."""
        self.ragged = [field.name for field in fields if field.ragged]
        """Names of the ragged fields."""
        self._values = GrowingArray(np.int64, 2 * len(self.ragged))
        self._groups: dict[str, int] = {}
        self._is_ordered = True
        self.seqlens, self.generated_lens = GrowingArray(np.int32), GrowingArray(np.int32)
        """Tokens and generated tokens of the sequences, of which batches have views."""
        self.value_lens = GrowingArray(np.int64, 2 * len(self.ragged))
        """Values of each ragged field in the sequences, and generated tokens without any."""

    def append_rows(self, block: StoredTurns, counts: Counts, reserve: ReserveRows) -> Counts:
        """Append the rows of stored turns and return the new counts."""
        intake = block.intake
        groups = [labels.group for labels in intake.labels]
        group_ids, num_groups = number_groups(groups, self._groups, counts.groups)
        num_turns = np.array(intake.num_turns, np.int32)
        turns = counts.turns + len(intake.turn_size)
        trajectories = counts.trajectories + len(num_turns)
        spans = self._spans_of(block, counts)
        end = counts.spans + len(spans)
        tables = reserve(max(end, trajectories) + 1)
        self.spans.write(counts.spans, spans)
        discounts = [labels.turn_discount for labels in intake.labels]
        tables["turn_discounts"][counts.trajectories : trajectories] = discounts
        tables["group_ids"][counts.trajectories : trajectories] = group_ids
        owners = np.arange(counts.trajectories, trajectories).repeat(num_turns)
        tables["turn_trajectory"][counts.turns : turns] = owners
        ends = counts.turns + num_turns.cumsum()
        tables["cu_turns"][counts.trajectories + 1 : trajectories + 1] = ends
        generated = counts.generated + np.array(intake.turn_size, np.int64).cumsum()
        tables["cu_generated"][counts.turns + 1 : turns + 1] = generated
        for field in TURN_FIELDS:
            tables[field.name][counts.turns : turns] = intake.numbers[field.attribute]
        of_last = tables["turn_truncated"][ends - 1]
        tables["truncated"][counts.trajectories : trajectories] = [
            last if labels.truncated is None else labels.truncated
            for labels, last in zip(intake.labels, of_last.tolist(), strict=True)
        ]
        return counts._replace(
            trajectories=trajectories,
            turns=turns,
            chains=counts.chains + len(intake.chain_sizes),
            spans=end,
            most_turns=max(counts.most_turns, int(num_turns.max(initial=0))),
            generated=counts.generated + intake.num_generated,
            groups=num_groups,
        )

    def arrange(
        self, layout: Layout, counts: Counts, before: Counts, *, reserve: ReserveRows
    ) -> Counts:
        """Compute the runs and boundaries of the turns after ``before``; return the new counts.

        A sequence is a chain (``"merged"``) or a turn (``"turns"``): a prefix of one chain either
        way. A run is a span and its context: the tokens of the sequence between the span before
        it and the span. The spans of a trajectory follow each other, so the sequences of later
        trajectories follow those of earlier ones.

        Raises:
            ValueError: If the batch would pass 2³¹ tokens.
        """
        new = slice(before.spans, counts.spans)
        order, opens, context, held = _contexts(self.spans.rows[new], layout)
        arrays = self.spans, self._values, self.rows
        spans, values, rows = (array.rows[new][order] for array in arrays)
        sequence = spans[:, Span.CHAIN if layout == "merged" else Span.TURN]
        ends = before.tokens + (spans[:, Span.END] - context).cumsum()
        num_tokens = int(ends[-1]) if ends.size else before.tokens
        if num_tokens > MAX_TOKENS:
            raise ValueError(
                f"a batch holds at most {MAX_TOKENS} tokens, layout {layout!r} needs {num_tokens}"
            )
        tables = reserve(counts.spans + 1)
        starts = np.empty_like(ends)
        starts[:1], starts[1:] = before.tokens, ends[:-1]
        columns = {
            Run.START: starts,
            Run.SOURCE: spans[:, Span.SOURCE] + context,
            Run.GENERATED: spans[:, Span.BEGIN] - context,
            Run.LOGPROB: spans[:, Span.LOGPROB],
            Run.POSITION: context,
            Run.SEQUENCE: sequence,
            Run.TURN: spans[:, Span.TURN],
            Run.VERSION: spans[:, Span.VERSION],
        }
        for column, numbers in columns.items():
            tables["runs"][new, column] = numbers
        tables["runs"][counts.spans] = [num_tokens, *[0] * (RUN_WIDTH - 1)]
        for number, field in enumerate(self._fields):
            skipped = 0 if field.generated_only else context
            tables["field_sources"][new, number] = rows[:, number] + skipped * field.row_bytes
        if not before.spans:
            self._is_ordered = True
            tables["cu_turns"][0] = tables["cu_generated"][0] = tables["cu_new"][0] = 0
        sizes = spans[:, Span.END] - spans[:, Span.BEGIN]
        first_spans = opens.nonzero()[0]
        sequences = before.sequences + len(first_spans)
        bounds = tables["cu_seqlens"][before.sequences : sequences + 1]
        bounds[:-1], bounds[-1] = starts[first_spans], num_tokens
        self._write_lengths(before.sequences, bounds, (sizes, values), first_spans)
        largest_group = self._order_groups(tables, counts, before)
        turn = spans[:, Span.TURN]
        first = turn[::-1]  # written in reverse, a turn's first span is written last
        tables["turn_sequence"][turn] = sequence
        tables["turn_spans"][first, 0] = (ends - sizes)[::-1]
        tables["turn_spans"][turn, 1] = ends
        tables["turn_begin"][first] = (starts - context + held)[::-1]
        return counts._replace(
            sequences=sequences,
            tokens=num_tokens,
            longest=_count_new(tables, counts, before)._replace(group=largest_group),
        )

    def _write_lengths(
        self, sequences: int, bounds: Ints, of_spans: tuple[Ints, Ints], first_spans: Ints
    ) -> None:
        """Write lengths after those of ``sequences``.

        ``of_spans`` has the generated tokens of each span, and what `value_lens` has;
        ``first_spans`` the spans that begin a sequence.
        """
        if not sequences:  # batches still have views of the old memory
            self.seqlens, self.generated_lens = GrowingArray(np.int32), GrowingArray(np.int32)
            self.value_lens = GrowingArray(np.int64, 2 * len(self.ragged))
        self.seqlens.write(sequences, _steps(bounds))
        for array, lengths in zip((self.generated_lens, self.value_lens), of_spans, strict=True):
            array.write(sequences, np.add.reduceat(lengths, first_spans))

    def value_lens_of_turns(self, counts: Counts) -> dict[str, Ints]:
        """Return the values of each ragged field in the turns, as `by_field`."""
        spans = slice(counts.spans)
        lengths = np.zeros((counts.turns, 2 * len(self.ragged)), np.int64)
        np.add.at(lengths, self.spans.rows[spans, Span.TURN], self._values.rows[spans])
        return by_field(self.ragged, lengths)

    def _order_groups(
        self, tables: Mapping[str, npt.NDArray[Any]], counts: Counts, before: Counts
    ) -> int:
        """Write trajectories and turns in the order of their groups, stable within a group.

        Groups are numbered as they appear. While their members are contiguous, only new rows are
        written. Returns the turns of the largest group.
        """
        group_ids = tables["group_ids"][: counts.trajectories]
        known = max(before.trajectories - 1, 0)
        self._is_ordered &= not (_steps(group_ids[known:]) < 0).any()
        first_trajectory, first_turn = before.trajectories, before.turns
        first = int(group_ids[known]) + 1 if first_trajectory else 0  # group that is new
        order = np.arange(first_trajectory, counts.trajectories)
        turn_order = np.arange(first_turn, counts.turns)
        if not self._is_ordered:
            if counts.groups <= 1 << 16:
                group_ids = group_ids.astype(np.uint16)  # sorted in linear time
            first_trajectory = first_turn = first = 0
            order = group_ids.argsort(kind="stable")
            owners = tables["turn_trajectory"][: counts.turns]
            turn_order = group_ids[owners].argsort(kind="stable")
        tables["order_of_trajectories"][first_trajectory : counts.trajectories] = order
        tables["order_of_turns"][first_turn : counts.turns] = turn_order
        bounds = group_ids[order].searchsorted(np.arange(first, counts.groups + 1))
        tables["cu_group_trajectories"][first : counts.groups + 1] = first_trajectory + bounds
        cu_turns, cu_group_turns = tables["cu_turns"], tables["cu_group_turns"]
        ends = np.zeros(len(order) + 1, np.int64)
        (cu_turns[order + 1] - cu_turns[order]).cumsum(out=ends[1:])
        cu_group_turns[first : counts.groups + 1] = first_turn + ends[bounds]
        turns = _steps(cu_group_turns[max(first - 1, 0) : counts.groups + 1])
        return int(turns.max(initial=before.longest.group))

    def _spans_of(self, block: StoredTurns, counts: Counts) -> Ints:
        """Return the rows of `Span` of stored turns; write the positions of extra fields' rows."""
        intake = block.intake
        chain = np.array(intake.turn_chain, np.int64)
        begin = np.array(intake.turn_begin, np.int64)
        size = np.array(intake.turn_size, np.int64)
        sizes = np.array(intake.chain_sizes, np.int64)
        offset = (sizes.cumsum() - sizes)[chain]  # tokens before the chain
        trained = size.cumsum() - size  # generated tokens before the turn
        version = np.array(intake.numbers["version_start"], np.int64)
        turn = np.arange(len(size))
        start, stop = np.zeros_like(size), size
        if intake.version_runs:
            runs = [
                (index, *run)
                for index, (first, count) in enumerate(
                    zip(intake.numbers["version_start"], intake.turn_size, strict=True)
                )
                for run in intake.version_runs.get(index, [(first, 0, count)])
            ]
            turn, version, start, stop = np.array(runs, np.int64).T
            chain, begin, offset, trained = (c[turn] for c in (chain, begin, offset, trained))
        rows = [  # the byte of each span's first row, or of its chain's
            block.rows[number]
            + (trained + start if field.generated_only else offset) * field.row_bytes
            for number, field in enumerate(self._fields)
        ]
        values = [cu[trained + stop] - cu[trained + start] for cu in block.cu_values]
        for array, columns in ((self.rows, rows), (self._values, values)):
            of_spans = np.array(columns, np.int64).reshape(len(columns), len(turn)).T
            array.write(counts.spans, of_spans)
        return np.array(
            [
                counts.turns + turn,
                counts.chains + chain,
                begin + start,
                begin + stop,
                version,
                block.logprobs + trained + start,
                block.ids + offset,
            ]
        ).T


def _steps(values: Ints) -> Ints:
    """Return each value minus the one before it, as `numpy.diff`, in a third of its overhead."""
    return values[1:] - values[:-1]


def _contexts(
    spans: Ints, layout: Layout
) -> tuple[slice | Ints, npt.NDArray[np.bool_], Ints, Ints]:
    """Return the order of spans in ``layout``, and three arrays in that order.

    These say which spans are the first of their sequence, where the context of each begins, and
    how many tokens its chain has before its run.
    """
    chain = spans[:, Span.CHAIN]
    is_sorted = not (_steps(chain) < 0).any()
    order = slice(None) if is_sorted else chain.argsort(kind="stable")
    opens, context = _context(spans[order], Span.CHAIN)
    if layout == "merged":
        return order, opens, context, context
    held = np.empty_like(context)
    held[order] = context
    return slice(None), *_context(spans, Span.TURN), held


def _context(spans: Ints, unit: Span) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Return which spans are the first of their ``unit``, and the start of each span's context.

    The context starts where the span before it ended, at 0 for the first of a unit.
    """
    opens, context = np.ones(len(spans), np.bool_), np.zeros(len(spans), np.int64)
    opens[1:] = spans[1:, unit] != spans[:-1, unit]
    context[1:] = spans[:-1, Span.END]
    context[opens] = 0
    return opens, context


def _count_new(tables: Mapping[str, npt.NDArray[Any]], counts: Counts, before: Counts) -> Longest:
    """Write the numbers of tokens that are new with turns; return the maxima of trajectories."""
    turns, cu_new = slice(before.turns, counts.turns), tables["cu_new"]
    new = tables["turn_spans"][turns, 1] - tables["turn_begin"][turns]
    cu_new[before.turns + 1 : counts.turns + 1] = cu_new[before.turns] + new.cumsum()
    bounds = tables["cu_turns"][before.trajectories : counts.trajectories + 1]
    sizes = (_steps(tables[name][bounds]) for name in ("cu_generated", "cu_new"))
    most = before.longest
    return Longest(*(int(of.max(initial=most[n])) for n, of in enumerate(sizes)))


def check_layout(layout: str) -> None:
    """Raise unless ``layout`` is known."""
    if layout not in LAYOUTS:
        known = " or ".join(repr(name) for name in LAYOUTS)
        raise ValueError(f"layout must be {known}, got {layout!r}")


def by_field(ragged: Sequence[str], lengths: Ints) -> dict[str, Ints]:
    """Return rows of `BatchTables.value_lens` as `PackedBatch.value_lens` has them."""
    columns = np.split(lengths, len(ragged), axis=1) if ragged else []
    return dict(zip(ragged, columns, strict=True))


def number_groups(
    groups: Iterable[str | None], known: dict[str, int], num_groups: int
) -> tuple[list[int], int]:
    """Number groups in order of first appearance; ``None`` is always a group of its own.

    Args:
        groups: Group of each trajectory.
        known: Number of each group named before. Groups that are new are added, and what a call
            added that did not count, at its end, is removed first.
        num_groups: Groups before.

    Returns:
        The number of each trajectory's group, and how many groups there are then.

    Example:
        >>> number_groups(["b", None, "a", "b", None], {}, 0)
        ([0, 1, 2, 0, 3], 4)
    """
    while known and next(reversed(known.values())) >= num_groups:
        known.popitem()
    numbers = []
    for group in groups:
        number = num_groups if group is None else known.setdefault(group, num_groups)
        num_groups += number == num_groups
        numbers.append(number)
    return numbers, num_groups
