"""Extra per-token fields of a packed batch, gathered from a word stream by the table of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.fields.build import (
    check_run_table,
    check_runs,
    check_stretches,
    copy_stretches,
)
from trajpack.kernels.runs import MAX_TOKENS, TILE, Run
from trajpack.kernels.validation import check_integer, check_tensor, values_to_check

OP = "gather_fields"
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtype that moves a unit, by the unit's bytes."""


class RowLayout(NamedTuple):
    """Layout of a field's rows as the op takes it: four integers."""

    width: int
    """Units of a row."""
    unit: int
    """Bytes of a unit."""
    fill: int
    """Unit of a row that is not given, as a signed integer."""
    generated_only: int
    """Whether only generated tokens have rows."""


class FieldLayout(NamedTuple):
    """Layout of a field's rows, and the tokens that have one."""

    dtype: torch.dtype
    """Dtype of at most 8 bytes."""
    shape: tuple[int, ...]
    """Shape of a token's row."""
    fill: bytes
    """Memory of one element in the rows of tokens without a row."""
    generated_only: bool
    """Whether only generated tokens have rows; else all tokens but padding have."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_layout(self) -> RowLayout:
        """Layout in units of 8 bytes for 8-byte dtypes, else the most of 1, 2 and 4 that fit."""
        unit = 8 if self.dtype.itemsize == 8 else math.gcd(self.row_bytes, 4)
        fill = int.from_bytes((self.fill * 8)[:unit], "little", signed=True)
        return RowLayout(self.row_bytes // unit, unit, fill, int(self.generated_only))


def gather_fields(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    fields: Sequence[FieldLayout],
    num_tokens: int,
    impl: Impl = "auto",
) -> list[torch.Tensor]:
    r"""Gather the rows of extra fields into one row for each token of a batch.

    Args:
        words: int32 stream that holds the rows, bit for bit, those of a field at multiples of
            its row's bytes from a 16-byte boundary.
        runs: ``[runs + 1, 8]`` int32, as for `trajpack.kernels.fields.build.build`.
        sources: ``[runs + 1, fields]`` int64: byte of the stream at which the row of a run's
            first token begins, or of its first generated token where ``generated_only``.
        fields: Layouts of the rows.
        num_tokens: Tokens of the batch.
        impl: As for `trajpack.kernels.fields.build.build`.

    Returns:
        A tensor ``[num_tokens, *shape]`` for each field; ``fill`` where a token has no row.

    Cost: one launch for all fields, no copy, no host synchronisation.

    Example:
        >>> words = torch.tensor([5, 6, 7], dtype=torch.int32)
        >>> runs = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]).int()
        >>> field = FieldLayout(torch.int32, (), b"\xff" * 4, generated_only=True)
        >>> gather_fields(words, runs, torch.zeros(2, 1, dtype=torch.int64), [field], 3)
        [tensor([-1,  5,  6], dtype=torch.int32)]
    """
    _check_inputs(words, runs, sources, fields, num_tokens)
    gathered = torch.ops.trajpack.gather_fields(
        words.contiguous(),
        runs.contiguous(),
        sources.contiguous(),
        num_tokens,
        [number for field in fields for number in field.row_layout],
        resolve_impl(OP, impl, words),
    )
    return [_as_rows(*pair, num_tokens) for pair in zip(gathered, fields, strict=True)]


def empty_rows(
    fields: Sequence[FieldLayout], num_tokens: int, device: torch.device
) -> list[torch.Tensor]:
    """Return uninitialised rows over memory in whole tiles, for `gather_fields_into`."""
    flat = empty_units([field.row_layout for field in fields], num_tokens, device)
    return [_as_rows(*pair, num_tokens) for pair in zip(flat, fields, strict=True)]


def gather_fields_into(
    rows: Sequence[torch.Tensor],
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    fields: Sequence[FieldLayout],
    impl: Impl = "auto",
) -> None:
    """Write rows into memory of `empty_rows`: `gather_fields` without an allocation, capturable."""
    num_tokens = rows[0].shape[0] if rows else 0
    _check_inputs(words, runs, sources, fields, num_tokens)
    layouts = [field.row_layout for field in fields]
    for row, layout in zip(rows, layouts, strict=True):
        room = row.untyped_storage().nbytes() // layout.unit
        tiles = -(-num_tokens * layout.width // TILE)
        if row.storage_offset() or room < tiles * TILE or not row.is_contiguous():
            raise ValueError(
                f"{OP}: rows must be in whole tiles of {TILE} units, as empty_rows makes them, "
                f"got shape {list(row.shape)} with room for {room} units of {layout.unit} bytes"
            )
    out = [row.view(-1).view(UNITS[layout.unit]) for row, layout in zip(rows, layouts, strict=True)]
    _write(
        out, words, runs, sources, num_tokens, layouts=layouts, impl=resolve_impl(OP, impl, words)
    )


def _check_inputs(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    fields: Sequence[FieldLayout],
    num_tokens: int,
) -> None:
    check_tensor(OP, "words", words, dtypes=(torch.int32,))
    check_run_table(OP, runs, words.device)
    check_tensor(OP, "sources", sources, ndim=2, dtypes=(torch.int64,), device=words.device)
    expected = [runs.shape[0], len(fields)]
    if list(sources.shape) != expected:
        raise ValueError(f"{OP}: sources must have shape {expected}, got {list(sources.shape)}")
    check_integer(OP, "num_tokens", num_tokens, most=MAX_TOKENS)


def empty_units(
    layouts: Sequence[RowLayout], num_tokens: int, device: torch.device
) -> list[torch.Tensor]:
    """Return uninitialised units of all rows of each field, over memory in whole tiles."""
    sizes = [num_tokens * layout.width for layout in layouts]
    return [
        torch.empty(-(-size // TILE) * TILE, dtype=UNITS[layout.unit], device=device)[:size]
        for size, layout in zip(sizes, layouts, strict=True)
    ]


def _as_rows(units: torch.Tensor, field: FieldLayout, num_tokens: int) -> torch.Tensor:
    if not num_tokens:  # torch cannot view no bytes as another dtype
        return units.new_empty((0, *field.shape), dtype=field.dtype)
    return units.view(field.dtype).view(num_tokens, *field.shape)


def _write(
    out: Sequence[torch.Tensor],
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_tokens: int,
    *,
    layouts: Sequence[RowLayout],
    impl: str,
) -> None:
    """Write units that `empty_units` made."""
    check_runs(OP, runs, num_tokens)
    _check_sources(words, runs, sources, layouts)
    if impl == "triton":
        from trajpack.kernels.fields.gather_fields_triton import write_rows

        write_rows(words, runs, sources, num_tokens, layouts=layouts, out=out)
    elif words.device.type == "cpu":
        _write_on_host(out, words, runs, sources, layouts)
    else:
        reference = _gather_reference(words, runs, sources, num_tokens, layouts)
        for units, gathered in zip(out, reference, strict=True):
            units.copy_(gathered)


def _check_sources(
    words: torch.Tensor, runs: torch.Tensor, sources: torch.Tensor, layouts: Sequence[RowLayout]
) -> None:
    """Raise if the tables can be read and rows lie outside of the stream; after `check_runs`."""
    table, begins = values_to_check(runs), values_to_check(sources)
    if table is None or begins is None:
        return
    rows = table.numpy().astype(np.int64)
    lengths, rows = np.diff(rows[:, Run.START]), rows[:-1]
    given = np.where(rows[:, Run.SOURCE] >= 0, lengths, 0)
    generated = (given - rows[:, Run.GENERATED]).clip(min=0)
    for number, (width, unit, _, generated_only) in enumerate(layouts):
        counts = (generated if generated_only else given) * width * unit
        rule, num_bytes = f"sources must keep bytes of field {number}", 4 * words.shape[0]
        check_stretches(OP, rule, begins.numpy()[:-1, number], counts, num_bytes)


def _gather_reference(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_tokens: int,
    layouts: Sequence[RowLayout],
) -> list[torch.Tensor]:
    """Define the op in plain torch: each unit looks up its token's run."""
    run = torch.repeat_interleave(runs[:, Run.START].diff(), output_size=num_tokens).long()
    offset = torch.arange(num_tokens, device=words.device) - runs[run, Run.START]
    given = runs[run, Run.SOURCE] >= 0
    behind = offset - runs[run, Run.GENERATED]
    stream = torch.nn.functional.pad(words, (0, -words.shape[0] % 2 + 2 * (words.shape[0] == 0)))
    gathered = []
    for number, (width, unit, fill, generated_only) in enumerate(layouts):
        row = behind if generated_only else offset
        has_row = given & (row >= 0)
        place = sources[run, number] // unit + row * width
        columns = torch.arange(width, device=words.device)
        index = torch.where(has_row, place, 0)[:, None] + torch.where(has_row[:, None], columns, 0)
        rows = torch.where(has_row[:, None], stream.view(UNITS[unit])[index], fill)
        gathered.append(rows.reshape(-1))
    return gathered


