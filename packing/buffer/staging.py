"""Staging memory: tables and token stream of a batch, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Tables have a multiple of 16 rows, so that each begins at a multiple of 16 bytes, which the
kernels are compiled for."""


class Column(NamedTuple):
    """Dtype and width of one table."""

    dtype: np.dtype[Any]
    width: int | None = None
    """Entries of a row; a row is a scalar if ``None``."""


class HostRegion:
    """int32 words on the host: tables with the same number of rows, then the stream."""

    def __init__(self, columns: Mapping[str, Column], words: torch.Tensor, num_rows: int) -> None:
        self.words = words
        self.copies: list[torch.cuda.Event] = []
        """Events behind copies that read the words; a write waits for them."""
        self.captured = False
        """Whether a captured graph reads the words; they must not change."""
        self.partition(columns, num_rows)

    def partition(self, columns: Mapping[str, Column], num_rows: int) -> None:
        """Divide the words into tables of ``num_rows`` rows (a multiple of 16) and the stream."""
        memory = self.words.numpy()
        self.num_rows = num_rows
        self.tables: dict[str, npt.NDArray[Any]] = {}
        self.offsets: dict[str, int] = {}
        begin = 0
        for name, column in columns.items():
            end = begin + num_rows * (column.width or 1) * column.dtype.itemsize // 4
            table = memory[begin:end].view(column.dtype)
            self.tables[name] = table if column.width is None else table.reshape(num_rows, -1)
            self.offsets[name] = begin
            begin = end
        self.begin = begin
        self.stream: npt.NDArray[np.int32] = memory[begin:]


class DeviceRegion(NamedTuple):
    """Words of a region on the device."""

    words: torch.Tensor
    """int32 ``[words]``: the tables, then the stream."""
    stream: torch.Tensor
    """int32: the token stream, a view of ``words``."""
    columns: Mapping[str, Column]
    offsets: Mapping[str, int]
    """First word of each table."""

    def table(self, name: str, num_rows: int) -> torch.Tensor:
        """Return a table as a tensor over the region's memory, made by ``set_``, not as a view.

        Views share a version counter: a write to one table would invalidate other tables that
        autograd saved.
        """
        dtype, width = self.columns[name]
        place = 4 * self.offsets[name] // dtype.itemsize
        shape, strides = ((num_rows,), (1,)) if width is None else ((num_rows, width), (width, 1))
        fresh = torch.empty(0, dtype=TORCH_DTYPES[dtype], device=self.words.device)
        return fresh.set_(self.words.untyped_storage(), place, shape, strides)


class Staging:
    """Memory that a buffer fills: tables that grow row by row, and behind them the stream.

    All tables have the same number of rows, and the stream begins behind the last table. A copy
    includes the unused rows; `clear` takes most of them away if few were used. For a CUDA
    device there are two pinned regions, so that copies are asynchronous and one region is filled
    while the other is copied. A write waits only for copies of the region that it writes to. A
    region that a CUDA graph has captured is never written again, and lives as long as this object.
    """

    def __init__(
        self, device: torch.device, columns: Mapping[str, Column], num_words: int = 0
    ) -> None:
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._columns = columns
        self._row_words = sum(c.dtype.itemsize * (c.width or 1) for c in columns.values()) / 4
        self.region = self._allocate(ALIGNMENT, num_words)
        self._spare: HostRegion | None = None
        self._captured: list[HostRegion] = []

    def reserve(
        self, num_words: int, num_rows: int, words_used: int
    ) -> Mapping[str, npt.NDArray[Any]]:
        """Wait until the region may be written, grow it if it is too small, return its tables.

        The tables and the first ``words_used`` words of the stream keep their values.
        """
        region = self.region
        self._wait(region)
        fits = num_words <= len(region.stream) and num_rows <= region.num_rows
        if fits and not region.captured:
            return region.tables
        rows = region.num_rows
        if num_rows > rows:
            rows = _aligned(max(num_rows, 2 * rows))
        words = len(region.stream)
        if num_words > words:
            words = max(num_words, 2 * words)
        larger = self._allocate(rows, words)
        larger.stream[:words_used] = region.stream[:words_used]
        for name, table in region.tables.items():
            larger.tables[name][: len(table)] = table
        self.region = larger
        return larger.tables

    def clear(self, rows_used: int) -> None:
        """Reset the tables and keep the memory; switch regions if the current one is in flight."""
        region, spare = self.region, self._spare
        if region.copies or region.captured:
            if spare is None or len(spare.words) < len(region.words):
                spare = self._allocate(region.num_rows, len(region.stream))
            self.region = spare
            self._spare = None if region.captured else region
        rows, fitting = region.num_rows, _aligned(rows_used + rows_used // 4)
        if rows > 2 * fitting:
            rows = max(fitting, ALIGNMENT)
        if rows != self.region.num_rows:  # of a spare region too, so that as much fits as before
            self.region.partition(self._columns, rows)

    def send(self, num_words: int) -> DeviceRegion:
        """Copy tables and stream to the device in one copy.

        On the host there is no copy: the result shares the region's memory, until the next write.
        """
        region = self.region
        words = region.words[: region.begin + num_words]
        on_host = self.device.type == "cpu"
        arena = words if on_host else words.to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            if not torch.cuda.is_current_stream_capturing():
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self.device))
                region.copies = [*(copy for copy in region.copies if not copy.query()), event]
            elif not region.captured:
                region.captured = True
                self._captured.append(region)
        return DeviceRegion(arena, arena[region.begin :], self._columns, region.offsets)

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _wait(self, region: HostRegion) -> None:
        if region.copies:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a buffer cannot be written while a CUDA graph is captured: pack in the "
                    "layout that is captured, and synchronise, before the capture begins"
                )
            for event in region.copies:
                event.synchronize()
            region.copies = []

    def _allocate(self, num_rows: int, num_words: int) -> HostRegion:
        size = int(num_rows * self._row_words) + num_words
        if self.device.type == "cuda":
            try:  # device="cpu", because torch's default device may be another
                words = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
            except RuntimeError as error:
                if torch.cuda.is_available():
                    raise
                raise ValueError(
                    f"device must be one that torch finds here, got '{self.device}': there is no "
                    "CUDA device"
                ) from error
        else:
            words = torch.from_numpy(np.empty(size, np.int32))
        return HostRegion(self._columns, words, num_rows)


def _aligned(num_rows: int) -> int:
    return -(-num_rows // ALIGNMENT) * ALIGNMENT


TORCH_DTYPES = {
    np.dtype(np.int8): torch.int8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}
