"""Packed sequences through each family of transformers: the table of docs/formats/huggingface.md.

"right" is the logits of the separate sequences, "refused" an error of the model, and "wrong" other
logits without an error. What is not right must be named by `check_isolation`.
"""

from __future__ import annotations

import dataclasses
import random
import re
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers

from tests.packing.isolation.tiny_models import (
    FAMILIES,
    NOT_TINY,
    VOCABULARY,
    takes_kernels,
    tiny_model,
    tiny_model_with_pictures,
)
from tests.packing.micro_batches.micro_batch_loops import ALIGNMENTS
from tests.support.slow import slow_after
from trajpack import Trajectory, Turn, pack
from trajpack.packing.adapters.huggingface import check_isolation
from trajpack.packing.micro_batches.alignment import Alignment

PAGE = Path(__file__).parents[3] / "docs/formats/huggingface.md"
LENGTHS = (17, 33, 1, 64, 2)
KERNELS = ("none", "recurrent", "flash")
"""Columns of the table: which kernels there are."""


def the_table() -> dict[str, dict[str, str]]:
    """Return what the page says of each family, by the kernels that there are."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    wanted = [row for row in rows if len(row) == 4 and set(row[1:]) <= {*OUTCOMES, ""}]
    return {
        family: {kernels: word for kernels, word in zip(KERNELS, row[1:], strict=True) if word}
        for row in wanted
        for family in re.findall(r"`([^`]+)`", row[0])
    }


OUTCOMES = {"right": None, "refused": "cannot take packed sequences", "wrong": "see each other"}
"""What can come of packed sequences, and what `check_isolation` says of it."""
TABLE = the_table()
(TABLE_VERSION,) = re.findall(r"^## Families of transformers (.*)$", PAGE.read_text(), re.M)
of_this_version = pytest.mark.skipif(
    not transformers.__version__.startswith(f"{TABLE_VERSION}."),
    reason=f"the table is of transformers {TABLE_VERSION}, installed is {transformers.__version__}",
)
LARGEST_ROUNDING = 3e-4
"""Of the deviation of logits: rounding moves ``dory`` by 1.1e-4, and ``zamba`` leaks 8.5e-4."""
RECURRENT = [family for family, row in TABLE.items() if "recurrent" in row]


def some_batch():
    """Return a batch of sequences of which two are shorter than a convolution."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=generator).split(LENGTHS)
    return pack([Trajectory(str(i), [Turn(row, [], [])]) for i, row in enumerate(ids)])


def alone(model, batch):
    """Return the logits of the sequences by themselves, ``[tokens, vocabulary]``."""
    with torch.no_grad():
        rows = batch.input_ids.split(batch.seqlens)
        return torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])


def outcome(model, inputs, expected):
    """Return "right", "refused" or "wrong"."""
    with torch.no_grad():
        try:
            packed = model(**inputs).logits[0]
        except (TypeError, ValueError):
            return "refused"
    moved = (packed - expected).abs().max() / expected.std()
    return "right" if moved < LARGEST_ROUNDING else "wrong"


def make(family, kernels):
    return tiny_model(
        family,
        kernels=kernels != "none" and takes_kernels(family),
        flash=kernels == "flash",
    )


@of_this_version
@pytest.mark.slow
def test_the_table_has_every_family_that_is_tried():
    assert set(TABLE) == set(FAMILIES)
    assert {family for family in FAMILIES if takes_kernels(family)} == set(RECURRENT)
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    left_out = {family for families in NOT_TINY.values() for family in families}
    assert set(mapping) == set(FAMILIES) | left_out


def pytest_generate_tests(metafunc):
    """Try every family with ``--full``, else a few of those with the same outcomes."""
    if metafunc.function is test_a_family_is_right_or_named:
        most = None if metafunc.config.getoption("--full") else 6
        alike = {}
        for family, row in TABLE.items():
            alike.setdefault(str(row), []).append(family)
        families = [slow_after(1, some[:most]) for some in alike.values()]
        metafunc.parametrize("family", [*chain.from_iterable(families)])


