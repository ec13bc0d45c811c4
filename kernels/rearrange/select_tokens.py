"""Tokens of a packed batch, segment after segment, laid out anew: all their fields at once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.rearrange.token_rows import Number, as_rows, as_units, layouts_of, rows_of
from trajpack.kernels.runs import MAX_TOKENS
from trajpack.kernels.validation import check_device, check_tensor

if TYPE_CHECKING:
    from trajpack.kernels.rearrange.select_tokens_host import HostSources

OP = "select_tokens"
Positions: TypeAlias = Literal["continue", "zero"]


class Segment(IntEnum):
    """Rows of the table of segments. A segment is a stretch of the result."""

    START = 0
    """Index of its first token in the result; the next column's START ends the segment."""
    SOURCE = 1
    """Index of its first token in what is selected from."""
    LENGTH = 2
    """Tokens that it takes from there; what it has more is padding."""


class SelectedTokens(NamedTuple):
    """Result of `select_tokens`."""

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
    return TokenSources(sources, fills).select(table, num_tokens, positions, impl)


class TokenSources:
    """Tensors over the same tokens, from which one table after another selects.

    Args:
        sources: As for `select_tokens`.
        fills: As for `select_tokens`.

    Raises:
        TypeError, ValueError: As `select_tokens`.
    """

    def __init__(self, sources: Sequence[torch.Tensor], fills: Sequence[Number]) -> None:
        self._sources, self._fills = list(sources), list(fills)
        check_sources(OP, self._sources)
        if len(self._fills) != len(self._sources):
            raise ValueError(
                f"{OP}: fills must be {len(self._sources)}, one of each source, got {fills}"
            )
        pairs = list(zip(self._sources, self._fills, strict=True))
        self._layouts = [rows_of(*pair) for pair in pairs]

    def select(
        self,
        table: torch.Tensor,
        num_tokens: int,
        positions: Positions = "continue",
        impl: Impl = "auto",
    ) -> SelectedTokens:
        """Do what `select_tokens` does."""
        check_table(OP, table, num_tokens, self._sources[0].device)
        if positions not in ("continue", "zero"):
            raise ValueError(f"{OP}: positions must be 'continue' or 'zero', got {positions!r}")
        chosen = resolve_impl(OP, impl, table)
        if chosen == "torch" and _is_on_host(table):  # all but the operator, for its overhead
            *rows, position_ids, segment_ids = self._on_host.select(table, num_tokens, positions)
            return SelectedTokens(rows, position_ids, segment_ids)
        *rows, position_ids, segment_ids = torch.ops.trajpack.select_tokens(
            self._units,
            table if table.stride(1) == 1 else table.contiguous(),
            num_tokens,
            [number for rows in self._layouts for number in rows],
            positions,
            chosen,
        )
        pairs = zip(rows, self._sources, strict=True)
        shaped = [as_rows(flat, source, num_tokens) for flat, source in pairs]
        return SelectedTokens(shaped, position_ids, segment_ids)

    @cached_property
    def _units(self) -> list[torch.Tensor]:
        pairs = zip(self._sources, self._layouts, strict=True)
        return [as_units(source, rows) for source, rows in pairs]

    @cached_property
    def _on_host(self) -> HostSources:
        from trajpack.kernels.rearrange.select_tokens_host import HostSources

        return HostSources(self._sources, self._fills)


def _is_on_host(table: torch.Tensor) -> bool:
    """Tell whether a table can be read for nothing: not one of a compiler's, without values."""
    real = type(table) is torch.Tensor and not torch.compiler.is_compiling()
    return real and table.device.type == "cpu"


def check_sources(op: str, sources: Sequence[torch.Tensor]) -> None:
    """Raise unless there are tensors over the same tokens, of dtypes that can be moved."""
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
        check_device(op, name, source, sources[0].device)


def check_table(op: str, table: torch.Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise unless a table can select ``num_tokens`` from sources on ``device``."""
    check_tensor(op, "table", table, ndim=2, dtypes=(torch.int32,))
    if table.shape[0] < len(Segment) or table.shape[1] == 0:
        raise ValueError(
            f"{op}: table must have shape [{len(Segment)} or more, segments + 1], "
            f"got {list(table.shape)}"
        )
    check_device(op, "table", table, device)
    if not isinstance(num_tokens, (int, torch.SymInt)):
        raise TypeError(f"{op}: num_tokens must be an integer, got {num_tokens!r}")
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"{op}: num_tokens must be in [0, {MAX_TOKENS}], got {num_tokens}")


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
        from trajpack.kernels.rearrange.select_tokens_host import check_segments
        from trajpack.kernels.rearrange.select_tokens_triton import select_forward

        check_segments(OP, table, num_tokens, sources[0].shape[0] // rows[0].width)
        return select_forward(sources, table, num_tokens, rows, positions)
    if table.device.type == "cpu":
        from trajpack.kernels.rearrange.select_tokens_host import HostSources

        on_host = HostSources(
            [source.view(-1, row.width) for source, row in zip(sources, rows, strict=True)],
            [row.fill for row in rows],
        )
        selected = on_host.select(table, num_tokens, positions)
        return [flat.reshape(-1) for flat in selected]
    shaped = [source.view(-1, row.width) for source, row in zip(sources, rows, strict=True)]
    found = select_reference(shaped, table, num_tokens, [row.fill for row in rows], positions)
    flat = [row.reshape(-1) for row in found.rows]
    return [*flat, found.position_ids, found.segment_ids]


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
