"""`overlong_penalty` against DAPO's equation 13, one response at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trajpack.kernels.corrections.penalties import overlong_penalty


def penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Say the three cases as the paper does."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return factor * ((max_length - buffer) - length) / buffer
    return -factor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0])
@pytest.mark.parametrize(("max_length", "buffer"), [(20, 5), (20, 1), (20, 20), (20_480, 4_096)])
def test_every_length_has_the_paper_s_value(
    max_length: int, buffer: int, factor: float, dtype: torch.dtype
) -> None:
    edges = (max_length - buffer, max_length)
    lengths = sorted({0, 1, *(edge + off for edge in edges for off in (-1, 0, 1, 2, 1000))} - {-1})
    found = overlong_penalty(torch.tensor(lengths, dtype=dtype), max_length, buffer, factor=factor)
    expected = [penalty(length, max_length, buffer, factor) for length in lengths]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)


def test_no_length_reaches_below_the_whole_penalty() -> None:
    lengths = torch.tensor([2**31 - 1, 2**31 - 2, 10], dtype=torch.int32)
    assert overlong_penalty(lengths, 10, 4, factor=2.0).tolist() == [-2.0, -2.0, -2.0]


def test_no_penalty_is_a_plain_zero() -> None:
    found = overlong_penalty(torch.tensor([0, 3]), 10, 4)
    assert not found.signbit().any()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("num", [0, 1, 4])
def test_shapes_alone_are_enough(num: int, device: str) -> None:
    found = overlong_penalty(torch.zeros(num, dtype=torch.int32, device=device), 8, 2)
    assert (found.shape, found.dtype, found.device.type) == ((num,), torch.float32, device)


N = torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "match", "arguments", "factor"),
    [
        (TypeError, "^overlong_penalty: lengths must be a tensor, got list", ([1], 8, 2), 1.0),
        (TypeError, "lengths must be int32 or int64, got float32", (N.float(), 8, 2), 1.0),
        (ValueError, r"lengths must have 1 dim.*\[1, 3\]", (N[None], 8, 2), 1.0),
        (TypeError, "max_length must be an int, got 8.0", (N, 8.0, 2), 1.0),
        (ValueError, "max_length must be at least 1, got 0", (N, 0, 2), 1.0),
        (TypeError, "overlong_buffer must be an int, got True", (N, 8, True), 1.0),
        (ValueError, "overlong_buffer must be at least 1, got 0", (N, 8, 0), 1.0),
        (ValueError, r"must be at most max_length \(8\), got 9", (N, 8, 9), 1.0),
        (TypeError, "factor must be a number, got '1'", (N, 8, 2), "1"),
        (ValueError, "factor must be finite and not negative, got -1", (N, 8, 2), -1),
        (ValueError, "factor must be finite and not negative, got nan", (N, 8, 2), math.nan),
    ],
)
def test_wrong_input_is_named(
    error: type[Exception], match: str, arguments: tuple[Any, Any, Any], factor: Any
) -> None:
    with pytest.raises(error, match=match):
        overlong_penalty(*arguments, factor=factor)
