"""The benchmarks' own logic: no number without a check, no rival breaks a run, no stale table."""

import json
import math
import platform
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import device_contest, machine, plots, report, rivals, timing
from benchmarks.contest import OURS, Contender, Contest, Entry, as_record, best_of, race
from benchmarks.kernels import bench_kernels_gpu, pad_job, returns_job
from benchmarks.packing import bench_pack, bench_pack_gpu, bench_sizes, bench_trainer_inputs
from benchmarks.packing.whole_job import RIVALS, assert_same_fields, by_lists
from benchmarks.reasons import REASONS
from benchmarks.workloads import (
    MULTI_TURN,
    SEQUENCES,
    WORKLOADS,
    as_lists,
    conversations,
    lengths_a,
    single_turns,
)

ROOT = Path(__file__).parents[1]
SMALL = 0.002
LENGTHS = np.array([3, 1, 8, 5])


def must_be(wanted):
    def check(result):
        assert result == wanted

    return check


def contest(**options):
    return Contest("job", "A: a", 10, must_be("right"), **options)


def says(result):
    return lambda: result


def results_of(*records):
    return machine.describe("command") | {"contests": list(records)}


# --- the contest


def test_a_result_that_was_not_checked_or_failed_its_check_has_no_number():
    entries = race(
        contest(),
        [
            Contender(OURS, says("right"), "all"),
            Contender("liar", says("wrong"), "all"),
            Contender("absent", None, "all", missing="not installed (absent)"),
        ],
    )
    ours, liar, absent = entries
    assert ours.checked
    assert ours.best > 0
    assert (liar.best, liar.seconds) == (None, [])
    assert "wrong result, not timed" in liar.note
    assert (absent.best, absent.note) == (None, "not installed (absent)")
    entries[1].seconds.append(1.0)  # not even if something had timed it
    record = as_record(contest(), entries)
    assert [entry["best_ms"] is None for entry in record["entries"]] == [False, True, True]
    table = report.render(results_of(record))
    row = next(line for line in table.splitlines() if line.startswith("| liar"))
    assert row.split("|")[2].strip() == "-"
    assert "liar: wrong result, not timed: assert 'wrong' == 'right': A." in table
    assert "absent: not installed (absent): A." in table


def test_a_wrong_result_of_ours_fails_the_benchmark():
    with pytest.raises(AssertionError):
        race(contest(), [Contender(f"{OURS}, merged", says("wrong"), "all")])


def test_an_error_of_ours_fails_the_benchmark_and_one_of_a_rival_is_noted():
    def fail():
        raise RuntimeError("no such operator\nat line 1")

    (entry,) = race(contest(), [Contender("rival", fail, "all")])
    assert (entry.best, entry.note) == (None, "failed: no such operator")
    with pytest.raises(RuntimeError, match="no such operator"):
        race(contest(), [Contender(OURS, fail, "all")])


def test_contenders_take_turns_and_each_round_is_released():
    calls = []

    def noting(name):
        return Contender(
            name,
            lambda: calls.append(name) or "right",
            "all",
            release=lambda: calls.append(f"{name} released"),
        )

    race(contest(rounds=2), [noting("a"), noting("b")])
    assert calls == ["a", "a released", "b", "b released"] * 3


def test_a_contender_that_uses_its_share_up_runs_once_and_that_run_counts():
    times = iter([10.0, 0.1, 0.2])
    timed = contest(rounds=1, clock=lambda work: (next(times), work()))
    slow, fast = race(
        timed, [Contender("slow", says("right"), ""), Contender("fast", says("right"), "")]
    )
    assert slow.seconds == [10.0]
    assert fast.seconds == [0.2]  # the run that was checked, 0.1, is a warm-up


def test_best_of_refuses_an_entry_without_a_number():
    with pytest.raises(AssertionError, match="not installed"):
        best_of([Entry("rival", "all", note="not installed")], "rival")


# --- rivals


def test_a_missing_package_is_reported_by_name_and_its_contender_is_never_made():
    def never(module):
        raise AssertionError

    missing = rivals.contender("no_such_package_of_any_kind", "rival", never, "all")
    assert missing.work is None
    assert missing.missing == "not installed (no_such_package_of_any_kind)"


