"""Cutting a packed batch into micro-batches by a plan, and merging their outputs.

All is laid out on the host from lengths; the tables of a plan go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, check_not_captured
from trajpack.kernels.rearrange.select_tokens import Number, Segment, TokenSources, merge_tokens
from trajpack.packing.micro_batches.alignment import Alignment, Ints, Placement, check_alignment
from trajpack.packing.micro_batches.generated import Fields
from trajpack.packing.micro_batches.micro_batch import MicroBatch, check_given

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.plan.types import Plan

OWN = (
    "input_ids",
    "turn_ids",
    "prompt_mask",
    "loss_mask",
    "rollout_logprobs",
    "policy_versions",
    "returns",
)
"""Fields of every micro-batch that are selected from the batch."""
FILLS: Mapping[str, Number] = {"turn_ids": -1, "policy_versions": -1}
"""Padding values other than 0."""
MAX_ITEMSIZE = 8
"""Maximum bytes of an element that a kernel moves."""
CU_SEQLENS = len(Segment)
"""Row of a table behind those of `Segment`: cumulative sums of true lengths."""
COLUMNS_MULTIPLE = 4
"""Columns of a table are a multiple of this: each row begins at a multiple of 16 bytes."""


class Lengths(NamedTuple):
    """Sequences of a batch, on the host."""

    seqlens: Ints
    """int64 ``[sequences]``: tokens of each."""
    starts: Ints
    """int64 ``[sequences]``: first token of each."""


class PaddedMicroBatch(NamedTuple):
    """Sequences of a micro-batch and their padding, laid out on the host."""

    sequences: Ints
    """int64 ``[selected]``: indices of the sequences."""
    kept: Ints
    """int64 ``[selected]``: tokens that each keeps."""
    placement: Placement


class SegmentTable(NamedTuple):
    """Segments of tokens to select."""

    ends: Ints
    """Cumulative sums of the segments' lengths in the result."""
    sources: Ints
    """First source token of each segment."""
    kept: Ints
    """Source tokens of each segment; padding follows."""
    cu_seqlens: Ints = np.zeros(0, np.int64)
    """Cumulative sums of true lengths."""
    min_columns: int = 0


def lengths_of(seqlens: Iterable[int]) -> Lengths:
    """Return lengths and first tokens of a batch's sequences."""
    lengths = np.fromiter(seqlens, np.int64)
    return Lengths(lengths, np.cumsum(lengths) - lengths)


def summed(value_lens: Mapping[str, Ints]) -> dict[str, tuple[int, int]]:
    """Return the sums of rows of `PackTables.value_lens`."""
    return {name: (*lengths.sum(0).tolist(),) for name, lengths in value_lens.items()}


def place_selected(
    lengths: Lengths, sequences: Iterable[int], alignment: Alignment
) -> PaddedMicroBatch:
    """Lay out chosen sequences.

    Raises:
        TypeError: If they are not integers.
        ValueError: If the batch has no such sequence, or the alignment no room.
    """
    check_alignment(alignment)
    chosen = np.asarray(list(sequences) if not isinstance(sequences, np.ndarray) else sequences)
    if chosen.size and chosen.dtype.kind not in "iu":
        raise TypeError(f"sequences must be integers, got {chosen.dtype}")
    chosen = chosen.astype(np.int64)
    wrong = chosen[(chosen < 0) | (chosen >= len(lengths.seqlens))]
    if chosen.ndim != 1 or wrong.size:
        got = f"{wrong[0]}" if wrong.size else f"shape {list(chosen.shape)}"
        raise ValueError(f"sequences must be in [0, {len(lengths.seqlens)}), got {got}")
    kept = lengths.seqlens[chosen]
    return PaddedMicroBatch(chosen, kept, alignment.place(kept))


