"""Extra per-token fields of a packed batch, gathered from a word stream by the table of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.fields.build_host import check_runs, copy_stretches
from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, TILE, Run
from trajpack.kernels.validation import check_device, check_tensor

OP = "gather_fields"


class Moved(NamedTuple):
    """A field as the operator knows it: four integers."""

    width: int
    """Units of a row."""
    unit: int
    """Bytes of a unit."""
    fill: int
    """A unit of a row that is not given, as a signed integer."""
    generated_only: int
    """Whether generated tokens alone have rows."""


class FieldLayout(NamedTuple):
    """What a field's rows look like and which tokens have one."""

    dtype: torch.dtype
    """Of at most 8 bytes."""
    shape: tuple[int, ...]
    """Shape of a token's row."""
    fill: bytes
    """One element of the rows of tokens that have none, as it lies in memory."""
    generated_only: bool
    """Whether generated tokens alone have rows, or all tokens but padding."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def moved(self) -> Moved:
        """How a row is moved."""
        fill = int.from_bytes((self.fill * 8)[: self.unit], "little", signed=True)
        return Moved(self.row_bytes // self.unit, self.unit, fill, int(self.generated_only))

    @property
    def unit(self) -> int:
        """Bytes that are moved as one: 4, or as many as divide a row; 8 for 8-byte elements."""
        return 8 if self.dtype.itemsize == 8 else math.gcd(self.row_bytes, 4)


UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        words: int32 stream that holds the rows, bit for bit, each field's at multiples of its
            row's bytes from a 16-byte boundary.
        runs: ``[runs + 1, 8]`` int32, as for `trajpack.kernels.fields.build.build`.
        sources: ``[runs + 1, fields]`` int64: byte of the stream at which the row of a run's
            first token begins, or of its first generated token where ``generated_only``.
        fields: What the rows look like.
        num_tokens: Tokens of the batch.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.

    Returns:
        A tensor ``[num_tokens, *shape]`` for each field; ``fill`` where a token has no row.

    Raises:
        TypeError: If a dtype is none of the above.
        ValueError: If shapes or devices disagree.

    Cost: one launch for all fields, no copy, no host synchronisation.

    Example:
        >>> words = torch.tensor([5, 6, 7], dtype=torch.int32)
        >>> runs = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]).int()
        >>> field = FieldLayout(torch.int32, (), b"\xff" * 4, generated_only=True)
        >>> gather_fields(words, runs, torch.zeros(2, 1, dtype=torch.int64), [field], 3)
        [tensor([-1,  5,  6], dtype=torch.int32)]
    """
    _check_inputs(words, runs, sources, len(fields), num_tokens)
    chosen = resolve_impl(OP, impl, words)
    gathered = torch.ops.trajpack.gather_fields(
        words.contiguous(),
        runs.contiguous(),
        sources.contiguous(),
        num_tokens,
        [number for field in fields for number in field.moved],
        chosen,
    )
    if num_tokens == 0:
        return [words.new_empty((0, *field.shape), dtype=field.dtype) for field in fields]
    return [
        flat.view(field.dtype).view(num_tokens, *field.shape)
        for flat, field in zip(gathered, fields, strict=True)
    ]


