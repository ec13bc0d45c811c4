"""Ragged fields in the trainers' formats: the same as padded rows, or refused."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import random_batch
from trajpack import GRPO, Alignment, TokenField, pack
from trajpack.packing.adapters import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, verl

PADDED = TokenField("sampling_mask", torch.int32, (4,), fill=-1)
MASK = TokenField("sampling_mask", torch.int32, ragged=True)


def both_batches(seed, layout):
    """Return a batch with padded masks, and one with the same masks as a ragged field."""
    padded = random_batch(np.random.default_rng(seed), fields=[PADDED], layout=layout)
    trajectories = [
        dataclasses.replace(one, turns=[with_lists(turn) for turn in one.turns])
        for one in padded.unpack()
    ]
    return padded, pack(trajectories, layout, fields=[MASK])


def with_lists(turn):
    rows = [[token for token in row if token != -1] for row in turn.fields[MASK.name].tolist()]
    return dataclasses.replace(turn, fields={MASK.name: rows})


def plain(value):
    """Return a value of a format in lists; rows of masks without their padding."""
    if isinstance(value, dict):
        return {key: plain(of) for key, of in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        entries = [plain(one) for one in value]
        return [one for one in entries if type(one) is not int or one != -1]
    return value


WRITERS = {
    "prime-rl, samples": prime_rl.to_training_samples,
    "prime-rl, tensors": prime_rl.to_tensor_micro_batch,
    "prime-rl, micro-batch": prime_rl.to_micro_batch,
    "slime": slime.to_samples,
    "skyrl": skyrl.to_generator_output,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("layout", ["merged", "turns"])
@pytest.mark.parametrize("seed", [5, 25])
def test_a_ragged_mask_is_written_as_a_padded_one(name, layout, seed):
    padded, ragged = (batch.with_advantages(GRPO()) for batch in both_batches(seed, layout))
    assert ragged.value_counts[MASK.name][0] > 0
    assert plain(WRITERS[name](ragged)) == plain(WRITERS[name](padded))


@pytest.mark.parametrize("name", ["prime-rl, tensors", "prime-rl, micro-batch"])
def test_micro_batches_are_written_too(name):
    batches = [batch.with_advantages(GRPO()) for batch in both_batches(25, "merged")]
    alignment = Alignment(sequence_multiple=4, total_multiple=16)
    padded, ragged = (batch.select([1, 0], alignment) for batch in batches)
    assert plain(WRITERS[name](ragged)) == plain(WRITERS[name](padded))


@pytest.mark.usefixtures("skyrl")
def test_skyrls_training_input_has_packed_support():
    padded, ragged = map(skyrl.to_training_input, both_batches(25, "merged"))
    key = "rollout_sample_support"
    assert plain(ragged[key].values) == plain(padded[key].values)
    assert torch.equal(ragged[key].cu_seqlens, padded[key].cu_seqlens)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (verl.to_data_proto_dict, "any"),
        (nemo_rl.to_loss_inputs, "any"),
        (areal.to_padded_dict, "any"),
        (skyrl.to_training_input, "any"),
        (skyrl.to_generator_output, "routed_experts"),
        (slime.to_samples, "teacher_log_probs"),
        (prime_rl.to_micro_batch, "temperatures"),
        (prime_rl.to_training_samples, "ref_logprobs"),
        (openrlhf.to_experience_dict, openrlhf.FIELDS[0]),
    ],
)
def test_formats_without_room_refuse_them_by_name(write, name):
    _, batch = both_batches(5, "merged")
    trajectories = batch.unpack()
    for turn in (turn for one in trajectories for turn in one.turns):
        turn.fields[name] = turn.fields.pop(MASK.name)
    batch = pack(trajectories, fields=[TokenField(name, torch.int32, ragged=True)])
    with pytest.raises(ValueError, match=rf"a row for each token, \['{name}'\] are ragged"):
        write(batch.with_advantages(GRPO()))


@pytest.mark.parametrize("field", [("float32", ()), ("int32", (2,))])
@pytest.mark.parametrize("name", WRITERS)
def test_masks_that_are_no_token_ids_are_refused(name, field):
    dtype, shape = field
    declared = TokenField(MASK.name, getattr(torch, dtype), shape, ragged=True)
    _, batch = both_batches(5, "merged")
    trajectories = batch.unpack()
    for turn in (turn for one in trajectories for turn in one.turns):
        cu, values = turn.fields[MASK.name]
        wide = np.broadcast_to(np.reshape(values, (-1, *[1] * len(shape))), (len(values), *shape))
        turn.fields[MASK.name] = type(turn.fields[MASK.name])(cu, wide)
    batch = pack(trajectories, fields=[declared]).with_advantages(GRPO())
    with pytest.raises(ValueError, match="sampling_mask must hold integers"):
        WRITERS[name](batch)


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (slime.to_samples, slime.from_samples),
        (
            prime_rl.to_training_samples,
            partial(prime_rl.from_training_samples, missing_reward=0.0),
        ),
        (skyrl.to_generator_output, skyrl.from_generator_output),
    ],
)
@pytest.mark.parametrize("seed", [5, 25])
def test_ragged_masks_are_read_as_they_were_written(write, read, seed):
    _, batch = both_batches(seed, "merged")
    back = read(write(batch), fields=[MASK.name])
    again = pack(back, fields=[MASK])
    assert again.seqlens == batch.seqlens
    assert plain(again.ragged(MASK.name)) == plain(batch.ragged(MASK.name))
