"""Numbers of turns: a row of `TURN_FIELDS` puts a number into every form of a turn."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trajpack
from trajpack.packing.turn_fields import TURN_FIELDS

ROOT = Path(__file__).parents[2]
VALUES = {"reward": 0.1, "truncated": True, "version_start": 3, "version_end": 5}
VALUES |= {"stop_reason": "tool"}
NEW = {"score": ("turn_scores", "torch.float64", 0.25), "stage": ("turn_stages", "torch.int32", 7)}
"""Attribute of `Turn`: attribute of `PackedBatch`, dtype and value."""
PROGRAM = Path(__file__).with_name("turn_field_forms.py")


def trajectory():
    turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5], **VALUES)
    return trajpack.Trajectory("a", [turn])


@pytest.mark.parametrize("field", TURN_FIELDS, ids=lambda field: field.attribute)
def test_a_number_of_a_turn_is_in_every_form_of_a_batch(field, tmp_path):
    packed = trajpack.pack([trajectory()])
    trajpack.save(packed, tmp_path / "batch.safetensors")
    loaded = trajpack.load(tmp_path / "batch.safetensors")
    given = VALUES[field.attribute]
    for batch in (packed, loaded):
        tensor = getattr(batch, field.name)
        assert (tensor.dtype, tensor.tolist()) == (field.dtype, [field.plain(given)])
        (turn,) = batch.unpack()[0].turns
        assert type(getattr(turn, field.attribute)) is type(given)
        assert getattr(turn, field.attribute) == given


def test_the_table_has_every_number_of_a_turn():
    assert {field.attribute for field in TURN_FIELDS} == {*VALUES}


def edited(folder, path, before, after):
    """Insert a text before another one into a file of a copied product."""
    text = (folder / path).read_text()
    assert text.count(before) == 1, path
    (folder / path).write_text(text.replace(before, after + before))


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Add a row for each new number, and the attributes; return its values in every form."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("copy")
    product = folder / "trajpack"
    shutil.copytree(ROOT / "src" / "trajpack", product)
    rows = [
        f'    TurnField("{attribute}", "{name}", {dtype}),\n'
        for attribute, (name, dtype, _) in NEW.items()
    ]
    edited(product, "packing/turn_fields.py", ')\n"""Each has', "".join(rows))
    attributes = "".join(f"    {attribute}: float = 0\n" for attribute in NEW)
    edited(product, "packing/types.py", "\n    def __eq__(self, other: object)", attributes)
    tensors = "".join(f"    {name}: torch.Tensor\n" for name, _, _ in NEW.values())
    edited(product, "packing/batch/batch.py", "    turn_sequence: torch.Tensor\n", tensors)
    done = subprocess.run(
        [sys.executable, "-P", PROGRAM, folder, json.dumps(NEW)],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("attribute", NEW)
def test_a_row_of_the_table_adds_a_number_everywhere(forms, attribute):
    *_, value = NEW[attribute]
    found = {form: values[attribute] for form, values in forms.items()}
    assert found.pop("equality") is True
    assert set(found) == {
        "batch", "saved file", "unpacked", "log", "Parquet", "Ray payload", "device batch",
    }  # fmt: skip
    assert list(found.values()) == [[value]] * len(found)
