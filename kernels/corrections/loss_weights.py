"""Per-token weights that make a plain weighted sum of losses any of the usual means."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch

from trajpack.kernels.validation import check_device, check_tensor

INTEGERS = (torch.int32, torch.int64)
NUMBERS = (*INTEGERS, torch.float32, torch.float64)

Aggregation: TypeAlias = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "prompt_mean", "constant"
]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
"""Names of the aggregations."""


def loss_weights(
    aggregation: Aggregation,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None = None,
    *,
    num_sequences: int | None = None,
    group_ids: torch.Tensor | None = None,
    num_groups: int | None = None,
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return weights ``w`` such that ``(w * token_loss).sum()`` is the aggregated loss.

    With N generated tokens in all, nₛ in sequence s and n_g in group g, S sequences and G
    groups with any::

        "token_mean"                  1 / N
        "sequence_mean_token_mean"    1 / (S · nₛ)
        "sequence_mean_token_sum"     1 / S
        "prompt_mean"                 1 / (G · n_g)
        "constant"                    1 / denominator

    A sequence is what counts as one response: all generated tokens of a trajectory, in
    however many rows they are packed. Give ids of trajectories, and a token has the same
    weight in layout ``"turns"`` and in layout ``"merged"``, bit for bit.

    Args:
        aggregation: One of `AGGREGATIONS`.
        loss_mask: ``[tokens]`` bool: True on generated tokens.
        sequence_ids: ``[tokens]`` int32 or int64: the token's sequence, in any order; an id
            outside ``[0, num_sequences)`` means none, and weight 0. ``"token_mean"`` and
            ``"constant"`` do not need it, nor use it.
        num_sequences: How many ids there may be.
        group_ids: ``[num_sequences]`` int32 or int64: the sequence's group of responses to one
            prompt; outside ``[0, num_groups)``: none. For ``"prompt_mean"`` alone.
        num_groups: How many ids of groups there may be.
        denominator: In place of N, S or G, where a batch is spread over ranks: the sum over
            ranks of their `loss_denominator`, a number or a 0-d tensor, so that the losses of
            the ranks add up to that of the whole. (Where gradients are averaged over ranks,
            divide it by their number.) A sequence, or group, must then be on one rank.
            ``"constant"`` needs it: Dr. GRPO's is the longest length allowed times the responses.

    Returns:
        ``[tokens]`` float32, computed in float64: 0 where ``loss_mask`` is False, and
        everywhere in a batch without generated tokens. Constants: no gradient flows.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, an argument that the aggregation needs is
            missing, or a number is out of its range.

    Cost: up to 36 small operations over tokens and sequences; integers are counted with
    atomics, whose order changes nothing. No copy, no host synchronisation.

    Example:
        >>> loss_mask = torch.tensor([False, True, True, True, True])
        >>> sequence_ids = torch.tensor([0, 0, 0, 0, 1])
        >>> loss_weights("sequence_mean_token_mean", loss_mask, sequence_ids, num_sequences=2)
        tensor([0.0000, 0.1667, 0.1667, 0.1667, 0.5000])

    Reference:
        Token mean: DAPO, arXiv 2503.14476, equation 8. Sequence means: GRPO, arXiv 2402.03300,
        and ``agg_loss`` of verl, which too counts sequences with tokens only. Prompt mean:
        SkyRL. Constant: Dr. GRPO, arXiv 2503.20783. One mean over rows that were split from one
        rollout: slime, ``rollout_mask_sums``.
    """
    op = "loss_weights"
    slots, num_slots = _slots(
        op, aggregation, loss_mask, sequence_ids, num_sequences, group_ids, num_groups
    )
    if denominator is not None:
        _check_denominator(op, denominator, loss_mask.device)
    elif aggregation == "constant":
        raise ValueError(f"{op}: aggregation='constant' needs denominator")
    counts = _generated(loss_mask, slots, num_slots)
    if denominator is None:
        denominator = _num_used(counts, slots)
    if slots is None or aggregation == "sequence_mean_token_sum":
        counts = torch.ones_like(counts)
    share = 1.0 / (counts.clamp(min=1).double() * denominator)
    if slots is not None:
        share = torch.where(slots < num_slots, share[slots], 0.0)
    return torch.where(loss_mask, share, 0.0).float()


