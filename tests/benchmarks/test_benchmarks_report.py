"""The report: documents that are what the results say, and results that are whole."""

import json
import math
import platform
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import conftest, device_report, machine, plots, report
from benchmarks.contest import OURS, Contest, Entry, as_record
from benchmarks.promises import EXCEPTIONS, LOGPROBS, OVER_COLUMNS, PRODUCTS, PROMISES, broken
from benchmarks.reasons import PER_CALL, PER_TURN, TRUSTS, reason
from benchmarks.tables import SIZES, provenance, render, winners
from tests.benchmarks.contest_cases import results_of

ROOT = Path(__file__).parents[2]
COPY = "copy of as many bytes"


def record_of(ours_ms, rival_ms, rival="numpy.concatenate per field", workload="A: a", job="job"):
    """Return a record of rounds that took so many milliseconds."""
    given = Contest(job, workload, 10**6, lambda result: None)
    ours, other = ([1e-3 * took for took in rounds] for rounds in (ours_ms, rival_ms))
    entries = [Entry(OURS, "all", True, "", ours), Entry(rival, "all", True, "", other)]
    return as_record(given, entries)


def test_a_rival_that_wins_is_bold_and_the_reason_is_said():
    table = render(results_of(record_of([10.0], [5.0])))
    assert "**5 / 5 (2x faster)**" in table
    assert f"- Faster than ours: numpy.concatenate per field on A. Because {TRUSTS}." in table
    table = render(results_of(record_of([5.0, 6.0, 7.0], [10.0, 10.0, 20.0])))
    assert "5 / 6" in table
    assert "10 / 10 (2x slower)" in table
    assert "**10" not in table
    assert "Faster" not in table


def test_nobody_wins_where_best_and_median_disagree():
    record = record_of([10.0, 10.0, 10.0], [9.0, 11.0, 12.0])
    assert winners([record]) == []
    assert "9 / 11 (even)" in render(results_of(record))


def test_reasons_are_those_of_the_workload():
    name = "numpy.concatenate per field"
    assert reason(name, "pack, from arrays", "A: a", 10**7) == TRUSTS
    assert reason(name, "pack, from arrays", "C: c", 10**7) == PER_TURN
    assert reason(name, SIZES, "1,024", 1024) == PER_CALL
    assert reason("nobody", SIZES, "1,024", 1024) == ""


# --- promises


def promise_of(times):
    promise = PROMISES[1]
    record = record_of([1.0], [times], promise.slow, job=promise.job)
    return record | {"job": promise.job}


def test_a_promise_that_is_not_kept_is_named():
    (three, whole) = broken([promise_of(19.0)])
    assert "not measured, promised 20" in three
    assert "the whole job against Python lists, arrays in: 19.0 times, promised 20" in whole
    assert len(broken([promise_of(21.0)])) == 1


def test_an_exception_is_a_promise_too():
    (job, fast, workload), (times, why) = list(EXCEPTIONS.items())[1]
    assert fast == OURS
    assert why
    record = promise_of(times + 0.1) | {"workload": workload, "job": job}
    assert not [said for said in broken([record]) if "the whole job" in said]
    record = promise_of(times - 0.1) | {"workload": workload, "job": job}
    assert [said for said in broken([record]) if "the whole job" in said]


def test_committed_results_of_the_host_keep_the_promises():
    (host,) = [one for one in report.load() if one["measured"] == "cpu"]
    assert broken(host["contests"]) == []


def test_the_summary_says_what_is_promised_and_where_others_are_faster():
    kept = promise_of(30.0)
    slower = record_of([10.0], [5.0], job="pack, from arrays", workload="B: b")
    said = report.in_short(results_of(kept, slower))
    assert "**30 to 30 times faster**: the whole job against Python lists, arrays in" in said
    assert "(the benchmark fails below 20)" in said
    assert "**Up to 2 times slower** end to end" in said
    assert "`numpy.concatenate per field` on B (arrays)" in said


# --- the committed results


def test_every_rival_that_wins_in_the_committed_results_has_a_reason():
    for results in report.load():
        for name, record in winners(results["contests"]):
            assert reason(name, record["job"], record["workload"], record["tokens"]), name


def test_the_limit_is_below_all_others_and_grows_with_size():
    for results in report.load():
        if results["measured"] == "gpu":
            continue
        limits = []
        for record in results["contests"]:
            if record["job"] == SIZES:
                best = {entry["contender"]: entry["best_ms"] for entry in record["entries"]}
                limits.append(best.pop(COPY))
                assert limits[-1] <= 1.1 * min(took for took in best.values() if took)
        assert all(later > 0.9 * earlier for earlier, later in pairwise(limits))


def test_committed_results_say_where_they_come_from():
    for results in report.load():
        assert results["hardware"]["processor"]
        assert results["versions"]["torch"]
        assert results["commit"] not in ("", "unknown")
        assert "pytest benchmarks" in results["command"] or "make hardware" in results["command"]
        for record in results["contests"]:
            for entry in record["entries"]:
                assert entry["best_ms"] is None or math.isfinite(entry["best_ms"])


