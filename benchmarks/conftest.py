"""The fixture that runs a contest, and what is printed and written when all have run."""

import json
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.contest import OURS, as_record, race
from benchmarks.report import render

RECORDS = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption(
        "--results", default="build/benchmarks", help="folder for cpu.json, gpu.json and plots"
    )


def pytest_configure(config):
    config.stash[RECORDS] = []


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    for name in ("node", "release"):
        machine_info.pop(name, None)
    machine_info.update(machine.describe(_command(config)))


@pytest.fixture
def hold(request):
    """Run a contest, keep its record, and show ours in pytest-benchmark's table too."""

    def run(contest, contenders, **measured):
        entries = race(contest, contenders)
        request.config.stash[RECORDS].append(as_record(contest, entries) | measured)
        if request.config.pluginmanager.hasplugin("benchmark"):
            benchmark = request.getfixturevalue("benchmark")
            benchmark.extra_info.update(tokens=contest.tokens)
            ours = next(contender for contender in contenders if contender.name == OURS)
            benchmark.pedantic(ours.work, rounds=1)
        return entries

    return run


@pytest.fixture(scope="session")
def keep(pytestconfig):
    """Return the list of records, for a benchmark that is no contest."""
    return pytestconfig.stash[RECORDS]


def pytest_terminal_summary(terminalreporter, config):
    records = config.stash[RECORDS]
    if not records:
        return
    device = "gpu" if any("device" in record for record in records) else "cpu"
    results = machine.describe(_command(config)) | {"contests": records}
    folder = Path(config.getoption("results"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    terminalreporter.write_line("")
    terminalreporter.write(render(results))
    terminalreporter.write_line(f"\nwritten to {path}")


def _command(config):
    words = ["python", "-m", "pytest", *config.invocation_params.args]
    return " ".join(f'"{word}"' if " " in str(word) else str(word) for word in words)
