"""The fixture that runs a contest, and what is printed and written when all have run."""

import json
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.contest import as_record, race
from benchmarks.report import RESULTS
from benchmarks.tables import render

RECORDS = pytest.StashKey()
COLLECTED = pytest.StashKey()
BUILD = machine.ROOT / "build" / "benchmarks"


def pytest_addoption(parser):
    parser.addoption("--results", default="build/benchmarks", help="folder for cpu.json and plots")
    parser.addoption(
        "--update", action="store_true", help="replace contests of committed results by those here"
    )


def pytest_configure(config):
    config.stash[RECORDS] = []
    config.stash[COLLECTED] = set()


def pytest_collection_finish(session):
    session.config.stash[COLLECTED] = {item.path for item in session.items}


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    for name in ("node", "release"):
        machine_info.pop(name, None)
    machine_info.update(machine.describe(_command(config)))


@pytest.fixture
def keep(pytestconfig):
    """Return what keeps the record of a contest, and writes all of them at once to a file."""

    def keep_record(record):
        records = pytestconfig.stash[RECORDS]
        records.append(record)
        folder = Path(pytestconfig.getoption("results"))
        _write(_results(pytestconfig), BUILD if _is_committed(folder) else folder, "_unfinished")

    return keep_record


@pytest.fixture
def hold(request, keep):
    """Run a contest, keep its record, and show ours in pytest-benchmark's table too."""

    def run(contest, contenders):
        entries = race(contest, contenders)
        record = as_record(contest, entries)
        keep(record)
        if request.config.pluginmanager.hasplugin("benchmark"):
            _show(request.getfixturevalue("benchmark"), contest, entries[0].seconds)
        return record

    return run


def _show(benchmark, contest, seconds):
    """Give pytest-benchmark the rounds of the contest: its clock tells them, nothing runs again."""
    benchmark.extra_info.update(tokens=contest.tokens)
    told = iter([moment for took in seconds for moment in (0.0, took)])
    benchmark._timer = lambda: next(told)
    benchmark.pedantic(lambda: None, rounds=len(seconds))


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if not config.stash[RECORDS]:
        return
    results = _results(config)
    folder = Path(config.getoption("results"))
    terminalreporter.write_line("")
    terminalreporter.write(render(results))
    part = part_of(config, exitstatus) if _is_committed(folder) else ""
    if part and config.getoption("update") and not exitstatus:
        results, part = updated(folder, results), ""
    if part:
        terminalreporter.write_line(f"\n{folder} is left as it is: {part}")
        folder = BUILD
    path = _write(results, folder)
    for unfinished in (folder, BUILD):
        (unfinished / "cpu_unfinished.json").unlink(missing_ok=True)
    terminalreporter.write_line(f"\nwritten to {path}")


def part_of(config, exitstatus):
    """Say why this run is not whole, so that committed results stay; nothing if it is."""
    if exitstatus:
        return "not everything passed"
    chosen = [word for word in config.args if "::" in str(word)]
    if config.getoption("keyword") or chosen:
        return "only some benchmarks were chosen"
    every = set((machine.ROOT / "benchmarks").glob("*/bench_*.py"))
    left_out = sorted(path.name for path in every - config.stash[COLLECTED])
    return f"{', '.join(left_out)} did not run" if left_out else ""


def updated(folder, results):
    """Return committed results whose contests of the same jobs are those of a run.

    Each of them says where it comes from, since it is not of the run of the others.
    """
    whole = json.loads((folder / "cpu.json").read_text())
    described = {name: results[name] for name in ("hardware", "versions", "commit", "command")}
    new = [record | {"described": described} for record in results["contests"]]
    jobs = {record["job"] for record in new}
    kept = [record for record in whole["contests"] if record["job"] not in jobs]
    return whole | {"contests": [*kept, *new]}


def _is_committed(folder):
    return folder.resolve() == RESULTS.resolve()


def _results(config):
    records = config.stash[RECORDS]
    described = machine.describe(_command(config)) | {"measured": "cpu"}
    return described | {"contests": records}


def _write(results, folder, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cpu{suffix}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def _command(config):
    words = ["python", "-m", "pytest", *config.invocation_params.args]
    return " ".join(f'"{word}"' if " " in str(word) else str(word) for word in words)
