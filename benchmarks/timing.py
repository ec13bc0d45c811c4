"""How long work takes on a device, measured six ways; and the copy that is the limit.

On a CUDA device: GPU time with a cold and with a warm second-level cache, replay of a captured
graph, wall time, time until the host is free again, and what the profiler counts. On the host,
where all of it is the same, only wall time: so the logic runs anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.contest import Contender
from trajpack.testing import assert_same_bits

FLUSH_BYTES = 2**28
"""Read between runs, to leave nothing of the inputs in the cache: four times an H200's. Lines that
were read are dropped by the timed work; lines that were written, it would have to write back."""
MOST_RUNS = 15
COUNTED_BELOW = 0.05
"""Seconds of a run from which a rival's launches are not counted: there are too many."""
UNKNOWN = {"launches": None, "copies": None, "waits": None}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
Work = Callable[[], Any]


def copy_of(
    num_bytes: int, device: str = "cpu", writes: int = 1
) -> tuple[Work, Callable[[Any], None]]:
    """Return a copy that reads and writes ``num_bytes`` in all, and the check of its result.

    It writes what it reads ``writes`` times, each time to another place. On the host it is one
    thread's, between arrays that were written before.
    """
    count = max(1, num_bytes // (8 * (1 + writes)))
    if device == "cpu":
        given, written = np.arange(count), np.zeros((writes, count), np.int64)

        def copy_on_host() -> torch.Tensor:
            np.copyto(written, given)
            return torch.from_numpy(written)

        return copy_on_host, lambda got: _assert_copies(got, torch.from_numpy(given))
    if writes == 1:
        source = torch.arange(count, device=device)
        target = torch.empty_like(source)[None]
        return lambda: target.copy_(source[None]), lambda got: _assert_copies(got, source)
    from benchmarks.kernels.repeated_copy import BLOCK, copy_to_all  # Triton, if there is a GPU

    source = torch.arange(max(1, round(count / BLOCK)) * BLOCK, device=device)
    target = torch.empty((writes, len(source)), dtype=source.dtype, device=device)
    return lambda: copy_to_all(source, target), lambda got: _assert_copies(got, source)


def _assert_copies(got: torch.Tensor, given: torch.Tensor) -> None:
    for row in got:
        assert_same_bits(row, given)


def sending(num_bytes: int, device: str) -> tuple[Work, Callable[[Any], None]]:
    """Return one copy of ``num_bytes`` from pinned memory to the device, and its check."""
    if device == "cpu":
        copy, check = copy_of(2 * num_bytes, device)
        return lambda: copy()[0], lambda got: check(got[None])
    source = torch.arange(max(1, num_bytes // 4), dtype=torch.int32).pin_memory()
    target = torch.empty_like(source, device=device)
    return (
        lambda: target.copy_(source, non_blocking=True),
        lambda got: assert_same_bits(got.cpu(), source),
    )


def measure(contender: Contender, device: str) -> dict[str, Any]:
    """Return the median milliseconds of each kind, counts, and the most memory it took.

    ``None`` stands where a kind cannot be had; ``graph_note`` then says why.
    """
    work = contender.work
    runs = _Runs(work, contender.release)
    if device == "cpu":
        return {"wall_ms": runs.median(lambda: _enqueue_and_wall(work, lambda: None)[1])}
    both = runs.several(lambda: _enqueue_and_wall(work, torch.cuda.synchronize))
    hidden = _median([enqueued for enqueued, _ in both])
    cold = runs.median(lambda: _gpu(work, hidden, cold=True))
    warm = runs.median(lambda: _gpu(work, hidden, cold=False))
    (peak,) = runs.several(lambda: peak_mib(work), repeats=1)
    counts: dict[str, int | None] = dict(UNKNOWN)
    if contender.is_ours or runs.took < COUNTED_BELOW:
        (counts,) = runs.several(lambda: launches(work), repeats=1)
    if contender.on_host:
        replay_ms, note = None, "part of the work is the host's"
    elif counts["waits"] != 0:
        replay_ms, note = None, f"waits for the device {counts['waits'] or 'perhaps some'} times"
    else:
        replay_ms, note = graph_ms(work)
    return {
        "cold_ms": cold,
        "warm_ms": warm,
        "graph_ms": replay_ms,
        "graph_note": note,
        "wall_ms": _median([wall for _, wall in both]),
        "enqueue_ms": hidden,
        "peak_mib": peak,
        **counts,
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
    """As many runs as fit a second, from 3 to 15, after one that is not counted."""

    def __init__(self, work: Work, release: Callable[[], None] | None) -> None:
        self._release = release
        begin = time.perf_counter()
        work()
        self._released()
        self.took = time.perf_counter() - begin
        self._repeats = max(3, min(MOST_RUNS, int(1 / max(self.took, 1e-9))))

    def several(self, run: Callable[[], Any], repeats: int | None = None) -> list[Any]:
        results = []
        for _ in range(repeats or self._repeats):
            results.append(run())
            self._released()
        return results

    def median(self, run: Callable[[], float]) -> float:
        return _median(self.several(run))

    def _released(self) -> None:
        if self._release:
            self._release()


def _enqueue_and_wall(work: Work, wait: Callable[[], None]) -> tuple[float, float]:
    wait()
    begin = time.perf_counter()
    work()
    enqueued = time.perf_counter()
    wait()
    return 1e3 * (enqueued - begin), 1e3 * (time.perf_counter() - begin)


def _gpu(work: Work, enqueue_ms: float, *, cold: bool) -> float:
    """Time between two events, while the device is kept busy until the host has enqueued all.

    Work that waits for the device is timed with its waiting: it cannot be enqueued ahead.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if cold:
        _flush()
    _keep_busy(1.5 * enqueue_ms + 0.05)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _flush() -> None:
    _scratch().sum()


_SCRATCH: list[torch.Tensor] = []


def _scratch() -> torch.Tensor:
    if not _SCRATCH:
        _SCRATCH.append(torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda"))
    return _SCRATCH[0]


def _keep_busy(milliseconds: float) -> None:
    sleep = getattr(torch.cuda, "_sleep", None)  # cycles; absent in some builds
    if sleep is not None:
        sleep(int(milliseconds * 2e6))  # at 2 GHz or less, so at least as long


def graph_ms(work: Work) -> tuple[float | None, str]:
    """Return the median milliseconds of a replay of the captured work, or None and why not."""
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # allocates and compiles before the capture
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            kept = work()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, str(error).strip().splitlines()[0][:100]
    took = _median([_gpu(graph.replay, 0.05, cold=False) for _ in range(MOST_RUNS)])
    del kept
    return took, ""


def launches(work: Work) -> dict[str, int | None]:
    """Count kernels, copies and host waits of one call, with the profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # the device's part alone: with the host's, an operator for each of a million pieces is kept
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return count((event.name, event.device_type == on_device) for event in profiled.events())


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
