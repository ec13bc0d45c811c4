"""Functions and tensors of a caller as estimators; `spread` and `with_loss_mask`."""

import dataclasses
import re

import pytest
import torch

from tests.packing.loader.loader_cases import many
from trajpack import GAE, GRPO, RLOO, Trajectory, TurnReturns, pack, pack_tree


def grouped(count=12, size=3):
    """Return trajectories in groups, with rewards that differ."""
    found = []
    for number, one in enumerate(many(count)):
        turns = [dataclasses.replace(turn, reward=number % 5 + 0.25) for turn in one.turns]
        found.append(Trajectory(one.id, turns, f"g{number // size}", turn_discount=0.5))
    return found


def leave_one_out(scores, group_ids, batch):
    sums = torch.zeros(batch.num_groups, dtype=scores.dtype).index_add(0, group_ids, scores)
    sizes = torch.bincount(group_ids)
    return scores - (sums[group_ids] - scores) / (sizes[group_ids] - 1)


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_a_function_of_scores_and_groups_is_an_estimator(layout):
    batch = pack(grouped(), layout)
    ours = batch.with_advantages(leave_one_out)
    theirs = batch.with_advantages(RLOO())
    torch.testing.assert_close(ours.advantages, theirs.advantages)
    assert ours.advantages.dtype == torch.float32
    assert torch.equal(ours.returns, batch.returns)
    assert ours.metric_names == theirs.metric_names
    torch.testing.assert_close(ours.metrics, theirs.metrics)


def of_tokens(batch):
    """Return the advantage of each generated token as a number of its turn and its place."""
    numbers = torch.arange(batch.num_tokens).float() - batch.turn_spans[:, 0][batch.turn_ids]
    return torch.where(batch.loss_mask, numbers + 100.0 * batch.turn_ids, 0.0)


def test_a_function_gives_numbers_for_turns_or_tokens():
    batch = pack(grouped())
    by_turn = batch.with_advantages(lambda scores, group_ids, batch: batch.turn_returns)
    expected = batch.with_advantages(TurnReturns(whiten=False)).advantages
    assert torch.equal(by_turn.advantages, expected)
    wanted = of_tokens(batch)
    for given in (wanted[batch.loss_mask], wanted, wanted.where(batch.loss_mask, 7.0)):
        of_function = batch.with_advantages(lambda *_, given=given: given.double())
        assert torch.equal(of_function.advantages, wanted)
        assert torch.equal(batch.with_advantages(given).advantages, wanted)


def test_a_tree_takes_a_function():
    seen = []

    def watched(scores, group_ids, batch):
        seen.append(batch)
        return leave_one_out(scores, group_ids, batch)

    tree = pack_tree(grouped()).with_advantages(watched)
    expected = pack_tree(grouped()).with_advantages(RLOO()).entries.advantages
    torch.testing.assert_close(tree.entries.advantages, expected)
    assert seen[0].num_generated == tree.num_entries


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            torch.zeros(5),
            "with_advantages: Tensor must give floats [12] (trajectory) or [20] (turn)",
        ),
        (torch.zeros(12).long(), "got torch.int64 [12] on cpu"),
        (torch.zeros(12, 1), "got torch.float32 [12, 1] on cpu"),
        (torch.zeros(12, device="meta"), "got torch.float32 [12] on meta"),
        (lambda *_: [0.0] * 12, "with_advantages: <lambda> must give floats [12] (trajectory)"),
        (leave_one_out, "with_advantages: leave_one_out takes no ref_logprobs: it has no kl"),
    ],
)
def test_what_is_no_advantage_is_refused(given, expected):
    batch, inputs = pack(grouped()), {}
    if given is leave_one_out:
        inputs["ref_logprobs"] = batch.rollout_logprobs
    with pytest.raises(ValueError, match=re.escape(expected)):
        batch.with_advantages(given, **inputs)


