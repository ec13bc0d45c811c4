"""What must hold for any trajectories, in every layout and implementation."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack import PackedBatch, Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.testing import assert_batches_equal, trajectories, trajectory_lists

LAYOUTS = ["merged", "turns"]
layouts = st.sampled_from(LAYOUTS)
TOKEN_FIELDS = [
    "input_ids",
    "position_ids",
    "turn_ids",
    "prompt_mask",
    "loss_mask",
    "rollout_logprobs",
    "policy_versions",
    "returns",
]


@given(trajectory_lists(), layouts)
def test_unpack_inverts_pack(given_trajectories, layout):
    assert pack(given_trajectories, layout=layout).unpack() == given_trajectories


@given(trajectory_lists(), layouts)
@settings(max_examples=10)
def test_triton_and_torch_write_the_same_bits(given_trajectories, layout):
    torch_batch = pack(given_trajectories, layout=layout, impl="torch")
    assert_batches_equal(torch_batch, pack(given_trajectories, layout=layout, impl="triton"))


@given(trajectory_lists(), layouts)
def test_packing_together_is_packing_alone_and_concatenating(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout)
    alone = [pack([trajectory], layout=layout) for trajectory in given_trajectories]
    turns = list(itertools.accumulate((one.num_turns for one in alone), initial=0))
    for name in TOKEN_FIELDS:
        pieces = [getattr(one, name) for one in alone]
        if name == "turn_ids":
            pieces = [
                torch.where(ids >= 0, ids + first, ids)
                for ids, first in zip(pieces, turns, strict=False)
            ]
        together = torch.cat([getattr(batch, name)[:0], *pieces])
        assert torch.equal(getattr(batch, name), together), name
    assert batch.seqlens == tuple(itertools.chain.from_iterable(one.seqlens for one in alone))
    together = torch.cat([batch.turn_returns[:0], *(one.turn_returns for one in alone)])
    assert torch.equal(batch.turn_returns, together)


@given(trajectory_lists(), layouts, st.randoms())
def test_order_permutes_results_only(given_trajectories, layout, random):
    order = list(range(len(given_trajectories)))
    random.shuffle(order)
    permuted = pack([given_trajectories[i] for i in order], layout=layout)
    for index, (ids, logprobs, returns) in zip(order, per_trajectory(permuted), strict=True):
        expected = list(per_trajectory(pack(given_trajectories, layout=layout)))[index]
        assert all(map(torch.equal, (ids, logprobs, returns), expected))


def per_trajectory(batch: PackedBatch):
    """Yield ids, log-probabilities and returns of each trajectory's sequences, in order."""
    sequences = torch.arange(batch.num_tokens)
    for begin, end in itertools.pairwise(batch.cu_turns.tolist()):
        owned = torch.isin(batch.sequence_ids, batch.turn_sequence[begin:end].unique())
        of = sequences[owned]
        yield batch.input_ids[of], batch.rollout_logprobs[of], batch.returns[of]


@given(trajectories("a"), trajectories("b"), trajectories("c"), layouts)
def test_changing_one_trajectory_changes_no_other(first, other, changed, layout):
    ones = list(per_trajectory(pack([first, other, first], layout=layout)))
    twos = list(per_trajectory(pack([first, changed, first], layout=layout)))
    for left, right in ((ones[0], twos[0]), (ones[2], twos[2]), (ones[0], ones[2])):
        assert all(map(torch.equal, left, right))


@given(trajectory_lists(), layouts)
def test_every_generated_token_is_trained_exactly_once(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout)
    turns = [turn for trajectory in given_trajectories for turn in trajectory.turns]
    assert int(batch.loss_mask.sum()) == sum(len(turn.completion_ids) for turn in turns)
    assert batch.num_generated == int(batch.loss_mask.sum())
    for index, turn in enumerate(turns):
        mine = batch.turn_ids == index
        assert batch.input_ids[mine].tolist() == np.asarray(turn.completion_ids).tolist()
        assert bool(batch.loss_mask[mine].all())
        assert torch.equal(batch.returns[mine], batch.turn_returns[batch.turn_ids[mine].long()])


@given(trajectory_lists(), layouts)
def test_tokens_that_were_not_generated_carry_the_fill_values(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout)
    rest = ~batch.loss_mask
    assert torch.equal(batch.prompt_mask, rest)
    assert torch.equal(batch.turn_ids < 0, rest)
    assert bool((batch.turn_ids[rest] == -1).all())
    assert bool((batch.policy_versions[rest] == -1).all())
    assert bool((batch.policy_versions[~rest] >= 0).all())
    assert not batch.rollout_logprobs[rest].any()
    assert not batch.returns[rest].any()


@given(trajectory_lists(), layouts)
def test_boundaries_positions_ids_and_lengths_tell_one_story(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout)
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == batch.num_tokens
    assert tuple(end - begin for begin, end in itertools.pairwise(bounds)) == batch.seqlens
    assert all(length > 0 for length in batch.seqlens)
    assert batch.max_seqlen == max(batch.seqlens, default=0)
    positions = [position for length in batch.seqlens for position in range(length)]
    assert batch.position_ids.tolist() == positions
    sequences = [i for i, length in enumerate(batch.seqlens) for _ in range(length)]
    assert batch.sequence_ids.tolist() == sequences
    for turn, (begin, end) in enumerate(batch.turn_spans.tolist()):
        assert bool((batch.turn_ids[begin:end] == turn).all())
        sequence = int(batch.turn_sequence[turn])
        assert bounds[sequence] <= begin <= end <= bounds[sequence + 1]


@given(trajectory_lists(), layouts)
def test_returns_are_rewards_discounted_over_the_trajectory(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout)
    expected = []
    for trajectory in given_trajectories:
        returns, later = [], 0.0
        for turn in reversed(trajectory.turns):
            later = turn.reward + trajectory.turn_discount * later
            returns.append(later)
        expected += reversed(returns)
    torch.testing.assert_close(
        batch.turn_returns, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-6
    )


@given(trajectory_lists())
def test_a_conversation_is_stored_once(given_trajectories):
    buffer = TrajectoryBuffer()
    for trajectory in given_trajectories:
        buffer.add(trajectory)
    assert buffer.num_tokens == buffer.pack("merged").num_tokens
    assert buffer.pack("merged").num_tokens <= buffer.pack("turns").num_tokens


@given(trajectory_lists(), layouts)
def test_the_whole_path_runs_where_no_value_can_be_read(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout, device="meta")
    host = pack(given_trajectories, layout=layout)
    for name, tensor in batch.tensors().items():
        assert tensor.is_meta
        assert tensor.shape == host.tensors()[name].shape
        assert tensor.dtype == host.tensors()[name].dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_has_no_tokens_and_the_boundary_zero(layout):
    batch = pack([], layout=layout)
    assert batch.num_tokens == batch.num_turns == len(batch) == batch.max_seqlen == 0
    assert batch.cu_seqlens.tolist() == batch.cu_turns.tolist() == [0]
    assert batch.unpack() == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("length", [1, 2, 1023, 1024, 1025, 2048])
def test_lengths_at_tile_edges_survive(layout, impl, length):
    prompt = list(range(length))
    turns = [
        Turn(prompt, [7], [-1.0]),
        Turn([*prompt, 7], [], []),
        Turn([*prompt, 7, 9], [8], [-2.0]),
    ]
    given_trajectories = [Trajectory("a", turns), Trajectory("b", [Turn([1], [], [])])]
    assert pack(given_trajectories, layout=layout, impl=impl).unpack() == given_trajectories
