"""Credit given to a batch that was given credit before."""

import pytest
import torch

from tests.packing.credit.credit_cases import EVERY, some_trajectories
from tests.packing.credit.credit_check import check
from trajpack import GAE, GRPO, Trajectory, Turn, TurnReturns, pack

TURNS = [Turn([1], [2, 3], [-1.0, -1.0], 1.0), Turn([1, 2, 3, 4], [5], [-1.0], 1.0)]


@pytest.mark.parametrize("estimator", [TurnReturns(), TurnReturns(whiten=True), GRPO()])
@pytest.mark.parametrize("before", [GAE(0.5, 0.5), TurnReturns(), GRPO()])
def test_what_was_there_before_changes_nothing(estimator, before):
    batch = pack(some_trajectories(20), device="cpu")
    values = torch.linspace(-1, 1, batch.num_tokens)
    fresh = batch.with_advantages(estimator)
    again = batch.with_advantages(before, values).with_advantages(estimator)
    for name in ("advantages", "returns", "metrics"):
        assert torch.equal(getattr(again, name), getattr(fresh, name)), name


def test_turn_returns_are_those_of_the_turns_after_a_scan_too():
    batch = pack([Trajectory("a", TURNS, turn_discount=0.5)], device="cpu")
    scanned = batch.with_advantages(GAE(0.5, 0.5), torch.zeros(batch.num_tokens))
    credited = scanned.with_advantages(TurnReturns())
    for rows in (credited.advantages, credited.returns):
        assert rows[batch.loss_mask].tolist() == [1.5, 1.5, 1.0]
    assert credited.advantages.data_ptr() != credited.returns.data_ptr()


@pytest.mark.parametrize("name", ["TurnReturns", "TurnReturns, whitened"])
def test_the_kernels_spread_the_returns(name):
    check(some_trajectories(6), EVERY[name], "triton")
