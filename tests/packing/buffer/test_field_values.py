"""What a declared field makes of the values it is given, whatever holds them."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from trajpack import TokenField, Trajectory, Turn, load, pack, save


def packed(dtype, values, **options):
    field = TokenField("v", dtype, **options)
    turn = Turn([1], [2] * len(values), [0.0] * len(values), fields={"v": values})
    return pack([Trajectory("a", [turn])], device="cpu", fields=[field]), turn


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_keep_their_precision_whatever_torchs_default(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        batch, _ = packed(torch.float64, [0.1, 1 / 3], fill=0.1)
        narrow, _ = packed(torch.float32, [0.1])
    finally:
        torch.set_default_dtype(before)
    assert batch.fields["v"].tolist() == [0.1, 0.1, 1 / 3]
    assert narrow.fields["v"][1].item() == np.float32(0.1)


def test_fields_are_the_hosts_whatever_torchs_default_device():
    with torch.device("meta"):
        batch, _ = packed(torch.float32, [0.5], fill=2.0)
    assert batch.fields["v"].tolist() == [2.0, 0.5]


@pytest.mark.slow
def test_the_package_is_imported_under_any_default_device():
    code = "import torch; torch.set_default_device('meta'); import trajpack"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, [0.1, float("nan")]),
        (torch.float64, [0.1, float("inf")]),
        (torch.bfloat16, torch.tensor([0.1, 0.2])),
        (torch.float8_e4m3fn, torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)),
        (torch.int16, np.arange(4, dtype=np.int16)[::-2]),
        (torch.int16, np.array([1, 2], ">i2")),
        (torch.uint8, np.frombuffer(b"ab", np.uint8)),
        (torch.float32, np.float32([1, 2])),
    ],
)
def test_values_come_back_equal_to_those_given(tmp_path, dtype, values):
    batch, turn = packed(dtype, values)
    assert batch.unpack()[0].turns == (turn,)
    save(batch, tmp_path / "batch.safetensors")
    assert load(tmp_path / "batch.safetensors").unpack()[0].turns == (turn,)


def test_no_rows_equal_no_rows_of_any_shape():
    batch, turn = packed(torch.float32, [], shape=(2,))
    assert batch.unpack()[0].turns == (turn,)


def test_what_would_lose_a_part_is_refused():
    with pytest.raises(TypeError, match="field 'v' cannot be read as numbers"):
        packed(torch.float32, np.array([1 + 2j]))


def test_declarations_of_the_wrong_kind_are_named():
    with pytest.raises(TypeError, match="fields must be several TokenField, got TokenField"):
        pack([], fields=TokenField("v", torch.int8))
    with pytest.raises(TypeError, match="field 'v': shape must be a tuple, got 4"):
        TokenField("v", torch.int8, 4)
