"""``trajpack plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from tests.commands.command import call, refusal
from trajpack import Trajectory, Turn, load, pack, plan_micro_batches, plan_ranks, save
from trajpack.commands import app
from trajpack.packing.plan.units import Algorithm, Policy


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    sizes = [6, 5, 4, 3, 2]
    turns = [Turn([1] * (size - 1), [2], [-0.5]) for size in sizes]
    batch = pack([Trajectory(str(size), [turn]) for size, turn in zip(sizes, turns, strict=True)])
    save(batch, tmp_path / "batch.safetensors")
    return tmp_path / "batch.safetensors"


def test_a_plan_is_shown_with_its_statistics(batch_file: Path) -> None:
    done = call("plan", batch_file, "--capacity", 10)
    assert done.status == 0, done.stderr
    for text in ("2 of up to 10 tokens; at least 2 are needed", "100.0%", "20", "0 tokens at ends"):
        assert text in done.stdout
    assert "largest rank" not in done.stdout


def test_the_sequences_are_those_of_the_functions(batch_file: Path) -> None:
    lengths = load(batch_file).seqlens
    options = ("plan", batch_file, "--capacity", 8, "--json")
    plan = plan_micro_batches(lengths, 8, algorithm="next_fit")
    shown = json.loads(call(*options, "--algorithm", "next_fit").stdout)
    assert shown["ranks"] == [[sequences.tolist() for sequences in plan]]
    assert shown["statistics"]["num_micro_batches"] == len(plan)
    plans = plan_ranks(lengths, 2, 8)
    shown = json.loads(call(*options, "--ranks", 2).stdout)
    assert shown["ranks"] == [[each.tolist() for each in plans.plan(rank)] for rank in range(2)]
    loads = [int(plans.plan(rank).loads.sum()) for rank in range(2)]
    text = call(*options[:-1], "--ranks", 2).stdout
    assert re.search(rf"tokens of 2 ranks\W+{loads[0]}, {loads[1]}", text), text


def test_long_sequences_are_refused_or_treated_as_asked(batch_file: Path) -> None:
    assert "sequence 0" in refusal("plan", batch_file, "--capacity", 5)
    done = call("plan", batch_file, "--capacity", 5, "--oversized", "drop", "--json")
    assert json.loads(done.stdout)["statistics"]["num_dropped"] == 1
    text = call("plan", batch_file, "--capacity", 5, "--oversized", "truncate_at_turn").stdout
    assert "4, 1 dropped" in text


def test_the_options_are_those_of_plan_micro_batches() -> None:
    assert get_args(app.Algorithm) == get_args(Algorithm)
    assert get_args(app.Oversized) == get_args(Policy)
