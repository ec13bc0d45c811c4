"""Rewards of turns placed at tokens, or summed to one number per row."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from trajpack.kernels.scan.segment_sum import segment_sum
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.rows import prompt_lengths_of

Score: TypeAlias = Literal["rewards", "returns"]
Place: TypeAlias = Literal["turns", "last"]


def row_scores(batch: PackedBatch, of: Score = "rewards") -> torch.Tensor:
    """Return one number for each sequence, float32 ``[sequences]``.

    ``"rewards"``: the sum of the sequence's turn rewards, not discounted; ``"returns"``: the
    discounted return of its first turn, with rewards of later turns in other sequences. Cost: a few
    launches over the turns, no synchronisation.
    """
    sequence = batch.turn_sequence.long()
    if of == "rewards":
        return _sum_by_index(batch.turn_rewards, sequence, len(batch))
    if of != "returns":
        raise ValueError(f"row_scores: of must be 'rewards' or 'returns', got {of!r}")
    turn = torch.arange(batch.num_turns, device=batch.device)
    first = turn.new_full((len(batch),), batch.num_turns)
    return batch.turn_returns[first.scatter_reduce(0, sequence, turn, "amin")]


def token_scores(batch: PackedBatch, *, op: str = "", place: Place = "turns") -> torch.Tensor:
    """Return rewards at tokens, float32 ``[tokens]``, 0 elsewhere.

    With ``"turns"`` each turn's reward is at its last generated token. The reward of a turn without
    generated tokens is at the generated token before it in the sequence, or else at the first one;
    a sequence without generated tokens loses its rewards. With ``"last"`` the sum of a sequence's
    rewards is at its last token, generated or not.

    Cost: a few launches over the turns and one over the tokens, no synchronisation.
    """
    if place not in ("turns", "last"):
        raise ValueError(f"{op}: scores must be 'turns' or 'last', got {place!r}")
    if place == "last":
        scores = batch.turn_rewards.new_zeros(batch.num_tokens, dtype=torch.float32)
        return scores.index_copy(0, batch.cu_seqlens[1:].long() - 1, row_scores(batch))
    if not batch.num_tokens:
        return batch.turn_rewards.float()
    start, end = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    sequence = batch.turn_sequence.long()
    first = (start + prompt_lengths_of(batch))[sequence]
    begins, ends = batch.turn_spans.long().unbind(1)
    order = ends.argsort(stable=True)  # chains may interleave: the order of their tokens
    generated = torch.where(ends > begins, ends - 1, -1)
    last = torch.empty_like(generated)
    last[order] = generated[order].cummax(0).values
    index = torch.maximum(last, first)
    index = torch.where(first < end[sequence], index, batch.num_tokens)  # a place to be dropped
    return _sum_by_index(batch.turn_rewards, index, batch.num_tokens + 1)[:-1]


def _sum_by_index(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Sum values with equal index in their order, without atomics: bitwise reproducible."""
    index, order = index.sort(stable=True)
    number = (index.diff(prepend=index.new_full((1,), -1)) != 0).cumsum(0) - 1
    bounds = torch.searchsorted(number, torch.arange(len(values) + 1, device=index.device))
    sums = segment_sum(values[order], bounds.int()).float()
    place = torch.cat([index, index.new_full((1,), size)])[bounds[:-1]]  # of no values: dropped
    return sums.new_zeros(size + 1).index_copy_(0, place, sums)[:-1]
