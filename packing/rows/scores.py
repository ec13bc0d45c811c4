"""Rewards of turns, as trainers that know rows alone want them: at tokens, or one for a row."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from trajpack.kernels.reduce.segment_reduce import segment_sum
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.rows import prompt_lengths_of

Score: TypeAlias = Literal["rewards", "returns"]
Place: TypeAlias = Literal["turns", "last"]


def row_scores(batch: PackedBatch, of: Score = "rewards") -> torch.Tensor:
    """Return one number for each sequence, float32 ``[sequences]``.

    Args:
        batch: In any layout.
        of: ``"rewards"`` adds up the rewards of the sequence's turns as they were given;
            ``"returns"`` takes the return of its first turn: discounted, and with what later
            turns in other sequences were rewarded.

    Raises:
        ValueError: If ``of`` is neither.

    Cost: a few launches over the turns, no synchronisation.
    """
    sequence = batch.turn_sequence.long()
    if of == "rewards":
        return _added_up(batch.turn_rewards, sequence, len(batch)).float()
    if of != "returns":
        raise ValueError(f"row_scores: of must be 'rewards' or 'returns', got {of!r}")
    turn = torch.arange(batch.num_turns, device=batch.device)
    first = turn.new_full((len(batch),), batch.num_turns)
    first = first.scatter_reduce(0, sequence, turn, "amin")
    return batch.turn_returns[first]


def token_scores(batch: PackedBatch) -> torch.Tensor:
    """Return each turn's reward at the last token it generated, float32 ``[tokens]``, else 0.

    The reward of a turn that generated nothing stands at the last token generated before it in
    its sequence, or after it where there is none before. A sequence without generated tokens
    has no place for rewards.

    Cost: a few launches over turns and tokens, no synchronisation.
    """
    if not batch.num_tokens:
        return batch.turn_rewards.float()
    start, end = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    sequence = batch.turn_sequence.long()
    first = (start + prompt_lengths_of(batch))[sequence]
    token = torch.arange(batch.num_tokens, device=batch.device)
    last = torch.where(batch.loss_mask, token, -1).cummax(0).values
    place = last[(batch.turn_spans[:, 1].long() - 1).clamp(min=0)]
    place = torch.maximum(place, first)
    place = torch.where(first < end[sequence], place, batch.num_tokens)
    return _added_up(batch.turn_rewards, place, batch.num_tokens + 1)[:-1].float()


def scores_at_end(batch: PackedBatch) -> torch.Tensor:
    """Return the sum of each sequence's rewards at its last token, float32 ``[tokens]``, else 0.

    Where nothing was generated that token is one of the prompt.

    Cost: a few launches over turns and tokens, no synchronisation.
    """
    scores = batch.turn_rewards.new_zeros(batch.num_tokens, dtype=torch.float32)
    return scores.index_copy(0, batch.cu_seqlens[1:].long() - 1, row_scores(batch))


def placed_scores(batch: PackedBatch, op: str, place: Place) -> torch.Tensor:
    """Return rewards at tokens as ``place`` says: `token_scores` or `scores_at_end`.

    Raises:
        ValueError: If ``place`` is neither ``"turns"`` nor ``"last"``.
    """
    if place not in ("turns", "last"):
        raise ValueError(f"{op}: scores must be 'turns' or 'last', got {place!r}")
    return token_scores(batch) if place == "turns" else scores_at_end(batch)


def _added_up(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Add values up by their index, in their order, without atomics: the same in every run."""
    index, order = index.sort(stable=True)
    bounds = torch.searchsorted(index, torch.arange(size + 1, device=index.device))
    return segment_sum(values[order], bounds.int())
