"""Tokens laid out anew, segment by segment: all fields of a batch, or one with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.fields.stretches import copier, count_up, located, slices, taken
from trajpack.kernels.fields.units import UNITS, Rows, as_rows, layouts_of, rows_of
from trajpack.kernels.runs import MAX_TOKENS
from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_device,
    check_integer,
    check_tensor,
    values_to_check,
)

Number: TypeAlias = bool | int | float
OP = "select_tokens"
Positions: TypeAlias = Literal["continue", "zero"]


class Segment(IntEnum):
    """Rows of the table of segments. A segment is a stretch of the result."""

    START = 0
    """Index of its first token in the result; the next column's START ends the segment."""
    SOURCE = 1
    """Index of its first token in the sources."""
    LENGTH = 2
    """Tokens that it takes from the sources; its other tokens are padding."""


class SelectedTokens(NamedTuple):
    """Result of `select_tokens`.

    Attributes:
        rows: ``[num_tokens, *rest]`` for each source, of its dtype.
        position_ids: int64 ``[num_tokens]``: position of each token in its segment.
        segment_ids: int32 ``[num_tokens]``: segment of each token.
    """

    rows: list[torch.Tensor]
    position_ids: torch.Tensor
    segment_ids: torch.Tensor


def select_tokens(
    sources: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    fills: Sequence[Number],
    positions: Positions = "continue",
    impl: Impl = "auto",
) -> SelectedTokens:
    """Lay stretches of several tensors over the same tokens out anew, with padding between them.

    Args:
        sources: One or more of shape ``[source_tokens, *rest]``, each with its own dtype of at
            most 8 bytes; moved bit for bit. Those that are not contiguous are copied first.
        table: ``[3 or more, segments + 1]`` int32, see `Segment`: START begins at 0, never
            decreases and ends at ``num_tokens``. The rest of the last column and further rows
            are not read.
        num_tokens: Tokens of the result.
        fills: Padding value of each source.
        positions: Positions of padding: ``"continue"`` counts on from the segment's tokens,
            ``"zero"`` is 0.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.

    Returns:
        `SelectedTokens`. No gradient flows.

    Raises:
        TypeError: If a dtype is none of the above.
        ValueError: If shapes or devices disagree, or, on the host, if the table is ill-formed.
            A table on a device is not read; no address outside the sources is touched.

    Example:
        >>> table = torch.tensor([[0, 3, 5], [4, 0, 0], [2, 2, 0]], dtype=torch.int32)
        >>> selected = select_tokens([torch.arange(10, 16)], table, 5, [-1])
        >>> selected.rows[0], selected.position_ids
        (tensor([14, 15, -1, 10, 11]), tensor([0, 1, 2, 0, 1]))
    """
    return TokenSources(sources, fills).select(table, num_tokens, positions, impl)


class TokenSources:
    """Tensors over the same tokens, from which one table after another selects.

    Arguments and errors are those of `select_tokens`.
    """

    def __init__(self, sources: Sequence[torch.Tensor], fills: Sequence[Number]) -> None:
        self._sources = list(sources)
        _check_sources(OP, self._sources)
        if len(fills) != len(self._sources):
            count = len(self._sources)
            raise ValueError(f"{OP}: fills must be {count}, one of each source, got {fills}")
        self._rows = [_layout_of(*pair) for pair in zip(self._sources, fills, strict=True)]

    def select(
        self,
        table: torch.Tensor,
        num_tokens: int,
        positions: Positions = "continue",
        impl: Impl = "auto",
    ) -> SelectedTokens:
        """Do what `select_tokens` does."""
        _check_table(OP, table, num_tokens, self._sources[0].device)
        check_choice(OP, "positions", positions, ("continue", "zero"))
        chosen = resolve_impl(OP, impl, table.device)
        *units, position_ids, segment_ids = torch.ops.trajpack.select_tokens(
            self._units,
            table if table.stride(1) == 1 else table.contiguous(),
            num_tokens,
            [number for rows in self._rows for number in rows],
            positions,
            chosen,
        )
        pairs = zip(units, self._sources, strict=True)
        rows = [as_rows(flat, num_tokens, one.dtype, one.shape[1:]) for flat, one in pairs]
        return SelectedTokens(rows, position_ids, segment_ids)

    @cached_property
    def _units(self) -> list[torch.Tensor]:
        return [_as_units(*pair) for pair in zip(self._sources, self._rows, strict=True)]


