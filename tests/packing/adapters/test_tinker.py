import dataclasses

import numpy as np
import pytest

from tests.packing.adapters.cases import sequences_of, some_batch
from trajpack.packing.adapters.tinker import to_datum_kwargs, to_datums

INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


@pytest.fixture
def types(peer):
    """Its own types; its first module is a client of a service."""
    return peer("tinker").load("tinker.types")


def test_a_datum_is_a_sequence_shifted_by_one(types):
    batch = some_batch()
    datums = to_datums(batch)
    long = [tokens.tolist() for tokens in sequences_of(batch, batch.input_ids) if len(tokens) > 1]
    assert len(datums) == len(long) == len(batch) - 1
    for datum, tokens in zip(datums, long, strict=True):
        assert type(datum) is types.Datum
        assert datum.model_input.to_ints() == tokens[:-1]
        targets = datum.loss_fn_inputs["target_tokens"]
        assert targets.data == tokens[1:]
        assert datum.model_input.length == targets.shape[0] == len(tokens) - 1


def test_loss_inputs_have_the_services_dtypes_and_are_of_predicted_tokens(types):
    batch = some_batch()
    columns = {
        "logprobs": batch.rollout_logprobs,
        "advantages": batch.advantages,
        "mask": batch.loss_mask.float(),
    }
    expected = {name: sequences_of(batch, column) for name, column in columns.items()}
    kept = [index for index, length in enumerate(batch.seqlens) if length > 1]
    for index, datum in zip(kept, to_datums(batch), strict=True):
        inputs = datum.loss_fn_inputs
        assert list(inputs) == ["target_tokens", *columns]
        assert inputs["target_tokens"].to_numpy().dtype == INT64
        for name, pieces in expected.items():
            assert inputs[name].to_numpy().dtype == FLOAT32
            assert inputs[name].tolist() == pieces[index][1:].tolist(), name


def test_the_real_type_converts_our_tensors_as_it_does_lists(types):
    batch = some_batch()
    for given, datum in zip(to_datum_kwargs(batch, mask=False), to_datums(batch), strict=True):
        lists = {name: values.tolist() for name, values in given["loss_fn_inputs"].items()}
        other = types.Datum(types.ModelInput.from_ints(given["model_input"]), lists)
        for name, values in other.loss_fn_inputs.items():
            mine = datum.loss_fn_inputs[name]
            assert (mine.dtype, mine.shape) == (values.dtype, values.shape), name
            assert mine.tolist() == values.tolist(), name


@pytest.mark.usefixtures("types")
def test_a_datum_keeps_its_values_when_the_batch_changes():
    batch = some_batch()
    (first, *_) = to_datums(batch)
    before = first.loss_fn_inputs["advantages"].tolist()
    batch.advantages.zero_()
    assert first.loss_fn_inputs["advantages"].tolist() == before
    assert any(before)


def test_tokens_outside_the_loss_mask_have_no_advantage():
    batch = some_batch()
    mask = batch.loss_mask & (batch.policy_versions != 1)
    datums = to_datum_kwargs(dataclasses.replace(batch, loss_mask=mask), mask=False)
    kept = [of[1:] for of in sequences_of(batch, mask) if len(of) > 1]
    for datum, trained in zip(datums, kept, strict=True):
        assert (datum["loss_fn_inputs"]["advantages"] != 0).tolist() == trained.tolist()
    assert mask.sum() < batch.loss_mask.sum()
