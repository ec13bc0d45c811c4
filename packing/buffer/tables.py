"""Tables of a batch, updated with each call of `extend`, so that `pack` only sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.kernels.runs import RUN_WIDTH, Run
from trajpack.packing.buffer.chains import ValidatedTurns
from trajpack.packing.buffer.staging import Column
from trajpack.packing.layout import (
    SPAN_COLUMNS,
    Arrangement,
    Layout,
    Origin,
    Spans,
    arrange,
    number_groups,
)
from trajpack.packing.token_fields import TokenField
from trajpack.packing.turn_fields import TURN_FIELDS

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
    "group_ids": Column(I32),
    **{field.name: Column(field.numpy_dtype) for field in TURN_FIELDS},
}
"""Tables that are sent with the stream. Each has one row more than entries."""


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


ReserveRows: TypeAlias = Callable[[int], Mapping[str, npt.NDArray[Any]]]
"""Reserves a number of rows in every table and returns the tables."""


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


class GrowingArray:
    """Array with appended rows; its memory doubles when full."""

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._rows = np.empty((0,) if width is None else (0, width), dtype)

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Return a view, which a later write may replace."""
        return self._rows[rows]

    def write(self, begin: int, block: npt.NDArray[Any]) -> None:
        """Write ``block`` after the first ``begin`` rows."""
        end = begin + len(block)
        if end > len(self._rows):
            shape = (max(end, 2 * len(self._rows)), *self._rows.shape[1:])
            larger = np.empty(shape, self._rows.dtype)
            larger[:begin] = self._rows[:begin]
            self._rows = larger
        self._rows[begin:end] = block


class BatchTables:
    """Fills the tables of a staging region, for one layout at a time.

    Rows are appended. They count when the caller keeps the returned counts, so a call that fails
    has no effect.
    """

    def __init__(self, fields: tuple[TokenField, ...]) -> None:
        self._fields = fields
        self._spans = GrowingArray(np.int64, len(SPAN_COLUMNS))
        self._rows = GrowingArray(np.int64, len(fields))
        self.forget_host()

    def forget_host(self) -> None:
        """Replace the arrays that batches have views of."""
        self.seqlens = GrowingArray(np.int32)
        self.discounts = GrowingArray(np.float64)
        self._groups: dict[str, int] = {}

    def append_rows(self, block: StoredTurns, counts: Counts, room: ReserveRows) -> Counts:
        """Append the rows of stored turns and return the new counts."""
        intake = block.intake
        group_ids, groups = number_groups(
            (labels.group for labels in intake.labels), self._groups, counts.groups
        )
        num_turns = np.array(intake.num_turns, np.int32)
        turns = counts.turns + len(intake.turn_size)
        trajectories = counts.trajectories + len(num_turns)
        spans = self._spans_of(block, counts)
        end = counts.spans + len(spans)
        tables = room(max(end, trajectories) + 1)
        self._spans.write(counts.spans, spans)
        discounts = np.array([labels.turn_discount for labels in intake.labels])
        self.discounts.write(counts.trajectories, discounts)
        tables["turn_discounts"][counts.trajectories : trajectories] = discounts
        tables["group_ids"][counts.trajectories : trajectories] = group_ids
        ends = counts.turns + np.cumsum(num_turns)
        tables["cu_turns"][counts.trajectories + 1 : trajectories + 1] = ends
        generated = counts.generated + np.cumsum(intake.turn_size)
        tables["cu_generated"][counts.turns + 1 : turns + 1] = generated
        for field in TURN_FIELDS:
            tables[field.name][counts.turns : turns] = getattr(intake, field.attribute)
        return counts._replace(
            trajectories=trajectories,
            turns=turns,
            chains=counts.chains + len(intake.chain_sizes),
            spans=end,
            most_turns=max(counts.most_turns, int(num_turns.max(initial=0))),
            generated=counts.generated + intake.num_generated,
            groups=groups,
        )

    def arrange(self, layout: Layout, counts: Counts, before: Counts, room: ReserveRows) -> Counts:
        """Compute run table and boundaries of the turns after ``before``."""
        spans = Spans(*self._spans[before.spans : counts.spans].T)
        done = arrange(layout, spans, Origin(before.tokens, before.turns))
        tables = room(counts.spans + 1)
        if not before.spans:
            self.seqlens = GrowingArray(np.int32)
            tables["cu_turns"][0] = tables["cu_generated"][0] = 0
        tables["runs"][before.spans : counts.spans] = done.runs
        tables["runs"][counts.spans] = [done.num_tokens, *[0] * (RUN_WIDTH - 1)]
        sequences = before.sequences + len(done.starts)
        cu_seqlens = tables["cu_seqlens"]
        cu_seqlens[before.sequences : sequences] = done.starts
        cu_seqlens[sequences] = done.num_tokens
        self.seqlens.write(before.sequences, np.diff(cu_seqlens[before.sequences : sequences + 1]))
        tables["turn_sequence"][before.turns : counts.turns] = done.turn_sequence
        tables["turn_spans"][before.turns : counts.turns] = done.turn_spans
        tables["turn_begin"][before.turns : counts.turns] = done.turn_begin
        if self._fields:
            sources = tables["field_sources"][before.spans : counts.spans]
            self._write_sources(sources, self._rows[before.spans : counts.spans], done)
        return counts._replace(sequences=sequences, tokens=done.num_tokens)

    def _spans_of(self, block: StoredTurns, counts: Counts) -> npt.NDArray[np.int64]:
        """Return the rows of `Spans` of stored turns; write the positions of extra fields' rows."""
        intake = block.intake
        chain = np.array(intake.turn_chain, np.int64)
        begin = np.array(intake.turn_begin, np.int64)
        size = np.array(intake.turn_size, np.int64)
        sizes = np.array(intake.chain_sizes, np.int64)
        offset = (np.cumsum(sizes) - sizes)[chain]  # tokens before the chain
        trained = np.cumsum(size) - size  # generated tokens before the turn
        version = np.array(intake.version_start, np.int64)
        turn = np.arange(len(size))
        start, stop = np.zeros_like(size), size
        if intake.version_runs:
            runs = [
                (index, *run)
                for index, (first, count) in enumerate(
                    zip(intake.version_start, intake.turn_size, strict=True)
                )
                for run in intake.version_runs.get(index, [(first, 0, count)])
            ]
            turn, version, start, stop = np.array(runs, np.int64).T
            chain, begin, offset, trained = (c[turn] for c in (chain, begin, offset, trained))
        self._rows.write(counts.spans, self._row_places(block, offset, trained + start))
        return np.stack(
            [
                counts.turns + turn,
                counts.chains + chain,
                begin + start,
                begin + stop,
                version,
                block.logprobs + trained + start,
                block.ids + offset,
            ],
            1,
        )

    def _row_places(
        self, block: StoredTurns, tokens: npt.NDArray[np.int64], trained: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the byte of the first row of each span, or of its chain, in each extra field."""
        places = np.empty((len(tokens), len(self._fields)), np.int64)
        for number, field in enumerate(self._fields):
            rows = trained if field.generated_only else tokens
            places[:, number] = block.rows[number] + rows * field.row_bytes
        return places

    def _write_sources(
        self, table: npt.NDArray[np.int64], places: npt.NDArray[np.int64], done: Arrangement
    ) -> None:
        """Write the byte of each run's first row: of its first token or first generated token."""
        for number, field in enumerate(self._fields):
            skipped = 0 if field.generated_only else done.runs[:, Run.POSITION].astype(np.int64)
            table[:, number] = places[done.order, number] + skipped * field.row_bytes
