"""The device's harness and contests, on the host: small shapes, and a pretended device."""

from types import SimpleNamespace

import torch

from benchmarks import timing


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


def test_launches_copies_and_waits_are_counted_by_name():
    on_device = ["build_kernel", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "sum_kernel"]
    on_host = ["cuLaunchKernelEx", "cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::add"]
    events = [(name, name in on_device) for name in on_device + on_host]
    assert timing.count(events) == {"launches": 2, "copies": 1, "waits": 1}
    unseen = {"launches": None, "copies": None, "waits": None}
    assert timing.count([("cuLaunchKernelEx", False)]) == unseen
