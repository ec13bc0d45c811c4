"""``trajpack report``, and the choices of ``trajpack inspect``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands.command import call, refusal
from trajpack import GRPO, Trajectory, TrajectoryLog, Turn, pack, save


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    groups = {"a@0": 1.0, "a@1": -2.0, "b@0": 0.5}
    batch = pack(
        [
            Trajectory(name, [Turn([1, 2], [3, 4], [-0.5, -1.5], reward)], group=name[0])
            for name, reward in groups.items()
        ]
    )
    save(batch.with_advantages(GRPO()), tmp_path / "batch.safetensors")
    return tmp_path / "batch.safetensors"


def test_a_page_and_its_numbers_go_beside_the_batch(batch_file: Path) -> None:
    done = call("report", batch_file, "--capacity", 8, "--ranks", 2)
    assert done.status == 0, done.stderr
    assert f"page       {batch_file.with_suffix('.html')}\n" in done.stdout
    numbers = json.loads(batch_file.with_suffix(".json").read_text())
    assert numbers["plan"]["capacity"] == 8
    assert numbers["ranks"]["num_ranks"] == 2
    assert json.loads(call("inspect", batch_file, "--json").stdout)["tokens"] == numbers["tokens"]
    assert "batch.html exists; --force replaces it" in refusal("report", batch_file)
    assert call("report", batch_file, "--force").status == 0


def test_a_log_has_a_page(tmp_path: Path) -> None:
    with TrajectoryLog.open(tmp_path / "log", mode="append") as log:
        log.append("a", [Trajectory("a", [Turn([1, 2], [3], [-0.5], 1.0)])])
    done = call("report", tmp_path / "log", "--out", tmp_path / "new" / "page.html")
    assert done.status == 0, done.stderr
    numbers = json.loads((tmp_path / "new" / "page.json").read_text())
    assert [row["id"] for row in numbers["trajectories"]["rows"]] == ["a"]


def test_inspect_shows_the_sequences_that_were_chosen(batch_file: Path) -> None:
    for options, names in (
        (["--order", "best", "--sequences", 1], ["a@0"]),
        (["--group", "a", "--order", "worst"], ["a@1", "a@0"]),
        (["--id", "b@0"], ["b@0"]),
    ):
        shown = call("inspect", batch_file, *options).stdout
        assert re.findall(r"─ sequence \d: (\S+)", shown) == names
        assert "mean advantage" in shown
