"""Numbers of turns: one table declares them for turns, batches, static batches and files."""

import pytest
import torch

import trajpack
from trajpack.packing.turn_fields import TURN_FIELDS

VALUES = {"reward": 0.1, "truncated": True, "version_start": 3, "version_end": 5}


def trajectory():
    turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5], **VALUES)
    return trajpack.Trajectory("a", [turn])


@pytest.mark.parametrize("field", TURN_FIELDS, ids=lambda field: field.attribute)
def test_a_number_of_a_turn_is_in_every_form_of_a_batch(field, tmp_path):
    packed = trajpack.pack([trajectory()])
    packed.save(tmp_path / "batch.safetensors")
    loaded = trajpack.PackedBatch.load(tmp_path / "batch.safetensors")
    buffer = trajpack.TrajectoryBuffer()
    buffer.add(trajectory())
    static = trajpack.StaticBatch(capacity=64, max_turns=3, device="cpu")
    padded = getattr(buffer.pack_into(static), field.name)
    given = VALUES[field.attribute]
    for batch in (packed, loaded):
        tensor = getattr(batch, field.name)
        assert (tensor.dtype, tensor.tolist()) == (field.dtype, [given])
        (turn,) = batch.unpack()[0].turns
        assert type(getattr(turn, field.attribute)) is type(given)
        assert getattr(turn, field.attribute) == given
    assert padded.tolist() == [given, field.padding, field.padding]


def test_the_table_has_every_number_of_a_turn():
    assert {field.attribute for field in TURN_FIELDS} == {*VALUES}
    dtypes = {field.dtype for field in TURN_FIELDS}
    assert dtypes <= {torch.float64, torch.int32, torch.bool}  # those that a table of the host has