def test_a_package_that_does_not_load_is_reported_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("raise OSError('no such symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    found, why = rivals.find("breaks_on_import")
    assert found is None
    assert why == "does not load here: no such symbol"


# --- the jobs, each contender against the reference


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_way_of_packing_writes_the_same_fields(workload):
    arrays = conversations(workload, SMALL)
    expected = by_lists(arrays)
    for given in (arrays, as_lists(arrays)):
        for way in (*RIVALS.values(), bench_pack.end_to_end(given)):
            got = way(given) if way in RIVALS.values() else way()
            assert_same_fields(got, expected)


@pytest.mark.parametrize("name", by_lists([])._fields)
def test_a_field_that_differs_is_found(name):
    trajectories = conversations(MULTI_TURN, 0.01)
    wrong = by_lists(trajectories)
    getattr(wrong, name)[-1] = getattr(wrong, name)[-1].logical_not() if "mask" in name else 7
    with pytest.raises(AssertionError):
        assert_same_fields(wrong, by_lists(trajectories))


def test_a_zero_of_the_other_sign_is_found():
    trajectories = conversations(MULTI_TURN, 0.01)
    wrong = by_lists(trajectories)
    wrong.rollout_logprobs[0] = -0.0
    with pytest.raises(AssertionError, match="rollout_logprobs"):
        assert_same_fields(wrong, by_lists(trajectories))


@pytest.mark.parametrize("job", [bench_trainer_inputs.FROM_ARRAYS, bench_trainer_inputs.FROM_LISTS])
def test_collators_agree_or_are_missing(job):
    entries = race(*bench_trainer_inputs.contest(job, MULTI_TURN, SMALL))
    assert all(entry.best or "not installed" in entry.note for entry in entries)
    bench_trainer_inputs.inputs.cache_clear()


@pytest.mark.parametrize("make", [returns_job.contest, pad_job.pad_contest, pad_job.unpad_contest])
def test_rivals_of_the_kernels_agree_or_are_missing(make):
    for entry in race(*make("small", LENGTHS)):
        assert entry.best or "not installed" in entry.note or "not load" in entry.note, entry


def test_sizes_have_as_many_tokens_as_they_say():
    for tokens in (1024, 4096):
        held = bench_sizes.sized(tokens)
        assert (
            sum(len(t.turns[0].prompt_ids) + len(t.turns[0].completion_ids) for t in held) == tokens
        )
    entries = race(*bench_sizes.contest(1024, rounds=1))
    assert all(entry.best for entry in entries)


def test_workloads_are_seeded():
    assert lengths_a().tolist() == lengths_a().tolist()
    for workload in (MULTI_TURN, next(iter(SEQUENCES))):
        assert conversations(workload, SMALL) == conversations(workload, SMALL)
    assert single_turns(LENGTHS) != single_turns(LENGTHS, seed=3)


# --- the device's harness, on the host


DEVICE_CONTESTS = {
    "pack": lambda: bench_pack_gpu.contest(
        "pack", MULTI_TURN, conversations(MULTI_TURN, SMALL), bench_pack_gpu.RIVALS, "cpu"
    ),
    "build": lambda: bench_kernels_gpu.build_contest("A", LENGTHS, "cpu"),
    "returns": lambda: bench_kernels_gpu.returns_contest("A", LENGTHS, "cpu"),
    "pad": lambda: bench_kernels_gpu.padding_contest(pad_job.pad_contest, "A", LENGTHS, "cpu"),
    "unpad": lambda: bench_kernels_gpu.padding_contest(pad_job.unpad_contest, "A", LENGTHS, "cpu"),
}


@pytest.mark.parametrize("job", DEVICE_CONTESTS)
def test_contests_of_the_device_check_and_measure(job):
    given = DEVICE_CONTESTS[job]()
    record = device_contest.hold_on_device(*given)
    for entry in record["entries"]:
        assert entry["best_ms"] or "not installed" in entry["note"] or "not load" in entry["note"]
    limit = record["entries"][-1]
    assert limit["contender"] == device_contest.COPY
    assert limit["of_copy"] == 1
    assert "of the copy" in report.render(results_of(record))


def test_a_wrong_result_on_the_device_is_not_measured(monkeypatch):
    monkeypatch.setattr(device_contest, "measure", lambda *_: {"cold_ms": 2.0, "wall_ms": 9.0})
    entrants = [Contender(OURS, says("right"), "all"), Contender("liar", says("wrong"), "all")]
    ours, liar, _ = device_contest.hold_on_device(contest(), entrants, 1000, "cpu")["entries"]
    assert ours["best_ms"] == 2.0
    assert liar["best_ms"] is None
    assert "cold_ms" not in liar
    host_first = [Contender(OURS, says("right"), "all", on_host=True)]
    assert (
        device_contest.hold_on_device(contest(), host_first, 1000, "cpu")["entries"][0]["best_ms"]
        == 9.0
    )


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
        }
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value, raising=False)
        patch.setattr(timing, "_SCRATCH", [torch.ones(4, dtype=torch.uint8)])

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
    assert found["wall_ms"] >= found["enqueue_ms"] > 0
    assert {name: found[name] for name in counts} == counts
    assert timing._SCRATCH[0].sum() == 0, "the cache was not flushed"
    timed = "wait busy event work event"
    assert timed in " ".join(device.calls), "work is enqueued while the device is busy"
    assert "busy event replay event" in " ".join(device.calls)


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


