"""Selected and merged tokens beside a loop over segments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack.kernels import validation
from trajpack.kernels.rearrange.select_tokens import (
    Segment,
    merge_tokens,
    select_reference,
    select_tokens,
)
from trajpack.kernels.runs import TILE
from trajpack.testing import assert_same_bits

SOURCE_TOKENS = 1300
SEGMENTS = {
    "no tokens": [],
    "one token": [(1, 1)],
    "only padding": [(5, 0)],
    "a few, some empty": [(3, 3), (0, 0), (700, 600), (1, 0), (1200, 1100), (5, 2), (0, 0)],
    "the end of a tile": [(1024, 1024), (1024, 1), (3, 3)],
    "many short ones": [(index % 5, index % 3 if index % 5 > 1 else 0) for index in range(400)],
}
"""Tokens of each segment, and how many of them it takes."""


def random_sources(rng, tokens=SOURCE_TOKENS):
    """Rows of every unit, one and several to a row, of arbitrary bits; and padding values."""
    shapes = {
        (torch.int64, ()): -1,
        (torch.bool, ()): True,
        (torch.float32, ()): float("nan"),
        (torch.int32, (3,)): 7,
        (torch.uint8, (2, 3)): 255,  # 6 bytes: two by two
        (torch.uint8, (5,)): 254,  # one by one
        (torch.bfloat16, (5,)): -1.5,
        (torch.float64, (2,)): 0.1,
        (torch.float16, ()): -2.0,
    }
    sources = []
    for dtype, shape in shapes:
        size = (tokens, *shape)
        if dtype == torch.bool:
            sources.append(torch.from_numpy(rng.random(size) < 0.5))
            continue
        raw = rng.integers(0, 256, (*size, dtype.itemsize), dtype=np.uint8)
        sources.append(torch.from_numpy(raw).view(dtype).view(size))
    return sources, list(shapes.values())


def table_of(segments, rng, tokens=SOURCE_TOKENS, more=0):
    """A table with arbitrary sources, garbage in the last column, and ``more`` empty segments."""
    lengths = [length for length, _ in segments] + [0] * more
    taken = np.array([took for _, took in segments] + [0] * more, np.int64)
    table = rng.integers(-(2**31), 2**31, (4, len(lengths) + 1), dtype=np.int32)
    table[Segment.START] = np.cumsum([0, *lengths])
    table[Segment.SOURCE, :-1] = rng.integers(0, tokens - taken + 1)
    table[Segment.LENGTH, :-1] = taken
    return torch.from_numpy(table), sum(lengths)


def by_loop(sources, table, fills, zero):
    columns = table[:3].T.tolist()
    rows = [[] for _ in sources]
    places, owners = [], []
    for number, ((start, first, taken), (end, *_)) in enumerate(pairwise(columns)):
        for offset in range(end - start):
            given = offset < taken
            for row, source, fill in zip(rows, sources, fills, strict=True):
                padding = torch.full(source.shape[1:], fill, dtype=source.dtype)
                row.append(source[first + offset] if given else padding)
            places.append(offset if given or not zero else 0)
            owners.append(number)
    stacked = [
        torch.stack(row) if row else source[:0] for row, source in zip(rows, sources, strict=True)
    ]
    return [*stacked, torch.tensor(places).long(), torch.tensor(owners).int()]


def check(segments, impl, seed=0, positions="continue", kinds=slice(None), more=0):
    rng = np.random.default_rng(seed)
    sources, fills = random_sources(rng)
    sources, fills = sources[kinds], fills[kinds]
    table, num_tokens = table_of(segments, rng, more=more)
    selected = select_tokens(sources, table, num_tokens, fills, positions, impl)
    expected = by_loop(sources, table, fills, positions == "zero")
    actual = [*selected.rows, selected.position_ids, selected.segment_ids]
    for name, pair in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(*pair, f"{name}")
    if impl == "torch":
        said = select_reference(sources, table, num_tokens, fills, positions)
        for pair in zip([*said.rows, *said[1:]], expected, strict=True):
            assert_same_bits(*pair)


@pytest.mark.parametrize("positions", ["continue", "zero"])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
def test_it_equals_a_loop_over_segments_bit_for_bit(impl, segments, positions):
    kinds = slice(5) if positions == "zero" else slice(5, None)
    check(segments, impl, positions=positions, kinds=kinds, more=3)


@given(
    segments=st.lists(
        st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=9
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_any_segments_equal_a_loop(impl, segments, seed):
    check(segments, impl, seed, kinds=slice(seed % 9, seed % 9 + 2))


def test_unaligned_and_strided_rows_are_moved(impl):
    """A row of 4 bytes that begins at an odd one, and rows that are not contiguous."""
    memory = torch.arange(200, dtype=torch.uint8)
    sources = [memory[1:197].view(49, 4), memory.view(50, 4).T[:, :49].T, memory[:98].view(49, 2)]
    table = torch.tensor([[0, 4, 6], [45, 0, 0], [4, 1, 0]], dtype=torch.int32)
    selected = select_tokens(sources, table, 6, [9, 9, 9], impl=impl)
    for rows, source in zip(selected.rows, sources, strict=True):
        assert_same_bits(rows[:5], torch.cat([source[45:49], source[:1]]))
        assert (rows[5] == 9).all()


def test_memory_is_allocated_in_whole_tiles_for_the_unmasked_stores():
    rng = np.random.default_rng(0)
    sources, fills = random_sources(rng)
    table, num_tokens = table_of([(1030, 1030)], rng)
    selected = select_tokens(sources, table, num_tokens, fills, impl="triton")
    for rows in (*selected.rows, selected.position_ids, selected.segment_ids):
        units = rows.untyped_storage().nbytes() // max(rows.element_size(), 1)
        assert units % TILE == 0
        assert units > rows.numel()


def test_a_segment_that_leaves_the_source_reads_nothing_outside(monkeypatch):
    monkeypatch.setattr(validation, "HOSTS", ())  # where tables are not read, as on a device
    table = torch.tensor([[0, 4], [8, 0], [4, 0]], dtype=torch.int32)
    rows = select_tokens([torch.arange(10)], table, 4, [-1], impl="triton").rows[0]
    assert rows.tolist() == [8, 9, -1, -1]
    table[Segment.SOURCE, 0] = -2
    rows = select_tokens([torch.arange(10)], table, 4, [-1], impl="triton").rows[0]
    assert rows.tolist() == [-1, -1, 0, 1]


def test_the_operators_are_registered_right(impl):
    table, inverse = a_permutation()
    operator = torch.ops.trajpack.select_tokens.default
    sources = [torch.arange(5), torch.arange(15, dtype=torch.int16)]
    layouts = [1, 8, -1, 3, 2, 0]
    torch.library.opcheck(operator, (sources, table, 6, layouts, "continue", impl))
    rows = torch.rand(5, 2, requires_grad=True)
    operator = torch.ops.trajpack.merge_tokens.default
    torch.library.opcheck(operator, (rows, table, inverse, 6, 0, impl))


T = torch.tensor([[0, 2, 3], [0, 2, 0], [2, 1, 0]], dtype=torch.int32)
MORE = torch.tensor([[0, 2, 3], [0, 1, 0], [2, 2, 0]], dtype=torch.int32)
X = torch.arange(3)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "select_tokens: table must be int32, got int64", ([X], T.long(), 3, [0])),
        (ValueError, r"table must have shape \[3 or more.*got \[2, 3\]", ([X], T[:2], 3, [0])),
        (ValueError, "there must be a source, got none", ([], T, 3, [])),
        (TypeError, "source 0 must be a tensor, got list", ([[1]], T, 3, [0])),
        (TypeError, "source 0 must be of a dtype.* got complex128", ([X.cdouble()], T, 3, [0])),
        (ValueError, r"source 1 must have \[3\] tokens.* got shape \[2\]", ([X, X[1:]], T, 3, [0])),
        (
            ValueError,
            r"source 0 must have rows, got shape \[3, 0\]",
            ([X[:, None][:, 1:]], T, 3, [0]),
        ),
        (ValueError, "table is on cpu but the other", ([X.to("meta")], T, 3, [0])),
        (ValueError, "fills must be 1, one of each source", ([X], T, 3, [])),
        (ValueError, r"num_tokens must be in \[0, 2147482624\], got -1", ([X], T, -1, [0])),
        (ValueError, "positions must be one of 'continue', 'zero', got 'x'", ([X], T, 3, [0], "x")),
        (ValueError, "must go from 0 to num_tokens 4 and never", ([X], T, 4, [0])),
        (ValueError, "take tokens from 0 to 2, they take some from 0 to 3", ([X[1:]], T, 3, [0])),
        (ValueError, "no segment may take fewer than 0 tokens", ([X], MORE, 3, [0])),
    ],
)
def test_wrong_input_is_named(error, match, arguments):
    with pytest.raises(error, match=match):
        select_tokens(*arguments)
    with pytest.raises(ValueError, match=r"merge_tokens: table must have shape .* got \[1, 3\]"):
        merge_tokens(torch.zeros(3), T, T[:1], 3)


def a_permutation():
    """Segments of 6 tokens, one of padding, that take 5; and the inverse."""
    table = torch.tensor([[0, 3, 6], [2, 0, 0], [3, 2, 0]], dtype=torch.int32)
    inverse = torch.tensor([[0, 2, 5], [3, 0, 0], [2, 3, 0]], dtype=torch.int32)
    return table, inverse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_merging_is_the_inverse_of_selecting(impl, dtype):
    table, inverse = a_permutation()
    rows = (torch.arange(10).view(5, 2) % 3).to(dtype)
    selected = merge_tokens(rows, table, inverse, 6, 1, impl)
    assert_same_bits(selected, rows[[2, 3, 4, 0, 1, 0]].index_fill(0, torch.tensor([5]), 1))
    assert_same_bits(merge_tokens(selected, inverse, table, 5, 0, impl), rows)


def test_gradients_go_back_to_the_rows_they_came_from(impl):
    table, inverse = a_permutation()
    rows = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def merge(x):
        return merge_tokens(x, table, inverse, 6, 0, impl)

    assert torch.autograd.gradcheck(merge, (rows,), fast_mode=True)
    assert torch.autograd.gradgradcheck(merge, (rows,), fast_mode=True)


def test_lazily_conjugated_and_negated_tensors_are_moved_by_value(impl):
    plain = torch.complex(torch.arange(5.0), torch.arange(1.0, 6.0))
    lazy = plain.conj()
    negated = torch._neg_view(torch.arange(1.0, 6.0))
    assert lazy.is_conj()
    assert negated.is_neg()
    table = torch.tensor([[0, 3], [1, 0], [3, 0]], dtype=torch.int32)
    rows = select_tokens([lazy, negated], table, 3, [0, 0], impl=impl).rows
    assert rows[0].tolist() == [1 - 2j, 2 - 3j, 3 - 4j]
    assert rows[1].tolist() == [-2.0, -3.0, -4.0]
