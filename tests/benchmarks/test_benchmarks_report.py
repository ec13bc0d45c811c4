"""The report: documents that are what the results say, and results that are whole."""

import json
import math
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import conftest, device_report, machine, plots, report
from benchmarks.contest import OURS, Contest, Entry, as_record
from benchmarks.promises import EXCEPTIONS, PROMISES, broken
from benchmarks.reasons import TRUSTS, reason
from benchmarks.tables import render, winners
from tests.benchmarks.contest_cases import results_of

ROOT = Path(__file__).parents[2]


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


def test_committed_results_say_where_they_come_from():
    for results in report.load():
        assert results["hardware"]["processor"]
        assert results["versions"]["torch"]
        assert results["commit"] not in ("", "unknown")
        assert "pytest benchmarks" in results["command"]
        for record in results["contests"]:
            for entry in record["entries"]:
                assert entry["best_ms"] is None or math.isfinite(entry["best_ms"])


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


def test_no_name_of_the_machine_is_written(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "name-of-the-machine")
    assert platform.node() not in json.dumps(machine.describe("command"))


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
