"""Content of a buffer: token stream, tables and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.buffer.chains import (
    TrajectoryLabels,
    ValidatedTurns,
    copy_numbers,
    named,
    validate_turns,
)
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.tables import BatchTables, Counts, StoredTurns, columns_for
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.layout import Layout
from trajpack.packing.token_fields import TokenField
from trajpack.packing.types import Trajectory

SETTLED = 64
"""Turns that may wait for a table update; their update costs as much as a call."""


class State(NamedTuple):
    """Counts of a buffer; replaced as a whole at the end of a call, so that calls are atomic."""

    num_words: int = 0
    num_tokens: int = 0
    num_turns: int = 0
    num_generated: int = 0
    num_trajectories: int = 0
    waiting: tuple[StoredTurns, ...] = ()
    """Stored turns that are not in the tables yet."""
    settled: Counts = Counts()
    """Counts of the tables."""
    layout: Layout = "merged"
    """Layout of the tables."""
    arranged: bool = False
    """Whether the tables of that layout are complete."""


class Store:
    """Stores the trajectories of a call, all or none, and keeps the tables of one layout."""

    def __init__(
        self, device: torch.device, capacity: int | None, fields: tuple[TokenField, ...]
    ) -> None:
        self.capacity = capacity
        self.fields = fields
        num_words = 2 * (capacity or 0)  # an id and a log-probability for each token
        self.staging = Staging(device, columns_for(fields), num_words)
        self.tables = BatchTables(fields)
        self.labels: list[TrajectoryLabels] = []
        self.state = State()

    def extend(self, given: Sequence[Trajectory]) -> None:
        """Check and store trajectories; see `TrajectoryBuffer.extend`."""
        intake = validate_turns(given, self.fields)
        state = self.state
        num_new = intake.num_tokens
        if self.capacity is not None and state.num_tokens + num_new > self.capacity:
            raise ValueError(
                f"{named(intake.labels)} needs {num_new} tokens, but "
                f"{self.capacity - state.num_tokens} of the buffer's {self.capacity} are left; "
                "pack and clear it, or give it more capacity"
            )
        block, end = self._write(intake)
        new = state._replace(
            num_words=end,
            num_tokens=state.num_tokens + num_new,
            num_turns=state.num_turns + len(intake.turn_size),
            num_generated=state.num_generated + intake.num_generated,
            num_trajectories=state.num_trajectories + len(intake.labels),
            waiting=(*state.waiting, block),
        )
        if new.num_turns - state.settled.turns >= SETTLED:
            with suppress(ValueError):  # too long for this layout: a pack says so, or takes another
                new = self._updated(new)
        self.labels[state.num_trajectories :] = intake.labels
        self.state = new

    def update_tables(self, layout: Layout) -> State:
        """Bring the tables up to date, for ``layout``."""
        if layout != self.state.layout:  # the tables will be overwritten
            self.state = self.state._replace(layout=layout, arranged=False)
        self.state = self._updated(self.state)
        return self.state

    def clear(self) -> None:
        """Forget every trajectory and keep the memory."""
        rows = self.state.settled.spans + 1
        self.labels = []  # not cleared: a batch looks its labels up when asked for them
        self.tables.forget_host()
        self.state = State(layout=self.state.layout)
        self.staging.clear(rows)

    def host_columns(self) -> dict[str, Callable[[], Any]]:
        """Return functions that compute the host values of a batch at first access."""
        return host_columns(self.labels, self.tables, self.state.settled)

    def _write(self, intake: ValidatedTurns) -> tuple[StoredTurns, int]:
        """Append turns to the stream; return their positions and the new end."""
        used = self.state.num_words
        logprobs = used + intake.num_tokens
        end = logprobs + intake.num_generated
        rows = []
        for pieces in intake.rows:
            begin = -(-end // 4) * 4  # at a multiple of 16 bytes
            rows.append(4 * begin)
            end = begin + -(-sum(piece.nbytes for piece in pieces) // 4)
        if end > INT32_MAX:
            raise ValueError(f"a buffer holds at most {INT32_MAX} words, this one needs {end}")
        self.staging.reserve(end, 0, words_used=used)
        stream = self.staging.stream
        floats = stream[logprobs : logprobs + intake.num_generated].view(np.float32)
        copy_numbers(intake, stream[used:logprobs], floats)
        for begin, pieces in zip(rows, intake.rows, strict=True):
            flat = [piece.reshape(-1) for piece in pieces]
            size = sum(piece.size for piece in flat)
            np.concatenate(flat, out=stream.view(np.uint8)[begin : begin + size])
        intake.rows = []  # the caller's arrays are not held
        return StoredTurns(intake, used, logprobs, tuple(rows)), end

    def _updated(self, state: State) -> State:
        """Bring the tables up to date, and return the state that says so."""

        def room(rows: int) -> Mapping[str, npt.NDArray[Any]]:
            self.staging.reserve(0, rows, words_used=state.num_words)
            return self.staging.tables

        counts = state.settled
        if state.arranged and not state.waiting:
            return state
        for block in state.waiting:
            counts = self.tables.append_rows(block, counts, room)
        before = state.settled if state.arranged else Counts()
        counts = self.tables.arrange(state.layout, counts, before, room)
        return state._replace(settled=counts, waiting=(), arranged=True)


def host_columns(
    labels: Sequence[TrajectoryLabels], tables: BatchTables, counts: Counts
) -> dict[str, Callable[[], Any]]:
    """Return functions that compute the host values of a batch at first access."""
    count = counts.trajectories
    seqlens = tables.seqlens[: counts.sequences]
    discounts = tables.discounts[:count]
    return {
        "seqlens": lambda: tuple(seqlens.tolist()),
        "num_groups": lambda: counts.groups,
        "turn_discounts": lambda: tuple(discounts.tolist()),
        "ids": lambda: tuple(label.id for label in labels[:count]),
        "groups": lambda: tuple(label.group for label in labels[:count]),
        "task_ids": lambda: tuple(label.task_id for label in labels[:count]),
        "birth_times_ms": lambda: tuple(label.birth_time_ms for label in labels[:count]),
    }
