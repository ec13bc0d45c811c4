"""Whitening over data-parallel ranks: one all-reduce of what each rank sums up."""

import dataclasses

import pytest
import torch

from tests.packing.credit.credit_cases import EVERY, given_beside, inputs_of, some_trajectories
from trajpack import TurnReturns, pack

WHITENED = {
    name: EVERY[name]
    for name in (
        "GAE, whitened", "TurnGAE, whitened", "ReinforcePlusPlus", "TurnReturns, whitened",
        "reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline by n", "GAE, whitened by n",
    )
}  # fmt: skip
WHITENED |= {
    f"{name}, mask": dataclasses.replace(estimator, truncated="mask")
    for name, estimator in WHITENED.items()
}


def shards():
    """Two lists of trajectories, each of whole groups, and both as one."""
    first = [dataclasses.replace(t, group=t.group or t.id) for t in some_trajectories(30, 9, 1)]
    second = [dataclasses.replace(t, group=f"{t.group} {t.id}") for t in some_trajectories(9, 5, 2)]
    return first, second, first + second


def credited(trajectories, estimator, beside, **more):
    batch = pack(trajectories, device="cpu")
    return batch.with_advantages(estimator, **inputs_of(batch, estimator, beside), **more)


def split(beside, first):
    """Rows of two shards, of which the first has these trajectories."""
    turns, num = sum(len(t.turns) for t in first), len(first)
    cuts = (turns, turns, turns, num, num, turns)
    pairs = [(rows[:cut], rows[cut:]) for rows, cut in zip(beside, cuts, strict=True)]
    return (type(beside)(*own) for own in zip(*pairs, strict=True))


@pytest.mark.parametrize("name", WHITENED)
def test_two_ranks_whiten_as_one_would(name):
    estimator = WHITENED[name]
    first, second, whole = shards()
    beside = given_beside(whole)
    parts = dict(zip((0, 1), zip((first, second), split(beside, first), strict=True), strict=True))
    sums = []
    for shard, own in parts.values():
        credited(shard, estimator, own, all_reduce=lambda s: sums.append(s.clone()))
    assert [(s.dtype, s.shape) for s in sums] == [(torch.float64, (3,))] * 2
    together = []
    for rank, (shard, own) in parts.items():
        batch = credited(
            shard, estimator, own, all_reduce=lambda s, other=sums[1 - rank]: s.add_(other)
        )
        alone = credited(shard, estimator, own)
        assert torch.equal(batch.metrics, alone.metrics), "of this rank, before it is whitened"
        assert not torch.allclose(batch.advantages, alone.advantages)
        together.append(batch.advantages)
    expected = credited(whole, estimator, beside).advantages
    torch.testing.assert_close(torch.cat(together), expected, rtol=1e-5, atol=1e-5)


def test_estimators_that_do_not_whiten_never_call_all_reduce():
    batch = pack(some_trajectories(), device="cpu")

    def asked(_):
        raise AssertionError

    for name in ("GRPO", "TurnReturns", "ReinforcePlusPlus, carry"):
        batch.with_advantages(EVERY[name], all_reduce=asked)
    with pytest.raises(AssertionError):
        batch.with_advantages(TurnReturns(whiten=True), all_reduce=asked)


def test_a_rank_without_tokens_takes_part():
    empty, calls = pack([], device="cpu"), []
    batch = empty.with_advantages(
        TurnReturns(whiten=True), all_reduce=lambda sums: calls.append(sums.tolist())
    )
    assert calls == [[0.0, 0.0, 0.0]]
    assert batch.advantages.shape == (0,)
