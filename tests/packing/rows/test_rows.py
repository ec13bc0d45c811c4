import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.adapters.row_cases import conversation, forked_batch, plain_batch, rows_by_loop
from trajpack import StaticBatch, TrajectoryBuffer, pack
from trajpack.packing.rows.rows import prompt_lengths_of, row_trajectories, row_turns, rows_of
from trajpack.packing.rows.scores import placed_scores, row_scores, scores_at_end, token_scores
from trajpack.testing import assert_same_bits, trajectory_lists

layouts = st.sampled_from(["merged", "turns"])


@settings(max_examples=25)
@given(trajectory_lists(), layouts, st.integers(0, 3), st.integers(0, 3))
def test_a_row_is_its_sequence_with_padding_around(trajectories, layout, more_before, more_behind):
    batch = pack(trajectories, layout=layout)
    expected = rows_by_loop(batch)
    num_prompt = max((len(row[0]) for row in expected), default=0) + more_before
    num_response = max((len(row[1]) for row in expected), default=0) + more_behind
    rows = rows_of(batch, max_prompt_length=num_prompt, max_response_length=num_response)
    assert len(rows) == len(expected)
    assert rows.width == num_prompt + num_response
    assert rows.prompt_lengths.tolist() == [len(row[0]) for row in expected]
    assert rows.response_lengths.tolist() == [len(row[1]) for row in expected]
    whole = rows.whole(batch.input_ids, -1)
    for row, (prompt, response, *_) in enumerate(expected):
        before, behind = num_prompt - len(prompt), num_response - len(response)
        assert whole[row].tolist() == [-1] * before + prompt + response + [-1] * behind
    assert torch.equal(rows.attention_mask, whole != -1)
    assert torch.equal(rows.prompts(batch.input_ids, -1), whole[:, :num_prompt])
    assert torch.equal(rows.responses(batch.input_ids, -1), whole[:, num_prompt:])
    assert torch.equal(rows.prompt_attention, rows.attention_mask[:, :num_prompt])
    assert torch.equal(rows.response_attention, rows.attention_mask[:, num_prompt:])


@settings(max_examples=25)
@given(trajectory_lists(), layouts)
def test_responses_come_back_to_their_tokens(trajectories, layout):
    batch = pack(trajectories, layout=layout)
    rows = rows_of(batch)
    back = rows.packed_responses(rows.responses(batch.rollout_logprobs, value=7.0))
    assert_same_bits(back, batch.rollout_logprobs)
    ids = rows.packed_responses(rows.responses(batch.input_ids), value=-1)
    lengths = prompt_lengths_of(batch)[batch.sequence_ids.long()]
    expected = torch.where(batch.position_ids >= lengths, batch.input_ids, -1)
    assert torch.equal(ids, expected)


def test_fields_of_any_shape_are_laid_out_and_brought_back():
    batch = forked_batch()
    rows = rows_of(batch, max_prompt_length=4)
    field = torch.arange(2 * batch.num_tokens).reshape(-1, 2).to(torch.int16)
    assert rows.whole(field).shape == (4, 4 + 10, 2)
    back = rows.packed_responses(rows.responses(field), value=-1)
    is_response = rows.packed_responses(torch.ones(4, 10, dtype=torch.bool))
    assert torch.equal(back[is_response], field[is_response])
    assert (back[~is_response] == -1).all()


def test_gradients_go_through_rows_and_back():
    batch = plain_batch()
    rows = rows_of(batch)
    values = torch.arange(float(batch.num_tokens), requires_grad=True)
    back = rows.packed_responses(rows.responses(values))
    back.sum().backward()
    expected = rows.packed_responses(torch.ones(3, rows.max_response_length))
    assert torch.equal(values.grad, expected)


def test_what_does_not_fit_is_refused():
    batch = plain_batch()
    with pytest.raises(ValueError, match="sequence 0 has 2 tokens, but max_prompt_length is 1"):
        rows_of(batch, max_prompt_length=1, max_response_length=10)
    with pytest.raises(ValueError, match="sequence 2 has 10 tokens, but max_response_length is 5"):
        rows_of(batch, max_response_length=5)
    with pytest.raises(TypeError, match=r"max_prompt_length must be an integer, got 2\.0"):
        rows_of(batch, max_prompt_length=2.0)
    with pytest.raises(ValueError, match="max_response_length must be 0 or more, got -1"):
        rows_of(batch, max_response_length=-1)
    rows = rows_of(batch)
    with pytest.raises(ValueError, match=r"must be over 22 tokens, got shape \[3\]"):
        rows.whole(torch.zeros(3))
    with pytest.raises(ValueError, match=r"must begin with \[3, 10\], got \[3, 9\]"):
        rows.packed_responses(torch.zeros(3, 9))


def test_a_padded_batch_is_refused():
    buffer = TrajectoryBuffer()
    buffer.add(conversation("a"))
    with pytest.raises(ValueError, match="the batch is padded"):
        rows_of(buffer.pack_into(StaticBatch(capacity=64, max_turns=8)))


def test_with_both_widths_nothing_is_read_back_to_the_host():
    batch = forked_batch().to("meta")
    rows = rows_of(batch, max_prompt_length=8, max_response_length=12)
    assert rows.whole(batch.input_ids).shape == (4, 20)
    assert rows.packed_responses(rows.responses(batch.returns)).shape == (batch.num_tokens,)
    for scores in (token_scores(batch), scores_at_end(batch)):
        assert scores.shape == (batch.num_tokens,)
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
    torch.testing.assert_close(row_scores(batch), torch.tensor(sums))
    tokens = [piece.sum().item() for piece in token_scores(batch).split(batch.seqlens)]
    silent = [not any(row[2]) for row in rows_by_loop(batch)]
    expected = [0.0 if no else total for no, total in zip(silent, sums, strict=True)]
    torch.testing.assert_close(torch.tensor(tokens), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert not token_scores(batch)[~batch.loss_mask].any()


def test_a_reward_stands_at_its_turns_last_token_or_at_the_rows():
    batch = forked_batch()
    places = token_scores(batch).nonzero()[:, 0]
    assert [(place.item(), batch.input_ids[place].item()) for place in places] == [
        (3, 4), (6, 7), (9, 6), (15, 100), (19, 111), (24, 122)
    ]  # fmt: skip
    assert token_scores(batch)[places].tolist() == [3.0, 8.0, 4.0, 1.0, 2.0, 3.0]
    ends = batch.cu_seqlens[1:].long() - 1
    assert scores_at_end(batch)[ends].tolist() == [11.0, 4.0, 16.0, 6.0]
    assert torch.equal(placed_scores(batch, "op", "last"), scores_at_end(batch))
    assert torch.equal(placed_scores(batch, "op", "turns"), token_scores(batch))
    with pytest.raises(ValueError, match="op: scores must be 'turns' or 'last', got 'all'"):
        placed_scores(batch, "op", "all")


def test_an_empty_batch_has_no_rows():
    batch = TrajectoryBuffer().pack()
    rows = rows_of(batch, max_prompt_length=3, max_response_length=4)
    assert rows.whole(batch.input_ids).shape == (0, 7)
    assert rows.packed_responses(torch.zeros(0, 4)).shape == (0,)
    assert row_turns(batch) == row_trajectories(batch) == []
    assert row_scores(batch).shape == token_scores(batch).shape == scores_at_end(batch).shape
