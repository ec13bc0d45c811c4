"""Staging memory: token stream and tables of a batch, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Arrays = Mapping[str, npt.NDArray[Any]]

ALIGNMENT = 4
"""Words: each table begins at a multiple of 16 bytes, which the kernels are compiled for."""
CLOSED = np.empty(0, np.int32).data


class HostRegion:
    """int32 words on the host: the stream, and behind it the tables that were sent last."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.stream: npt.NDArray[np.int32] = words.numpy()
        self.tables: Arrays | None = None
        """Tables that are behind the stream, if any."""
        self.copies: list[torch.cuda.Event] = []
        """Events behind copies that read the words; a write waits for them."""
        self.captured = False
        """Whether a captured graph reads the words; they must not change."""


class DeviceRegion(NamedTuple):
    """What a pack reads on the device."""

    stream: torch.Tensor
    """int32: the token stream."""
    tables: dict[str, torch.Tensor]
    """Tables by name. All are in the memory of the stream, unless that is on the host."""


class Staging:
    """Memory that a buffer fills with its stream, and a pack with tables behind it.

    For a CUDA device there are two pinned regions, so that copies are asynchronous and one region
    is filled while the other is copied. A write waits only for copies of the region that it writes
    to. A region that a CUDA graph has captured is never written again, and lives as long as this
    object.
    """

    def __init__(self, device: torch.device, num_words: int = 0) -> None:
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.region = self._allocate(num_words)
        self.stream = self.region.stream.data
        """Stream where it may be written at once; empty where it is to be reserved first."""
        self._spare: HostRegion | None = None
        self._captured: list[HostRegion] = []

    def reserve(self, num_words: int, words_used: int) -> npt.NDArray[np.int32]:
        """Wait until the region may be written, grow it if it is too small, return its stream.

        The first ``words_used`` words keep their values.
        """
        region = self.region
        self._wait(region)
        size = len(region.stream)
        if num_words > size or region.captured:
            larger = self._allocate(max(num_words, 2 * size) if num_words > size else size)
            larger.stream[:words_used] = region.stream[:words_used]
            self.region = larger
        self.region.tables = None
        self.stream = self.region.stream.data
        return self.region.stream

    def clear(self) -> None:
        """Keep the memory; switch regions if the current one is in flight."""
        region, spare = self.region, self._spare
        region.tables, self.stream = None, CLOSED
        if region.copies or region.captured:
            if spare is None or len(spare.stream) < len(region.stream):
                spare = self._allocate(len(region.stream))
            self.region = spare
            self._spare = None if region.captured else region

    def send(self, num_words: int, tables: Arrays) -> DeviceRegion:
        """Copy stream and tables to the device in one copy.

        On the host the result shares the memory of the stream, until the next write; tables are
        copied, because a batch may be written to. Tables that were sent last are not written again.
        """
        if self.device.type == "cpu":
            of_host = {name: torch.from_numpy(table.copy()) for name, table in tables.items()}
            return DeviceRegion(self.region.words[:num_words], of_host)
        places, end = dict[str, int](), num_words
        for name, table in tables.items():
            places[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = places[name] + -(-table.nbytes // 4)
        if self.region.tables is not tables:
            memory = self.reserve(end, num_words).view(np.uint8)
            for name, table in tables.items():
                begin = 4 * places[name]
                memory[begin : begin + table.nbytes] = table.reshape(-1).view(np.uint8)
            self.region.tables = tables
        region, self.stream = self.region, CLOSED
        arena = region.words[:end].to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            if not torch.cuda.is_current_stream_capturing():
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self.device))
                region.copies = [*(copy for copy in region.copies if not copy.query()), event]
            elif not region.captured:
                region.captured = True
                self._captured.append(region)
        sent = {name: _tensor(arena, places[name], table) for name, table in tables.items()}
        return DeviceRegion(arena[:num_words], sent)

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

    def _allocate(self, num_words: int) -> HostRegion:
        if self.device.type == "cuda":
            try:  # device="cpu", because torch's default device may be another
                words = torch.empty(num_words, dtype=torch.int32, device="cpu", pin_memory=True)
            except RuntimeError as error:
                if torch.cuda.is_available():
                    raise
                raise ValueError(
                    f"device must be one that torch finds here, got '{self.device}': there is no "
                    "CUDA device"
                ) from error
        else:
            words = torch.from_numpy(np.empty(num_words, np.int32))
        return HostRegion(words)


def _tensor(arena: torch.Tensor, word: int, table: npt.NDArray[Any]) -> torch.Tensor:
    """Return a table as a tensor over the arena's memory, made by ``set_``, not as a view.

    Views share a version counter: a write to one table would invalidate other tables that autograd
    saved.
    """
    dtype = TORCH_DTYPES[table.dtype]
    strides = tuple(stride // table.itemsize for stride in table.strides)
    fresh = torch.empty(0, dtype=dtype, device=arena.device)
    return fresh.set_(arena.untyped_storage(), 4 * word // table.itemsize, table.shape, strides)


TORCH_DTYPES = {
    np.dtype(np.int8): torch.int8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}
