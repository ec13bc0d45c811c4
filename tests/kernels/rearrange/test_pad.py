"""Padding and its inverse: meaning, every dtype and shape, gradients, memory, refusals."""

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.rearrange.bits import assert_bits, random_bits
from trajpack.kernels import validation
from trajpack.kernels.fields import stretches
from trajpack.kernels.fields.stretches import SHORT
from trajpack.kernels.rearrange.pad import BITS, pad, unpad
from trajpack.kernels.rearrange.pad_triton import pad_forward, unpad_forward
from trajpack.testing import assert_same_bits, boundaries

SIDES = ("left", "right")
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.uint16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
LENGTHS = {
    "no sequences": [],
    "only empty sequences": [0, 0, 0],
    "one token": [1],
    "a tile less one, a tile, a tile and one": [1023, 1024, 1025],
    "a row that ends one place before its tile": [1023, 7],
    "a sequence over several tiles": [3, 5000, 4],
    "many in a tile": [i * 7 % 5 for i in range(300)],
    "empty at both ends": [0, 0, 9, 0, 2, 0],
}
RESTS = [(), (1,), (3,), (4,), (2, 3), (5, 0), (8, 2)]


def by_loop(
    packed: torch.Tensor, lengths: list[int], max_seqlen: int, value: Any, side: str
) -> torch.Tensor:
    """Copy one sequence after the other."""
    shape = (len(lengths), max_seqlen, *packed.shape[1:])
    out = torch.full(shape, value, dtype=packed.dtype).view(BITS[packed.element_size()])
    bits = packed.contiguous().view(out.dtype)
    start = 0
    for row, length in zip(out, lengths, strict=True):
        first = max_seqlen - length if side == "left" else 0
        row[first : first + length] = bits[start : start + length]
        start += length
    return out.view(packed.dtype)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_they_equal_a_loop_over_sequences(impl: Any, lengths: list[int], side: Any) -> None:
    ends = boundaries(lengths)
    for rest, room in (((), 0), ((3,), 2), ((4,), 0)):
        packed = random_bits((sum(lengths), *rest), torch.float32)
        max_seqlen = max(lengths, default=0) + room
        padded = pad(packed, ends, max_seqlen, value=0.5, side=side, impl=impl)
        assert_bits(padded, by_loop(packed, lengths, max_seqlen, 0.5, side))
        assert padded.is_contiguous()
        assert_bits(unpad(padded, ends, len(packed), side=side, impl=impl), packed)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_the_reference_equals_a_loop_over_sequences(
    lengths: list[int], side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "HOSTS", ())  # where the torch of any device runs
    for dtype in (torch.bfloat16, torch.complex128):
        packed, ends = random_bits((sum(lengths), 2), dtype), boundaries(lengths)
        max_seqlen = max(lengths, default=0) + 1
        padded = pad(packed, ends, max_seqlen, value=2, side=side)
        assert_bits(padded, by_loop(packed, lengths, max_seqlen, 2, side))
        assert_bits(unpad(padded, ends, len(packed), side=side), packed)
        assert_bits(unpad(padded.mT.contiguous().mT, ends, len(packed), side=side), packed)


