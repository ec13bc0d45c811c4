from __future__ import annotations

import asyncio
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trajpack.packing.buffer.buffer import pack
from trajpack.packing.types import Trajectory

torch.set_num_threads(1)
EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> Any:
    return load("rewritten_history")


@pytest.fixture(scope="module")
def trajectories(example: Any) -> list[Trajectory]:
    rolled_out: list[Trajectory] = asyncio.run(example.roll_out(3, budget=100))
    return rolled_out


def breaks_of(trajectory: Trajectory) -> int:
    """Count the turns whose prompt does not begin with the turn before, prompt and completion."""
    count = 0
    for last, turn in itertools.pairwise(trajectory.turns):
        before = [*last.prompt_ids, *last.completion_ids]
        count += list(turn.prompt_ids[: len(before)]) != before
    return count


def test_a_break_of_the_prefix_begins_a_sequence(trajectories: list[Trajectory]) -> None:
    counted = [breaks_of(trajectory) for trajectory in trajectories]
    assert all(0 < count < 4 for count in counted)  # and some turns do go on
    assert [pack([one]).num_prefix_breaks for one in trajectories] == counted
    assert pack(trajectories).num_prefix_breaks == sum(counted)
    assert pack(trajectories, "turns").num_prefix_breaks is None


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_each_sampled_token_is_trained_once_and_nothing_is_lost(
    layout: Any, trajectories: list[Trajectory]
) -> None:
    batch = pack(trajectories, layout=layout)
    sampled = [t for one in trajectories for turn in one.turns for t in turn.completion_ids]
    logprobs = [p for one in trajectories for turn in one.turns for p in turn.completion_logprobs]
    trained = batch.loss_mask
    by_turn = torch.argsort(batch.turn_ids[trained], stable=True)
    assert batch.input_ids[trained][by_turn].tolist() == [int(token) for token in sampled]
    assert torch.equal(batch.rollout_logprobs[trained][by_turn], torch.tensor(logprobs))
    assert batch.unpack() == trajectories


def test_a_sequence_is_the_conversation_as_the_engine_saw_it(
    trajectories: list[Trajectory],
) -> None:
    batch = pack(trajectories)
    cu_seqlens = batch.cu_seqlens.tolist()
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    for turn, sequence in zip(turns, batch.turn_sequence.tolist(), strict=True):
        ids = batch.input_ids[cu_seqlens[sequence] : cu_seqlens[sequence + 1]].tolist()
        seen = [*turn.prompt_ids, *turn.completion_ids]
        assert ids[: len(seen)] == seen


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("2 * (3 + 4)", "14"), ("-1.5 / 3", "-0.5"), (" 7 ", "7")],
)
def test_the_calculator_works_numbers_out(expression: str, answer: str) -> None:
    assert load("calculator").calculate(expression) == answer


@pytest.mark.parametrize(
    "expression",
    [
        *["__import__('os')", "2 ** 9", "(1).real", "x", "1 +", "'a' * 9", "True + 1", ""],
        *["9" * 101, "(" * 99, "-" * 99 + "x", "1 if 1 else 2"],
    ],
)
def test_the_calculator_runs_no_code(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|numbers"):
        load("calculator").calculate(expression)