def _write_on_host(
    out: Sequence[torch.Tensor],
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    layouts: Sequence[RowLayout],
) -> None:
    """Copy stretch by stretch with numpy."""
    table = runs.numpy()[:-1].astype(np.int64)
    lengths = np.diff(runs.numpy()[:, Run.START]).astype(np.int64)
    stream = words.numpy()[: words.shape[0] // 2 * 2]  # whole units of 8 bytes
    for number, (width, unit, fill, generated_only) in enumerate(layouts):
        skipped = np.clip(table[:, Run.GENERATED], 0, lengths) if generated_only else 0
        counts = np.where(table[:, Run.SOURCE] >= 0, lengths - skipped, 0)
        flat = out[number].numpy()
        if counts.sum() * width < flat.size:
            flat[:] = fill
        given = counts > 0
        copy_stretches(
            flat,
            ((table[:, Run.START] + skipped) * width)[given],
            (words.numpy() if unit < 8 else stream).view(flat.dtype),
            begins=(sources.numpy()[:-1, number] // unit)[given],
            lengths=(counts * width)[given],
        )


def _row_layouts(numbers: Sequence[int]) -> list[RowLayout]:
    return [RowLayout(*numbers[at : at + 4]) for at in range(0, len(numbers), 4)]


def _run(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_tokens: int,
    numbers: list[int],
    impl: str,
) -> list[torch.Tensor]:
    layouts = _row_layouts(numbers)
    out = empty_units(layouts, num_tokens, words.device)
    _write(out, words, runs, sources, num_tokens, layouts=layouts, impl=impl)
    return out


def _fake(
    words: torch.Tensor, runs: Any, sources: Any, num_tokens: int, numbers: list[int], impl: str
) -> list[torch.Tensor]:
    return [
        words.new_empty(num_tokens * layout.width, dtype=UNITS[layout.unit])
        for layout in _row_layouts(numbers)
    ]


register_op(
    "gather_fields(Tensor words, Tensor runs, Tensor sources, SymInt num_tokens, int[] layouts, "
    "str impl) -> Tensor[]",
    _run,
    _fake,
)
