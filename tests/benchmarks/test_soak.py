"""The soak run: it keeps its numbers, and finds what it is there to find."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import soak
from benchmarks.soak_report import COLUMNS, MIB, Moment, Outcome, growth_of
from tests.agent.chaos.chaos_cases import chaos_prompts
from tests.agent.chaos.fault_plan import FaultPlan
from trajpack.agent.errors import EpisodeError
from trajpack.agent.runner.runner import EpisodeResult


def moments(seconds: int, bytes_per_second: float, noise: int = 0) -> list[Moment]:
    return [
        Moment(
            seconds=float(k),
            rss_bytes=int(300 * MIB + k * bytes_per_second + noise * (-1) ** k),
            num_turns=2000 * k,
            num_episodes=500 * k,
            num_failed=7 * k,
            num_again=90 * k,
            num_faults=100 * k,
            num_tasks=270,
            num_files=11,
            num_threads=3,
        )
        for k in range(seconds + 1)
    ]


def test_a_short_soak_runs_and_keeps_its_numbers(tmp_path: Path, capsys: Any) -> None:
    asked = ["--minutes", "0.02", "--timeout", "0.4", "--out", str(tmp_path)]
    assert soak.main(asked) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["soak.csv", "soak.json", "soak.svg"]
    with (tmp_path / "soak.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    kept = json.loads((tmp_path / "soak.json").read_text())
    assert kept["num_started"] == kept["num_logged"] > 100
    assert kept["num_lost"] == kept["num_doubled"] == 0
    assert kept["wrong"] == []
    assert kept["faults"]
    assert "lost 0, doubled 0" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "soak.svg")


def test_memory_that_grows_is_found_and_noise_is_not() -> None:
    assert growth_of(moments(30, 10 * MIB)) is None
    assert Outcome(moments(600, 0, noise=8 * MIB)).problems() == []
    assert growth_of(moments(600, 0.1 * MIB)) == pytest.approx(0.1 * 300 / 345, rel=1e-3)
    # 500 episodes a second that leave 200 bytes each
    (problem,) = Outcome(moments(600, 500 * 200)).problems()
    assert problem == "memory grew by 8.3% over the second half"


def test_what_is_lost_doubled_or_misnamed_is_found(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = soak.Ledger(FaultPlan(0))
    results = [EpisodeResult(prompt, (), EpisodeError("", "")) for prompt in chaos_prompts(4)]
    for result in (results[0], results[1], results[1], results[3]):
        ledger.take(result)
    ledger.close(4)
    outcome = ledger.outcome
    assert (outcome.num_lost, outcome.num_doubled, len(outcome.wrong)) == (1, 1, 4)
    outcome.moments = moments(2, 0)

    async def run(_: soak.Soak) -> Outcome:
        return outcome

    monkeypatch.setattr(soak.Soak, "run", run)
    assert soak.main(["--out", str(tmp_path)]) == 1
    assert "soak: 1 episodes were lost, 1 doubled" in capsys.readouterr().err