def empty_rows(
    fields: Sequence[FieldLayout], num_tokens: int, device: torch.device
) -> list[torch.Tensor]:
    """Return uninitialised rows over memory in whole tiles, for `gather_fields_into`."""
    return [
        torch.empty(-(-size // TILE) * TILE, dtype=UNITS[field.unit], device=device)[:size]
        .view(field.dtype)
        .view(num_tokens, *field.shape)
        for field in fields
        for size in (num_tokens * field.moved.width,)
    ]


def gather_fields_into(
    rows: Sequence[torch.Tensor],
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    fields: Sequence[FieldLayout],
    impl: Impl = "auto",
) -> None:
    """Write rows into memory that `empty_rows` made: `gather_fields` without an allocation.

    Raises:
        TypeError, ValueError: As `gather_fields`; also if the memory is not in whole tiles.

    Cost: one launch for all fields, capturable in a CUDA graph.
    """
    num_tokens = rows[0].shape[0] if rows else 0
    _check_inputs(words, runs, sources, len(fields), num_tokens)
    for row, field in zip(rows, fields, strict=True):
        units = row.numel() * row.itemsize // field.unit
        room = row.untyped_storage().nbytes() // field.unit
        if row.storage_offset() or room < -(-units // TILE) * TILE or not row.is_contiguous():
            raise ValueError(
                f"{OP}: rows must be in whole tiles of {TILE} units, as empty_rows makes them, "
                f"got shape {list(row.shape)} with room for {room} units of {field.unit} bytes"
            )
    out = [row.view(-1).view(UNITS[field.unit]) for row, field in zip(rows, fields, strict=True)]
    moved = [field.moved for field in fields]
    if resolve_impl(OP, impl, words) == "triton":
        from trajpack.kernels.fields.gather_fields_triton import write_rows

        check_runs(OP, runs, num_tokens)
        write_rows(words, runs, sources, num_tokens, moved, out)
    elif words.device.type == "cpu":
        _gather_on_host(words, runs, sources, num_tokens, moved, out)
    else:
        reference = _gather_reference(words, runs, sources, num_tokens, moved)
        for target, gathered in zip(out, reference, strict=True):
            target.copy_(gathered)


def _check_inputs(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_fields: int,
    num_tokens: int,
) -> None:
    check_tensor(OP, "words", words, ndim=1, dtypes=(torch.int32,))
    check_tensor(OP, "runs", runs, ndim=2, dtypes=(torch.int32,))
    check_tensor(OP, "sources", sources, ndim=2, dtypes=(torch.int64,))
    check_device(OP, "runs", runs, words.device)
    check_device(OP, "sources", sources, words.device)
    if runs.shape[0] == 0 or runs.shape[1] != RUN_WIDTH:
        raise ValueError(f"{OP}: runs must have shape [runs + 1, 8], got {list(runs.shape)}")
    if sources.shape != (runs.shape[0], num_fields):
        raise ValueError(
            f"{OP}: sources must have shape {[runs.shape[0], num_fields]}, "
            f"got {list(sources.shape)}"
        )
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"{OP}: num_tokens must be in [0, {MAX_TOKENS}], got {num_tokens}")


def _gather_reference(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_tokens: int,
    fields: Sequence[Moved],
) -> list[torch.Tensor]:
    """Say in plain torch what the op means: each unit looks its token's run up."""
    run = torch.repeat_interleave(runs[:, Run.START].diff(), output_size=num_tokens).long()
    offset = torch.arange(num_tokens, device=words.device) - runs[run, Run.START]
    given = runs[run, Run.SOURCE] >= 0
    behind = offset - runs[run, Run.GENERATED]
    stream = torch.nn.functional.pad(words, (0, -words.shape[0] % 2 + 2 * (words.shape[0] == 0)))
    gathered = []
    for number, (width, unit, fill, generated_only) in enumerate(fields):
        row = behind if generated_only else offset
        has_row = given & (row >= 0)
        place = sources[run, number] // unit + row * width
        columns = torch.arange(width, device=words.device)
        index = torch.where(has_row, place, 0)[:, None] + torch.where(has_row[:, None], columns, 0)
        rows = torch.where(has_row[:, None], stream.view(UNITS[unit])[index], fill)
        gathered.append(rows.reshape(-1))
    return gathered


def _gather_on_host(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_tokens: int,
    fields: Sequence[Moved],
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Copy stretch by stretch with numpy."""
    table = runs.numpy()[:-1].astype(np.int64)
    lengths = np.diff(runs.numpy()[:, Run.START]).astype(np.int64)
    stream = words.numpy()[: words.shape[0] // 2 * 2]  # in whole units of 8 bytes
    gathered = []
    for number, (width, unit, fill, generated_only) in enumerate(fields):
        skipped = np.clip(table[:, Run.GENERATED], 0, lengths) if generated_only else 0
        counts = np.where(table[:, Run.SOURCE] >= 0, lengths - skipped, 0)
        all_given = counts.sum() == num_tokens
        if out is not None:
            flat = out[number].numpy()
        else:
            flat = (np.empty if all_given else np.zeros)(num_tokens * width, f"i{unit}")
        if not all_given and (fill or out is not None):
            flat[:] = fill
        given = counts > 0
        copy_stretches(
            flat,
            ((table[:, Run.START] + skipped) * width)[given],
            (words.numpy() if unit < 8 else stream).view(flat.dtype),
            (sources.numpy()[:-1, number] // unit)[given],
            (counts * width)[given],
        )
        gathered.append(torch.from_numpy(flat))
    return gathered


def _run(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_tokens: int,
    layouts: list[int],
    impl: str,
) -> list[torch.Tensor]:
    fields = _moved(layouts)
    if impl == "torch" and words.device.type == "cpu":
        return _gather_on_host(words, runs, sources, num_tokens, fields)
    if impl == "torch":
        return _gather_reference(words, runs, sources, num_tokens, fields)
    from trajpack.kernels.fields.gather_fields_triton import gather_fields_forward

    check_runs(OP, runs, num_tokens)
    return gather_fields_forward(words, runs, sources, num_tokens, fields)


def _moved(layouts: Sequence[int]) -> list[Moved]:
    return [Moved(*layouts[at : at + 4]) for at in range(0, len(layouts), 4)]


def _fake(
    words: torch.Tensor,
    runs: torch.Tensor,
    sources: torch.Tensor,
    num_tokens: int,
    layouts: list[int],
    impl: str,
) -> list[torch.Tensor]:
    return [
        words.new_empty(num_tokens * field.width, dtype=UNITS[field.unit])
        for field in _moved(layouts)
    ]


LIBRARY.define(
    "gather_fields(Tensor words, Tensor runs, Tensor sources, SymInt num_tokens, int[] layouts, "
    "str impl) -> Tensor[]"
)
LIBRARY.impl("gather_fields", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::gather_fields", _fake, lib=LIBRARY)
