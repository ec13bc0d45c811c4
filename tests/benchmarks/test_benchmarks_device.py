"""The device's harness and contests, on the host: small shapes, and a pretended device."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import timing
from benchmarks.kernels import gae_job, returns_job


class PretendedDevice:
    """Stands in for torch.cuda: notes what is asked of it, and its clock counts the calls."""

    def __init__(self, patch):
        self.calls = []
        self.now = 0.0
        replaced = {
            "Event": lambda enable_timing: self.event(),
            "synchronize": lambda: self.calls.append("wait"),
            "_sleep": lambda cycles: self.calls.append("busy"),
            "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 2**20,
            "max_memory_allocated": lambda: 3 * 2**20,
        }
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value, raising=False)
        scratch = SimpleNamespace(sum=lambda: self.calls.append("flush"))
        patch.setattr(timing, "_SCRATCH", [scratch])

    def event(self):
        event = SimpleNamespace(at=None, synchronize=lambda: None)

        def record():
            self.now += 1
            event.at = self.now
            self.calls.append("event")

        event.record, event.elapsed_time = record, lambda end: end.at - event.at
        return event


def test_a_device_is_measured_with_a_cold_cache_while_it_is_busy(monkeypatch):
    device = PretendedDevice(monkeypatch)
    counts = {"launches": 2, "copies": 1, "waits": 0}
    monkeypatch.setattr(timing, "launches", lambda work: work() and counts)
    found = timing.brief(lambda: device.calls.append("work") or "done", "cuda")
    assert (found["cold_ms"], found["peak_mib"]) == (1, 2)
    assert found["wall_ms"] >= found["host_ms"] > 0
    assert {name: found[name] for name in counts} == counts
    assert "wait flush busy event work event" in " ".join(device.calls)
    assert timing.cold_ms(lambda: device.calls.append("work"), "cuda") == 1


def test_kernels_that_take_longest_together_are_kept(monkeypatch):
    monkeypatch.setattr(timing, "MOST_KERNELS", 2)
    timed = [("build_kernel", 3.0), ("scan_kernel", 2.5), ("fill", 4.0), ("scan_kernel", 2.5)]
    assert timing.longest(timed) == {"scan_kernel": 5.0, "fill": 4.0}


def test_launches_copies_and_waits_are_counted_by_name():
    on_device = ["build_kernel", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "sum_kernel"]
    on_host = ["cuLaunchKernelEx", "cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::add"]
    events = [(name, name in on_device) for name in on_device + on_host]
    assert timing.count(events) == {"launches": 2, "copies": 1, "waits": 1}
    unseen = {"launches": None, "copies": None, "waits": None}
    assert timing.count([("cuLaunchKernelEx", False)]) == unseen


@pytest.mark.parametrize(
    ("moved", "mix"),
    [((4, 4), (1, 1)), ((6, 38), (1, 6)), ((9, 4), (7, 3)), ((4, 0), (8, 1)), ((0, 5), (1, 8))],
)
def test_a_copy_has_about_the_proportion_that_is_asked_for(moved, mix):
    assert timing.mix_of(*moved) == mix


@pytest.mark.parametrize("mix", [(1, 1), (1, 6), (3, 2)])
def test_the_limit_moves_as_many_bytes_as_it_says(mix):
    read, written = (8 * 60 * rows for rows in mix)
    copy, check = timing.copy_of(read, written)
    result = copy()
    assert result.nbytes == written
    check(result)
    result[-1:] += 1
    with pytest.raises(AssertionError):
        check(result)


@pytest.mark.usefixtures("executor")
def test_the_kernel_that_is_the_limit_writes_the_sum_to_all_rows():
    from benchmarks.kernels.repeated_copy import BLOCK, copy_to_all

    source = torch.arange(2 * 3 * BLOCK).view(2, -1)
    target = copy_to_all(source, torch.zeros(6, 3 * BLOCK, dtype=torch.int64))
    assert (target == source.sum(0)).all()


@pytest.mark.parametrize(("job", "op"), [(returns_job, "discounted_returns"), (gae_job, "gae")])
def test_scans_are_given_the_longest_sequence(job, op, monkeypatch):
    """So that two jobs over the same sequences measure the same regime."""
    given = []
    real = getattr(job, op)

    def noted(*inputs, max_seqlen=None, **options):
        given.append(max_seqlen)
        return real(*inputs, max_seqlen=max_seqlen, **options)

    monkeypatch.setattr(job, op, noted)
    _, (ours, *_) = job.contest("some", np.array([3, 70, 5]))
    ours.check(ours.work())
    assert given == [70]
