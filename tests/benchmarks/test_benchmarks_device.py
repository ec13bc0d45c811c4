"""The device's harness and contests, on the host: small shapes, and a pretended device."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import device_contest, timing
from benchmarks.contest import OURS, Contender
from benchmarks.goals import goals, lines
from benchmarks.kernels import (
    build_job,
    gae_job,
    returns_job,
)
from benchmarks.packing import bench_pack_gpu
from benchmarks.promises import PACK_ONLY
from benchmarks.tables import render
from benchmarks.workloads import WORKLOADS, conversations
from tests.benchmarks.contest_cases import SMALL, contest, results_of, says


def test_a_wrong_result_on_the_device_is_not_measured(monkeypatch):
    monkeypatch.setattr(device_contest, "measure", lambda *_: {"cold_ms": 2.0, "wall_ms": 9.0})
    entrants = [Contender(OURS, says("right"), "all"), Contender("liar", says("wrong"), "all")]
    ours, liar, _ = device_contest.hold_on_device(contest(), entrants, (500, 500), "cpu")["entries"]
    assert (ours["best_ms"], liar["best_ms"]) == (2.0, None)
    assert "cold_ms" not in liar
    entrants = [Contender(OURS, says("right"), "all", on_host=True)]
    record = device_contest.hold_on_device(contest(), entrants, (500, 500), "cpu")
    assert record["entries"][0]["best_ms"] == 9.0


def test_a_rival_that_fails_while_it_is_measured_gets_a_note(monkeypatch):
    def measure(contender, device):
        if contender.name == "rival":
            raise RuntimeError("CUDA out of memory. Tried to allocate\nmore")
        return {"wall_ms": 1.0}

    monkeypatch.setattr(device_contest, "measure", measure)
    entrants = [Contender(OURS, says("right"), "all"), Contender("rival", says("right"), "all")]
    record = device_contest.hold_on_device(contest(), entrants, (500, 500), "cpu")
    ours, rival, limit = record["entries"]
    assert rival["note"] == "failed: CUDA out of memory. Tried to allocate"
    assert rival["best_ms"] is None
    assert "wall_ms" not in rival
    assert ours["best_ms"] == limit["best_ms"] == 1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_bytes_of_build_are_the_words_it_reads_once_and_what_it_writes(workload):
    inputs = build_job.build_inputs(conversations(workload, SMALL))
    begins, ends = build_job.stretches_read(inputs.runs)
    read = np.zeros(len(inputs.words), bool)
    for begin, end in zip(begins, ends, strict=True):
        read[begin:end] = True
    distinct = build_job.distinct_words(inputs.runs, len(inputs.words))
    assert distinct == read.sum() == len(inputs.words), "a buffer holds nothing that is not read"
    generated = int(build_job.build_reference(*inputs).loss_mask.sum())
    counted = inputs.num_tokens + generated
    if workload.startswith("multi-turn"):
        assert distinct < counted, "what turns repeat is read again, but not from memory"
    else:
        assert distinct == counted
    tables = inputs.runs.nbytes + inputs.turn_returns.nbytes
    assert build_job.moved_bytes(inputs) == (4 * distinct + tables, 38 * inputs.num_tokens)


class PretendedDevice:
    """Stands in for torch.cuda: notes what is asked of it, and its clock counts the calls."""

    def __init__(self, patch, captures=True):
        self.calls = []
        self.now = 0.0
        self.captures = captures
        stream = SimpleNamespace(wait_stream=lambda other: None)
        replaced = {
            "Event": lambda enable_timing: self.event(),
            "synchronize": lambda: self.calls.append("wait"),
            "_sleep": lambda cycles: self.calls.append("busy"),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.calls.append("replay")),
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda side: nullcontext(),
            "graph": lambda graph: self.capture(),
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

    @contextmanager
    def capture(self):
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield


def test_a_device_is_measured_every_way(monkeypatch):
    device = PretendedDevice(monkeypatch)
    counts = {"launches": 2, "copies": 1, "waits": 0}
    monkeypatch.setattr(timing, "launches", lambda work: work() and counts)
    ran = Contender(OURS, lambda: device.calls.append("work") or "done", "all")
    found = timing.measure(ran, "cuda")
    assert found["cold_ms"] == found["warm_ms"] == found["graph_ms"] == 1
    assert found["graph_note"] == ""
    assert found["peak_mib"] == 2
    assert found["wall_ms"] >= found["enqueue_ms"] > 0
    assert {name: found[name] for name in counts} == counts
    timed = "busy event work event"
    assert f"wait {timed}" in " ".join(device.calls), "work is enqueued while the device is busy"
    assert f"wait flush {timed}" in " ".join(device.calls), "also with a cold cache"
    assert "busy event replay event" in " ".join(device.calls)
    few = timing.brief(ran.work, "cuda")
    assert (few["cold_ms"], few["peak_mib"], few["launches"]) == (1, 2, 2)


@pytest.mark.parametrize(
    ("captures", "waits", "on_host", "note"),
    [
        (False, 0, False, "operation not permitted when stream is capturing"),
        (True, 3, False, "waits for the device 3 times"),
        (True, 0, True, "part of the work is the host's"),
    ],
)
def test_what_no_graph_can_replay_is_not_replayed(monkeypatch, captures, waits, on_host, note):
    device = PretendedDevice(monkeypatch, captures)
    counts = {"launches": 2, "copies": 1, "waits": waits}
    monkeypatch.setattr(timing, "launches", lambda work: counts)
    found = timing.measure(Contender(OURS, says("done"), "all", on_host=on_host), "cuda")
    assert (found["graph_ms"], found["graph_note"]) == (None, note)
    assert "replay" not in device.calls


def test_launches_of_a_rival_that_takes_long_are_not_counted(monkeypatch):
    PretendedDevice(monkeypatch)
    monkeypatch.setattr(timing, "COUNTED_BELOW", 0.0)
    counts = {"launches": 2, "copies": 1, "waits": 0}
    monkeypatch.setattr(timing, "launches", lambda work: counts)
    found = timing.measure(Contender("rival", says("done"), "all"), "cuda")
    assert found["launches"] is found["waits"] is found["graph_ms"] is None
    assert timing.measure(Contender(OURS, says("done"), "all"), "cuda")["launches"] == 2


def test_a_rival_that_takes_long_runs_once(monkeypatch):
    device = PretendedDevice(monkeypatch)
    monkeypatch.setattr(timing, "SLOW_S", 0.0)
    monkeypatch.setattr(timing, "launches", lambda work: {"launches": 1, "copies": 0, "waits": 0})
    for name, measured in (("rival", {"wall_ms"}), (OURS, {"wall_ms", "cold_ms", "launches"})):
        device.calls.clear()
        ran = Contender(name, lambda: device.calls.append("work"), "all")
        assert measured <= timing.measure(ran, "cuda").keys()
        assert (device.calls.count("work") == 1) == (name == "rival")


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


@pytest.mark.parametrize("mix", [(1, 1), (1, 6), (3, 2), None])
def test_the_limit_moves_as_many_bytes_as_it_says(mix):
    if mix is None:
        written, (copy, check) = 1600, timing.sending(1600, "cpu")
    else:
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


# --- the goals


def packed_on_a_device(**changed):
    ours = {"contender": PACK_ONLY, "enqueue_ms": 0.07, "wall_ms": 1.2, "launches": 2, "copies": 1}
    copy = {"contender": device_contest.SENT, "warm_ms": 1.0}
    record = {"job": bench_pack_gpu.JOB, "workload": "A: a"}
    return record | {"entries": [ours | {"waits": 0} | changed, copy]}


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, [True, True, True]),
        ({"enqueue_ms": 0.08}, [False, True, True]),
        ({"copies": 2}, [True, False, True]),
        ({"launches": 4}, [True, False, True]),
        ({"waits": 1}, [True, False, True]),
        ({"wall_ms": 1.26}, [True, True, False]),
        ({"launches": None}, [True, None, True]),
    ],
)
def test_a_goal_of_packing_is_met_or_not(changed, met):
    assert [goal.met for goal in goals([packed_on_a_device(**changed)])] == met


def test_a_goal_of_build_is_a_share_of_the_copy():
    def built(workload, share):
        entries = [{"contender": OURS, "of_copy": share}]
        return {"job": "build", "workload": workload, "entries": entries}

    records = [built("A: a", 0.84), built("B: b", 0.76), built("C: c", 0.4), built("D: d", 0.1)]
    assert [goal.met for goal in goals(records)] == [False, True, False]
    assert lines(records)[0] == (
        "- not met: build at 85% of a copy of as many bytes or more, A: 84%"
    )


def test_goals_are_printed_with_the_tables_of_a_device():
    record = packed_on_a_device() | {"tokens": 10, "device": "cuda"}
    for entry in record["entries"]:
        entry |= {"wrote": "all", "best_ms": 1.0, "median_ms": 1.0, "note": "", "cold_ms": 0.01}
    record["entries"][1]["of_copy"] = 1.0
    text = render(results_of(record, measured="gpu"))
    assert "- met: trajpack, pack only, one copy, 3 launches or fewer, no wait, A: a" in text
    assert "100%*" in text, "so short that the launch is measured"
    assert "some GPU, CUDA 13.0; " in text


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
