"""Weights of a batch's tokens in a loss: by aggregation, and by importance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

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
from trajpack.kernels.validation import check_choice, check_tensor

if TYPE_CHECKING:
    from trajpack.packing.credit.advantages import Batch

SequenceOf: TypeAlias = Literal["trajectory", "turn", "row"]
"""Unit of a sequence mean, see `PackedBatch.loss_weights`."""


def loss_weights(  # noqa: D417 - a method of batches
    batch: Batch,
    aggregation: Aggregation,
    *,
    per: SequenceOf = "trajectory",
    denominator: float | torch.Tensor | None = None,
    truncated: Literal["keep", "mask"] = "keep",
    impl: Impl = "auto",
) -> torch.Tensor:
    """Return weights with which a plain sum over tokens is the aggregated loss.

    A prompt is a group. ``per`` defines a sequence: with ``"trajectory"`` and ``"turn"`` the
    weight of a token is the same in every layout, bit for bit.

    Args:
        aggregation: ``"token_mean"``, ``"sequence_mean_token_mean"``,
            ``"sequence_mean_token_sum"``, ``"prompt_mean"`` or ``"constant"``.
        per: Unit of a sequence mean: a ``"trajectory"``, a ``"turn"``, or a ``"row"``, which is
            a sequence of this batch (a turn in layout ``"turns"``, a chain in ``"merged"``).
            TRL, verl and SkyRL count rows; TRL and SkyRL also count rows without a generated
            token: ``denominator=len(batch)``.
        denominator: Replaces the number of tokens, sequences or groups. For a batch that is
            spread over ranks: the sum of their `loss_denominator`. ``"constant"`` needs it.
        truncated: ``"mask"`` gives weight 0 to trajectories that were cut off, and does not
            count them.
        impl: See `trajpack.kernels`.

    Returns:
        float32 ``[tokens]``, 0 where not trained. Use `with_loss_mask` to drop tokens: of a
        packed batch a `loss_mask` that was written to through NumPy or ``.data`` is not read.

    Raises:
        ValueError: If ``per`` is unknown, or the aggregation has no sequence mean; see also
            `trajpack.kernels.loss_weights`.

    Reference:
        `trajpack.kernels.loss_weights`.

    Example:
        >>> import trajpack
        >>> turn = trajpack.Turn([1], [2, 3], [-1.0, -1.0])
        >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
        >>> batch.loss_weights("token_mean")
        tensor([0.0000, 0.5000, 0.5000])
    """
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


def loss_denominator(  # noqa: D417 - a method of batches
    batch: Batch,
    aggregation: Aggregation,
    *,
    per: SequenceOf = "trajectory",
    truncated: Literal["keep", "mask"] = "keep",
) -> torch.Tensor:
    """Return this batch's share of the denominator of `loss_weights`.

    Args:
        aggregation: As in `loss_weights`, except ``"constant"``.
        per: As in `loss_weights`.
        truncated: As in `loss_weights`.

    Returns:
        0-d int64 tensor: number of tokens, or of sequences or groups with tokens. The sum over
        ranks is the ``denominator`` of each rank.

    Raises:
        ValueError: As `loss_weights`.

    Reference:
        `trajpack.kernels.loss_weights`.
    """
    counts, places = _units(batch, aggregation, per, truncated)
    if aggregation == "constant":
        raise ValueError(
            "loss_denominator: aggregation='constant' has the denominator that it is given"
        )
    return denominator_of(counts, places)


def importance_weights(  # noqa: D417 - a method of batches
    batch: Batch,
    logprobs: torch.Tensor,
    correction: Correction,
    *,
    per: Literal["trajectory", "turn"] = "trajectory",
    metrics: bool = True,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return importance weights of the policy of ``logprobs`` over the sampling policy.

    Args:
        logprobs: float32 ``[tokens]`` of the trained policy before its update. Those of generated
            tokens alone, as of ``LMHead``, go to `trajpack.kernels.importance_weights` with the
            columns of ``generated``.
        correction: Rule for the ratios to `rollout_logprobs`, such as ``Correction.tis(2.0)``.
        per: Segments of ``correction``, if it has any.
        metrics: Whether to measure; without it they are ``[0]``.
        impl: See `trajpack.kernels`.

    Returns:
        Weights, float32 ``[tokens]``, 0 where not generated and the same in every layout; and
        metrics, float64 ``[12]``, named by ``IMPORTANCE_METRICS`` in the module
        ``trajpack.kernels.corrections.importance_weights``.

    Raises:
        ValueError: If ``per`` is unknown, or see `trajpack.kernels.importance_weights`.

    Reference:
        `trajpack.kernels.importance_weights`.
    """
    check_choice("importance_weights", "per", per, ("trajectory", "turn"))
    owners, num_slots = None, batch.num_turns
    if per == "trajectory":
        owners, num_slots = batch.tables.group_order.owners, batch.cu_turns.shape[0] - 1
    places = Places(None, batch.turn_ids, owners, batch.num_turns, num_slots)
    tokens = logprobs, batch.rollout_logprobs, batch.loss_mask
    check_tensor("importance_weights", "logprobs", logprobs, entries=batch.loss_mask.shape[0])
    check_weighed(*tokens, correction)
    return weigh_tokens(
        *tokens, correction, places, advantages=batch.advantages, metrics=metrics, impl=impl
    )


def _units(
    batch: Batch, aggregation: str, per: str, truncated: str
) -> tuple[torch.Tensor, Places | None]:
    """Return what counts tokens, and their slots; see `shares_of`."""
    check_choice("loss_weights", "aggregation", aggregation, AGGREGATIONS)
    check_choice("loss_weights", "per", per, get_args(SequenceOf))
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
