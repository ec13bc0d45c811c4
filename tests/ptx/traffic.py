"""Traffic of memory accesses, counted as a GPU makes them: by warps, in sectors and in passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SECTOR = 32


@dataclass
class Traffic:
    """Sum over the requests of warps to one memory in one direction."""

    requests: int = 0
    """Instructions of a warp in which a thread takes part."""
    sectors: int = 0
    """Distinct pieces of 32 bytes in each request; of shared memory the passes over its banks."""
    ideal: int = 0
    """The fewest that hold the distinct bytes asked for; passes without conflicts."""
    bytes: int = 0
    """Distinct bytes of each request."""

    def add(self, other: Traffic) -> None:
        self.requests += other.requests
        self.sectors += other.sectors
        self.ideal += other.ideal
        self.bytes += other.bytes


def distinct(ascending: Any) -> Any:
    """Return each number once; ``np.unique`` would not make use of the order."""
    return ascending[np.diff(ascending, prepend=ascending[:1] - 1) != 0]


def count_sectors(address: Any, warp: Any, size: int) -> Traffic:
    """Count the requests to global memory; ``size`` bytes for each thread."""
    address = address.astype(np.int64)
    order = np.lexsort((address, warp))
    address, warp = address[order], warp[order]
    is_first = np.r_[True, warp[1:] != warp[:-1]]
    is_new = is_first | np.r_[True, address[1:] != address[:-1]]
    sectors = address // SECTOR
    is_new_sector = is_first | np.r_[True, sectors[1:] != sectors[:-1]]
    begins = np.flatnonzero(is_first)
    touched = np.add.reduceat(is_new_sector.astype(np.int64), begins)
    distinct = np.add.reduceat(is_new.astype(np.int64), begins) * size
    ideal = -(-distinct // SECTOR)
    return Traffic(len(begins), int(touched.sum()), int(ideal.sum()), int(distinct.sum()))


def count_passes(address: Any, thread: Any, size: int) -> Traffic:
    """Count the passes over 32 banks of 4 bytes: half a warp at once for 8 bytes each.

    Threads ascend.
    """
    spread = max(size // 4, 1)
    group = np.repeat(thread // (32 // spread), spread)
    words = (address.astype(np.int64)[:, None] // 4 + np.arange(spread)).reshape(-1)
    keys = distinct(np.sort(group * (1 << 32) + words))
    slots, counts = np.unique((keys >> 32) * 32 + (keys & 31), return_counts=True)
    begins = np.flatnonzero(np.r_[True, slots[1:] // 32 != slots[:-1] // 32])
    worst, total = np.maximum.reduceat(counts, begins), np.add.reduceat(counts, begins)
    requests = len(distinct(thread // 32))
    ideal = -(-total // 32)
    return Traffic(requests, int(worst.sum()), int(ideal.sum()), int(total.sum()) * 4)
