"""Weights of a batch's tokens in a loss: by aggregation, and by importance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from trajpack.kernels.corrections.importance_weights import (
    Correction,
    check_weighed,
    weigh_tokens,
)
from trajpack.kernels.corrections.loss_weights import (
    AGGREGATIONS,
    Aggregation,
    check_denominator,
    denominator_of,
    shares_of,
)
from trajpack.kernels.corrections.slots import Places
from trajpack.kernels.credit.turns import Turns, spread
from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.validation import check_choice

if TYPE_CHECKING:
    from trajpack.packing.credit.advantages import Batch

SEQUENCES = ("trajectory", "turn", "row")
"""Units of a sequence mean, see `PackedBatch.loss_weights`."""


def loss_weights(
    batch: Batch,
    aggregation: Aggregation,
    per: str,
    truncated: str,
    *,
    denominator: float | torch.Tensor | None,
    impl: Impl,
) -> torch.Tensor:
    """Implement `PackedBatch.loss_weights`."""
    counts, places = _units(batch, aggregation, per, truncated)
    check_denominator(aggregation, denominator, batch.device)
    is_whole = batch.tables.is_whole(batch.loss_mask)
    counts_all = aggregation == "token_mean" and truncated == "keep" and is_whole
    if counts_all and denominator is None:
        denominator = max(batch.num_generated, 1)  # without generated tokens all weights are 0
    chosen = resolve_impl("loss_weights", impl, batch.device)
    weights = shares_of(aggregation, counts, places, denominator, chosen)
    if places is None or places.ids is not None:
        return weights
    return spread(Turns(batch.turn_ids, batch.tables.runs), weights, impl=chosen)[0]


def loss_denominator(
    batch: Batch, aggregation: Aggregation, per: str, truncated: str
) -> torch.Tensor:
    """Implement `PackedBatch.loss_denominator`."""
    counts, places = _units(batch, aggregation, per, truncated)
    if aggregation == "constant":
        raise ValueError(
            "loss_denominator: aggregation='constant' has the denominator that it is given"
        )
    return denominator_of(counts, places)


def importance_weights(
    batch: Batch,
    logprobs: torch.Tensor,
    correction: Correction,
    *,
    per: Literal["trajectory", "turn"],
    metrics: bool,
    impl: Impl,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `PackedBatch.importance_weights`."""
    check_choice("importance_weights", "per", per, SEQUENCES[:2])
    owners, num_slots = None, batch.num_turns
    if per == "trajectory":
        owners, num_slots = batch.tables.group_order.owners, batch.cu_turns.shape[0] - 1
    places = Places(None, batch.turn_ids, owners, batch.num_turns, num_slots)
    tokens = logprobs, batch.rollout_logprobs, batch.loss_mask
    check_weighed(*tokens, correction)
    return weigh_tokens(
        *tokens, correction, places, advantages=batch.advantages, metrics=metrics, impl=impl
    )


def _units(
    batch: Batch, aggregation: str, per: str, truncated: str
) -> tuple[torch.Tensor, Places | None]:
    """Return what counts tokens, and their slots; see `shares_of`."""
    check_choice("loss_weights", "aggregation", aggregation, AGGREGATIONS)
    check_choice("loss_weights", "per", per, SEQUENCES)
    check_choice("loss_weights", "truncated", truncated, ("keep", "mask"))
    if per != "trajectory" and not aggregation.startswith("sequence_mean"):
        raise ValueError(f"loss_weights: aggregation={aggregation!r} takes no per={per!r}")
    has_slots = aggregation not in ("token_mean", "constant")
    owners, num_slots, mask = None, batch.num_turns, batch.loss_mask
    if per == "row":  # there are no more rows than turns
        owners = batch.turn_sequence
    elif per == "trajectory" and has_slots:
        owners, num_slots = batch.tables.group_order.owners, batch.cu_turns.shape[0] - 1
        if aggregation == "prompt_mean":
            owners = batch.group_ids[owners]
    if truncated == "mask" and batch.num_turns:
        cut_off = batch.truncated[batch.tables.group_order.owners]
        if has_slots and owners is None:
            owners = torch.arange(batch.num_turns, dtype=torch.int32, device=batch.device)
        if owners is not None:
            owners = torch.where(cut_off, -1, owners)
        else:
            mask = mask & ~torch.cat([cut_off, cut_off[:1]])[batch.turn_ids]
    if not has_slots:
        return mask, None
    if batch.tables.is_whole(batch.loss_mask):
        return batch.cu_generated, Places(None, None, owners, batch.num_turns, num_slots)
    return mask, Places(None, batch.turn_ids, owners, batch.num_turns, num_slots)
