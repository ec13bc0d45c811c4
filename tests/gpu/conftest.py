"""Helpers of the tests on real hardware: work without a wait, in a graph, under the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

Result = TypeVar("Result")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every synchronisation of the host with the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run ``work`` once, which compiles, then capture it in a graph; return its result there."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Replay a graph and wait for its end."""
    graph.replay()
    torch.cuda.synchronize()


def device_events(work: Callable[[], object]) -> list[str]:
    """Return the names of the kernels and copies that ``work`` asks for; skip if none are seen."""
    work()  # compiles
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == on_device]
    if not names:
        pytest.skip("the profiler sees no device")
    return names
