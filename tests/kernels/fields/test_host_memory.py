"""Host memory of fields: reused once no reference to its content is left."""

import pytest
import torch

from trajpack.kernels.fields.build import FIELD_DTYPES, HostMemory


def addresses(fields):
    return [field.data_ptr() for field in fields]


def test_memory_of_released_fields_is_reused():
    memory = HostMemory()
    first = memory.fields(5000)
    assert {name: field.dtype for name, field in first._asdict().items()} == FIELD_DTYPES
    assert {field.shape for field in first} == {(5000,)}
    places = addresses(first)
    del first
    assert addresses(memory.fields(5000)) == places
    assert addresses(memory.fields(4000)) == places, "a shorter batch fits"
    assert addresses(memory.fields(6000)) == places, "and one a little longer"


@pytest.mark.parametrize(
    "hold",
    [
        lambda fields: fields,
        lambda fields: fields.input_ids[3:5],
        lambda fields: fields.input_ids.view(torch.int32),
        lambda fields: fields.input_ids.numpy()[7:],
        lambda fields: fields.input_ids.untyped_storage(),
        lambda fields: torch.utils.dlpack.to_dlpack(fields.input_ids),
        lambda fields: memoryview(fields.input_ids.numpy()),
    ],
)
def test_referenced_memory_is_not_reused(hold):
    memory = HostMemory()
    fields = memory.fields(5000)
    place = fields.input_ids.data_ptr()
    held = hold(fields)
    del fields
    others = [memory.fields(5000) for _ in range(3)]
    assert place not in [other.input_ids.data_ptr() for other in others]
    assert len({other.input_ids.data_ptr() for other in others}) == 3
    del held
    assert memory.fields(5000).input_ids.data_ptr() == place


def test_memory_much_too_large_is_released():
    memory = HostMemory()
    large = memory.fields(10_000_000).input_ids.untyped_storage().nbytes()
    assert memory.fields(2000).input_ids.untyped_storage().nbytes() < large / 100


def test_memory_of_a_peak_is_released():
    memory = HostMemory()
    peak = [memory.fields(100_000) for _ in range(20)]
    assert len(peak) == 20
    del peak
    memory.fields(2000)
    assert all(len(arrays) <= 2 for arrays in memory._lent.values())


def test_memory_that_fits_is_found_behind_some_that_does_not():
    memory = HostMemory()
    large, fitting = memory.fields(900_000), memory.fields(5000)
    place = fitting.input_ids.data_ptr()
    del large, fitting
    assert memory.fields(5000).input_ids.data_ptr() == place


def test_no_tokens_take_no_room():
    assert {field.shape for field in HostMemory().fields(0)} == {(0,)}
