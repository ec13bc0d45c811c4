"""Extra fields: gathered row by row as a loop over tokens would."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack.kernels.fields.gather_fields import (
    FieldLayout,
    GatherInputs,
    gather_fields,
    write_reference,
)
from trajpack.kernels.fields.units import as_rows, empty_units, rows_of
from trajpack.kernels.runs import Run
from trajpack.testing import assert_same_bits, random_build_inputs

FIELDS = [
    FieldLayout(torch.uint8, (3, 9), b"\xff", True),  # 27 bytes: moved one by one
    FieldLayout(torch.int16, (4, 2), b"\x07\x00", False),
    FieldLayout(torch.int16, (3,), b"\x07\x01", True),  # 6 bytes: two by two
    FieldLayout(torch.float32, (), np.float32(-1.5).tobytes(), True),
    FieldLayout(torch.float64, (), np.float64(0.1).tobytes(), True),
    FieldLayout(torch.bfloat16, (2,), b"\x80\x3f", False),
    FieldLayout(torch.bool, (), b"\x01", True),
]
LENGTHS = {
    "no tokens": [],
    "one token": [1],
    "a few runs": [3, 0, 17, 1],
    "tiles of every unit": [700, 400, 5],
    "tiny runs": [index % 4 for index in range(120)],
}


def random_inputs(lengths, fields=FIELDS, seed=0):
    """Runs of these lengths, and rows of arbitrary bits for each field."""
    rng = np.random.default_rng(seed)
    _, runs, _, num_tokens = random_build_inputs(rng, lengths)
    starts, parts, end = [], [], 0
    for field in fields:
        size = -(-(field.row_bytes * (sum(lengths) + 50)) // 16) * 16
        starts.append(end)
        parts.append(rng.integers(0, 256, size, dtype=np.uint8))
        end += size
    stream = np.concatenate([*parts, np.zeros(16, np.uint8)])
    first = rng.integers(0, 50, (len(runs), len(fields)))
    sources = np.array(starts) + first * [field.row_bytes for field in fields]
    return torch.from_numpy(stream.view(np.int32)), runs, torch.from_numpy(sources), num_tokens


def by_loop(words, runs, sources, fields, num_tokens):
    stream = words.numpy().view(np.uint8)
    gathered = []
    for number, field in enumerate(fields):
        rows = np.tile(np.frombuffer(field.fill, np.uint8), (num_tokens, math.prod(field.shape)))
        for row, following, source in zip(
            runs.tolist(), runs[1:].tolist(), sources[:, number].tolist(), strict=False
        ):
            for token in range(row[Run.START], following[Run.START]):
                skipped = row[Run.GENERATED] if field.generated_only else 0
                index = token - row[Run.START] - skipped
                if row[Run.SOURCE] >= 0 and index >= 0:
                    begin = source + index * field.row_bytes
                    rows[token] = stream[begin : begin + field.row_bytes]
        flat = torch.from_numpy(rows.reshape(-1)).view(field.dtype)
        gathered.append(flat.view(num_tokens, *field.shape))
    return gathered


def test_the_stream_may_begin_anywhere_in_its_memory():
    words, runs, sources, num_tokens = random_inputs([3, 0, 17, 1])
    shifted = torch.cat([words[:1], words])[1:]
    expected = gather_fields(words, runs, sources, FIELDS, num_tokens, "torch")
    actual = gather_fields(shifted, runs, sources, FIELDS, num_tokens, "torch")
    for pair in zip(actual, expected, strict=True):
        assert_same_bits(*pair)


def check(lengths, impl, fields=FIELDS, seed=0):
    words, runs, sources, num_tokens = random_inputs(lengths, fields, seed)
    actual = gather_fields(words, runs, sources, fields, num_tokens, impl)
    expected = by_loop(words, runs, sources, fields, num_tokens)
    for field, *pair in zip(fields, actual, expected, strict=True):
        assert_same_bits(*pair, str(field))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_it_equals_a_loop_over_tokens_bit_for_bit(impl, lengths):
    check(lengths, impl)


@given(lengths=st.lists(st.integers(0, 60), max_size=8), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_any_runs_equal_a_loop_over_tokens(impl, lengths, seed):
    fields = np.random.default_rng(seed).choice(len(FIELDS), 2, replace=False)
    check(lengths, impl, [FIELDS[number] for number in fields], seed)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_the_reference_equals_a_loop_over_tokens_bit_for_bit(lengths):
    words, runs, sources, num_tokens = random_inputs(lengths)
    layouts = [rows_of(*field[:3]) for field in FIELDS]
    out = empty_units(layouts, num_tokens, words.device)
    masks = [field.generated_only for field in FIELDS]
    write_reference(out, GatherInputs(words, runs, sources, num_tokens, layouts, masks))
    expected = by_loop(words, runs, sources, FIELDS, num_tokens)
    for units, field, rows in zip(out, FIELDS, expected, strict=True):
        assert_same_bits(as_rows(units, num_tokens, field.dtype, field.shape), rows)


def test_the_operator_is_registered_right(impl):
    words, runs, sources, num_tokens = random_inputs([3, 4])
    layouts, masks = [1, 1, 0, 1, 8, 5, 4, 4, -1], [True, False, True]
    operator = torch.ops.trajpack.gather_fields.default
    places = sources[:, :3] // 8 * 8
    torch.library.opcheck(operator, (words, runs, places, num_tokens, layouts, masks, impl))


W, R, S, N = random_inputs([3, 4], FIELDS[:1])


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "gather_fields: words must be int32, got int64", (W.long(), R, S, N)),
        (TypeError, "sources must be int64, got int32", (W, R, S.int(), N)),
        (ValueError, r"sources must have shape \[3, 1\], got \[2, 1\]", (W, R, S[1:], N)),
        (ValueError, r"runs must have shape .* got \[3, 7\]", (W, R[:, 1:], S, N)),
        (ValueError, "sources is on meta but the other inputs are on cpu", (W, R, S.to("meta"), N)),
        (ValueError, r"num_tokens must be in \[0, 2147482624\], got -1", (W, R, S, -1)),
    ],
)
def test_wrong_input_is_named(error, match, arguments):
    words, runs, sources, num_tokens = arguments
    with pytest.raises(error, match=match):
        gather_fields(words, runs, sources, FIELDS[:1], num_tokens)
