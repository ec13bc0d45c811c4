"""How long work takes on a device; and the copy that is the limit.

On a CUDA device: GPU time with a cold second-level cache, wall time, time until the host is free
again, and what the profiler counts. On the host, where all of it is the same, only wall time: so
the logic runs anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from trajpack.testing import assert_same_bits

FLUSH_BYTES = 2**28
"""Read between runs, to leave nothing of the inputs in the cache: four times an H200's. Lines that
were read are dropped by the timed work; lines that were written, it would have to write back."""
MOST_RUNS = 15
SHARE_S = 0.2
"""Seconds for the runs of each kind."""
UNKNOWN = {"launches": None, "copies": None, "waits": None}
MOST_KERNELS = 8
"""Kernels whose times are kept."""
MOST_NAMED = 60
"""Letters of a kernel's name that are kept."""
MOST_ROWS = 8
"""Rows that a copy reads or writes at most."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
Work = Callable[[], Any]


def mix_of(read: int, written: int) -> tuple[int, int]:
    """Return small numbers in about the proportion of two: `MOST_ROWS` at most, and none is 0."""
    share = Fraction(min(read, written), max(read, written)).limit_denominator(MOST_ROWS)
    share = max(share, Fraction(1, MOST_ROWS))
    few, many = share.numerator, share.denominator
    return (few, many) if read < written else (many, few)


def copy_of(
    read: int, written: int, device: str = "cpu"
) -> tuple[Work, Callable[[torch.Tensor], None]]:
    """Return a copy that reads and writes so many bytes, and the check of its result.

    It reads some rows, and writes their sum to some others, in about the proportion of the two
    (`mix_of`). On the host it is one thread's, between arrays that were written before.
    """
    reads, writes = mix_of(read, written)
    count = max(1, (read + written) // (8 * (reads + writes)))
    if device == "cpu":
        given, copies = np.arange(reads * count).reshape(reads, count), np.zeros((writes, count))
        copies = copies.astype(np.int64)

        def copy_on_host() -> torch.Tensor:
            np.copyto(copies, given if reads == 1 else given.sum(0))
            return torch.from_numpy(copies)

        return copy_on_host, lambda got: _assert_sums(got, torch.from_numpy(given))
    if reads == writes:
        source = torch.arange(count, device=device)[None]
        target = torch.empty_like(source)
        return lambda: target.copy_(source), lambda got: _assert_sums(got, source)
    from benchmarks.kernels.repeated_copy import BLOCK, copy_to_all  # Triton, if there is a GPU

    count = max(1, round(count / BLOCK)) * BLOCK
    source = torch.arange(reads * count, device=device).view(reads, count)
    target = torch.empty((writes, count), dtype=source.dtype, device=device)
    return lambda: copy_to_all(source, target), lambda got: _assert_sums(got, source)


def _assert_sums(got: torch.Tensor, given: torch.Tensor) -> None:
    wanted = given.sum(0)
    for row in got:
        assert_same_bits(row, wanted)


def cold_ms(work: Work, device: str) -> float:
    """Return the median milliseconds of the device with a cold cache; of the host on the host."""
    if device == "cpu":
        return _Runs(work, _nothing).median(lambda: _enqueue_and_wall(work, _nothing)[1])
    runs = _Runs(work, torch.cuda.synchronize)
    hidden = runs.median(lambda: _enqueue_and_wall(work, torch.cuda.synchronize)[0])
    return runs.median(lambda: _gpu(work, hidden))


def brief(work: Work, device: str) -> dict[str, Any]:
    """Return what a call costs in few runs; on the host only wall time."""
    if device == "cpu":
        return {"wall_ms": cold_ms(work, device)}
    runs = _Runs(work, torch.cuda.synchronize)
    both = runs.several(lambda: _enqueue_and_wall(work, torch.cuda.synchronize))
    hidden = _median([enqueued for enqueued, _ in both])
    return {
        "cold_ms": runs.median(lambda: _gpu(work, hidden)),
        "wall_ms": _median([wall for _, wall in both]),
        "host_ms": hidden,
        "peak_mib": peak_mib(work),
        **launches(work),
    }


def peak_mib(work: Work) -> float:
    """Return the most device memory that a call had at a time, its result included, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return float(peak) / 2**20


class _Runs:
    """As many runs as fit `SHARE_S`: 3 to 15, after one not counted."""

    def __init__(self, work: Work, wait: Callable[[], None]) -> None:
        begin = time.perf_counter()
        work()
        wait()
        each = time.perf_counter() - begin
        self._repeats = max(3, min(MOST_RUNS, int(SHARE_S / max(each, 1e-9))))

    def several(self, run: Callable[[], Any]) -> list[Any]:
        return [run() for _ in range(self._repeats)]

    def median(self, run: Callable[[], float]) -> float:
        return _median(self.several(run))


def _enqueue_and_wall(work: Work, wait: Callable[[], None]) -> tuple[float, float]:
    wait()
    begin = time.perf_counter()
    work()
    enqueued = time.perf_counter()
    wait()
    return 1e3 * (enqueued - begin), 1e3 * (time.perf_counter() - begin)


def _gpu(work: Work, enqueue_ms: float) -> float:
    """Time between two events, while the device is kept busy until the host has enqueued all.

    The cache is cold. Work that waits for the device cannot be enqueued ahead, and is timed with
    its waiting.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    _scratch().sum()  # flushes the cache
    _keep_busy(1.5 * enqueue_ms + 0.05)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _nothing() -> None:
    """Wait for nothing."""


_SCRATCH: list[torch.Tensor] = []


def _scratch() -> torch.Tensor:
    if not _SCRATCH:
        _SCRATCH.append(torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda"))
    return _SCRATCH[0]


def _keep_busy(milliseconds: float) -> None:
    sleep = getattr(torch.cuda, "_sleep", None)  # cycles; absent in some builds
    if sleep is not None:
        sleep(int(milliseconds * 2e6))  # at 2 GHz or less, so at least as long


def launches(work: Work) -> dict[str, Any]:
    """Count kernels, copies and host waits of one call, with the profiler, and time kernels."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # the device's part alone: with the host's, an operator for each of a million pieces is kept
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [(event.name, event.device_type == on_device) for event in profiled.events()]
    timed = ((e.name, e.device_time_total) for e in profiled.events() if e.device_type == on_device)
    return count(events) | {"kernels_us": longest(timed)}


def longest(timed: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the microseconds of the kernels that take longest together, by name."""
    found: dict[str, float] = {}
    for name, took in timed:
        found[name[:MOST_NAMED]] = found.get(name[:MOST_NAMED], 0.0) + took
    names = sorted(found, key=lambda name: -found[name])[:MOST_KERNELS]
    return {name: round(found[name], 2) for name in names}


def count(events: Iterable[tuple[str, bool]]) -> dict[str, int | None]:
    """Count launches, copies and waits among names of what ran, each with: on the device?

    A wait for the whole device is none: the measurement itself makes it. Where the profiler saw
    nothing on the device, nothing is known.
    """
    events = list(events)
    if not any(on_device for _, on_device in events):
        return dict(UNKNOWN)
    found = {"launches": 0, "copies": 0, "waits": 0}
    for name, on_device in events:
        if on_device and name.startswith("Memcpy"):
            found["copies"] += 1
        elif on_device and not name.startswith("Memset"):
            found["launches"] += 1
        elif not on_device and name.startswith(WAITS):
            found["waits"] += 1
    return found


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
