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
from benchmarks.promises import EXCEPTIONS, PROMISES, broken
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
    (host,) = report.load()
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
        assert "pytest benchmarks" in results["command"]
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
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"{report.BEGIN}\n{report.END}")
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


# --- the calls of `make hardware`


def write_call(folder, number, *rows):
    ended = [{"item": "scans", "outcome": "passed", "seconds": 2.0}]
    said = results_of(measured="gpu") | {"call": number, "items": ended, "rows": rows}
    (folder / "hardware").mkdir(exist_ok=True)
    (folder / "hardware" / f"call{number}.json").write_text(json.dumps(said))


def cells_of(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def scanned(took_ms, **more):
    return {"item": "scans", "workload": "A: a", "cold_ms": took_ms, "masked": False} | more


def test_rows_of_a_call_are_a_table_of_each_item(tmp_path):
    named = {"kernels_us": {"scan": 1}, "at_s": 1}
    write_call(
        tmp_path, 1, scanned(0.1, **named), scanned(0.2, again_ms=[0.2, 0.3]),
        {"item": "step", "error": "no"},
    )  # fmt: skip
    text = device_report.raw(tmp_path)
    cells = cells_of(text)
    assert ["scans", "passed", "2.0"] in cells
    assert ["A: a", "0.2", "False", "[0.2, 0.3]"] in cells
    assert "kernels_us" not in text


def test_the_page_shows_an_item_as_of_the_last_call_that_has_it(tmp_path):
    copy = {"item": "scans", "workload": "A: a", "way": "copy", "cold_ms": 0.05}
    write_call(tmp_path, 1, copy, scanned(0.1), scanned(0.3, of="base"))
    assert ["A", "50", "100", "300", "-", "-"] in cells_of(device_report.page(tmp_path))
    assert "100.0 µs on A (a copy 50.0)" in device_report.in_short(tmp_path)
    write_call(tmp_path, 2, {"item": "scans", "error": "no"})
    assert ["A", "50", "100", "300", "-", "-"] in cells_of(device_report.page(tmp_path))
    write_call(tmp_path, 3, copy, scanned(0.08))
    assert ["A", "50", "80", "-", "-", "-"] in cells_of(device_report.page(tmp_path))
    assert "some GPU" in device_report.page(tmp_path)


def test_the_fastest_other_way_stands_beside_ours(tmp_path):
    def row(way, **took):
        return {"item": "rivals", "job": "gae", "workload": "A: a", "way": way} | took

    write_call(
        tmp_path, 1, row("trajpack", cold_ms=0.1, wall_ms=9.0), row("slow", wall_ms=500.0),
        row("fast", cold_ms=0.05, wall_ms=1.0), row("absent", missing="not installed"),
    )  # fmt: skip
    assert ["gae", "A", "100", "50", "fast", "0.5"] in cells_of(device_report.page(tmp_path))


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
    assert conftest.part_of(run_of(), 0) == ""


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
    assert said in conftest.part_of(run_of(**changed), status)


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
