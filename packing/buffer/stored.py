"""`Stored`: what a buffer holds of its turns beside the word stream, as rows that grow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.packing.token_fields import TokenField
from trajpack.packing.turn_fields import TURN_FIELDS

Ints: TypeAlias = npt.NDArray[np.int64]

TURN = np.dtype(
    [
        ("reward", "f8"),
        ("logprob", "i4"),
        ("chain", "i4"),
        ("begin", "i4"),
        ("size", "i4"),
        ("version_start", "i4"),
        ("version_end", "i4"),
        ("truncated", "?"),
        ("stop_reason", "i1"),
    ],
    align=True,
)
"""Row of a turn: the word of its first log-probability; its chain; the tokens of its prompt and of
its completion; `TURN_FIELDS`. `TurnRow` of take.c is the same."""
CHAIN = np.dtype([("source", "i4"), ("size", "i4")])
"""Row of a chain: the word of its first token, and its tokens. `ChainRow` of take.c is the same."""


class Count(IntEnum):
    """Place of a number in `Stored.counts`."""

    WORDS = 0
    TOKENS = 1
    GENERATED = 2
    TURNS = 3
    CHAINS = 4
    TRAJECTORIES = 5
    SPANS = 6


class Labels(NamedTuple):
    """Strings and scalars of trajectories that stay on the host; a `PackedBatch` has them too."""

    ids: list[str]
    groups: list[str | None]
    task_ids: list[int | None]
    birth_times_ms: list[int | None]
    turn_discounts: list[float]
    truncated_as_given: list[bool | None]

    @classmethod
    def empty(cls) -> Labels:
        """Return labels of no trajectories."""
        return cls([], [], [], [], [], [])

    def append(self, *of_one: Any) -> None:
        """Append the labels of one trajectory."""
        columns: tuple[Any, ...] = self
        for column, value in zip(columns, of_one, strict=True):
            column.append(value)

    def extend(self, other: Labels, begin: int) -> None:
        """Replace the labels from a trajectory on by others."""
        columns: tuple[Any, ...] = self
        for mine, theirs in zip(columns, other, strict=True):
            mine[begin:] = theirs

    def as_tuples(self, end: int | None = None) -> dict[str, Any]:
        """Return the labels of the first trajectories as a `PackedBatch` has them."""
        columns: tuple[Any, ...] = self
        return {name: tuple(of[:end]) for name, of in zip(self._fields, columns, strict=True)}


class NewTurns(NamedTuple):
    """Turns of one call as Python's numbers; the arguments of `Stored.append`."""

    turns: list[tuple[Any, ...]]
    """`TURN` of each turn: log-probabilities and chains are counted from those of the call."""
    chain_sizes: list[int]
    num_turns: list[int]
    """Turns of each trajectory."""
    labels: Labels
    spans: list[tuple[int, ...]]
    """As `Stored.spans`: turns are counted from those of the call."""


class Columns(NamedTuple):
    """Stored turns without their tokens: int64 arrays but for `numbers`."""

    num_turns: Ints
    """Turns of each trajectory."""
    chain_sizes: Ints
    """Tokens of each chain."""
    sources: Ints
    """Word of the first token of each chain."""
    chains: Ints
    """Chain of each turn."""
    begins: Ints
    """Prompt tokens of each turn."""
    sizes: Ints
    """Completion tokens of each turn."""
    logprobs: Ints
    """Word of the first log-probability of each turn."""
    numbers: tuple[npt.NDArray[Any], ...]
    """`TURN_FIELDS` of each turn."""
    spans: Ints
    """``[any, 4]``: turn, version, and the part of the completion that the version sampled; of the
    turns that several versions sampled."""
    rows: tuple[Ints, ...]
    """Byte of the first row of each extra field: of each turn if only generated tokens have rows,
    of each chain else."""
    values: tuple[Ints, ...]
    """Two numbers of each turn for each ragged field: values, and tokens without values."""