@given(
    lengths=st.lists(st.integers(0, 30) | st.sampled_from([255, 256, 1024]), max_size=8),
    rest=st.sampled_from(RESTS),
    dtype=st.sampled_from(DTYPES),
    room=st.integers(0, 3),
    side=st.sampled_from(SIDES),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_unpad_undoes_pad_for_any_lengths(
    impl: Any,
    lengths: list[int],
    rest: tuple[int, ...],
    dtype: torch.dtype,
    room: int,
    side: Any,
    seed: int,
) -> None:
    packed, ends = random_bits((sum(lengths), *rest), dtype, seed), boundaries(lengths)
    max_seqlen = max(lengths, default=0) + room
    padded = pad(packed, ends, max_seqlen, value=1, side=side, impl=impl)
    assert_bits(padded, by_loop(packed, lengths, max_seqlen, 1, side))
    assert_bits(unpad(padded, ends, len(packed), side=side, impl=impl), packed)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-1, torch.int8),
        (-100, torch.int64),
        (2**63 - 1, torch.int64),
        (255, torch.uint8),
        (True, torch.bool),
        (-0.0, torch.float32),
        (float("nan"), torch.float64),
        (float("-inf"), torch.bfloat16),
        (3, torch.float16),
        (0.5, torch.float8_e5m2),
        (1 - 2j, torch.complex128),
        (1 - 2j, torch.complex64),
    ],
    ids=str,
)
def test_padding_has_the_bits_of_the_value(impl: Any, value: Any, dtype: torch.dtype) -> None:
    for rest in ((), (3,), (2, 8)):
        packed, ends = random_bits((2, *rest), dtype), boundaries([2, 0])
        padded = pad(packed, ends, 5, value=value, impl=impl)
        assert_bits(unpad(padded, ends, 2, impl=impl), packed)
        assert_bits(padded[0, 2:], torch.full((3, *rest), value, dtype=dtype))
        assert_bits(padded[1], torch.full((5, *rest), value, dtype=dtype))


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.parametrize("rest", [(), (3,), (4,), (8,)], ids=str)
def test_inputs_at_any_address_and_of_any_stride_are_read_right(
    impl: Any, shift: int, rest: tuple[int, ...]
) -> None:
    ends, lengths = boundaries([4, 6]), [4, 6]
    memory = random_bits((10, shift + int(np.prod(rest)) + 3), torch.float32)
    packed = memory[:, shift : shift + int(np.prod(rest))].unflatten(1, rest or (1,))
    packed = packed if rest else packed.squeeze(1)
    padded = pad(packed, ends, 7, impl=impl)
    assert_bits(padded, by_loop(packed, lengths, 7, 0, "right"))
    room = torch.nn.functional.pad(padded, [0, 0] * len(rest) + [shift, 2])
    assert_bits(unpad(room[:, shift : shift + 7], ends, 10, impl=impl), packed)
    flipped = padded.transpose(0, 1).contiguous().transpose(0, 1)
    assert_bits(unpad(flipped, ends, 10, impl=impl), packed)


def test_trailing_dimensions_may_be_transposed_and_numbers_conjugated(impl: Any) -> None:
    packed = random_bits((5, 3, 4), torch.int16).transpose(1, 2)
    padded = pad(packed, boundaries([2, 3]), 3, impl=impl)
    assert_bits(padded, by_loop(packed, [2, 3], 3, 0, "right"))
    assert_bits(unpad(padded.transpose(2, 3), boundaries([2, 3]), 5, impl=impl), packed.mT)
    conjugates = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert pad(conjugates, boundaries([1, 1]), 1, impl=impl).tolist() == [[1 - 2j], [3 + 4j]]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_are_right(impl: Any, dtype: torch.dtype, side: Any) -> None:
    ends = boundaries([1, 0, 2])
    packed = torch.randn(3, 1, dtype=dtype, requires_grad=True)
    padded = torch.randn(3, 3, 1, dtype=dtype, requires_grad=True)
    options = {"side": side, "impl": impl}
    # of a random direction, or of every entry
    check = partial(torch.autograd.gradcheck, fast_mode=impl == "triton")
    assert check(lambda x: pad(x, ends, 3, value=3, **options), packed)
    assert check(lambda x: unpad(x, ends, 3, **options), padded)


@pytest.mark.parametrize("rest", [(), (2,)], ids=str)
def test_gradients_that_are_expanded_are_read_right(impl: Any, rest: tuple[int, ...]) -> None:
    ends = boundaries([2, 1])
    packed = torch.zeros(3, *rest, requires_grad=True)
    pad(packed, ends, 4, impl=impl).sum().backward()
    assert_same_bits(packed.grad, torch.ones(3, *rest))  # type: ignore[arg-type]
    padded = torch.zeros(2, 4, *rest, requires_grad=True)
    unpad(padded, ends, 3, impl=impl).sum().backward()
    expected = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0]]).reshape(2, 4, *[1] * len(rest))
    assert_same_bits(padded.grad, expected.expand(2, 4, *rest).contiguous())  # type: ignore[arg-type]


