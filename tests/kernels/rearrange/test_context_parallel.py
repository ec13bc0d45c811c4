"""Index maps of context parallelism beside loops over chunks, written from their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from trajpack.kernels.rearrange.context_parallel import (
    chunks_of,
    context_parallel_index,
    context_parallel_order,
)
from trajpack.testing import assert_same_bits, boundaries


def partitioned_indices(cu_seqlens, num_tokens, cp_size, cp_rank):
    """Return what Transformer Engine's `thd_get_partitioned_indices` is defined to return.

    Token by token of a rank's share: its sequence is found in the boundaries divided by the ranks;
    in the front half of the sequence's share it lies in chunk `cp_rank`, else in the mirrored one.
    """
    shared = [bound // cp_size for bound in cu_seqlens]
    indices = []
    for token in range(num_tokens // cp_size):
        sequence = max(s for s in range(len(shared) - 1) if shared[s] <= token)
        size = shared[sequence + 1] - shared[sequence]
        offset = token - shared[sequence]
        index = offset + cu_seqlens[sequence] + (size // 2) * cp_rank
        if offset >= size // 2:
            index = cu_seqlens[sequence + 1] - (size // 2) * (cp_rank + 2) + offset
        indices.append(index)
    return indices


def chunks_by_loop(lengths, cp_size, cp_rank, partition):
    """Cut each sequence up, and put a rank's chunks behind each other."""
    indices, start = [], 0
    if partition == "whole":
        share = sum(lengths) // cp_size
        return list(range(cp_rank * share, (cp_rank + 1) * share))
    for length in lengths:
        tokens = list(range(start, start + length))
        size = length // chunks_of(cp_size, partition)
        chosen = [cp_rank] if partition == "contiguous" else [cp_rank, 2 * cp_size - 1 - cp_rank]
        for chunk in chosen:
            indices += tokens[chunk * size : (chunk + 1) * size]
        start += length
    return indices


@given(
    counts=st.lists(st.integers(0, 4), max_size=6),
    cp_size=st.integers(1, 4),
    partition=st.sampled_from(["zigzag", "contiguous", "whole"]),
)
def test_any_batch_is_cut_up_as_a_loop_does_and_put_together_again(counts, cp_size, partition):
    lengths = [count * 2 * cp_size for count in counts]
    cu_seqlens, num_tokens = boundaries(lengths), sum(lengths)
    shares = []
    for rank in range(cp_size):
        index = context_parallel_index(cu_seqlens, num_tokens, cp_size, rank, partition)
        expected = chunks_by_loop(lengths, cp_size, rank, partition)
        assert_same_bits(index, torch.tensor(expected, dtype=torch.int32))
        if partition == "zigzag":
            indices = partitioned_indices(cu_seqlens.tolist(), num_tokens, cp_size, rank)
            assert index.tolist() == indices
        shares.append(index)
    order = context_parallel_order(cu_seqlens, num_tokens, cp_size, partition)
    tokens = torch.arange(num_tokens)
    gathered = torch.cat([tokens[share] for share in shares])
    assert_same_bits(gathered[order], tokens)
    assert order.dtype == torch.int32


def test_repeated_boundaries_change_nothing():
    for partition in ("zigzag", "contiguous"):
        for rank in range(2):
            plain = context_parallel_index(boundaries([8, 4]), 12, 2, rank, partition)
            fixed = context_parallel_index(boundaries([8, 4, 0, 0]), 12, 2, rank, partition)
            assert_same_bits(fixed, plain)


@pytest.mark.parametrize("partition", ["zigzag", "contiguous", "whole"])
def test_one_rank_holds_sequences_of_any_length(partition):
    cu_seqlens = boundaries([3, 0, 1, 5])
    index = context_parallel_index(cu_seqlens, 9, 1, 0, partition)
    order = context_parallel_order(cu_seqlens, 9, 1, partition)
    assert index.tolist() == order.tolist() == list(range(9))


def test_shapes_alone_are_enough_on_the_meta_device():
    cu_seqlens = boundaries([8, 4]).to("meta")
    for partition in ("zigzag", "contiguous", "whole"):
        assert context_parallel_index(cu_seqlens, 12, 2, 0, partition).shape == (6,)
        assert context_parallel_order(cu_seqlens, 12, 2, partition).shape == (12,)


C = boundaries([4, 6, 2])


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        (r"cp_rank must be in \[0, 2\), got 2", (boundaries([4]), 4, 2, 2)),
        ("cp_size must be at least 1, got 0", (C, 12, 0, 0)),
        ("partition must be one of 'zigzag', 'contiguous', 'whole', got 'x'", (C, 12, 2, 0, "x")),
        ("num_tokens must be a multiple of 10, got 12", (C, 12, 5, 0)),
        ("num_tokens must be a multiple of 5, got 12", (C, 12, 5, 0, "whole")),
        (
            "a multiple of 4 tokens, sequence 1 has 6; align with sequence_multiple=4",
            (C, 12, 2, 0),
        ),
    ],
)
def test_wrong_input_is_named(match, arguments):
    with pytest.raises(ValueError, match=match):
        context_parallel_index(*arguments)


@pytest.mark.parametrize("bounds", [None, [0, 4, 12]])
def test_what_is_no_tensor_is_refused_under_the_name_of_the_operator(bounds):
    with pytest.raises(TypeError, match=r"^context_parallel_index: cu_seqlens must be a tensor"):
        context_parallel_index(bounds, 12, cp_size=2, cp_rank=0)
    with pytest.raises(TypeError, match=r"^context_parallel_order: cu_seqlens must be a tensor"):
        context_parallel_order(bounds, 12, cp_size=2)
    with pytest.raises(ValueError, match=r"^context_parallel_order: partition must be one of"):
        context_parallel_order(torch.tensor([0, 12], dtype=torch.int32), 12, 2, "zag")
