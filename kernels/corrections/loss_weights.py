"""Per-token weights with which a sum of token losses is one of the usual means."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.validation import check_choice, check_integer, check_number, check_tensor

INTEGERS = (torch.int32, torch.int64)

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
    impl: Impl = "auto",
) -> torch.Tensor:
    """Return weights ``w`` such that ``(w * token_loss).sum()`` is the aggregated loss.

    With N generated tokens in all, nₛ in sequence s and n_g in group g, S sequences and G
    groups with any::

        "token_mean"                  1 / N
        "sequence_mean_token_mean"    1 / (S · nₛ)
        "sequence_mean_token_sum"     1 / S
        "prompt_mean"                 1 / (G · n_g)
        "constant"                    1 / denominator

    A sequence is one response: all generated tokens of a trajectory, in any number of rows. With
    ids of trajectories a token has bitwise the same weight in the layouts ``"turns"`` and
    ``"merged"``.

    Args:
        aggregation: One of the names above.
        loss_mask: ``[tokens]`` bool: True on generated tokens.
        sequence_ids: ``[tokens]`` int32 or int64: the token's sequence, in any order; outside
            ``[0, num_sequences)``: none, and weight 0. Not used by ``"token_mean"`` and
            ``"constant"``.
        num_sequences: Number of sequence ids.
        group_ids: ``[num_sequences]`` int32 or int64: the sequence's group of responses to one
            prompt; outside ``[0, num_groups)``: none. For ``"prompt_mean"`` alone.
        num_groups: Number of group ids.
        denominator: In place of N, S or G, where a batch is spread over ranks: the sum over
            ranks of their `loss_denominator`, a number or a 0-d tensor, so that the losses of
            the ranks add up to that of the whole. Where gradients are averaged over ranks,
            divide it by their number. A sequence, or group, must then be on one rank.
            ``"constant"`` needs it: for Dr. GRPO the maximum length times the responses.
        impl: As of `segment_sum`; both implementations give the same bits.

    Returns:
        ``[tokens]`` float32, computed in float64: 0 where ``loss_mask`` is False. Not
        differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, an argument that the aggregation needs is
            missing, or a number is out of its range.

    Cost: one launch for ``"constant"``, two for ``"token_mean"``, three for all others, one of
    which fills zeros. They read 5 bytes of a token to count and 5 to write its 4. Counts are added
    by atomic additions of integers. No copy, no host synchronisation. With torch's implementation
    up to 36 small operations over tokens and sequences.

    Example:
        >>> loss_mask = torch.tensor([False, True, True, True, True])
        >>> sequence_ids = torch.tensor([0, 0, 0, 0, 1])
        >>> loss_weights("sequence_mean_token_mean", loss_mask, sequence_ids, num_sequences=2)
        tensor([0.0000, 0.1667, 0.1667, 0.1667, 0.5000])

    Reference:
        Token mean: DAPO, arXiv 2503.14476, equation 8. Sequence means: GRPO, arXiv 2402.03300,
        and ``agg_loss`` of verl, which also counts sequences with tokens only. Prompt mean:
        SkyRL. Constant: Dr. GRPO, arXiv 2503.20783. One mean over rows that were split from one
        rollout: slime, ``rollout_mask_sums``.
    """
    op = "loss_weights"
    ids, owners, sizes = _check_slots(
        op, aggregation, loss_mask, sequence_ids, num_sequences, group_ids, num_groups
    )
    if isinstance(denominator, torch.Tensor):
        device, numbers = loss_mask.device, (*INTEGERS, torch.float32, torch.float64)
        check_tensor(
            op, "denominator", denominator, ndim=0, dtypes=numbers, device=device, constant=True
        )
    elif denominator is not None:
        check_number(op, "denominator", denominator, above=0, finite=True)
    elif aggregation == "constant":
        raise ValueError(f"{op}: aggregation='constant' needs denominator")
    if resolve_impl(op, impl, loss_mask) == "triton":
        given = None if isinstance(denominator, torch.Tensor) else denominator
        on_device = denominator if isinstance(denominator, torch.Tensor) else None
        weights: torch.Tensor = torch.ops.trajpack.loss_weights(
            *(None if one is None else one.contiguous() for one in (loss_mask, ids, owners)),
            on_device,
            float(given or 0),
            sizes,
            ids is not None and aggregation != "sequence_mean_token_sum",
        )
        return weights
    slots, num_slots = _slots(ids, owners, sizes), sizes[1]
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
    """Return the denominator of `loss_weights` in this batch: N, S or G of its docstring.

    For a batch spread over ranks, pass the sum over ranks to `loss_weights`. Arguments and errors
    are those of `loss_weights`; ``"constant"``, whose denominator is given, is refused.

    Returns:
        0-d int64 on the device: generated tokens, or the sequences or groups with any.

    Cost: one to nineteen small launches. No copy, no host synchronisation.

    Example:
        >>> loss_mask, ids = torch.tensor([True, True, True]), torch.tensor([0, 0, 2])
        >>> loss_denominator("sequence_mean_token_sum", loss_mask, ids, num_sequences=3)
        tensor(2)

    Reference:
        ``global_batch_size`` and ``batch_num_tokens`` of verl's ``agg_loss``.
    """
    op = "loss_denominator"
    ids, owners, sizes = _check_slots(
        op, aggregation, loss_mask, sequence_ids, num_sequences, group_ids, num_groups
    )
    if aggregation == "constant":
        raise ValueError(f"{op}: aggregation='constant' has the denominator that it is given")
    slots = _slots(ids, owners, sizes)
    return _num_used(_generated(loss_mask, slots, sizes[1]), slots)


def _generated(loss_mask: torch.Tensor, slots: torch.Tensor | None, num: int) -> torch.Tensor:
    """Count generated tokens: all, or those of each of ``num`` slots and, last, of none."""
    if slots is None:
        return loss_mask.sum()
    return loss_mask.new_zeros(num + 1, dtype=torch.int64).scatter_add_(0, slots, loss_mask.long())


def _num_used(counts: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    return counts if slots is None else (counts[:-1] > 0).sum()


def _check_slots(
    op: str,
    aggregation: str,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None,
    num_sequences: int | None,
    group_ids: torch.Tensor | None,
    num_groups: int | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[int]]:
    """Return ids, groups of ids, and the numbers of ids and slots; ids are None if unused."""
    check_choice(op, "aggregation", aggregation, AGGREGATIONS)
    check_tensor(op, "loss_mask", loss_mask, dtypes=(torch.bool,))
    if aggregation in ("token_mean", "constant"):
        return None, None, [0, 0]
    needs = f"{op}: aggregation={aggregation!r} needs"
    if sequence_ids is None or num_sequences is None:
        raise ValueError(f"{needs} sequence_ids and num_sequences")
    check_integer(op, "num_sequences", num_sequences)
    device, tokens = loss_mask.device, loss_mask.shape[0]
    check_tensor(op, "sequence_ids", sequence_ids, dtypes=INTEGERS, device=device, entries=tokens)
    if aggregation != "prompt_mean":
        return sequence_ids, None, [num_sequences, num_sequences]
    if group_ids is None or num_groups is None:
        raise ValueError(f"{needs} group_ids and num_groups")
    check_integer(op, "num_groups", num_groups)
    check_tensor(
        op,
        "group_ids",
        group_ids,
        dtypes=INTEGERS,
        device=device,
        entries=num_sequences,
        per="sequence",
    )
    return sequence_ids, group_ids, [num_sequences, num_groups]


def _slots(
    ids: torch.Tensor | None, owners: torch.Tensor | None, sizes: list[int]
) -> torch.Tensor | None:
    """Return the slot of each token, their number for none; None if all tokens share one."""
    if ids is None:
        return None
    sequences = _within(ids, sizes[0])
    if owners is None:
        return sequences
    groups = _within(owners, sizes[1])
    return torch.cat([groups, groups.new_full((1,), sizes[1])])[sequences]


def _within(ids: torch.Tensor, num: int) -> torch.Tensor:
    """Return int64 ids, ``num`` for those outside ``[0, num)``."""
    return torch.where((ids >= 0) & (ids < num), ids, num).long()


def _run(
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None,
    group_ids: torch.Tensor | None,
    denominator: torch.Tensor | None,
    given: float,
    sizes: list[int],
    divides: bool,
) -> torch.Tensor:
    from trajpack.kernels.corrections.loss_weights_triton import loss_weights_forward

    return loss_weights_forward(
        loss_mask, sequence_ids, group_ids, denominator,
        given=given, num_ids=sizes[0], num_slots=sizes[1], divides=divides,
    )  # fmt: skip


register_op(
    "loss_weights(Tensor loss_mask, Tensor? sequence_ids, Tensor? group_ids, Tensor? denominator, "
    "float given, int[] sizes, bool divides) -> Tensor",
    _run,
    lambda loss_mask, *_: loss_mask.new_empty(loss_mask.shape, dtype=torch.float32),
)
