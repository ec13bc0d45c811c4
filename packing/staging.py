"""Host memory that fills up turn by turn and leaves for the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import INT32_MAX

ALIGNMENT = 4
"""Words to which every table is aligned: 16 bytes, what the kernels are compiled for."""


class GrowingArray:
    """Rows that are appended, read as one array, and forgotten; memory doubles as needed."""

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._row_shape = () if width is None else (width,)
        self._rows = np.empty((0, *self._row_shape), dtype)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def rows(self) -> npt.NDArray[Any]:
        """A view of what was appended; the next append may leave it behind."""
        return self._rows[: self._used]

    def append(self, block: npt.ArrayLike) -> None:
        """Add the rows of ``block`` at the end."""
        rows = np.asarray(block, self._rows.dtype).reshape(-1, *self._row_shape)
        needed = self._used + len(rows)
        if needed > len(self._rows):
            larger = np.empty((max(needed, 2 * len(self._rows)), *self._row_shape), rows.dtype)
            larger[: self._used] = self.rows
            self._rows = larger
        self._rows[self._used : needed] = rows
        self._used = needed

    def truncate(self, count: int = 0) -> None:
        """Forget the rows behind the first ``count`` and keep the memory."""
        self._used = min(self._used, count)


class Staging:
    """A region of int32 words: a stream that grows, then the tables of one batch behind it.

    For a CUDA device there are two regions, both pinned, so that copies are asynchronous and
    one region can be filled while the other is copied. The host waits for a copy only when it
    writes to the region that this copy reads.
    """

    def __init__(self, device: torch.device, num_words: int = 0) -> None:
        self.device = device
        self.used = 0
        """Words of the stream."""
        self._words = self._allocate(num_words)
        self._copied: torch.cuda.Event | None = None
        self._spare = (self._allocate(0), self._copied)

    def write(self, *pieces: npt.NDArray[Any]) -> int:
        """Append arrays of 4-byte entries to the stream, bit for bit, and return where they begin.

        Raises:
            ValueError: If the stream would pass 2³¹ words, the reach of an int32 index.
        """
        begin = self.used
        needed = begin + sum(piece.size for piece in pieces)
        if needed > INT32_MAX:
            raise ValueError(f"a buffer holds at most {INT32_MAX} words, this one needs {needed}")
        self._reserve(needed)
        words = self._words.numpy()
        end = begin
        for piece in pieces:
            words[end : end + piece.size] = piece.view(np.int32)
            end += piece.size
        self.used = end
        return begin

    def truncate(self, num_words: int) -> None:
        """Forget what was written behind the first ``num_words`` of the stream."""
        self.used = num_words

    def clear(self) -> None:
        """Forget the stream and keep the memory. A region in flight makes way for the other."""
        self.used = 0
        if self._copied is not None:
            (self._words, self._copied), self._spare = self._spare, (self._words, self._copied)

    def send(
        self, tables: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Write ``tables`` behind the stream and bring both to the device in one copy.

        On the host nothing is copied but the tables: the stream returned is a view that holds
        until the next write. Every table is a tensor of its own and no view of another, though
        on a device they share memory with the stream.
        """
        offsets = {}
        end = _aligned(self.used)
        for name, table in tables.items():
            offsets[name] = end
            end = _aligned(end + -(-table.nbytes // 4))
        self._reserve(end)
        region = self._words.numpy()[:end].view(np.uint8)
        for name, table in tables.items():
            at = 4 * offsets[name]
            region[at : at + table.nbytes] = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        if self.device.type == "cpu":
            on_host = {name: torch.from_numpy(table.copy()) for name, table in tables.items()}
            return self._words[: self.used], on_host
        arena = self._words[:end].to(self.device, non_blocking=True)
        self._remember_copy()
        return arena[: self.used], {
            name: _table(arena, offsets[name], table) for name, table in tables.items()
        }

    def _allocate(self, num_words: int) -> torch.Tensor:
        if self.device.type == "cuda":
            # named, since torch's default device may be another, and only the host has pages to pin
            return torch.empty(num_words, dtype=torch.int32, device="cpu", pin_memory=True)
        return torch.from_numpy(np.empty(num_words, np.int32))

    def _reserve(self, num_words: int) -> None:
        """Wait until the region may be written, and make room for ``num_words``."""
        if self._copied is not None:
            # while a graph is captured the host may not wait; all was done before it began
            if not torch.cuda.is_current_stream_capturing():
                self._copied.synchronize()
            self._copied = None
        if num_words > len(self._words):
            larger = self._allocate(max(num_words, 2 * len(self._words)))
            larger[: self.used] = self._words[: self.used]
            self._words = larger

    def _remember_copy(self) -> None:
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.device))


def _aligned(num_words: int) -> int:
    return -(-num_words // ALIGNMENT) * ALIGNMENT


def _table(arena: torch.Tensor, offset: int, table: npt.NDArray[Any]) -> torch.Tensor:
    """Return the words at ``offset`` as a tensor of ``table``'s dtype and shape.

    Not as a view: views share a version counter, and writing to one table would then
    invalidate what autograd saved of another.
    """
    dtype = torch.from_numpy(np.empty(0, table.dtype)).dtype
    place = (arena.storage_offset() + offset) * arena.itemsize // dtype.itemsize
    strides = [stride // table.itemsize for stride in np.ascontiguousarray(table).strides]
    fresh = torch.empty(0, dtype=dtype, device=arena.device)
    return fresh.set_(arena.untyped_storage(), place, table.shape, strides)