def loss_denominator(
    aggregation: Aggregation,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None = None,
    *,
    num_sequences: int | None = None,
    group_ids: torch.Tensor | None = None,
    num_groups: int | None = None,
) -> torch.Tensor:
    """Return what `loss_weights` divides by in this batch: N, S or G of its docstring.

    For a batch spread over ranks: sum it over them, and give the sum to `loss_weights`.

    Args:
        aggregation: One of `AGGREGATIONS` but ``"constant"``, whose denominator is given.
        loss_mask: As of `loss_weights`, and so are the others.
        sequence_ids: As of `loss_weights`.
        num_sequences: As of `loss_weights`.
        group_ids: As of `loss_weights`.
        num_groups: As of `loss_weights`.

    Returns:
        0-d int64 on the device: generated tokens, or the sequences or groups with any.

    Raises:
        TypeError: As of `loss_weights`.
        ValueError: As of `loss_weights`, and for ``"constant"``.

    Cost: one to nineteen small launches. No copy, no host synchronisation.

    Example:
        >>> loss_mask, ids = torch.tensor([True, True, True]), torch.tensor([0, 0, 2])
        >>> loss_denominator("sequence_mean_token_sum", loss_mask, ids, num_sequences=3)
        tensor(2)

    Reference:
        ``global_batch_size`` and ``batch_num_tokens`` of verl's ``agg_loss``.
    """
    op = "loss_denominator"
    slots, num_slots = _slots(
        op, aggregation, loss_mask, sequence_ids, num_sequences, group_ids, num_groups
    )
    if aggregation == "constant":
        raise ValueError(f"{op}: aggregation='constant' has the denominator that it is given")
    return _num_used(_generated(loss_mask, slots, num_slots), slots)


def _generated(loss_mask: torch.Tensor, slots: torch.Tensor | None, num: int) -> torch.Tensor:
    """Count generated tokens: of all, or in each of ``num`` slots and, last, in none."""
    if slots is None:
        return loss_mask.sum()
    return loss_mask.new_zeros(num + 1, dtype=torch.int64).scatter_add_(0, slots, loss_mask.long())


def _num_used(counts: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    return counts if slots is None else (counts[:-1] > 0).sum()


def _slots(
    op: str,
    aggregation: str,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None,
    num_sequences: int | None,
    group_ids: torch.Tensor | None,
    num_groups: int | None,
) -> tuple[torch.Tensor | None, int]:
    """Return where each token is counted, and of how many places; None where all are in one."""
    if aggregation not in AGGREGATIONS:
        expected = ", ".join(map(repr, AGGREGATIONS))
        raise ValueError(f"{op}: aggregation must be one of {expected}, got {aggregation!r}")
    check_tensor(op, "loss_mask", loss_mask, ndim=1, dtypes=(torch.bool,))
    if aggregation in ("token_mean", "constant"):
        return None, 0
    needs = f"{op}: aggregation={aggregation!r} needs"
    if sequence_ids is None or num_sequences is None:
        raise ValueError(f"{needs} sequence_ids and num_sequences")
    sequences = _places(op, "sequence", sequence_ids, num_sequences, loss_mask)
    _check_length(op, "sequence_ids", sequence_ids, loss_mask.shape[0], "token")
    if aggregation != "prompt_mean":
        return sequences, num_sequences
    if group_ids is None or num_groups is None:
        raise ValueError(f"{needs} group_ids and num_groups")
    groups = _places(op, "group", group_ids, num_groups, loss_mask)
    _check_length(op, "group_ids", group_ids, num_sequences, "sequence")
    return torch.cat([groups, groups.new_full((1,), num_groups)])[sequences], num_groups


def _places(
    op: str, noun: str, ids: torch.Tensor, num: int, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Return ids that may index ``num + 1`` places, of which the last is for all others."""
    check_tensor(op, f"{noun}_ids", ids, ndim=1, dtypes=INTEGERS)
    check_device(op, f"{noun}_ids", ids, loss_mask.device)
    if isinstance(num, bool) or not isinstance(num, (int, torch.SymInt)):
        raise TypeError(f"{op}: num_{noun}s must be an int, got {num!r}")
    if num < 0:
        raise ValueError(f"{op}: num_{noun}s must not be negative, got {num}")
    return torch.where((ids >= 0) & (ids < num), ids, num).long()


def _check_length(op: str, name: str, ids: torch.Tensor, num: int, of: str) -> None:
    if ids.shape[0] != num:
        raise ValueError(
            f"{op}: {name} must have one entry for each of {num} {of}(s), "
            f"got shape {list(ids.shape)}"
        )


def _check_denominator(op: str, denominator: float | torch.Tensor, device: torch.device) -> None:
    if isinstance(denominator, torch.Tensor):
        check_tensor(op, "denominator", denominator, ndim=0, dtypes=NUMBERS)
        check_device(op, "denominator", denominator, device)
        if denominator.requires_grad:
            raise ValueError(f"{op}: no gradient flows to denominator; pass denominator.detach()")
    elif isinstance(denominator, bool) or not isinstance(denominator, Real):
        raise TypeError(f"{op}: denominator must be a number or a tensor, got {denominator!r}")
    elif not 0 < denominator < math.inf:
        raise ValueError(f"{op}: denominator must be finite and above 0, got {denominator}")
