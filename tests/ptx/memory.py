"""Memory of a launch: which addresses exist, and who wrote and read each byte last.

An access has a time, the number of memory accesses and barriers before it. Two accesses to a byte,
of which one is a write, are a race unless a barrier, or a publication, lies between.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tests.ptx.origins import ANYWHERE, NONE, Origins
from tests.ptx.publications import Publications
from tests.ptx.traffic import SECTOR, distinct

SENTINEL = np.uint32(0x7FF8A5A5)
"""Content of memory that nobody has written: NaN as float32, and twice of it as float64."""
NOBODY, THREAD, WARP_OF, PROGRAM_OF, MANY = range(5)
"""Readers of a byte since its last write: of one warp, of one program, of several programs."""


Extent = tuple[int, int]
"""The first byte of a tensor and the first one behind it."""


class PtxError(RuntimeError):
    """What a kernel did that a GPU would stop for, or never end."""


class Clock:
    """The time of a batch of programs, and when each last passed a barrier."""

    def __init__(self, now: int, size: int, number: Any) -> None:
        self.now, self.size, self.number = now, size, number
        self.warp_sync = np.zeros(len(number) // 32, np.int32)
        self.program_sync = np.zeros(len(number) // size, np.int32)

    def barrier(self, programs: Any) -> None:
        self.now += 1
        self.program_sync[programs] = self.now

    def warp_barrier(self, warps: Any) -> None:
        self.now += 1
        self.warp_sync[warps] = self.now


class Accessors:
    """Threads that access memory now: one entry for each granule of each thread."""

    def __init__(self, index: Any, clock: Clock) -> None:
        self.index, self.size, self.now, self.clock = index, clock.size, clock.now, clock
        self.thread = clock.number[index]  # in the launch, from 1

    @cached_property
    def warp_sync(self) -> Any:
        return self.clock.warp_sync[self.index >> 5]

    @cached_property
    def program_sync(self) -> Any:
        return self.clock.program_sync[self.index // self.size]

    def settled(self, other: Any, group: Any, when: Any) -> Any:
        """Return for which entries a group with ``other`` in it is ordered before by a barrier."""
        related = relation(self.thread, other, self.size)
        by_warp = (group <= WARP_OF) & (related <= WARP_OF) & (when < self.warp_sync)
        by_program = (group <= PROGRAM_OF) & (related <= PROGRAM_OF) & (when < self.program_sync)
        return by_warp | by_program | ((group == THREAD) & (related == THREAD)) | (group == NOBODY)


def relation(one: Any, other: Any, size: int) -> Any:
    """Return the smallest group that holds both threads."""
    one, other = one - 1, other - 1
    found = np.where(one // size == other // size, PROGRAM_OF, MANY)
    found[one >> 5 == other >> 5] = WARP_OF
    found[one == other] = THREAD
    return found


class History:
    """The last writer and the readers since then of each granule of an allocation."""

    def __init__(self, size: int, publications: Publications | None) -> None:
        self.size, self.granule, self.publications = size, 16, publications
        self._make()

    def _make(self) -> None:
        count = -(-self.size // self.granule)
        self.writer, self.wrote = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.reader, self.read = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.readers, self.is_atomic = np.zeros(count, np.uint8), np.zeros(count, bool)
        self.is_written = self.is_read = False

    def places(self, offset: Any, size: int) -> Any:
        """Return the granules of accesses, ``size`` bytes each; granules shrink to fit."""
        wanted = min(size, self.granule)
        while wanted > 1 and ((offset & (wanted - 1)).any() or size % wanted):
            wanted //= 2
        if wanted < self.granule:
            self._refine(wanted)
        if size == self.granule:
            return offset // self.granule
        first = offset // self.granule
        return (first[:, None] + np.arange(size // self.granule)).ravel()

    def _refine(self, granule: int) -> None:
        times, self.granule = self.granule // granule, granule
        if not (self.is_written or self.is_read):
            self._make()
            return
        for name in ("writer", "wrote", "reader", "read", "readers", "is_atomic"):
            setattr(self, name, np.repeat(getattr(self, name), times))

    def on_read(self, place: Any, by: Accessors, *, is_atomic: bool = False) -> Any:
        """Return which granules race with their last write; remember the readers."""
        self.is_read = True
        raced = self._races_with_write(place, by, is_atomic=is_atomic)
        group = self.readers[place]
        if group.any():
            other = self.reader[place]
            settled = by.settled(other, group, self.read[place])
            larger = np.maximum(group, relation(by.thread, other, by.size))
            group = np.where(settled, THREAD, larger)
        else:
            group = THREAD
        first, last = self._claim(self.reader, place, by.thread)
        if (first != last).any():  # several threads of this very instruction
            group = np.maximum(group, relation(first, last, by.size))
        self.readers[place], self.read[place] = group, by.now
        return raced

    def on_write(self, place: Any, by: Accessors, *, is_atomic: bool = False) -> Any:
        """Return which granules race with an earlier access, and which within the instruction."""
        raced = self._races_with_write(place, by, is_atomic=is_atomic)
        if self.is_read:
            raced = raced | self._races_with_read(place, by)
        first, last = self._claim(self.writer, place, by.thread)
        self.wrote[place], self.is_atomic[place], self.readers[place] = by.now, is_atomic, NOBODY
        self.is_written = True
        return raced, (first != last) & (not is_atomic)

    def _races_with_write(self, place: Any, by: Accessors, *, is_atomic: bool) -> Any:
        other = self.writer[place] if self.is_written else None
        if other is None or not other.any():
            return np.zeros(len(place), bool)
        when, group = self.wrote[place], (other != 0).astype(np.uint8)  # nobody, or a thread
        raced = ~by.settled(other, group, when)
        if is_atomic:
            raced &= ~self.is_atomic[place]
        return self._unpublished(raced, other, when, by)

    def _races_with_read(self, place: Any, by: Accessors) -> Any:
        group = self.readers[place]
        if not group.any():
            return np.zeros(len(place), bool)
        other, when = self.reader[place], self.read[place]
        raced = ~by.settled(other, group, when)
        return self._unpublished(raced & (group != MANY), other, when, by) | (
            raced & (group == MANY)
        )

    def _unpublished(self, raced: Any, other: Any, when: Any, by: Accessors) -> Any:
        """Return ``raced`` without the entries that a publication orders."""
        if self.publications is None or not self.publications.logs or not raced.any():
            return raced
        synced = by.program_sync
        for entry in np.flatnonzero(raced):
            thread = int(by.thread[entry])
            before, then = int(other[entry]), int(when[entry])
            raced[entry] = not self.publications.orders(before, then, thread, int(synced[entry]))
        return raced

    @staticmethod
    def _claim(owner: Any, place: Any, thread: Any) -> tuple[Any, Any]:
        """Write threads to their places; return the first and the last thread of each place."""
        owner[place[::-1]] = thread[::-1]
        lowest = owner[place]
        owner[place] = thread
        return lowest, owner[place]


@dataclass
class Allocation:
    begin: int
    end: int
    history: History | None = None
    sectors: dict[str, Any] = field(default_factory=dict)
    """Pieces of 32 bytes that were touched, by kind of access."""

    def touch(self, way: str, sector: Any) -> None:
        count = -(-(self.end - self.begin) // SECTOR)
        self.sectors.setdefault(way, np.zeros(count, bool))[sector] = True


class GlobalMemory:
    """The host's own memory, accessed in place, as far as it is known what is there.

    Args:
        allocations: What exists.
        size: Threads of a program.
        extents: First byte and end of the tensor that each parameter points to, by its name.
    """

    def __init__(
        self, allocations: list[Allocation], size: int, extents: dict[str, Extent]
    ) -> None:
        merged: list[Allocation] = []
        for one in sorted(allocations, key=lambda a: (a.begin, -a.end)):
            if not merged or one.end > merged[-1].end:
                merged.append(one)
        self.allocations, self.publications = merged, Publications(size)
        self.extents = extents
        self.begins = np.array([one.begin for one in merged], np.uint64)
        self.ends = np.array([one.end for one in merged], np.uint64)
        self.base = merged[0].begin & ~0xFF if merged else 0
        self.views = {size: self._view(size) for size in (1, 2, 4, 8, 16)} if merged else {}
        self.reach: dict[Origins, list[Extent] | None] = {}

    def _view(self, size: int) -> Any:
        """Return all memory from ``base`` on as words; only addresses that were found are read."""
        code = {16: "|V16"}.get(size, f"<u{size}")
        interface = {
            "data": (self.base, False),
            "shape": ((1 << 47) // size,),
            "typestr": code,
            "version": 3,
        }
        return np.asarray(type("Host", (), {"__array_interface__": interface})())

    def find(self, address: Any, size: int, origins: Origins = NONE) -> Any:
        """Return the allocation of all accesses, or of each one; -1 is out of bounds."""
        if not len(self.allocations):
            return np.full(len(address), -1)
        tensors = self._tensors(origins)
        low, high = int(address.min()), int(address.max()) + size
        at = bisect_right(self.begins, low) - 1
        is_inside = tensors is None or any(low >= begin and high <= end for begin, end in tensors)
        if is_inside and at >= 0 and high <= int(self.ends[at]):
            return at
        which = np.searchsorted(self.begins, address, "right").astype(np.int64) - 1
        outside = (which < 0) | (address + np.uint64(size) > self.ends[which])
        if tensors is not None:
            outside |= ~np.any(
                [(address >= begin) & (address + np.uint64(size) <= end) for begin, end in tensors],
                axis=0,
            )
        return np.where(outside, -1, which)

    def _tensors(self, origins: Origins) -> list[Extent] | None:
        """Return the extents that addresses of some origins may reach; None is all memory."""
        if origins not in self.reach:
            known = [self.extents[name] for name in sorted(origins) if name in self.extents]
            self.reach[origins] = known if known and ANYWHERE not in origins else None
        return self.reach[origins]

    def unwritten(self, place: Any, words: list[Any], width: int) -> int:
        """Count the loaded words that hold what fresh memory holds; of short ones all 4 bytes."""
        if width < 4:
            words = [
                self.views[4][distinct(np.sort(place + width * i >> 2))] for i in range(len(words))
            ]
        pattern = np.uint64(int(SENTINEL) << 32 | int(SENTINEL)) if width == 8 else SENTINEL
        return sum(int((word == pattern).sum()) for word in words)

    def history(self, number: int) -> History:
        one = self.allocations[number]
        if one.history is None:
            one.history = History(one.end - one.begin, self.publications)
        return one.history