@of_this_version
@pytest.mark.attack
@pytest.mark.usefixtures("flash_attention")
def test_a_family_is_right_or_named(family):
    batch = some_batch()
    inputs = batch.model_inputs()
    without_seq_idx = {name: value for name, value in inputs.items() if name != "seq_idx"}
    for kernels, word in TABLE[family].items():
        model = make(family, kernels)
        expected = alone(model, batch)
        assert outcome(model, inputs, expected) == word, kernels
        if word != "right":
            with pytest.raises(ValueError, match=OUTCOMES[word]) as caught:
                check_isolation(model)
            assert type(model).__name__ in str(caught.value)
        elif kernels == "recurrent":
            assert outcome(model, without_seq_idx, expected) == "wrong"
            check_isolation(model)


@of_this_version
@pytest.mark.attack
def test_a_family_of_attention_that_is_right_passes_the_check(tries):
    right = [f for f in TABLE if TABLE[f]["none"] == "right"]
    for family in random.Random(0).sample(right, tries(len(right))):
        check_isolation(make(family, "none"))


def with_cu_seqlens(batch):
    """Return the inputs with the boundaries by the name that kernels of FLA have for them."""
    return batch.model_inputs() | {"cu_seqlens": batch.cu_seqlens}


@pytest.mark.parametrize("family", ["bailing_hybrid", "kimi_linear"])
def test_kimi_delta_attention_takes_boundaries_by_another_name(family):
    batch, model = some_batch(), make(family, "recurrent")
    assert outcome(model, with_cu_seqlens(batch), alone(model, batch)) == "right"
    check_isolation(model, inputs=with_cu_seqlens)


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("bamba", "recurrent"),
        ("lfm2", "recurrent"),
        ("qwen3_5_text", "recurrent"),
        ("qwen3_5_text", "flash"),
    ],
)
def test_padding_of_a_micro_batch_reaches_no_other_sequence(family, kernels):
    model, whole = make(family, kernels), some_batch()
    chosen = [3, 2, 4, 0]
    expected = alone(model, whole).split(whole.seqlens)
    for name, alignment in ALIGNMENTS.items():
        if alignment.total is not None:
            alignment = dataclasses.replace(alignment, total=192)  # noqa: PLW2901
        batch = whole.select(chosen, alignment)
        with torch.no_grad():
            rows = model(**batch.model_inputs()).logits[0].split(batch.padded_seqlens)
        for sequence, row in zip(chosen, rows, strict=False):
            kept = expected[sequence]
            assert (row[: len(kept)] - kept).abs().max() < 1e-4, (name, sequence)


PICTURES = {
    "qwen3_vl": "Qwen3VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_vl": "Qwen2VL",
    "glm4v": "Glm4v",
}
"""Classes that take pictures beside text, by their folder."""


@pytest.mark.parametrize("folder", PICTURES)
def test_a_model_with_pictures_is_right_with_the_positions_of_mrope(folder):
    """Given text alone; all but the first are wrong with one row of positions."""
    batch, model = some_batch(), tiny_model_with_pictures(folder, PICTURES[folder])
    expected = alone(model, batch)
    assert outcome(model, batch.model_inputs(mrope=True), expected) == "right"
    alignment = Alignment(sequence_multiple=8, total=192)
    padded = batch.select(range(len(batch)), alignment)
    with torch.no_grad():
        rows = model(**padded.model_inputs(mrope=True)).logits[0].split(padded.padded_seqlens)
    kept = [row[:length] for row, length in zip(rows, batch.seqlens, strict=False)]
    torch.testing.assert_close(torch.cat(kept), expected, rtol=0, atol=1e-4)
    check_isolation(model, inputs=lambda trial: trial.model_inputs(mrope=True))
    if folder == "qwen3_vl":
        assert outcome(model, batch.model_inputs(), expected) == "right"
        check_isolation(model)
        return
    assert outcome(model, batch.model_inputs(), expected) == "wrong"
    repair = r"self_attn .*Give it four rows of positions: batch\.model_inputs\(mrope=True\)"
    with pytest.raises(ValueError, match=repair):
        check_isolation(model)
