"""`turn_gae` against a loop over turns and AReaL's own vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.credit.token_loops import (
    Batch,
    Walk,
    assert_rounds,
    batch_of,
    joined,
    plain_gae,
    small_blocks,
)
from trajpack.kernels.credit.gae import gae, turn_gae
from trajpack.testing import boundaries

TURNS = ("0011", "", "--0--112-", "0", "---", "111--111", "1-0-2-3-0-", "-" * 17 + "5" * 17 + "6")
"""Turns of sequences, a letter a token; ``-`` was not generated. Turn 1 crosses a boundary."""


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def batch_and_turns(turns: tuple[str, ...] = TURNS) -> tuple[Batch, torch.Tensor]:
    masks = ["".join("." if letter == "-" else "g" for letter in turn) for turn in turns]
    ids = [-1 if letter == "-" else int(letter) for turn in turns for letter in turn]
    return batch_of(masks), torch.tensor(ids, dtype=torch.int32)


def by_turn(walk: Walk, ids: list[int]) -> tuple[list[float], list[float]]:
    """Gather the turns of a sequence, take a token for each, and hand its numbers to all."""
    turns: list[dict[str, Any]] = []
    before = None
    for token, turn in enumerate(ids):
        if turn >= 0 and turn != before:
            turns.append({"reward": 0.0, "value": walk.values[token], "tokens": []})
        if turn >= 0:
            turns[-1]["tokens"].append(token)
        if turns:
            turns[-1]["reward"] += walk.rewards[token]
        before = turn
    rewards, values = ([turn[name] for turn in turns] for name in ("reward", "value"))
    given = plain_gae(Walk(rewards, values, [True] * len(turns), *walk[3:]))
    rows = [0.0] * len(ids), [0.0] * len(ids)
    for turn, *numbers in zip(turns, *given, strict=True):
        for row, number in zip(rows, numbers, strict=True):
            for token in turn["tokens"]:
                row[token] = number
    return rows


def options(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: rows for name, rows in batch.options().items() if name != "loss_mask"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_equals_a_loop_over_turns(dtype: torch.dtype, impl: Any) -> None:
    batch, ids = batch_and_turns()
    rows = turn_gae(
        batch.rewards, batch.values, batch.cu_seqlens, ids.to(dtype), impl=impl, **options(batch)
    )
    parts = zip(batch.walks(), (part.tolist() for part in ids.split(batch.lengths)), strict=True)
    for actual, exact in zip(rows, joined([by_turn(*part) for part in parts]), strict=True):
        assert_rounds(actual, exact)


def test_turns_equal_numbers_of_areal(impl: Any) -> None:
    """Its returns are the value where ours are 0: on tokens that were not generated."""
    rewards, values = torch.tensor([0.0, 3, 0, 0, 4]), torch.tensor([1.0, 5, 9, 2, 8])
    ids = torch.tensor([0, 0, -1, 2, 2], dtype=torch.int32)
    advantages, returns = turn_gae(
        rewards, values, boundaries([5]), ids, gamma=0.5, lam=0.25, bootstrap=torch.tensor([8.0]),
        impl=impl,
    )  # fmt: skip
    assert advantages.tolist() == [3.75, 3.75, 0, 6, 6]
    assert returns.tolist() == [4.75, 4.75, 0, 8, 8]
    ids = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    advantages, _ = turn_gae(
        torch.tensor([0.0, 1, 0, 2]), torch.zeros(4), boundaries([4]), ids, lam=0.5, impl=impl
    )
    assert advantages.tolist() == [2.0] * 4


def test_tokens_equal_numbers_of_areal(impl: Any) -> None:
    """Its mask is rolled by one, and holds what it carries where ours is 0."""
    mask = torch.tensor([True, True, False, False, True, True, False])
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 1, 0])
    advantages, _ = gae(
        rewards, torch.zeros(7), boundaries([7]), gamma=0.5, lam=1.0, loss_mask=mask,
        observation="carry_drop", impl=impl,
    )  # fmt: skip
    assert advantages.tolist() == [0.125, 0.25, 0, 0, 0.5, 1, 0]


def test_rewards_have_a_gradient(impl: Any) -> None:
    rewards = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([-1, 0, 0, -1, 1, -1])
    advantages, _ = turn_gae(
        rewards, torch.zeros(6), boundaries([6]), ids, gamma=0.5, lam=0.5, impl=impl
    )
    (gradient,) = torch.autograd.grad(advantages @ torch.tensor([9.0, 1, 2, 9, 4, 9]), rewards)
    assert gradient.tolist() == [0.0, 3.0, 3.0, 3.0, 4.75, 4.75]
