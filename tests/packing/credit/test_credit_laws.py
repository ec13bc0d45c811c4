"""Laws of credit that hold for any trajectories: layouts, order, company, groups."""

import dataclasses
from itertools import chain

import torch
from hypothesis import given, strategies as st

from tests.packing.credit.credit_cases import (
    EVERY,
    LAYOUTS,
    generated,
    given_beside,
    is_whitened,
    over_tokens,
)
from tests.packing.credit.credit_oracle import MORE, assert_close, credited, named
from trajpack.testing import assert_same_bits, trajectory_lists

names = st.sampled_from([*EVERY, *MORE])
groups = st.sampled_from([None, "x", "y"])


@st.composite
def grouped(draw, max_size=4):
    drawn = draw(trajectory_lists(max_size))
    return [dataclasses.replace(trajectory, group=draw(groups)) for trajectory in drawn]


@given(grouped(), names)
def test_both_layouts_give_a_token_the_same_advantage(trajectories, name):
    estimator = named(name)
    merged, turns = (credited(trajectories, estimator, layout) for layout in LAYOUTS)
    pair = [generated(batch, batch.advantages) for batch in (merged, turns)]
    assert_close(*pair, estimator)
    assert_same_bits(*(generated(batch, batch.returns) for batch in (merged, turns)))
    torch.testing.assert_close(merged.metrics, turns.metrics, rtol=1e-9, atol=1e-9)


def of_trajectories(batch, rows):
    """Split what generated tokens have by trajectory."""
    sizes = batch.cu_generated[batch.cu_turns.long()].diff().tolist()
    return generated(batch, rows).split(sizes) if sizes else ()


def beside_of(trajectories, beside, index):
    """Return what stands beside one trajectory."""
    first = sum(len(trajectory.turns) for trajectory in trajectories[:index])
    past = first + len(trajectories[index].turns)
    turns, one = slice(first, past), slice(index, index + 1)
    rows = (own[turns] for own in beside[:3])
    return type(beside)(*rows, beside.bootstrap[one], beside.scores[one], beside.state_ids[turns])


def joined(parts):
    """Return what stands beside several, one behind the other."""
    return type(parts[0])(*(list(chain(*rows)) for rows in zip(*parts, strict=True)))


@given(grouped(), names, st.randoms(), st.sampled_from(LAYOUTS))
def test_the_order_of_trajectories_permutes_advantages(trajectories, name, random, layout):
    if not trajectories:
        return
    estimator, beside = named(name), given_beside(trajectories)
    order = list(range(len(trajectories)))
    random.shuffle(order)
    parts = [beside_of(trajectories, beside, index) for index in order]
    straight = credited(trajectories, estimator, layout, beside)
    permuted = credited([trajectories[i] for i in order], estimator, layout, joined(parts))
    ours = of_trajectories(straight, straight.advantages)
    theirs = of_trajectories(permuted, permuted.advantages)
    for index, other in zip(order, theirs, strict=True):
        # groups are summed in the order of the batch
        torch.testing.assert_close(other, ours[index], rtol=1e-5, atol=1e-5)
        if over_tokens(estimator) and not is_whitened(estimator):
            assert_same_bits(other, ours[index])


@given(grouped(), names, st.sampled_from(LAYOUTS))
def test_a_complete_group_has_the_same_bits_alone_and_packed(trajectories, name, layout):
    estimator, beside = named(name), given_beside(trajectories)
    if is_whitened(estimator) or getattr(estimator, "recipe", "") == "gpg":
        return  # whose advantages are of the whole batch
    together = credited(trajectories, estimator, layout, beside)
    rows = of_trajectories(together, together.advantages)
    for group in {t.group for t in trajectories}:
        own = [index for index, t in enumerate(trajectories) if t.group == group]
        alone = credited(
            [trajectories[index] for index in own],
            estimator,
            layout,
            joined([beside_of(trajectories, beside, index) for index in own]),
        )
        for index, row in zip(own, of_trajectories(alone, alone.advantages), strict=True):
            assert_same_bits(row, rows[index])


@given(grouped(), names, st.sampled_from(LAYOUTS))
def test_only_the_end_of_the_episode_tells_whether_it_was_cut_off(trajectories, name, layout):
    """Flags of turns count where the trajectory says nothing, and then that of its last turn."""
    estimator, beside = named(name), given_beside(trajectories)
    said = [
        dataclasses.replace(
            t,
            truncated=t.is_truncated,
            turns=[dataclasses.replace(turn, truncated=not turn.truncated) for turn in t.turns],
        )
        for t in trajectories
    ]
    pair = [credited(of, estimator, layout, beside) for of in (trajectories, said)]
    assert_same_bits(*(batch.advantages for batch in pair))
    assert_same_bits(*(batch.loss_weights("token_mean", truncated="mask") for batch in pair))


@given(grouped(), names)
def test_a_trajectory_without_a_group_is_its_own_group(trajectories, name):
    estimator, beside = named(name), given_beside(trajectories)
    named_apart = [
        dataclasses.replace(t, group=f"own {index}") if t.group is None else t
        for index, t in enumerate(trajectories)
    ]
    pair = (credited(given_, estimator, "merged", beside) for given_ in (trajectories, named_apart))
    assert_same_bits(*(batch.advantages for batch in pair))
