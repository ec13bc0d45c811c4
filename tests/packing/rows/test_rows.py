import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.packing.adapters.cases import forked_batch, plain_batch, rows_by_loop
from trajpack import Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.rows.layout import (
    ones_of,
    row_scores,
    row_trajectories,
    row_turns,
    split_rows,
    token_scores,
)
from trajpack.testing import trajectory_lists

layouts = st.sampled_from(["merged", "turns"])


def test_fields_of_any_shape_are_laid_out_and_have_gradients():
    batch = forked_batch()
    whole, prompts, responses = split_rows(batch, max_prompt_length=4)
    field = torch.arange(2.0 * batch.num_tokens).reshape(-1, 2).requires_grad_()
    laid_out, mask = whole.of(field, -1), whole.of(ones_of(batch, torch.bool))
    assert laid_out.shape == (4, 4 + 10, 2)
    assert torch.equal(laid_out[mask], field)  # rows in order, without padding
    assert (laid_out[~mask] == -1).all()
    for dtype in (torch.float32, torch.bfloat16, torch.bool):  # without a gradient, by another way
        expected = laid_out.detach().to(dtype)
        assert torch.equal(
            whole.of(field.detach().to(dtype), expected[~mask][0, 0].item()), expected
        )
    assert torch.equal(prompts.of(field, -1), laid_out[:, :4])
    assert torch.equal(responses.of(field, -1), laid_out[:, 4:])
    responses.of(field).sum().backward()
    in_response = torch.cat(
        [
            torch.arange(length) >= len(row[0])
            for row, length in zip(rows_by_loop(batch), batch.seqlens, strict=True)
        ]
    )
    assert torch.equal(field.grad, in_response[:, None].expand(-1, 2).float())


def test_sequences_longer_than_their_row_are_refused():
    batch = plain_batch()
    with pytest.raises(ValueError, match="sequence 0 has 2 tokens, but max_prompt_length is 1"):
        split_rows(batch, max_prompt_length=1, max_response_length=10)
    with pytest.raises(ValueError, match="sequence 2 has 10 tokens, but max_response_length is 5"):
        split_rows(batch, max_response_length=5)
    with pytest.raises(TypeError, match=r"max_prompt_length must be an integer, got float"):
        split_rows(batch, max_prompt_length=2.0)


def test_with_both_widths_no_value_is_read_back_to_the_host():
    batch = forked_batch().to("meta")
    whole, *_ = split_rows(batch, max_prompt_length=8, max_response_length=12)
    assert whole.of(batch.input_ids).shape == (4, 20)
    for place in ("turns", "last"):
        assert token_scores(batch, place=place).shape == (batch.num_tokens,)
    assert row_scores(batch).shape == row_scores(batch, "returns").shape == (4,)


def test_rows_know_their_trajectories_and_turns():
    assert row_trajectories(forked_batch()) == [0, 0, 1, 2]
    assert row_turns(forked_batch()) == [[0, 1, 3], [2], [4], [5, 6, 7]]
    assert row_trajectories(plain_batch()) == [0, 1, 2]
    assert row_trajectories(plain_batch(layout="turns")) == [0, 0, 1, 2, 2, 2]


@settings(max_examples=25)
@given(trajectory_lists(), layouts)
def test_no_reward_is_lost_but_that_of_rows_without_a_response(trajectories, layout):
    batch = pack(trajectories, layout=layout)
    sums = [0.0] * len(batch)
    for turn, sequence in enumerate(batch.turn_sequence.tolist()):
        sums[sequence] += batch.turn_rewards[turn].item()
    whole = [sum(turn.reward for turn in trajectory.turns) for trajectory in trajectories]
    expected = [whole[trajectory] for trajectory in row_trajectories(batch)]
    torch.testing.assert_close(row_scores(batch), torch.tensor(expected))
    tokens = [piece.sum().item() for piece in token_scores(batch).split(batch.seqlens)]
    silent = [not any(row[2]) for row in rows_by_loop(batch)]
    expected = [0.0 if no else total for no, total in zip(silent, sums, strict=True)]
    torch.testing.assert_close(torch.tensor(tokens), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert not token_scores(batch)[~batch.loss_mask].any()


@settings(max_examples=60)
@given(trajectory_lists(), layouts)
def test_a_reward_is_where_a_loop_over_turns_places_it(trajectories, layout):
    """Also where chains interleave, and where turns generated nothing."""
    batch = pack(trajectories, layout=layout)
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    bounds, generated = batch.cu_seqlens.tolist(), batch.loss_mask.nonzero()[:, 0].tolist()
    for turn, (_, end) in enumerate(batch.turn_spans.tolist()):
        row = int(batch.turn_sequence[turn])
        own = [token for token in generated if bounds[row] <= token < bounds[row + 1]]
        if own:
            place = max((token for token in own if token < end), default=own[0])
            expected[place] += batch.turn_rewards[turn]
    assert torch.equal(token_scores(batch), expected.float())


class LargeResults(TorchDispatchMode):
    """Addresses of results with at least a number of entries."""

    def __init__(self, least):
        super().__init__()
        self.least, self.addresses = least, set()

    def __torch_dispatch__(self, op, types, arguments=(), keywords=None):
        result = op(*arguments, **(keywords or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if one.numel() >= self.least:
                self.addresses.add(one.data_ptr())
        return result


def test_scores_fill_one_row_of_tokens_and_work_on_turns():
    batch = pack([Trajectory("a", [Turn([1] * 500, [2] * 500, [-0.5] * 500, reward=1.0)] * 3)])
    with LargeResults(batch.num_tokens) as large:
        token_scores(batch)
    assert len(large.addresses) == 1


def test_the_reward_of_a_row_is_at_its_last_token():
    batch = forked_batch()
    ends = batch.cu_seqlens[1:].long() - 1
    at_end = token_scores(batch, place="last")
    assert at_end[ends].tolist() == [15.0, 15.0, 16.0, 6.0]
    assert at_end.count_nonzero() == 4
    with pytest.raises(ValueError, match="op: scores must be 'turns' or 'last', got 'all'"):
        token_scores(batch, op="op", place="all")


def test_an_empty_batch_has_no_rows():
    batch = TrajectoryBuffer().pack()
    whole, *_ = split_rows(batch, max_prompt_length=3, max_response_length=4)
    assert whole.of(batch.input_ids).shape == (0, 7)
    assert row_turns(batch) == row_trajectories(batch) == []
    assert row_scores(batch).shape == token_scores(batch).shape == (0,)
    assert token_scores(batch, place="last").shape == (0,)
