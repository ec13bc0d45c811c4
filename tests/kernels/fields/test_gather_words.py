"""Tensors gathered into one stream of words: meaning, every dtype, the table, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack.kernels.fields.gather_words import (
    KINDS,
    Kind,
    Piece,
    gather_words,
    gather_words_reference,
    piece_table,
)
from trajpack.kernels.fields.gather_words_triton import BLOCK
from trajpack.testing import assert_same_bits

HUGE = torch.tensor([1e300, -1e300, 1e-60], dtype=torch.float64)
ANY_LENGTH = st.integers(0, 40) | st.sampled_from([BLOCK - 1, BLOCK])
OP = torch.ops.trajpack.gather_words.default
LENGTHS = {
    "one word": [1],
    "only empty pieces": [0, 0, 0],
    "a tile less one, a tile, a tile and one": [BLOCK - 1, BLOCK, BLOCK + 1],
    "a piece over several tiles": [5, 3 * BLOCK, 7],
    "many pieces in a tile": [i * 7 % 5 for i in range(300)],
    "empty at both ends and at a tile's edge": [0, 0, BLOCK, 0, 0, 9, 0],
}


def random_piece(rng: np.random.Generator, length: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(length)).to(dtype)
    return torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, length)).to(dtype)


def by_value(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Convert one entry after the other, by numpy's scalars."""
    words: list[int] = []
    for tensor in tensors:
        for entry in tensor.tolist():
            if tensor.is_floating_point():
                words.append(int(np.float32(entry).view(np.int32)))
            else:
                words.append((int(entry) + 2**31) % 2**32 - 2**31)
    return torch.tensor(words, dtype=torch.int32)


