"""Index maps of context parallelism: the tokens of a packed batch that each rank holds."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from trajpack.kernels.validation import check_boundaries, check_cu_seqlens, values_to_check

Partition: TypeAlias = Literal["zigzag", "contiguous", "whole"]
"""Distribution of tokens to ranks.

- ``"zigzag"``: each sequence in twice as many chunks as ranks; rank ``r`` holds chunk ``r`` from
  the front and chunk ``r`` from the end, so that causal attention costs every rank the same.
- ``"contiguous"``: each sequence in as many chunks as ranks; rank ``r`` holds chunk ``r``.
- ``"whole"``: the batch in as many chunks as ranks, across boundaries.
"""


def context_parallel_index(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    cp_size: int,
    cp_rank: int,
    partition: Partition = "zigzag",
) -> torch.Tensor:
    """Return the tokens that a rank holds, in its order: ``x[index]`` is its share of ``x``.

    Make labels before: at the end of a chunk the next token is on another rank.

    Args:
        cu_seqlens: ``[sequences + 1]`` int32 boundaries in memory, padding included: starts at 0,
            ends at ``num_tokens``, never decreases. Lengths are multiples of `chunks_of`.
        num_tokens: Tokens of all sequences.
        cp_size: Number of ranks.
        cp_rank: Number of the rank.
        partition: See `Partition`.

    Returns:
        int32 ``[num_tokens / cp_size]``, sequence after sequence.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If there is no such rank or partition, or ``num_tokens`` does not divide; on the
            host also if the length of a sequence does not.

    Reference:
        Transformer Engine, ``thd_get_partitioned_indices``: the same numbers for ``"zigzag"``.

    Example:
        >>> cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
        >>> context_parallel_index(cu_seqlens, 12, cp_size=2, cp_rank=0)
        tensor([ 0,  3,  4,  5, 10, 11], dtype=torch.int32)
    """
    op = "context_parallel_index"
    chunks = _check(op, cu_seqlens, num_tokens, cp_size=cp_size, partition=partition)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{op}: cp_rank must be in [0, {cp_size}), got {cp_rank}")
    return _held(cu_seqlens, num_tokens, cp_size, cp_rank, partition=partition, chunks=chunks).int()


def context_parallel_order(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    cp_size: int,
    partition: Partition = "zigzag",
) -> torch.Tensor:
    """Return the place of each token among those of rank 0, then of rank 1, and so on.

    The inverse of `context_parallel_index`: with the concatenated outputs of all ranks,
    ``gathered[order]`` is in the order of the batch.

    Args:
        cu_seqlens: As for `context_parallel_index`.
        num_tokens: As for `context_parallel_index`.
        cp_size: Number of ranks.
        partition: See `Partition`.

    Returns:
        int32 ``[num_tokens]``.

    Raises:
        TypeError, ValueError: As `context_parallel_index`.

    Example:
        >>> cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
        >>> context_parallel_order(cu_seqlens, 12, cp_size=2)
        tensor([ 0,  6,  7,  1,  2,  3,  8,  9, 10, 11,  4,  5], dtype=torch.int32)
    """
    op = "context_parallel_order"
    chunks = _check(op, cu_seqlens, num_tokens, cp_size=cp_size, partition=partition)
    rank = torch.arange(cp_size, device=cu_seqlens.device)[:, None]
    held = _held(cu_seqlens, num_tokens, cp_size, rank, partition=partition, chunks=chunks)
    place = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.empty_like(place).index_copy_(0, held.reshape(-1), place)


def _held(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    cp_size: int,
    rank: int | torch.Tensor,
    *,
    partition: Partition,
    chunks: int,
) -> torch.Tensor:
    """Return the tokens of a rank, or those of each of ``[ranks, 1]``, int64."""
    place = torch.arange(num_tokens // cp_size, device=cu_seqlens.device)
    if partition == "whole":
        return place + rank * (num_tokens // cp_size)
    bounds = cu_seqlens.long()
    held = bounds // cp_size
    sequence = torch.searchsorted(held, place, right=True) - 1
    offset = place - held[sequence]
    chunk = (bounds.diff() // chunks)[sequence]
    first = bounds[sequence] + rank * chunk + offset
    if partition == "contiguous":
        return first
    return torch.where(offset < chunk, first, first + (chunks - 2 - 2 * rank) * chunk)


def chunks_of(cp_size: int, partition: Partition) -> int:
    """Return the number of equal chunks of a sequence; its length must be a multiple of it.

    Raises:
        ValueError: If there is no such partition, or no rank.

    Example:
        >>> chunks_of(4, "zigzag"), chunks_of(4, "contiguous"), chunks_of(4, "whole")
        (8, 4, 1)
    """
    if partition not in get_args(Partition):
        known = ", ".join(repr(name) for name in get_args(Partition))
        raise ValueError(f"partition must be one of {known}, got {partition!r}")
    if cp_size < 1:
        raise ValueError(f"cp_size must be at least 1, got {cp_size}")
    if cp_size == 1 or partition == "whole":
        return 1
    return 2 * cp_size if partition == "zigzag" else cp_size


def _check(
    op: str, cu_seqlens: torch.Tensor, num_tokens: int, *, cp_size: int, partition: Partition
) -> int:
    check_cu_seqlens(op, cu_seqlens)
    try:
        chunks = chunks_of(cp_size, partition)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    multiple = max(chunks, cp_size)
    if num_tokens % multiple:
        raise ValueError(f"{op}: num_tokens must be a multiple of {multiple}, got {num_tokens}")
    check_boundaries(op, cu_seqlens, num_tokens)
    readable = values_to_check(cu_seqlens)
    if readable is not None and chunks > 1:
        lengths = readable.diff()
        wrong = (lengths % chunks).nonzero()
        if wrong.numel():
            number = int(wrong[0])
            raise ValueError(
                f"{op}: each sequence must have a multiple of {chunks} tokens, sequence {number} "
                f"has {int(lengths[number])}; align with sequence_multiple={chunks}"
            )
    return chunks
