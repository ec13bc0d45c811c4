from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.packing.adapters.cases import clipped_loss, packed_logprobs, some_batch
from trajpack import DrGRPO, Trajectory, Turn, pack, plan_micro_batches
from trajpack.agent import build_tiny_model
from trajpack.packing.adapters.trl import to_async_row, to_async_samples, to_flat_async_row
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.testing import assert_same_bits

PAD = 0


def collate(trl, rows_of_samples):
    rows = []
    for samples in rows_of_samples:
        rows.append(trl.TreeRow())
        for sample in samples:
            rows[-1].add(sample)
    return trl.DataCollatorForRollout(PAD, num_processes=len(rows))([rows])


def test_the_row_is_what_the_real_collator_makes_of_samples_that_share_nothing(trl):
    batch = some_batch(level="sequence")
    ours, theirs = to_async_row(batch), collate(trl, [to_async_samples(batch)])
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert_same_bits(ours[key], tensor, key)


def test_samples_that_share_a_prefix_are_trained_alike_folded_or_not(trl):
    """The collator folds the prompt; which token predicts what, and its worth, stay the same."""
    turns = [Turn([1, 2], [3, 4], [-0.5, -0.25]), Turn([1, 2], [3, 5], [-0.5, -0.75], reward=1.0)]
    batch = pack([Trajectory(str(n), [turn], "g") for n, turn in enumerate(turns)], device="cpu")
    batch = batch.with_advantages(DrGRPO())
    ours, theirs = to_async_row(batch), collate(trl, [to_async_samples(batch)])
    assert theirs["input_ids"].shape[1] < ours["input_ids"].shape[1]
    terms = []
    for row in (ours, theirs):
        at = row["token_index"][0]
        keys = ("old_log_probs", "advantages", "segment_id")
        given = [row["position_ids"][0, at], row["shift_labels"][0, at]]
        columns = [*given, *(row[key][0] for key in keys)]
        terms.append(sorted(zip(*(column.tolist() for column in columns), strict=True)))
    assert terms[0] == terms[1]
    assert len(terms[0]) == batch.num_generated


class Scorer(torch.nn.Module):
    """A model as the asynchronous trainer calls it, with attention that this machine has.

    The trainer's own gathers keys for a kernel of flash attention; over sequences side by side
    that is attention within each, which the model also does by position ids.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, shift_labels, fused_lm_head, **tree):
        places = tree["tree_cu_seqlens_q"]
        assert torch.equal(places, tree["tree_cu_seqlens_k"])
        assert tree["tree_max_seqlen_q"] == tree["tree_max_seqlen_k"] == int(places.diff().max())
        starts = torch.nonzero(position_ids[0] == 0)[:, 0]
        assert set(places[:-1].tolist()) >= set(starts.tolist())
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        logprobs = output.logits.float().log_softmax(-1)
        chosen = logprobs.gather(2, shift_labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return SimpleNamespace(log_probs=chosen, entropy=entropy)


def async_loss(trl, model, row):
    from accelerate import Accelerator

    state = SimpleNamespace(
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2,
        accelerator=Accelerator(cpu=True), current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)}, _step_forward_tokens=0.0,
        _step_trained_tokens=0.0, _step_seq_len_weighted=0.0, _step_samples=0.0,
        _step_forward_s=0.0,
    )  # fmt: skip
    loss = trl.AsyncGRPOTrainer.compute_loss(state, Scorer(model), row)
    return loss, state


@pytest.mark.parametrize("padded", [False, True])
def test_the_asynchronous_trainers_loss_of_the_row_is_that_of_the_packed_tokens(trl, padded):
    model, _ = build_tiny_model(seed=0)
    batch = some_batch()
    expected = clipped_loss(
        packed_logprobs(model, batch), batch.rollout_logprobs, batch.advantages, batch.loss_mask
    )
    row = batch
    if padded:
        row = batch.select([5, 3, 4, 1, 0, 2], Alignment(sequence_multiple=4, total=128))
    loss, state = async_loss(trl, model, to_async_row(row))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert state._step_trained_tokens == batch.num_generated
    assert state._step_forward_tokens == row.num_tokens
    several = to_async_row(row, num_trained=torch.tensor(2 * batch.num_generated))
    torch.testing.assert_close(async_loss(trl, model, several)[0], loss / 2)


def test_the_flat_row_has_everything_at_its_token():
    batch = some_batch()
    row = to_flat_async_row(batch)
    assert row.pop("metrics") == {}
    assert {key: tensor.dtype for key, tensor in row.items()} == {
        "input_ids": torch.int64, "attention_mask": torch.int64, "completion_mask": torch.int64,
        "position_ids": torch.int64, "old_log_probs": torch.float32, "advantages": torch.float32,
        "global_n_tokens": torch.float32, "global_n_forward_tokens": torch.float32,
        "mean_seq_len": torch.float32,
    }  # fmt: skip
    assert row["global_n_forward_tokens"].tolist() == [batch.num_tokens]
    assert row["mean_seq_len"].item() == pytest.approx(batch.num_tokens / len(batch))
    assert not row["completion_mask"][row["position_ids"] == 0].any()
    assert row["global_n_tokens"].tolist() == [batch.num_generated]
    model, _ = build_tiny_model(seed=0)
    logits = model(
        input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False
    ).logits.log_softmax(-1)
    logprobs = logits[:, :-1].gather(2, row["input_ids"][:, 1:, None])[..., 0]
    shifted = (row[key][:, 1:] for key in ("old_log_probs", "advantages", "completion_mask"))
    ours = clipped_loss(logprobs, *shifted)
    expected = clipped_loss(
        packed_logprobs(model, batch), batch.rollout_logprobs, batch.advantages, batch.loss_mask
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_advantages_that_differ_within_a_sequence_are_refused():
    with pytest.raises(ValueError, match=r"a sequence must be equal, got .* in sequence 0"):
        to_async_samples(some_batch())


@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
def test_rows_of_micro_batches_have_the_terms_of_the_batch_and_a_dummy_none(tail):
    batch = some_batch()
    plan = plan_micro_batches(batch.seqlens, 32, align=4, multiple_of=8)
    alignment = Alignment(sequence_multiple=4, total=40, tail=tail, max_sequences=9)
    rows = [to_async_row(micro_batch) for micro_batch in batch.micro_batches(plan, alignment)]
    assert any(len(chosen) == 0 for chosen in plan)
    terms = []
    for row in [to_async_row(batch), *rows]:
        holds = row["token_index"][0] >= 0
        at = row["token_index"][0, holds]
        columns = [row[key][0, at] for key in ("input_ids", "shift_labels", "position_ids")]
        columns += [row[key][0, holds] for key in ("old_log_probs", "advantages")]
        terms.append(list(zip(*(column.tolist() for column in columns), strict=True)))
        assert len(terms[-1]) == int((row["shift_labels"] >= 0).sum()) == row["global_n_tokens"]
    whole, *parts = terms
    assert sorted(whole) == sorted(term for part in parts for term in part)
    assert [] in parts
