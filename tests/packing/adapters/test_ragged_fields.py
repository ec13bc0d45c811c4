"""Ragged fields in the trainers' formats: sampling masks of ids, all others refused."""

import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import random_batch
from trajpack import TokenField
from trajpack.packing.adapters import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, verl


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
    field = TokenField(name, torch.int32, ragged=True)
    batch = random_batch(np.random.default_rng(5), fields=[field])
    with pytest.raises(ValueError, match=rf"a row for each token, \['{name}'\] are ragged"):
        write(batch)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"dtype": torch.float32, "ragged": True}, "hold integers .* got torch.float32"),
        ({"dtype": torch.int32, "ragged": True, "shape": (2,)}, r"integers .* shape \[2\]"),
        ({"dtype": torch.int32, "shape": (4,), "fill": -1}, "ragged=True, got padded rows"),
    ],
)
def test_masks_that_are_no_lists_of_token_ids_are_refused(field, words):
    field = TokenField("sampling_mask", **field)
    batch = random_batch(np.random.default_rng(5), fields=[field])
    for write in (
        prime_rl.to_training_samples,
        prime_rl.to_tensor_micro_batch,
        prime_rl.to_micro_batch,
        slime.to_samples,
        skyrl.to_generator_output,
    ):
        with pytest.raises(ValueError, match=f"sampling_mask must .*{words}"):
            write(batch)