class Stored(NamedTuple):
    """Rows of the stored turns, chains and trajectories; `counts` says how many of them are valid.

    A call appends its rows behind the valid ones, and changes `counts` last. So what an interrupted
    call left is overwritten by the next.
    """

    turns: bytearray
    """Rows of `TURN`."""
    chains: bytearray
    """Rows of `CHAIN`."""
    num_turns: bytearray
    """int32: turns of each trajectory."""
    labels: Labels
    spans: list[tuple[int, ...]]
    """Turn, version, start and end of what each version sampled, of turns of several versions."""
    counts: array[int]
    """int64, by `Count`."""
    rows: tuple[bytearray, ...]
    """int64 columns: `Columns.rows`."""
    values: tuple[bytearray, ...]
    """int64 columns: `Columns.values`."""

    @classmethod
    def empty(cls, fields: Sequence[TokenField] = ()) -> Stored:
        """Return rows of no turns with these extra fields."""
        num_values = 2 * sum(field.ragged for field in fields)
        return cls(
            bytearray(), bytearray(), bytearray(), Labels.empty(), [], array("q", [0] * len(Count)),
            tuple(bytearray() for _ in fields), tuple(bytearray() for _ in range(num_values)),
        )  # fmt: skip

    def append(
        self,
        new: NewTurns,
        logprob: int,
        end: int,
        fields: Sequence[tuple[TokenField, int]] = (),
        values: Sequence[Ints] = (),
    ) -> None:
        """Append the turns of a call.

        Args:
            new: The turns.
            logprob: Word of the first log-probability of the call.
            end: Words of the stream with this call.
            fields: Each extra field, and the byte of its first row of the call.
            values: As `Columns.values`.
        """
        words, tokens, generated, *counts = self.counts
        num_turns, num_chains, num_trajectories, num_spans = counts
        turns = np.array(new.turns, TURN)
        chains = np.empty(len(new.chain_sizes), CHAIN)
        chains["size"] = new.chain_sizes
        before = chains["size"].cumsum() - chains["size"]
        for column, (field, begin) in zip(self.rows, fields, strict=True):
            skipped, first = (
                (turns["logprob"], num_turns) if field.generated_only else (before, num_chains)
            )
            column[8 * first :] = (begin + field.row_bytes * skipped.astype(np.int64)).tobytes()
        for column, numbers in zip(self.values, values, strict=True):
            column[8 * num_turns :] = numbers.astype(np.int64).tobytes()
        turns["logprob"] += logprob
        turns["chain"] += num_chains
        chains["source"] = words + before
        self.turns[TURN.itemsize * num_turns :] = turns.tobytes()
        self.chains[CHAIN.itemsize * num_chains :] = chains.tobytes()
        self.num_turns[4 * num_trajectories :] = np.array(new.num_turns, np.int32).tobytes()
        self.labels.extend(new.labels, num_trajectories)
        self.spans[num_spans:] = [(num_turns + turn, *run) for turn, *run in new.spans]
        self.counts[:] = array(
            "q",
            [
                end,
                tokens + sum(new.chain_sizes),
                generated + int(turns["size"].sum(dtype=np.int64)),
                num_turns + len(turns),
                num_chains + len(chains),
                num_trajectories + len(new.num_turns),
                len(self.spans),
            ],
        )

    def columns(self) -> Columns:
        """Return the rows as columns of their own."""
        counts = self.counts
        turns = np.frombuffer(bytes(self.turns), TURN, counts[Count.TURNS])
        chains = np.frombuffer(bytes(self.chains), CHAIN, counts[Count.CHAINS])
        num_turns = np.frombuffer(bytes(self.num_turns), np.int32, counts[Count.TRAJECTORIES])
        spans = self.spans[: counts[Count.SPANS]]
        return Columns(
            num_turns=num_turns.astype(np.int64),
            chain_sizes=chains["size"].astype(np.int64),
            sources=chains["source"].astype(np.int64),
            chains=turns["chain"].astype(np.int64),
            begins=turns["begin"].astype(np.int64),
            sizes=turns["size"].astype(np.int64),
            logprobs=turns["logprob"].astype(np.int64),
            numbers=tuple(turns[field.attribute].copy() for field in TURN_FIELDS),
            spans=np.array(spans, np.int64).reshape(-1, 4),
            rows=tuple(np.frombuffer(bytes(column), np.int64) for column in self.rows),
            values=tuple(
                np.frombuffer(bytes(column), np.int64, len(turns)) for column in self.values
            ),
        )