def test_ids_and_logprobs_become_words(impl: Any) -> None:
    ids = torch.tensor([7, 151_643])
    logprobs = torch.tensor([-0.5, 0.0], dtype=torch.bfloat16)
    words = gather_words([ids, logprobs, ids[:1].int()], impl)
    assert words.tolist() == [7, 151_643, np.float32(-0.5).view(np.int32), 0, 7]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_dtype_has_its_words(impl: Any, dtype: torch.dtype) -> None:
    piece = random_piece(np.random.default_rng(0), 40, dtype)
    assert_same_bits(gather_words([piece], impl), by_value([piece]))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_pieces_of_any_length_and_kind_follow_one_another(impl: Any, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    dtypes = rng.permutation(np.arange(len(lengths)) % len(KINDS))
    pieces = [random_piece(rng, n, list(KINDS)[k]) for n, k in zip(lengths, dtypes, strict=True)]
    assert_same_bits(gather_words(pieces, impl), by_value(pieces))
    assert_same_bits(gather_words_reference(pieces), by_value(pieces))


@given(
    pieces=st.lists(st.tuples(ANY_LENGTH, st.sampled_from([*KINDS])), max_size=10),
    skipped=st.integers(0, 3),
)
@settings(max_examples=20)
def test_any_pieces_at_any_address_become_their_words(
    impl: Any, pieces: list[tuple[int, torch.dtype]], skipped: int
) -> None:
    rng = np.random.default_rng(len(pieces))
    tensors = [random_piece(rng, skipped + n, dtype)[skipped:] for n, dtype in pieces]
    assert_same_bits(gather_words(tensors, impl), by_value(tensors))


def test_numbers_at_the_edges_are_kept(impl: Any) -> None:
    inf, nan = float("inf"), float("nan")
    words = torch.tensor([0x7F800001, 0x7FC12345, -1, -(2**31), 1], dtype=torch.int32)
    assert_same_bits(gather_words([words.view(torch.float32)], impl), words)  # every kind of NaN
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        floats = torch.tensor([inf, -inf, -0.0, 6e-5, nan], dtype=dtype)
        gathered = gather_words([floats], impl).view(torch.float32)
        assert_same_bits(gathered[:4], floats[:4].float())
        assert gathered[4].isnan()
    assert gather_words([HUGE], impl).view(torch.float32).tolist() == [inf, -inf, 0.0]


def test_numbers_beyond_float32_raise_no_warning() -> None:
    assert gather_words([HUGE]).view(torch.float32).isinf().sum() == 2


def test_no_tensors_and_empty_tensors_give_no_words(impl: Any) -> None:
    assert_same_bits(gather_words([], impl), torch.empty(0, dtype=torch.int32))
    assert_same_bits(gather_words([torch.empty(0)], impl), torch.empty(0, dtype=torch.int32))


def test_iterators_and_tensors_with_gradients_are_accepted() -> None:
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    words = gather_words(tensor for tensor in [leaf, leaf])  # type: ignore[arg-type]
    assert words.view(torch.float32).tolist() == [1.0, 2.0, 1.0, 2.0]
    assert not words.requires_grad


def test_the_table_holds_starts_addresses_and_kinds() -> None:
    pieces = [torch.zeros(3), torch.zeros(0), torch.zeros(4, dtype=torch.int64)[2:]]
    table = piece_table(pieces)
    assert (table.dtype, table.shape) == (np.int64, (4, 4))
    assert table[:, Piece.START].tolist() == [0, 3, 3, 5]
    assert table[:3, Piece.ADDRESS].tolist() == [piece.data_ptr() for piece in pieces]
    assert table[:3, Piece.KIND].tolist() == [Kind.WORD, Kind.WORD, Kind.INT64]
    assert table[3, Piece.KIND] == table[3, Piece.ADDRESS] == 0


def test_the_op_takes_a_table_inside_another_tensor() -> None:
    pieces = [torch.arange(5), torch.tensor([0.5])]
    table = torch.cat([torch.ones(9).long(), torch.from_numpy(piece_table(pieces)).flatten()])
    words = torch.ops.trajpack.gather_words(table[9:].view(3, 4), 6)
    assert_same_bits(words, gather_words_reference(pieces))


def test_the_operator_is_registered_right() -> None:
    pieces = [torch.arange(5), torch.tensor([0.5])]
    torch.library.opcheck(OP, (torch.from_numpy(piece_table(pieces)), 6))


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
def test_shapes_alone_are_enough_on_the_meta_device(impl: Any) -> None:
    pieces = [torch.empty(7, device="meta"), torch.empty(2, device="meta", dtype=torch.int64)]
    words = gather_words(pieces, impl)
    assert (words.shape, words.dtype, words.device.type) == ((9,), torch.int32, "meta")


@pytest.mark.parametrize(
    ("error", "match", "piece"),
    [
        (TypeError, r"^gather_words: tensors\[1\] must be a tensor, got list", [1]),
        (TypeError, r"tensors\[1\] must be int32 or .*got complex64", torch.zeros(1) * 1j),
        (ValueError, r"must have 1 dimension\(s\), got shape \[2, 1\]", torch.zeros(2, 1)),
        (ValueError, r"must have 1 dimension\(s\), got shape \[\]", torch.tensor(1)),
        (ValueError, r"\[1\] must be contiguous, got stride 2", torch.zeros(4)[::2]),
        (ValueError, "is on meta but the other inputs are on cpu", torch.zeros(2, device="meta")),
    ],
)
def test_wrong_input_is_named(error: type[Exception], match: str, piece: Any) -> None:
    with pytest.raises(error, match=match):
        gather_words([torch.zeros(1), piece])
    with pytest.raises(error, match=match):
        piece_table([torch.zeros(1), piece])


def test_a_first_piece_that_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"^gather_words: tensors\[0\] must be a tensor, got int"):
        gather_words([1, torch.zeros(1)])  # type: ignore[list-item]


def test_more_words_than_the_kernel_counts_are_refused() -> None:
    most = torch.empty(2**31 - 1024, dtype=torch.int8, device="meta")
    assert piece_table([most])[-1, Piece.START] == 2**31 - 1024
    with pytest.raises(ValueError, match="at most 2147482624 words, got 2147482625"):
        piece_table([most, torch.empty(1, device="meta")])