def merge_tokens(
    rows: torch.Tensor,
    table: torch.Tensor,
    inverse: torch.Tensor,
    num_tokens: int,
    fill: Number = 0,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Lay stretches of one tensor out anew, as `select_tokens` does, and let gradients flow.

    Args:
        rows: ``[source_tokens, *rest]`` of a dtype of at most 8 bytes.
        table: Segments of the result, as for `select_tokens`.
        inverse: Segments of ``rows``, by which the result gives ``rows`` back. Each token is
            taken at most once.
        num_tokens: Tokens of the result.
        fill: Value of tokens of the result that have no source.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.

    Returns:
        ``[num_tokens, *rest]``. Differentiable any number of times with respect to ``rows``;
        tokens that are not used have a gradient of 0.

    Raises:
        TypeError, ValueError: As `select_tokens`.

    Example:
        >>> table = torch.tensor([[0, 1, 3], [2, 0, 0], [1, 2, 0]], dtype=torch.int32)
        >>> inverse = torch.tensor([[0, 2, 3], [1, 0, 0], [2, 1, 0]], dtype=torch.int32)
        >>> merge_tokens(torch.tensor([7.0, 8.0, 9.0]), table, inverse, 3)
        tensor([9., 7., 8.])
    """
    op = "merge_tokens"
    _check_sources(op, [rows])
    _check_table(op, table, num_tokens, rows.device)
    _check_table(op, inverse, rows.shape[0], rows.device)
    tables, chosen = (table.contiguous(), inverse.contiguous()), resolve_impl(op, impl, rows.device)
    merged: torch.Tensor = torch.ops.trajpack.merge_tokens(rows, *tables, num_tokens, fill, chosen)
    return merged


def _check_sources(op: str, sources: Sequence[torch.Tensor]) -> None:
    """Raise unless there are tensors over the same tokens, of dtypes that can be moved."""
    if not sources:
        raise ValueError(f"{op}: there must be a source, got none")
    for number, source in enumerate(sources):
        name = f"source {number}"
        check_tensor(op, name, source, or_more=True)
        check_device(op, name, source, sources[0].device)
        if source.dtype.itemsize > 8:
            kind = str(source.dtype).removeprefix("torch.")
            raise TypeError(f"{op}: {name} must be of a dtype of at most 8 bytes, got {kind}")
        if source.shape[0] != sources[0].shape[0]:
            raise ValueError(
                f"{op}: {name} must have {list(sources[0].shape)[:1]} tokens in its first "
                f"dimension, as source 0, got shape {list(source.shape)}"
            )
        if 0 in source.shape[1:]:
            raise ValueError(f"{op}: {name} must have rows, got shape {list(source.shape)}")


def _check_table(op: str, table: torch.Tensor, num_tokens: int, device: torch.device) -> None:
    check_tensor(op, "table", table, ndim=2, dtypes=(torch.int32,), device=device)
    if table.shape[0] < len(Segment) or table.shape[1] == 0:
        raise ValueError(
            f"{op}: table must have shape [{len(Segment)} or more, segments + 1], "
            f"got {list(table.shape)}"
        )
    check_integer(op, "num_tokens", num_tokens, most=MAX_TOKENS)


def _check_segments(op: str, table: torch.Tensor, num_tokens: int, num_sources: int) -> None:
    """Raise if the values of a table can be read and it does not select ``num_tokens`` tokens."""
    readable = values_to_check(table)
    if readable is None:
        return
    start, source, given = readable.numpy().astype(np.int64)[: len(Segment)]
    check_boundaries(op, readable[Segment.START], num_tokens, name="segments")
    lengths, source, given = np.diff(start), source[:-1], given[:-1]
    if (given < 0).any() or (given > lengths).any():
        raise ValueError(f"{op}: no segment may take fewer than 0 tokens or more than it has")
    taken = given > 0
    low, high = source[taken].min(initial=0), (source + given)[taken].max(initial=0)
    if low < 0 or high > num_sources:
        raise ValueError(
            f"{op}: segments must take tokens from 0 to {num_sources}, "
            f"they take some from {low} to {high}"
        )


def select_reference(
    sources: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    fills: Sequence[Number],
    positions: str = "continue",
) -> SelectedTokens:
    """Define `select_tokens` in plain torch: each token looks up its segment.

    No value is read by the host, so it runs on any device.
    """
    segment, offset, token, given = located(num_tokens, *table[: len(Segment), :-1])
    rows = []
    for source, fill in zip(sources, fills, strict=True):
        padding = torch.full((), fill, dtype=source.dtype, device=source.device)
        rows.append(taken(source, token, given, padding))
    given &= (token >= 0) & (token < sources[0].shape[0])
    counted = torch.where(given, offset, 0) if positions == "zero" else offset
    return SelectedTokens(rows, counted, segment.int())


def _select_on_host(
    units: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    rows: Sequence[Rows],
    positions: str,
) -> list[torch.Tensor]:
    """Return the selected units of each source, then positions and segments.

    Without ``positions`` it returns units alone. The table is valid.
    """
    start, source, given = table.numpy().astype(np.int64)[: len(Segment), :-1]
    lengths = np.diff(start, append=num_tokens)
    copied, outs = copier(num_tokens, start, source, given), []
    for flat, row in zip(units, rows, strict=True):
        array, rest = flat.numpy(), () if row.width == 1 else (row.width,)
        out = np.empty((num_tokens, *rest), array.dtype)
        copied(out, array.reshape(-1, *rest), row.fill)
        outs.append(torch.from_numpy(out).view(-1))
    if not positions:
        return outs
    counted, some = np.empty(num_tokens, np.int64), lengths > 0
    count_up(counted, start[some], np.zeros_like(start[some]), lengths[some])
    if positions == "zero":
        for padding in slices(start + given, start + lengths):
            counted[padding] = 0
    segments = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return [*outs, torch.from_numpy(counted), torch.from_numpy(segments)]


def _layout_of(source: torch.Tensor, fill: Number) -> Rows:
    offset = source.dtype.itemsize * int(source.storage_offset()) * source.is_contiguous()
    return rows_of(source.dtype, source.shape[1:], _bytes_of(fill, source.dtype), offset)


@lru_cache(maxsize=256)
def _bytes_of(fill: Number, dtype: torch.dtype) -> bytes:
    return bytes(torch.full((1,), fill, dtype=dtype, device="cpu").view(torch.uint8).tolist())


def _as_units(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a source as a flat tensor of its units; a view if it is contiguous."""
    source = source.detach().resolve_conj().resolve_neg()
    return source.contiguous().view(-1).view(UNITS[rows.unit])


def _select(
    units: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    layouts: Sequence[int],
    positions: str,
    impl: str,
    op: str = OP,
) -> list[torch.Tensor]:
    """Return the selected units of each source; with ``positions`` also positions and segments."""
    rows = layouts_of(layouts)
    _check_segments(op, table, num_tokens, units[0].shape[0] // rows[0].width)
    if impl == "triton":
        from trajpack.kernels.rearrange.select_tokens_triton import select_forward

        return select_forward(units, table, num_tokens, rows, positions)
    if table.device.type == "cpu":
        return _select_on_host(units, table, num_tokens, rows, positions)
    shaped = [flat.view(-1, row.width) for flat, row in zip(units, rows, strict=True)]
    found = select_reference(shaped, table, num_tokens, [row.fill for row in rows], positions)
    places = [found.position_ids, found.segment_ids] if positions else []
    return [*(row.reshape(-1) for row in found.rows), *places]


def _fake(units: Any, table: torch.Tensor, num_tokens: int, layouts: Any, *_: Any) -> Any:
    pairs = zip(units, layouts_of(layouts), strict=True)
    outs = [flat.new_empty(num_tokens * row.width) for flat, row in pairs]
    return [*outs, table.new_empty(num_tokens, dtype=torch.int64), table.new_empty(num_tokens)]


register_op(
    "select_tokens(Tensor[] sources, Tensor table, SymInt num_tokens, int[] layouts, "
    "str positions, str impl) -> Tensor[]",
    _select,
    _fake,
)


def _merge(
    rows: torch.Tensor, table: torch.Tensor, inverse: Any, num_tokens: int, *options: Any
) -> torch.Tensor:
    fill, impl = options
    layout = _layout_of(rows, fill)
    units = [_as_units(rows, layout)]
    (merged,) = _select(units, table, num_tokens, layout, "", impl, "merge_tokens")
    return as_rows(merged, num_tokens, rows.dtype, rows.shape[1:])


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    rows, table, inverse, _, _, ctx.impl = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(table, inverse)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    table, inverse = ctx.saved_tensors
    inputs = grad.contiguous(), inverse, table, ctx.num_rows, 0, ctx.impl
    return torch.ops.trajpack.merge_tokens(*inputs), *[None] * 5


register_op(
    "merge_tokens(Tensor rows, Tensor table, Tensor inverse, SymInt num_tokens, Scalar fill, "
    "str impl) -> Tensor",
    _merge,
    lambda rows, table, inverse, num_tokens, *_: rows.new_empty((num_tokens, *rows.shape[1:])),
    setup_context=_setup_context,
    backward=_backward,
)
