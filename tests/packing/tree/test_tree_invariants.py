"""Invariants of chains and trees: fewest tokens, laminar intervals, any order, edits."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.tree import tree_oracle as oracle
from trajpack import GAE, GRPO, Trajectory, Turn, TurnReturns, pack, pack_tree
from trajpack.packing.batch import breaks
from trajpack.testing import assert_same_bits, trajectory_lists

TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=3)


@st.composite
def turns_that_repeat(draw):
    """Draw up to 6 turns whose prompts often repeat or extend an earlier turn, or a part of it."""
    turns = []
    for _ in range(draw(st.integers(1, 6))):
        earlier = [oracle.path_of(turn) for turn in turns]
        kept = list(draw(st.sampled_from(earlier))) if earlier and draw(st.booleans()) else []
        kept = kept[: draw(st.integers(0, len(kept)))] if draw(st.booleans()) else kept
        new = draw(TOKENS) if not kept or draw(st.booleans()) else []
        completion = draw(TOKENS) if draw(st.booleans()) else []
        turns.append(Turn([*kept, *new], completion, [-0.5] * len(completion)))
    return turns


def fewest_tokens(turns):
    """Return the tokens of the best cover: a turn goes on behind one earlier one, used once."""
    paths = [oracle.path_of(turn) for turn in turns]

    def most_saved(turn, used):
        if turn == len(turns):
            return 0
        prompt, saved = tuple(turns[turn].prompt_ids), most_saved(turn + 1, used)
        for other in range(turn):
            if other not in used and prompt[: len(paths[other])] == paths[other]:
                rest = most_saved(turn + 1, used | {other})
                saved = max(saved, len(paths[other]) + rest)
        return saved

    return sum(map(len, paths)) - most_saved(0, frozenset())


@pytest.mark.slow
@given(turns_that_repeat())
@settings(max_examples=300)
def test_chains_are_the_best_cover_of_turns(turns):
    """I3: no other way to append turns to earlier ones stores fewer tokens."""
    trajectories = [Trajectory("a", turns)]
    assert pack(trajectories).num_tokens == fewest_tokens(turns)
    assert pack_tree(trajectories).statistics().num_tokens_merged == fewest_tokens(turns)


@given(trajectory_lists())
def test_chains_are_in_the_order_of_their_tokens_and_equal_ones_stay_in_order(trajectories):
    merged = pack(trajectories)
    rows = [row.tolist() for row in merged.input_ids.split(merged.seqlens)]
    order = pack_tree(trajectories).chains.trie.order
    assert order.tolist() == sorted(range(len(rows)), key=rows.__getitem__)


@given(trajectory_lists().filter(bool), st.randoms())
@settings(max_examples=30)
def test_the_order_of_trajectories_changes_no_value_of_an_entry(trajectories, random):
    """I9: nodes stay as they are, and what entries have stays with their trajectory."""
    order = [*range(len(trajectories))]
    random.shuffle(order)
    one, other = pack_tree(trajectories), pack_tree([trajectories[index] for index in order])
    for name in ("input_ids", "position_ids", "tree_end", "tree_parent", "loss_mask", "cu_seqlens"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for there, here in enumerate(order):
        for name in ("entry_node", "rollout_logprobs", "policy_versions", "returns"):
            pairs = ((one, here), (other, there))
            rows = [getattr(b, name)[slice(*bounds_of(b, place))] for b, place in pairs]
            assert torch.equal(*rows), name
    hidden = torch.randn(one.num_nodes, 4, generator=torch.Generator().manual_seed(0))
    head = torch.linspace(-1, 1, 12).view(3, 4)
    targets = [batch.input_ids.remainder_(3) for batch in (one, other)]
    assert torch.equal(*targets)
    values = torch.linspace(-1, 1, one.num_nodes)
    for estimator, is_exact in ((TurnReturns(), True), (GAE(0.9, 0.8), True), (GRPO(), False)):
        found = []
        for batch in (one, other):
            given_values = values[batch.entry_parent] if estimator == GAE(0.9, 0.8) else None
            with_advantages = batch.with_advantages(estimator, given_values)
            found.append((with_advantages.advantages, batch.logprobs(hidden, head)))
        for there, here in enumerate(order):
            begin, end = bounds_of(one, here)
            low, high = bounds_of(other, there)
            for whole, moved in zip(*found, strict=True):
                if is_exact:
                    assert_same_bits(moved[low:high], whole[begin:end])
                else:  # sums over a group are in the order of its members
                    torch.testing.assert_close(moved[low:high], whole[begin:end])


def bounds_of(batch, trajectory):
    turns = batch.entries.cu_turns[trajectory : trajectory + 2].long()
    return batch.entries.cu_generated[turns].tolist()


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_windows_are_told_apart_without_a_hash(begin, size, token):
    """I15: numbers of windows are equal exactly where the tokens are, so nothing can collide."""
    tokens = torch.arange(60).numpy().copy()
    tokens[begin : begin + size] = token
    windows = [tuple(tokens[k : k + breaks.RUN].tolist()) for k in range(60 - breaks.RUN + 1)]
    numbers = breaks._numbers_of_windows(tokens).tolist()
    assert len(numbers) == len(windows)
    for one, number in zip(windows, numbers, strict=True):
        assert [other == number for other in numbers] == [other == one for other in windows]


@given(st.integers(0, 49), st.integers(1, 2**31 - 1))
def test_an_edit_anywhere_keeps_every_entry(place, change):
    """I11: prompt and history share what is before the edit, and both keep their tokens."""
    history = list(range(50))
    edited = [*history, 77]
    edited[place] = (edited[place] + change) % 2**31
    turns = [Turn(history[:20], history[20:], [-0.5] * 30), Turn(edited, [1], [-0.25])]
    batch = pack_tree([Trajectory("a", turns)])
    assert batch.chains.trie.shared.tolist() == [0, place]
    assert (batch.num_nodes, batch.num_entries) == (50 + 52 - place, 31)
    assert batch.unpack() == [Trajectory("a", turns)]