def place_plan(lengths: Lengths, plan: Plan, alignment: Alignment) -> list[PaddedMicroBatch]:
    """Lay out the sequences of every micro-batch of a plan.

    Raises:
        TypeError: If the plan is no `Plan`.
        ValueError: If the plan is for other sequences, the alignment has no room, or padding that
            the plan did not count takes a micro-batch over the capacity.
    """
    check_alignment(alignment)
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
    multiple, oversized, placed = alignment.sequence_multiple, set(plan.oversized), []
    for number in range(len(plan)):
        chosen = np.asarray(plan[number], np.int64)
        try:
            placement = alignment.place(kept[chosen])
        except ValueError as error:
            raise ValueError(f"micro-batch {number}: {error}") from error
        if plan.align % multiple:
            used = int((-(-kept[chosen] // multiple) * multiple).sum())
            ranks = 1 if plan.cp_sizes is None else int(plan.cp_sizes[number])
            if used > plan.capacity * ranks and oversized.isdisjoint(chosen.tolist()):
                raise ValueError(
                    f"micro-batch {number} has {used} tokens with sequence_multiple={multiple}, "
                    f"over the capacity {plan.capacity * ranks}: plan with align={multiple}"
                )
        placed.append(PaddedMicroBatch(chosen, kept[chosen], placement))
    return placed


def cut(
    batch: PackedBatch,
    placed: Sequence[PaddedMicroBatch],
    alignment: Alignment,
    tensors: Mapping[str, torch.Tensor] | None,
    impl: Impl,
) -> Iterator[MicroBatch]:
    """Check everything, send the tables, and return an iterator that makes the micro-batches.

    Raises:
        TypeError: If one of ``tensors`` is no tensor.
        ValueError: If one has the wrong shape or device, or a name that is taken; if a micro-batch
            has too many generated tokens.
    """
    named = {name: getattr(batch, name) for name in OWN} | dict(batch.fields)
    if batch.advantages is not None:
        named["advantages"] = batch.advantages
    taken = {field.name for field in fields(MicroBatch)} | set(batch.fields)
    named |= checked_tensors(tensors, taken, num_tokens=batch.num_tokens, device=batch.device)
    fills = {**FILLS, "input_ids": alignment.token_id}
    fills |= {field.name: field.fill for field in batch.token_fields}
    sources = TokenSources([*named.values()], [fills.get(name, 0) for name in named])
    counts = _num_generated(batch.tables.generated_lens, placed, alignment.max_generated)
    tables = send_tables([_table(batch, one, alignment) for one in placed], batch.device)
    value_lens = batch.tables.value_lens if batch.ragged_values else {}

    def select(one: PaddedMicroBatch, table: torch.Tensor, num_generated: int) -> MicroBatch:
        lengths, padded, num_tokens = one.placement
        rows, position_ids, sequence_ids = sources.select(
            table, num_tokens, alignment.positions, impl
        )
        selected = dict(zip(named, rows, strict=True))
        seqlens, padded_seqlens = tuple(lengths.tolist()), tuple(padded.tolist())
        num_boundaries = alignment.num_boundaries or len(padded_seqlens) + 1
        cu_padded = table[Segment.START, :num_boundaries]
        same = seqlens == padded_seqlens
        fixed = alignment.total if alignment.max_sequences is not None else None
        return MicroBatch(
            **{name: selected.pop(name) for name in OWN},
            position_ids=position_ids,
            sequence_ids=sequence_ids,
            advantages=selected.pop("advantages", None),
            fields=Fields(selected),
            cu_seqlens=cu_padded if same else table[CU_SEQLENS, :num_boundaries],
            cu_seqlens_padded=cu_padded,
            seqlens=seqlens,
            padded_seqlens=padded_seqlens,
            sequences=tuple(one.sequences.tolist()),
            num_kept=tuple(one.kept.tolist()),
            max_seqlen=max(padded_seqlens, default=0) if fixed is None else fixed,
            num_generated=num_generated,
            ragged_values=batch.ragged_values,
            value_counts=summed({name: lens[one.sequences] for name, lens in value_lens.items()}),
        )

    return map(select, placed, tables, counts)


def _num_generated(
    lengths: Sequence[int], placed: Sequence[PaddedMicroBatch], most: int | None
) -> list[int]:
    """Return the generated tokens of each micro-batch, or as many as all have room for."""
    counts = [sum(lengths[index] for index in one.sequences) for one in placed]
    if most is None:
        return counts
    if max(counts, default=0) > most:
        raise ValueError(
            f"a micro-batch must have at most max_generated={most} generated tokens, got "
            f"{max(counts)}"
        )
    return [most] * len(counts)


def _table(batch: PackedBatch, one: PaddedMicroBatch, alignment: Alignment) -> SegmentTable:
    ends, true_ends = (
        np.cumsum(lengths) for lengths in (one.placement.padded_seqlens, one.placement.seqlens)
    )
    starts = batch.host_lengths.starts[one.sequences]
    return SegmentTable(ends, starts, one.kept, true_ends, alignment.num_boundaries or 0)


def checked_tensors(
    tensors: Mapping[str, torch.Tensor] | None,
    taken: Collection[str],
    *,
    num_tokens: int,
    device: torch.device,
) -> Mapping[str, torch.Tensor]:
    """Return a caller's tensors over the tokens of a batch; the errors are those of `cut`."""
    for name, tensor in (tensors or {}).items():
        check_given(name, tensor, taken, num_tokens=num_tokens, device=device)
        if tensor.dtype.itemsize > MAX_ITEMSIZE or 0 in tensor.shape[1:]:
            raise ValueError(
                f"tensors: {name!r} must have rows, of a dtype of at most {MAX_ITEMSIZE} bytes, "
                f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
    return tensors or {}


def merged(
    lengths: Lengths,
    placed: Sequence[PaddedMicroBatch],
    outputs: Sequence[torch.Tensor],
    device: torch.device,
    *,
    fill: Number,
    impl: Impl,
) -> torch.Tensor:
    """Return outputs of micro-batches in the order of the batch, as `PackedBatch.merge` does."""
    outputs = list(outputs)
    _check_outputs(outputs, placed, device)
    sequences = np.concatenate([one.sequences for one in placed])
    counts = np.bincount(sequences, minlength=len(lengths.seqlens))
    if counts.max(initial=0) > 1:
        raise ValueError(f"sequence {counts.argmax()} is in more than one micro-batch")
    # segments of all micro-batches, concatenated; padding sequences keep no token
    ends = np.cumsum(np.concatenate([one.placement.padded_seqlens for one in placed]))
    sources, kept, begins = np.zeros_like(ends), np.zeros_like(ends), np.append(0, ends)[:-1]
    back, taken = np.zeros_like(lengths.seqlens), np.zeros_like(lengths.seqlens)
    first = 0
    for one in placed:
        here = slice(first, first + len(one.sequences))
        sources[here], kept[here] = lengths.starts[one.sequences], one.kept
        back[one.sequences], taken[one.sequences] = begins[here], one.kept
        first += len(one.placement.padded_seqlens)
    table, inverse = send_tables(
        [SegmentTable(np.cumsum(lengths.seqlens), back, taken), SegmentTable(ends, sources, kept)],
        device,
    )
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return merge_tokens(rows, table, inverse, int(lengths.seqlens.sum()), fill, impl)


def _check_outputs(
    outputs: Sequence[torch.Tensor], placed: Sequence[PaddedMicroBatch], device: torch.device
) -> None:
    """Raise unless there is an output for every micro-batch, with rows alike."""
    if len(outputs) != len(placed):
        raise ValueError(
            f"outputs must be {len(placed)}, one of each micro-batch, got {len(outputs)}"
        )
    for number, (output, one) in enumerate(zip(outputs, placed, strict=True)):
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"output {number} must be a tensor, got {type(output).__name__}")
        if output.shape[:1] != (one.placement.num_tokens,):
            raise ValueError(
                f"output {number} must have shape [{one.placement.num_tokens}, ...], a row for "
                f"each token of its micro-batch, got {list(output.shape)}"
            )
        first, got = _row_of(outputs[0]), _row_of(output)
        if first != got or output.device != device:
            raise ValueError(
                f"output {number} must have rows of {first} on {device}, as output 0, got {got} "
                f"on {output.device}"
            )


def _row_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[1:])}"


def send_tables(tables: Sequence[SegmentTable], device: torch.device) -> list[torch.Tensor]:
    """Return tables on the device, int32 ``[rows, columns]`` each; spare columns repeat the end."""
    remedy = "their tables leave host memory that is gone by the replay: make them before"
    check_not_captured("micro-batches", device, remedy)
    rows = CU_SEQLENS + 1
    columns = (max(len(one.ends) + 1, one.min_columns) for one in tables)
    sizes = (rows * -(-count // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE for count in columns)
    ends = list(accumulate(sizes, initial=0))
    # on the CPU explicitly: torch's default device may be another
    pinned = device.type == "cuda"
    words = torch.zeros(ends[-1], dtype=torch.int32, device="cpu", pin_memory=pinned)

    def split(words: torch.Tensor) -> list[torch.Tensor]:
        return [words[begin:end].view(rows, -1) for begin, end in pairwise(ends)]

    for one, table in zip(tables, (part.numpy() for part in split(words)), strict=True):
        for row, sums in ((Segment.START, one.ends), (CU_SEQLENS, one.cu_seqlens)):
            table[row, 1:] = sums[-1] if sums.size else 0
            table[row, 1 : len(sums) + 1] = sums
        table[Segment.SOURCE, : len(one.sources)] = one.sources
        table[Segment.LENGTH, : len(one.kept)] = one.kept
    return split(words.to(device, non_blocking=True))