def test_as_many_turns_as_generated_tokens_are_not_guessed():
    turns = many(2)[1].turns
    sizes = [(*turns[0].completion_ids[:2],), ()]
    uneven = [
        dataclasses.replace(turn, completion_ids=ids, completion_logprobs=[0.0] * len(ids))
        for turn, ids in zip(turns, sizes, strict=True)
    ]
    batch = pack([Trajectory("a", uneven)])
    with pytest.raises(ValueError, match="Tensor gives 2 numbers, but there are as many generated"):
        batch.with_advantages(torch.ones(2))
    of_turn = batch.spread(torch.tensor([1.0, 2.0]), of="turn")
    assert batch.with_advantages(of_turn).advantages[batch.loss_mask].tolist() == [1.0, 1.0]
    even = [
        dataclasses.replace(turn, completion_ids=[5], completion_logprobs=[0.0]) for turn in turns
    ]
    batch = pack([Trajectory("a", even)])
    credited = batch.with_advantages(torch.tensor([1.0, 2.0]))
    assert credited.advantages[batch.loss_mask].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_values_are_spread_to_the_generated_tokens(layout):
    batch = pack(grouped(), layout)
    turn, generated = batch.turn_ids.long(), batch.loss_mask
    owner = torch.repeat_interleave(torch.arange(12), batch.cu_turns.diff())
    for x, of, source in (
        (torch.arange(12), "trajectory", owner[turn]),
        (torch.arange(batch.num_turns * 2.0).view(-1, 2), "turn", turn),
        (torch.arange(batch.num_turns) % 2 == 0, "turn", turn),
        (torch.arange(batch.num_generated) + 5, "token", generated.cumsum(0) - 1),
    ):
        spread = batch.spread(x, of=of)
        assert spread.dtype == x.dtype
        assert torch.equal(spread[generated], x[source[generated]])
        assert not spread[~generated].any()
    x = torch.ones(batch.num_turns, requires_grad=True)
    batch.spread(x, of="turn").sum().backward()
    assert torch.equal(x.grad, batch.cu_generated.diff().float())


@pytest.mark.parametrize(
    ("x", "of", "expected"),
    [
        (torch.zeros(3), "turn", "spread: x must have one entry for each of 20 turn(s)"),
        (torch.zeros(20), "row", "spread: of must be 'trajectory', 'turn' or 'token', got 'row'"),
        (torch.zeros(20, device="meta"), "turn", "spread: x is on meta"),
        ([0.0] * 20, "turn", "spread: x must be a tensor, got list"),
    ],
)
def test_what_cannot_be_spread_is_refused(x, of, expected):
    with pytest.raises((TypeError, ValueError), match=re.escape(expected)):
        pack(grouped()).spread(x, of=of)


def test_dropped_tokens_count_in_no_weight_and_wrong_masks_are_refused():
    batch = pack(grouped()).with_advantages(leave_one_out)
    mask = torch.arange(batch.num_tokens) % 3 > 0
    dropped = batch.with_loss_mask(mask)
    kept = int(dropped.loss_mask.sum())
    weights = dropped.loss_weights("token_mean")
    assert weights[dropped.loss_mask].tolist() == pytest.approx([1 / kept] * kept)
    assert not weights[~dropped.loss_mask].any()
    assert dropped.tables.generated_lens == batch.tables.generated_lens
    assert f"{batch.num_generated} generated, {kept} trained" in repr(dropped)
    assert "trained" not in repr(batch)
    with pytest.raises(TypeError, match="with_loss_mask: keep must be bool, got int64"):
        batch.with_loss_mask(mask.long())
    with pytest.raises(ValueError, match="with_loss_mask: keep must have one entry for each"):
        batch.with_loss_mask(mask[1:])


@pytest.mark.parametrize(
    ("name", "estimator"), [("grpo", GRPO()), ("rloo", RLOO()), ("gae", GAE())]
)
def test_an_estimator_is_named(name, estimator):
    batch = pack(grouped())
    given = batch.with_advantages(name, batch.rollout_logprobs)
    same = batch.with_advantages(estimator, batch.rollout_logprobs)
    assert torch.equal(given.advantages, same.advantages)
    with pytest.raises(ValueError, match=r"estimator must be one of grpo, .*, got 'GRPO'"):
        batch.with_advantages("GRPO")