def test_launches_copies_and_waits_are_counted_by_name():
    on_device = ["build_kernel", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "sum_kernel"]
    on_host = ["cuLaunchKernelEx", "cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::add"]
    events = [(name, name in on_device) for name in on_device + on_host]
    assert timing.count(events) == {"launches": 2, "copies": 1, "waits": 1}
    unseen = {"launches": None, "copies": None, "waits": None}
    assert timing.count([("cuLaunchKernelEx", False)]) == unseen


def test_the_limit_moves_as_many_bytes_as_it_says():
    copy, check = timing.copy_of(1600)
    result = copy()
    assert 2 * result.nbytes == 1600
    check(result)
    result[0] += 1
    with pytest.raises(AssertionError):
        check(result)


# --- the report


def record_of(ours_ms, rival_ms, rival="numpy.concatenate per field"):
    entries = [
        Entry(OURS, "all", True, "", [ours_ms / 1e3]),
        Entry(rival, "all", True, "", [rival_ms / 1e3]),
    ]
    return as_record(contest(), entries)


def test_a_rival_that_wins_is_bold_and_the_reason_is_said():
    table = report.render(results_of(record_of(10.0, 5.0)))
    assert "**5 (0.5x)**" in table
    assert (
        "- Faster than ours: numpy.concatenate per field on A. "
        f"Because {REASONS['numpy.concatenate per field']}." in table
    )
    table = report.render(results_of(record_of(5.0, 10.0)))
    assert "10 (2x)" in table
    assert "**10" not in table
    assert "Faster" not in table


def test_every_rival_that_wins_in_the_committed_results_has_a_reason():
    for results in report.load():
        for name, _ in report.winners(results["contests"]):
            assert name in REASONS


def test_committed_results_say_where_they_come_from():
    for results in report.load():
        assert results["hardware"]["processor"]
        assert results["versions"]["torch"]
        assert results["commit"] not in ("", "unknown")
        assert "pytest benchmarks" in results["command"]
        for record in results["contests"]:
            for entry in record["entries"]:
                assert entry["best_ms"] is None or math.isfinite(entry["best_ms"])


def run_report(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.report", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_documents_are_what_the_committed_results_say():
    done = run_report("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_document_that_drifted_is_named(tmp_path, monkeypatch, capsys):
    drifted = tmp_path / "README.md"
    drifted.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "README", drifted)
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "all.md")
    monkeypatch.setattr(plots, "write_png", lambda results, path: None)
    (tmp_path / "jobs.md").write_text("# Jobs\n")
    assert report.main(["--check"]) == 1
    assert "README.md is not what its results say" in capsys.readouterr().out
    assert "old" in drifted.read_text()
    assert report.main([]) == 0
    assert drifted.read_text().startswith("before\n<!-- speed: begin")
    assert drifted.read_text().endswith("<!-- speed: end -->\nafter\n")
    assert report.main(["--check"]) == 0


def test_a_document_without_markers_is_refused(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("no markers")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    with pytest.raises(SystemExit, match="each marker once"):
        report.main([])


def test_the_plot_has_a_line_for_each_contender_that_has_numbers(tmp_path):
    record = record_of(1.0, 2.0) | {"job": report.SIZES, "tokens": 1024}
    record["entries"][1]["best_ms"] = None
    results = results_of(record)
    assert plots.series(results) == {OURS: ([1024], [1.0])}
    pytest.importorskip("matplotlib")
    plots.write_png(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_no_name_of_the_machine_is_written(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "name-of-the-machine")
    assert platform.node() not in json.dumps(machine.describe("command"))