def test_nothing_but_boundaries_is_kept_for_the_gradient(impl: Any) -> None:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    ends = boundaries([2, 1])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pad(torch.zeros(3, 9, requires_grad=True), ends, 4, impl=impl)
        unpad(torch.zeros(2, 4, 9, requires_grad=True)[:, :-1], ends, 3, impl=impl)
    assert [tensor.dtype for tensor in saved] == [torch.int32, torch.int32]
    assert all(torch.equal(tensor, ends) for tensor in saved)


def test_the_host_allocates_the_result_and_no_more() -> None:
    logits, ends = torch.zeros(4, 9, 40_000), boundaries([8, 3, 0, 6])
    unpad(logits[:, :-1], ends, 17)  # imports
    tracemalloc.start()
    packed = unpad(logits[:, :-1], ends, 17)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert packed.nbytes <= peak <= packed.nbytes + 100_000


@pytest.mark.parametrize("mean", [SHORT // 2, 16 * SHORT])
def test_short_and_long_rows_are_the_same_on_the_host(mean: int) -> None:
    lengths = np.random.default_rng(0).integers(0, mean // 4, 50).tolist()
    packed, ends = random_bits((sum(lengths), 2), torch.int32), boundaries(lengths)
    for side in SIDES:
        padded = pad(packed, ends, max(lengths), value=7, side=side)  # type: ignore[arg-type]
        assert_bits(padded, by_loop(packed, lengths, max(lengths), 7, side))
        wider = torch.nn.functional.pad(padded, (0, 1))[..., :-1]
        for rows in (padded, wider):
            assert_bits(unpad(rows, ends, len(packed), side=side), packed)  # type: ignore[arg-type]


BROKEN = {
    "beyond the tokens": [0, 4, 900],
    "negative": [-5, -2, 3],
    "begins late": [700, 800, 900],
    "backward": [0, 9, 2, 11, -(2**31), 2**31 - 1],
    "a sequence too long": [0, 9, 11],
}


@pytest.mark.parametrize("ends", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("side", SIDES)
def test_the_kernels_stay_inside_whatever_boundaries_say(ends: list[int], side: Any) -> None:
    """As on a device, where nothing checks them; an address outside would crash or show."""
    table = torch.zeros(4096, dtype=torch.int32)
    table[1000:] = 2**31 - 1  # with what lies before and after, more sequences than there are
    table[1000 : 1000 + len(ends)] = torch.tensor(ends, dtype=torch.int32)
    cu_seqlens = table[1000 : 1000 + len(ends)]
    inside = torch.full((3000,), 9)
    inside[1000:1011] = 1
    packed = inside[1000:1011]
    padded = pad_forward(packed, cu_seqlens, 5, 0, side)
    assert set(padded.unique().tolist()) <= {0, 1}
    batch = len(ends) - 1
    inside[1000 : 1000 + batch * 5] = 1
    rows = inside[1000 : 1000 + batch * 5].view(batch, 5)
    unpadded = unpad_forward(rows, cu_seqlens, 11, side)
    assert set(unpadded.unique().tolist()) <= {0, 1}


@pytest.mark.parametrize("side", SIDES)
def test_the_tail_of_a_sequence_too_long_is_dropped(
    impl: Any, side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (validation, stretches):
        monkeypatch.setattr(module, "HOSTS", ())  # where boundaries are not read, as on a device
    ends = boundaries([4, 1])
    padded = pad(torch.tensor([1, 2, 3, 4, 5]), ends, 2, side=side, impl=impl)
    assert padded.tolist() == [[1, 2], [0, 5] if side == "left" else [5, 0]]
    assert unpad(padded, ends, 5, side=side, impl=impl).tolist() == [1, 2, 0, 0, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_operators_are_registered_right(impl: Any, dtype: torch.dtype) -> None:
    ends = boundaries([2, 0, 3])
    leaves = [torch.ones(5, 2, dtype=dtype), torch.ones(3, 4, 2, dtype=dtype)]
    if dtype.is_floating_point:
        leaves = [leaf.requires_grad_() for leaf in leaves]
    ops = torch.ops.trajpack
    torch.library.opcheck(ops.pad.default, (leaves[0], ends, 4, 1, "left", impl))
    torch.library.opcheck(ops.unpad.default, (leaves[1], ends, 5, "left", impl))


X, ENDS = torch.arange(3.0), boundaries([2, 1])
ROWS = X.expand(2, 3)
UNPAD = {"op": "unpad"}
"""Marks a case of `unpad`."""


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (TypeError, r"^pad: packed must be a tensor, got list", ([1.0], ENDS, 2), {}),
        (ValueError, r"packed must have at least 1 dim.*got shape \[\]", (X[0], ENDS, 2), {}),
        (TypeError, "cu_seqlens must be int32, got int64", (X, ENDS.long(), 2), {}),
        (ValueError, "cu_seqlens is on meta", (X, ENDS.to("meta"), 2), {}),
        (TypeError, "max_seqlen must be an int, got 2.0", (X, ENDS, 2.0), {}),
        (ValueError, r"max_seqlen must be in \[0, 2147479552\], got -1", (X, ENDS, -1), {}),
        (ValueError, "max_seqlen 1, sequence 0 has 2 tokens", (X, ENDS, 1), {}),
        (ValueError, "num_tokens 3 .* from 0 to 4", (X, boundaries([4]), 4), {}),
        (ValueError, "from 1 to 3", (X, ENDS + torch.tensor([1, 0, 0]).int(), 2), {}),
        (ValueError, "in steps of -1 or more", (X, boundaries([4, -1]), 4), {}),
        (ValueError, "side must be one of 'left', 'right', got 'up'", (X, ENDS, 2), {"side": "up"}),
        (ValueError, "impl must be", (X, ENDS, 2), {"impl": "fast"}),
        (TypeError, "value must be a value of float32, got '0'", (X, ENDS, 2), {"value": "0"}),
        (TypeError, "value of float32, got 1j", (X, ENDS, 2), {"value": 1j}),
        (TypeError, "value of int64, got 0.5", (X.long(), ENDS, 2), {"value": 0.5}),
        (ValueError, r"\[0, 255\] for uint8, got -1", (X.byte(), ENDS, 2), {"value": -1}),
        (ValueError, r"\[0, 1\] for bool, got 2", (X.bool(), ENDS, 2), {"value": 2}),
        (TypeError, r"^unpad: padded must be a tensor, got int", (1, ENDS, 3), UNPAD),
        (ValueError, r"padded must have at least 2 dim.*got shape \[3\]", (X, ENDS, 3), UNPAD),
        (ValueError, r"3 entries .* shape \[2, 3\], got 2", (ROWS, ENDS[:2], 3), UNPAD),
        (TypeError, "num_tokens must be an int, got None", (ROWS, ENDS, None), UNPAD),
        (ValueError, "num_tokens must be in .*, got -3", (ROWS, ENDS, -3), UNPAD),
        (ValueError, "num_tokens 4 .* from 0 to 3", (ROWS, ENDS, 4), UNPAD),
        (ValueError, "max_seqlen 1, sequence 0 has 2", (ROWS[:, :1], ENDS, 3), UNPAD),
    ],
)
def test_wrong_input_is_named(
    error: type[Exception], match: str, arguments: Any, options: Any
) -> None:
    call = unpad if options is UNPAD else partial(pad, **options)
    with pytest.raises(error, match=match):
        call(*arguments)
