"""Tokens of a packed batch, segment after segment, laid out anew: all their fields at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.runs import MAX_TOKENS
from trajpack.kernels.validation import check_device, check_tensor

OP = "select_tokens"
Number: TypeAlias = bool | int | float
Positions: TypeAlias = Literal["continue", "zero"]
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By its bytes, as what a unit of a row is moved; values are never looked at."""


class Segment(IntEnum):
    """Rows of the table of segments. A segment is a stretch of the result."""

    START = 0
    """Index of its first token in the result; the next column's START ends the segment."""
    SOURCE = 1
    """Index of its first token in what is selected from."""
    LENGTH = 2
    """Tokens that it takes from there; what it has more is padding."""


class Rows(NamedTuple):
    """How a source's rows are moved."""

    width: int
    """Units of a row."""
    unit: int
    """Bytes of a unit."""
    fill: int
    """A unit of padding, as a signed integer."""


class SelectedTokens(NamedTuple):
    """What `select_tokens` returns."""

    rows: list[torch.Tensor]
    """``[num_tokens, *rest]`` for each source, of its dtype."""
    position_ids: torch.Tensor
    """int64 ``[num_tokens]``: how many tokens of its segment stand before each."""
    segment_ids: torch.Tensor
    """int32 ``[num_tokens]``: the segment of each."""


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
            decreases and ends at ``num_tokens``; of the last column nothing else is read, nor is
            any further row.
        num_tokens: Tokens of the result.
        fills: What padding holds in each source's rows.
        positions: Positions of padding: ``"continue"`` counts on from the segment's tokens,
            ``"zero"`` is 0.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.

    Returns:
        `SelectedTokens`. No gradient flows; see `trajpack.kernels.merge_tokens`.

    Raises:
        TypeError: If a dtype is none of the above.
        ValueError: If shapes or devices disagree. On the host, where the table can be read for
            nothing, also if it is ill-formed. On a device it is not read, and no address outside
            the sources is touched.

    Cost: one launch for all, no copy, no host synchronisation.

    Example:
        >>> table = torch.tensor([[0, 3, 5], [4, 0, 0], [2, 2, 0]], dtype=torch.int32)
        >>> selected = select_tokens([torch.arange(10, 16)], table, 5, [-1])
        >>> selected.rows[0], selected.position_ids
        (tensor([14, 15, -1, 10, 11]), tensor([0, 1, 2, 0, 1]))
    """
    check_sources(OP, sources, table, num_tokens)
    if len(fills) != len(sources):
        raise ValueError(f"{OP}: fills must be {len(sources)}, one of each source, got {fills}")
    if positions not in ("continue", "zero"):
        raise ValueError(f"{OP}: positions must be 'continue' or 'zero', got {positions!r}")
    chosen = resolve_impl(OP, impl, table)
    layouts = [rows_of(source, fill) for source, fill in zip(sources, fills, strict=True)]
    *rows, position_ids, segment_ids = torch.ops.trajpack.select_tokens(
        [as_units(source, rows) for source, rows in zip(sources, layouts, strict=True)],
        table if table.stride(1) == 1 else table.contiguous(),
        num_tokens,
        [number for rows in layouts for number in rows],
        positions,
        chosen,
    )
    shaped = [as_rows(flat, source, num_tokens) for flat, source in zip(rows, sources, strict=True)]
    return SelectedTokens(shaped, position_ids, segment_ids)


def check_sources(
    op: str, sources: Sequence[torch.Tensor], table: torch.Tensor, num_tokens: int
) -> None:
    """Raise unless sources and table can belong together."""
    check_tensor(op, "table", table, ndim=2, dtypes=(torch.int32,))
    if table.shape[0] < len(Segment) or table.shape[1] == 0:
        raise ValueError(
            f"{op}: table must have shape [{len(Segment)} or more, segments + 1], "
            f"got {list(table.shape)}"
        )
    if not sources:
        raise ValueError(f"{op}: there must be a source, got none")
    for number, source in enumerate(sources):
        name = f"source {number}"
        if not isinstance(source, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(source).__name__}")
        if source.dtype.itemsize > 8:
            kind = str(source.dtype).removeprefix("torch.")
            raise TypeError(f"{op}: {name} must be of a dtype of at most 8 bytes, got {kind}")
        if source.ndim == 0 or source.shape[0] != sources[0].shape[0]:
            raise ValueError(
                f"{op}: {name} must have {list(sources[0].shape)[:1]} tokens in its first "
                f"dimension, as source 0, got shape {list(source.shape)}"
            )
        if 0 in source.shape[1:]:
            raise ValueError(f"{op}: {name} must have rows, got shape {list(source.shape)}")
        check_device(op, name, source, table.device)
    if not isinstance(num_tokens, (int, torch.SymInt)):
        raise TypeError(f"{op}: num_tokens must be an integer, got {num_tokens!r}")
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"{op}: num_tokens must be in [0, {MAX_TOKENS}], got {num_tokens}")


def rows_of(source: torch.Tensor, fill: Number) -> Rows:
    """Return how a source's rows are moved: in units as wide as rows and storage allow."""
    itemsize = source.dtype.itemsize
    row = math.prod(source.shape[1:]) * itemsize
    aligned = itemsize * source.storage_offset() if source.is_contiguous() else 0
    unit = 8 if itemsize == 8 else math.gcd(row, aligned, 4)
    return Rows(row // unit, unit, _fill_bits(fill, source.dtype, unit))


def as_units(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a source as a flat tensor of its units; a view where it is contiguous."""
    return source.detach().contiguous().view(-1).view(UNITS[rows.unit])


def as_rows(units: torch.Tensor, source: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return flat units as rows like those of ``source``."""
    shape = (num_tokens, *source.shape[1:])
    if num_tokens == 0:  # whose strides torch does not view as another dtype
        return source.new_empty(shape)
    return units.view(source.dtype).view(shape)


@lru_cache(maxsize=256)
def _fill_bits(fill: Number, dtype: torch.dtype, unit: int) -> int:
    element = torch.full((1,), fill, dtype=dtype, device="cpu").view(torch.uint8)
    return int.from_bytes((bytes(element.tolist()) * 8)[:unit], "little", signed=True)


def select_reference(
    sources: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    fills: Sequence[Number],
    positions: Positions = "continue",
) -> SelectedTokens:
    """Say in plain torch what `select_tokens` means: each token looks its segment up.

    No value is read by the host, so it runs on any device.
    """
    start = table[Segment.START]
    segment = torch.repeat_interleave(start.diff(), output_size=num_tokens)
    offset = torch.arange(num_tokens, device=table.device) - start[segment]
    token = table[Segment.SOURCE][segment] + offset
    given = (offset < table[Segment.LENGTH][segment]) & (token >= 0)
    given &= token < sources[0].shape[0]
    rows = []
    for source, fill in zip(sources, fills, strict=True):
        padding = torch.full((), fill, dtype=source.dtype, device=source.device)
        rest = source.shape[1:]
        if source.shape[0] == 0:
            rows.append(padding.expand((num_tokens, *rest)).clone())
            continue
        moved = source[torch.where(given, token, 0)]
        rows.append(torch.where(given.view(-1, *[1] * len(rest)), moved, padding))
    counted = torch.where(given, offset, 0) if positions == "zero" else offset
    return SelectedTokens(rows, counted, segment.int())


def _run(
    sources: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    layouts: list[int],
    positions: Positions,
    impl: str,
) -> list[torch.Tensor]:
    rows = layouts_of(layouts)
    if impl == "triton":
        from trajpack.kernels.select_tokens_triton import select_forward

        return select_forward(sources, table, num_tokens, rows, positions)
    if table.device.type == "cpu":
        from trajpack.kernels.select_tokens_host import select_on_host

        return select_on_host(sources, table, num_tokens, rows, positions)
    shaped = [source.view(-1, row.width) for source, row in zip(sources, rows, strict=True)]
    selected = select_reference(shaped, table, num_tokens, [row.fill for row in rows], positions)
    flat = [row.reshape(-1) for row in selected.rows]
    return [*flat, selected.position_ids, selected.segment_ids]


def layouts_of(numbers: Sequence[int]) -> list[Rows]:
    """Return what the operators are given as flat integers."""
    return [Rows(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]


def _fake(
    sources: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    layouts: list[int],
    positions: Positions,
    impl: str,
) -> list[torch.Tensor]:
    rows = [
        source.new_empty(num_tokens * row.width)
        for source, row in zip(sources, layouts_of(layouts), strict=True)
    ]
    return [*rows, table.new_empty(num_tokens, dtype=torch.int64), table.new_empty(num_tokens)]


LIBRARY.define(
    "select_tokens(Tensor[] sources, Tensor table, SymInt num_tokens, int[] layouts, "
    "str positions, str impl) -> Tensor[]"
)
LIBRARY.impl("select_tokens", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::select_tokens", _fake, lib=LIBRARY)