def test_what_differs_by_workload_is_shown_for_each():
    first, second = (record_of([1.0], [2.0], workload=name) for name in "ab")
    second["entries"][0]["wrote"] = "some"
    assert "| all / some |" in render(results_of(first, second))


def test_the_documents_are_what_the_committed_results_say(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_a_document_that_drifted_is_named(tmp_path, monkeypatch, capsys):
    drifted = tmp_path / "README.md"
    drifted.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "README", drifted)
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "all.md")
    monkeypatch.setattr(plots, "write_png", lambda results, path: None)
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
    record = record_of([1.0], [2.0]) | {"job": SIZES, "tokens": 1024}
    record["entries"][1]["best_ms"] = None
    results = results_of(record)
    assert plots.series(results) == {OURS: ([1024], [1.0])}
    pytest.importorskip("matplotlib")
    plots.write_png(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_no_name_of_the_machine_is_written(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "name-of-the-machine")
    assert platform.node() not in json.dumps(machine.describe("command"))


@pytest.mark.parametrize("measured", ["cpu", "gpu"])
def test_the_processor_is_named_and_a_gpu_only_where_it_was_measured(measured):
    results = results_of() | {"measured": measured}
    results["hardware"] = results["hardware"] | {"gpu": "some GPU", "cuda": "13.0"}
    said = provenance(results)
    assert results["hardware"]["processor"] in said
    assert ("some GPU" in said) == (measured == "gpu")
    assert report._plot(results) == f"sizes_{measured}.png"


# --- the parts of `make hardware`


def measured_on_a_device(ours, rivals, job="build", workload="A: a"):
    """Return a record of cold and wall milliseconds; a rival of one number has wall time alone."""

    def entry(name, cold, wall):
        measured = {"wall_ms": wall} | ({} if cold is None else {"cold_ms": cold})
        best = {"best_ms": cold or wall, "median_ms": cold or wall}
        return {"contender": name, "wrote": "all", "note": "", "rounds": 1} | best | measured

    entries = [entry(OURS, *ours) | {"of_copy": 0.5}]
    entries += [entry(name, *times) for name, times in rivals.items()]
    entries.append(entry(COPY, 0.5, 0.5) | {"of_copy": 1.0})
    return {
        "job": job, "workload": workload, "tokens": 10, "device": "cuda", "written": 0,
        "entries": entries,
    }  # fmt: skip


def write_parts(folder, **parts):
    """Write what `make hardware` writes, of parts with their changes to the record of a part."""
    said = results_of(measured="gpu") | {"command": "make hardware"}
    ended = [{"part": "sync", "outcome": "stopped after 1 s", "seconds": 1.0, "commit": "older"}]
    for name, changed in parts.items():
        ended.append({"part": name, "outcome": "passed", "seconds": 2.0, "commit": "newer"})
        target = folder / "hardware" / name / "gpu.json"
        target.parent.mkdir(parents=True)
        record = measured_on_a_device((2.0, 9.0), {"torch": (4.0, 3.0)}, job=name)
        target.write_text(json.dumps(said | {"contests": [record], "commit": "newer"} | changed))
    (folder / "hardware.json").write_text(json.dumps(said | {"parts": ended}))


def test_the_parts_of_a_device_are_one_set_of_results(tmp_path):
    write_parts(tmp_path, build={"commit": "older"}, scans={}, sums={"versions": {"torch": "1.0"}})
    (results,) = report.load(tmp_path)
    assert [one["job"] for one in results["contests"]] == ["build", "scans", "sums"]
    assert "commit older (build), newer (scans, sums); `make hardware`" in provenance(results)
    others = [line for line in render(results).splitlines() if "torch 1.0" in line]
    assert len(others) == 1, "what ran with other versions says so"
    (tmp_path / "gpu.json").write_text(json.dumps(results_of(measured="gpu")))
    assert report.load(tmp_path)[0]["contests"] == [], "one whole run comes before parts"


def test_how_each_part_ended_is_said(tmp_path):
    write_parts(tmp_path, build={})
    rows = [{"outcome": "passed"}, {"outcome": "failed: no"}, {"outcome": "passed"}]
    (tmp_path / "hardware" / "sync.json").write_text(json.dumps({"rows": rows}))
    table = device_report.outcomes(report.load(tmp_path)[0], tmp_path)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert ["sync", "stopped after 1 s", "1.0", "2", "older"] in cells
    assert ["build", "passed", "2.0", "-", "newer"] in cells


def test_rows_of_a_call_are_a_table_of_each_item(tmp_path):
    rows = [
        {"item": "scans", "workload": "A", "cold_ms": 0.1, "kernels_us": {"scan": 1}, "at_s": 1},
        {"item": "scans", "workload": "B", "again_ms": [0.2, 0.3]},
        {"item": "step", "error": "no"},
    ]
    ended = [{"item": "scans", "outcome": "passed", "seconds": 2.0}]
    said = results_of(measured="gpu") | {"call": 1, "items": ended, "rows": rows}
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "call1.json").write_text(json.dumps(said))
    lines = device_report.of_calls(tmp_path).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert ["scans", "passed", "2.0"] in cells
    assert ["workload", "cold_ms", "again_ms"] in cells
    assert ["B", "-", "[0.2, 0.3]"] in cells
    assert "kernels_us" not in str(lines)


