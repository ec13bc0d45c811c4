"""Extra per-token fields of a packed batch, gathered from a word stream by the table of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.fields.build import check_run_table, check_runs, check_stretches
from trajpack.kernels.fields.stretches import copier, located, taken
from trajpack.kernels.fields.units import UNITS, Rows, as_rows, empty_units, layouts_of, rows_of
from trajpack.kernels.runs import MAX_TOKENS, Run
from trajpack.kernels.validation import check_integer, check_tensor, values_to_check

OP = "gather_fields"


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


class GatherInputs(NamedTuple):
    """Inputs of `gather_fields`, with fields as units of `trajpack.kernels.fields.units`."""

    words: torch.Tensor
    runs: torch.Tensor
    sources: torch.Tensor
    num_tokens: int
    layouts: Sequence[Rows]
    masks: Sequence[bool]
    """Which fields have rows of generated tokens alone."""

    def fields(self) -> Iterator[tuple[int, Rows, bool]]:
        """Yield number, layout and mask of each field."""
        return zip(range(len(self.layouts)), self.layouts, self.masks, strict=True)


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

    Raises:
        TypeError: If a dtype is none of the above.
        ValueError: If shapes or devices disagree, or, for tensors on the host, the tables do not
            end at ``num_tokens`` or lead out of ``words``.

    Example:
        >>> words = torch.tensor([5, 6, 7], dtype=torch.int32)
        >>> runs = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]).int()
        >>> field = FieldLayout(torch.int32, (), b"\xff" * 4, generated_only=True)
        >>> gather_fields(words, runs, torch.zeros(2, 1, dtype=torch.int64), [field], 3)
        [tensor([-1,  5,  6], dtype=torch.int32)]
    """
    check_tensor(OP, "words", words, dtypes=(torch.int32,))
    check_run_table(OP, runs, words.device)
    check_tensor(OP, "sources", sources, ndim=2, dtypes=(torch.int64,), device=words.device)
    expected = [runs.shape[0], len(fields)]
    if list(sources.shape) != expected:
        raise ValueError(f"{OP}: sources must have shape {expected}, got {list(sources.shape)}")
    check_integer(OP, "num_tokens", num_tokens, most=MAX_TOKENS)
    chosen, layouts = resolve_impl(OP, impl, words.device), _layouts(fields)
    masks = [field.generated_only for field in fields]
    inputs = (one.contiguous() for one in (words, runs, sources))
    numbers = [number for layout in layouts for number in layout]
    gathered = torch.ops.trajpack.gather_fields(*inputs, num_tokens, numbers, masks, chosen)
    return _as_rows(gathered, fields, num_tokens)


def _layouts(fields: Sequence[FieldLayout]) -> list[Rows]:
    return [rows_of(*field[:3]) for field in fields]


def _as_rows(
    units: Sequence[torch.Tensor], fields: Sequence[FieldLayout], num_tokens: int
) -> list[torch.Tensor]:
    pairs = zip(units, fields, strict=True)
    return [as_rows(one, num_tokens, field.dtype, field.shape) for one, field in pairs]


def _write(out: Sequence[torch.Tensor], given: GatherInputs, impl: str) -> None:
    """Write units of `empty_units`."""
    checked, begins = check_runs(OP, given.runs, given.num_tokens), values_to_check(given.sources)
    if checked and begins is not None:
        _, lengths, generated = checked
        for number, (width, unit, _), mask in given.fields():
            counts = np.minimum(lengths, generated) if mask else lengths
            rule, size = f"sources must keep bytes of field {number}", 4 * given.words.shape[0]
            begin = begins.numpy()[:-1, number]
            check_stretches(OP, rule, begin, counts * width * unit, size)
    if impl == "triton":
        from trajpack.kernels.fields.gather_fields_triton import write_rows

        write_rows(out, given)
    elif given.words.device.type == "cpu":
        _write_on_host(out, given)
    else:
        write_reference(out, given)


def write_reference(out: Sequence[torch.Tensor], given: GatherInputs) -> None:
    """Define the op in plain torch: each token looks up its run, then its row."""
    words, runs, sources, num_tokens, *_ = given
    run, offset, *_ = located(num_tokens, *runs[:-1, : Run.GENERATED + 1].unbind(1))
    for units, (number, (width, unit, fill), mask) in zip(out, given.fields(), strict=True):
        row = offset - runs[run, Run.GENERATED] if mask else offset
        has_row = (runs[run, Run.SOURCE] >= 0) & (row >= 0)
        place = sources[run, number] // unit + row * width
        whole = words if unit < 8 else words[: words.shape[0] // 2 * 2]
        if 4 * whole.storage_offset() % unit:  # torch cannot view it as units
            whole = whole.clone()
        stream = whole.view(UNITS[unit])
        if stream.shape[0] < width:  # no token has a row
            stream = stream.new_zeros(width)
        rows = taken(stream.unfold(0, width, 1), place, has_row, fill)
        units[: rows.numel()].copy_(rows.view(-1))


def _write_on_host(out: Sequence[torch.Tensor], given: GatherInputs) -> None:
    """Copy the rows of a run at once."""
    words, runs, sources, num_tokens, *_ = given
    start, table = runs.numpy()[:, Run.START].astype(np.int64), runs.numpy()[:-1]
    lengths = np.diff(start)
    skipped = np.clip(table[:, Run.GENERATED], 0, lengths)
    for units, (number, (width, unit, fill), mask) in zip(out, given.fields(), strict=True):
        begin = start[:-1] + skipped if mask else start[:-1]
        size = np.where(table[:, Run.SOURCE] >= 0, start[1:] - begin, 0)
        rows, stream = units.numpy()[: num_tokens * width], words.numpy()
        stream = stream[: stream.size // 2 * 2] if unit == 8 else stream
        origin = sources.numpy()[:-1, number] // unit
        copied = copier(rows.size, begin * width, origin, size * width)
        copied(rows, stream.view(rows.dtype), fill)


def _run(words: torch.Tensor, runs: Any, sources: Any, num_tokens: int, *options: Any) -> Any:
    numbers, masks, impl = options
    layouts = layouts_of(numbers)
    out = empty_units(layouts, num_tokens, words.device)
    _write(out, GatherInputs(words, runs, sources, num_tokens, layouts, masks), impl)
    return [one[: num_tokens * row.width] for one, row in zip(out, layouts, strict=True)]


def _fake(words: torch.Tensor, runs: Any, sources: Any, num_tokens: int, *rest: Any) -> Any:
    return [
        words.new_empty(num_tokens * layout.width, dtype=UNITS[layout.unit])
        for layout in layouts_of(rest[0])
    ]


register_op(
    "gather_fields(Tensor words, Tensor runs, Tensor sources, SymInt num_tokens, int[] layouts, "
    "bool[] generated_only, str impl) -> Tensor[]",
    _run,
    _fake,
)
