"""Shifts within sequences: as a loop over them would, and never across a boundary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from trajpack.kernels.rearrange.shift import (
    drop_tokens,
    dropped_boundaries,
    shift_tokens,
)
from trajpack.testing import assert_same_bits, boundaries

LENGTHS = st.lists(st.integers(0, 5), max_size=6)


def shifted_by_loop(x, lengths, direction, fill):
    rows = x.tolist()
    out, start = [], 0
    for length in lengths:
        part = rows[start : start + length]
        if part:
            out += [*part[1:], fill] if direction == "left" else [fill, *part[:-1]]
        start += length
    return torch.tensor(out, dtype=x.dtype)


@given(lengths=LENGTHS, direction=st.sampled_from(["left", "right"]))
def test_any_sequences_are_shifted_as_a_loop_shifts_them(lengths, direction):
    x = torch.arange(sum(lengths)) + 10
    for dtype, fill in ((torch.int64, -100), (torch.float32, 0.5), (torch.bool, True)):
        tokens = x.to(dtype) if dtype != torch.bool else x % 2 == 0
        shifted = shift_tokens(tokens, boundaries(lengths), direction, fill)
        assert_same_bits(shifted, shifted_by_loop(tokens, lengths, direction, fill))


@given(lengths=LENGTHS, end=st.sampled_from(["first", "last"]))
def test_any_sequences_lose_a_token_at_their_end(lengths, end):
    x = torch.arange(sum(lengths)) * 3
    cu_seqlens = boundaries(lengths)
    parts = x.split(lengths)
    left = [part[1:] if end == "first" else part[:-1] for part in parts]
    dropped = drop_tokens(x, cu_seqlens, end, sum(length > 0 for length in lengths))
    assert_same_bits(dropped, torch.cat([x[:0], *left]))
    assert_same_bits(dropped_boundaries(cu_seqlens), boundaries([len(part) for part in left]))


def test_rows_are_moved_whole_and_gradients_with_them():
    cu_seqlens = boundaries([2, 3])
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: shift_tokens(t, cu_seqlens, "left"), (x,))
    assert torch.autograd.gradcheck(lambda t: drop_tokens(t, cu_seqlens, "first", 2), (x,))
    shifted = shift_tokens(x, cu_seqlens, "right", -1.0)
    assert_same_bits(shifted[[1, 3, 4]].detach(), x[[0, 2, 3]].detach())
    assert (shifted[[0, 2]] == -1).all()


def test_shapes_alone_are_enough_on_the_meta_device():
    x, cu_seqlens = torch.empty(5, 3, device="meta"), torch.empty(4, device="meta").int()
    assert shift_tokens(x, cu_seqlens, "left").shape == (5, 3)
    assert drop_tokens(x, cu_seqlens, "last", 2).shape == (3, 3)


C = boundaries([2, 1])


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "shift_tokens: x must be a tensor, got list", ([1], C, "left")),
        (ValueError, "x must have at least 1 dimension", (torch.tensor(1), C, "left")),
        (TypeError, "cu_seqlens must be int32, got int64", (C, C.long(), "left")),
        (ValueError, "cu_seqlens is on meta but", (torch.zeros(3), C.to("meta"), "left")),
        (ValueError, "must go from 0 to num_tokens 4 and", (torch.zeros(4), C, "left")),
        (
            ValueError,
            "direction must be one of 'left', 'right', got 'up'",
            (torch.zeros(3), C, "up"),
        ),
    ],
)
def test_wrong_input_is_named(error, match, arguments):
    with pytest.raises(error, match=match):
        shift_tokens(*arguments)


def test_tokens_are_dropped_at_one_of_two_ends():
    with pytest.raises(
        ValueError, match="drop_tokens: end must be one of 'first', 'last', got 'left'"
    ):
        drop_tokens(torch.zeros(3), C, "left", 2)


@pytest.mark.parametrize("number", [0, 1, 3, 99])
def test_a_wrong_number_of_sequences_is_refused_by_name(number):
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"num_sequences must be 2, .* with tokens, got {number}$"):
        drop_tokens(torch.arange(5), cu_seqlens, "last", number)


@pytest.mark.parametrize("as_subclass", [torch.nn.Parameter, type("Own", (torch.Tensor,), {})])
def test_boundaries_of_a_subclass_are_checked_too(as_subclass):
    wrong = torch.tensor([0, 3, 60], dtype=torch.int32)
    if as_subclass is torch.nn.Parameter:
        wrong = torch.nn.Parameter(wrong, requires_grad=False)
    else:
        wrong = wrong.as_subclass(as_subclass)
    with pytest.raises(ValueError, match="cu_seqlens must go from 0 to num_tokens 6"):
        shift_tokens(torch.arange(6), wrong, "left")