def test_a_device_is_summarised_by_its_fastest_rivals():
    records = [
        measured_on_a_device((2.0, 9.0), {"slow": (8.0, 8.0), "fast": (3.0, 9.9)}),
        measured_on_a_device((2.0, 5.0), {"slow": (None, 500.0)}, workload="B: b"),
        measured_on_a_device((2.0, 5.0), {OVER_COLUMNS: (20.0, 30.0)}, job=PROMISES[3].job),
        measured_on_a_device((2.0, 5.0), {"rival": (1.0, 5.0)}, job="sums"),
        measured_on_a_device((2.0, 5.0), {"rival": (4.0, 5.0)}, job="sums", workload="B: b"),
        measured_on_a_device((4.0, 5.0), {"dense": (2.0, 6.0), PRODUCTS: (1.0, 1.0)}, job=LOGPROBS),
        measured_on_a_device((1.0, 6.0), {"by hand": (2.0, 4.0)}, job="pack") | {"sent": True},
    ]
    results = results_of(*records, measured="gpu")
    fast, slow = device_report.in_short(results).splitlines()
    assert "build 1.5 to 100 (50%); gae of tokens 10 (50%); gae of tokens, against the" in fast
    assert slow.endswith(
        f": sums 2 times (`rival` on A); {LOGPROBS} 2 times (`dense`); pack 1.5 times (`by hand`)."
    )
    rows = [line.split("|")[1:-1] for line in device_report.table(results).splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert cells["build"] == ["50%", "1.5 to 100", "0.89 to 100"]
    assert cells[LOGPROBS] == ["-", "0.5", "1.2"]


# --- results that are whole


def run_of(**changed):
    every = set((ROOT / "benchmarks").glob("*/bench_*.py"))
    settings = {"args": ["benchmarks"], "keyword": "", "collected": every} | changed
    return SimpleNamespace(
        args=settings["args"],
        getoption=lambda name: settings[name],
        stash={conftest.COLLECTED: settings["collected"]},
    )


def test_a_run_of_everything_that_passed_is_whole():
    for measured in ("cpu", "gpu"):
        assert conftest.part_of(run_of(), 0, measured) == ""


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, 1, "not everything passed"),
        ({"keyword": "bench_pad"}, 0, "only some benchmarks were chosen"),
        ({"args": ["benchmarks/a.py::bench_b"]}, 0, "only some benchmarks were chosen"),
        ({"collected": set()}, 0, "bench_pack.py, "),
    ],
)
def test_committed_results_stay_where_a_run_is_not_whole(changed, status, said):
    assert said in conftest.part_of(run_of(**changed), status, "cpu")


def test_contests_of_a_run_of_a_part_replace_those_of_their_jobs_and_say_where_they_come_from(
    tmp_path,
):
    whole = results_of(record_of([9.0], [9.0], job="kept"), record_of([8.0], [8.0], job="again"))
    (tmp_path / "cpu.json").write_text(json.dumps(whole | {"commit": "older"}))
    part = results_of(record_of([7.0], [7.0], job="again")) | {"commit": "newer"}
    found = conftest.updated(tmp_path, part)
    assert [one["job"] for one in found["contests"]] == ["kept", "again"]
    assert [one["entries"][0]["best_ms"] for one in found["contests"]] == [9.0, 7.0]
    lines = [line for line in render(found).splitlines() if "commit" in line or "**" in line]
    assert ["older" in lines[0], lines[1], "newer" in lines[2], lines[3]] == [
        True, "**kept**", True, "**again**",
    ]  # fmt: skip


def test_facts_of_workloads_are_rows_of_the_table():
    one, other = record_of([1.0], [2.0]), record_of([1.0], [2.0], workload="B: b")
    table = render(results_of(one | {"facts": {"ratio": "6.0"}}, other | {"facts": {"bytes": "7"}}))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert ["ratio", "6.0", "-", ""] in rows
    assert ["bytes", "-", "7", ""] in rows


def test_pytest_benchmark_is_told_the_rounds_of_the_contest():
    moments = []

    class Pretended:
        def __init__(self):
            self.extra_info = {}

        def pedantic(self, work, rounds):
            for _ in range(rounds):
                begin = self._timer()
                assert work() is None
                moments.append(self._timer() - begin)

    shown = Pretended()
    conftest._show(shown, Contest("job", "A", 7, print), [0.5, 0.25])
    assert moments == [0.5, 0.25]
    assert shown.extra_info == {"tokens": 7}
