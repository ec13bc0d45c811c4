"""The tests' changes of Triton's interpreter keep every result and find overflows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from tests.support.interpreter import wrapping

pytestmark = pytest.mark.usefixtures("interpreter")


@triton.jit
def compose(first_gain, first_sum, second_gain, second_sum):
    return first_gain * second_gain, second_gain * first_sum + second_sum


@triton.jit
def smaller(one, other):
    return tl.where(other < one, other, one)


@triton.jit
def scan_kernel(gains, sums, least, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    index = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    gain, value = tl.load(gains + index), tl.load(sums + index)
    smallest = tl.associative_scan(value, AXIS, smaller, reverse=REVERSE)
    gain, value = tl.associative_scan((gain, value), AXIS, compose, reverse=REVERSE)
    tl.store(gains + index, gain)
    tl.store(sums + index, value)
    tl.store(least + index, smallest)


@triton.jit
def compute_kernel(numbers, OPERATION: tl.constexpr):
    place = numbers + tl.arange(0, 8)
    number = tl.load(place)
    if OPERATION == "add":
        number = number + number
    elif OPERATION == "sub":
        number = 0 - number - number
    else:
        number = number * number
    tl.store(place, number)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_scan_has_the_bits_of_a_loop(axis: int, reverse: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    gains, sums = (torch.rand(4, 8, generator=draw, dtype=torch.float64) - 0.5 for _ in range(2))
    least = torch.zeros_like(sums)
    lines = [np.moveaxis(tensor.numpy().copy(), axis, 0) for tensor in (gains, sums)]
    gain, total = (line[::-1] if reverse else line for line in lines)
    smallest = np.minimum.accumulate(total)
    for place in range(1, len(gain)):
        total[place] = gain[place] * total[place - 1] + total[place]
        gain[place] = gain[place - 1] * gain[place]

    scan_kernel[(1,)](gains, sums, least, AXIS=axis, REVERSE=reverse)
    for actual, expected in ((gains, gain), (sums, total), (least, smallest)):
        found = np.moveaxis(actual.numpy(), axis, 0)
        np.testing.assert_array_equal(found[::-1] if reverse else found, expected)


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_an_integer_that_overflows_is_an_error(operation: Any) -> None:
    fits = torch.full((8,), 2**15, dtype=torch.int32)
    compute_kernel[(1,)](fits, OPERATION=operation)
    too_much = torch.full((8,), 2**31 - 1, dtype=torch.int32)
    with pytest.raises(TritonError, match=f"OverflowError.*{operation} of int32"):
        compute_kernel[(1,)](too_much, OPERATION=operation)
    with wrapping():
        compute_kernel[(1,)](too_much, OPERATION=operation)
