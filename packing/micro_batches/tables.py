"""Tables of micro-batches: made on the host from lengths, sent in one copy for a whole plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.dispatch import check_not_captured
from trajpack.kernels.rearrange.select_tokens import Segment
from trajpack.packing.micro_batches.alignment import Alignment, Placement

if TYPE_CHECKING:
    from trajpack.packing.plan.plan import Plan

Ints: TypeAlias = npt.NDArray[np.int64]
CU_SEQLENS = len(Segment)
"""Row of a table behind those of `Segment`: sums of true lengths."""
ROWS = CU_SEQLENS + 1
ALIGNED = 4
"""Columns of which a table has a multiple: then each row begins at a multiple of 16 bytes."""


class Placed(NamedTuple):
    """A micro-batch worked out."""

    sequences: Ints
    kept: Ints
    """Tokens that each of them keeps."""
    placement: Placement


class Lengths(NamedTuple):
    """Sequences of a batch on the host."""

    seqlens: Ints
    starts: Ints
    """First token of each."""


def lengths_of(seqlens: Iterable[int]) -> Lengths:
    """Return where sequences of so many tokens begin."""
    lengths = np.fromiter(seqlens, np.int64)
    return Lengths(lengths, np.cumsum(lengths) - lengths)


def place_selected(lengths: Lengths, sequences: Iterable[int], alignment: Alignment) -> Placed:
    """Place chosen sequences.

    Raises:
        TypeError: If they are no integers.
        ValueError: If the batch has no such sequence, or the alignment no room.
    """
    chosen = np.asarray(list(sequences) if not isinstance(sequences, np.ndarray) else sequences)
    if chosen.size and chosen.dtype.kind not in "iu":
        raise TypeError(f"sequences must be integers, got {chosen.dtype}")
    chosen = chosen.astype(np.int64)
    wrong = chosen[(chosen < 0) | (chosen >= len(lengths.seqlens))]
    if chosen.ndim != 1 or wrong.size:
        got = f"{wrong[0]}" if wrong.size else f"shape {list(chosen.shape)}"
        raise ValueError(f"sequences must be in [0, {len(lengths.seqlens)}), got {got}")
    kept = lengths.seqlens[chosen]
    return Placed(chosen, kept, alignment.place(kept))


def place_plan(lengths: Lengths, plan: Plan, alignment: Alignment) -> list[Placed]:
    """Place the sequences of every micro-batch of a plan.

    Raises:
        TypeError: If the plan is none.
        ValueError: If the plan is one for other sequences, or the alignment has no room.
    """
    if not hasattr(plan, "cu_bins"):
        raise TypeError(f"plan must be a Plan, of one rank and step, got {type(plan).__name__}")
    if len(plan.seqlens) != len(lengths.seqlens):
        raise ValueError(
            f"the plan is for {len(plan.seqlens)} sequences, the batch has {len(lengths.seqlens)}"
        )
    kept = lengths.seqlens.copy()
    for sequence, tokens in plan.truncated.items():
        kept[sequence] = tokens
    wrong = np.flatnonzero((kept > lengths.seqlens) | (kept != np.asarray(plan.seqlens)))
    wrong = wrong[np.isin(wrong, plan.order)]
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"the plan keeps {plan.seqlens[first]} tokens of sequence {first}, which has "
            f"{lengths.seqlens[first]} in the batch"
        )
    placed = []
    for number in range(len(plan)):
        chosen = np.asarray(plan[number], np.int64)
        try:
            placement = alignment.place(kept[chosen])
        except ValueError as error:
            raise ValueError(f"micro-batch {number}: {error}") from error
        placed.append(Placed(chosen, kept[chosen], placement))
    _check_capacity(plan, placed, alignment)
    return placed


def _check_capacity(plan: Plan, placed: Sequence[Placed], alignment: Alignment) -> None:
    """Raise where padding that the plan did not reckon with takes a micro-batch over capacity."""
    multiple = alignment.sequence_multiple
    if plan.align % multiple == 0:
        return
    for number, micro_batch in enumerate(placed):
        used = int((-(-micro_batch.kept // multiple) * multiple).sum())
        if used > plan.capacity and not set(plan.oversized) & set(micro_batch.sequences.tolist()):
            raise ValueError(
                f"micro-batch {number} has {used} tokens with sequence_multiple={multiple}, over "
                f"the capacity {plan.capacity}: plan with align={multiple}"
            )


class Region:
    """Tables on the host, one behind the other, that go to the device in one copy."""

    def __init__(self, columns: Sequence[int], device: torch.device) -> None:
        remedy = "their tables leave host memory that is gone by the replay: make them before"
        check_not_captured("micro-batches", device, remedy)
        self._columns = [-(-count // ALIGNED) * ALIGNED for count in columns]
        self._device = device
        size = ROWS * sum(self._columns)
        if device.type == "cuda":
            # named, since torch's default device may be another, and only the host has pages to pin
            self._words = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
        else:
            self._words = torch.from_numpy(np.empty(size, np.int32))
        self.tables = [table.numpy() for table in self._split(self._words)]

    def send(self) -> list[torch.Tensor]:
        """Return the tables on the device."""
        return self._split(self._words.to(self._device, non_blocking=True))

    def _split(self, words: torch.Tensor) -> list[torch.Tensor]:
        tables, begin = [], 0
        for columns in self._columns:
            end = begin + ROWS * columns
            tables.append(words[begin:end].view(ROWS, columns))
            begin = end
        return tables


def fill_table(
    table: npt.NDArray[np.int32], ends: Ints, sources: Ints, kept: Ints, cu_seqlens: Ints
) -> None:
    """Write a table: segments that end so; the first of them take ``kept`` tokens each.

    What the table has more repeats the last boundary.
    """
    table[:] = 0
    table[Segment.START, 1:] = ends[-1] if ends.size else 0
    table[CU_SEQLENS, 1:] = cu_seqlens[-1] if cu_seqlens.size else 0
    table[Segment.START, 1 : len(ends) + 1] = ends
    table[CU_SEQLENS, 1 : len(cu_seqlens) + 1] = cu_seqlens
    table[Segment.SOURCE, : len(sources)] = sources
    table[Segment.LENGTH, : len(kept)] = kept


def send_tables(
    lengths: Lengths, placed: Sequence[Placed], alignment: Alignment, device: torch.device
) -> list[torch.Tensor]:
    """Return the table of each micro-batch on the device.

    Cost: one copy for all of them; on the host none.
    """
    least = alignment.num_boundaries or 0
    columns = [max(len(one.placement.seqlens) + 1, least) for one in placed]
    region = Region(columns, device)
    for table, one in zip(region.tables, placed, strict=True):
        ends = np.cumsum(one.placement.padded_seqlens)
        cu_seqlens = np.cumsum(one.placement.seqlens)
        fill_table(table, ends, lengths.starts[one.sequences], one.kept, cu_seqlens)
    return region.send()


def send_merge_tables(
    lengths: Lengths, placed: Sequence[Placed], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables that put the micro-batches' tokens, concatenated, back: one and its inverse.

    Raises:
        ValueError: If a sequence is in two micro-batches.

    Cost: one copy; on the host none.
    """
    sequences = np.concatenate([one.sequences for one in placed] or [np.zeros(0, np.int64)])
    counts = np.bincount(sequences, minlength=len(lengths.seqlens))
    if counts.max(initial=0) > 1:
        raise ValueError(f"sequence {counts.argmax()} is in more than one micro-batch")
    padded = [one.placement.padded_seqlens for one in placed]
    ends = np.cumsum(np.concatenate(padded or [np.zeros(0, np.int64)]))
    region = Region([len(lengths.seqlens) + 1, len(ends) + 1], device)
    sources, kept = np.zeros((2, len(ends)), np.int64)
    held = np.zeros(len(ends), np.bool_)
    first = 0
    for one in placed:
        here = slice(first, first + len(one.sequences))
        sources[here], kept[here], held[here] = lengths.starts[one.sequences], one.kept, True
        first += len(one.placement.padded_seqlens)
    begins = np.append(0, ends)[:-1]
    back, taken = np.zeros((2, len(lengths.seqlens)), np.int64)
    back[sequences], taken[sequences] = begins[held], kept[held]
    none = np.zeros(0, np.int64)
    fill_table(region.tables[0], np.cumsum(lengths.seqlens), back, taken, none)
    fill_table(region.tables[1], ends, sources, kept, none)
    merging, inverse = region.send()
    return merging, inverse
